"""Read Megatron's token files: `prefix.bin` holds all tokens, `prefix.idx` says where documents begin.

    .idx   magic (9 bytes) | version u64 = 1 | dtype code u8 | sequences u64 | documents + 1 u64
           length of each sequence i32 | its byte offset i64 | documents as ranges of sequences i64 | [mode i8 each]

All little endian, as in Megatron-LM's megatron/core/datasets/indexed_dataset.py.  `prefix.manifest.json` is our own and
says how the corpus was made; token files that Megatron wrote have none.
Opening takes the same time for any size: of a large index only some runs of entries are checked, and the checksum only
of a file of up to WHOLE bytes.  Whatever is read in blocks is checked completely, and `verify` checks everything.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron3d.data.token_files.files import read_blocks, require_regular, with_suffix
from megatron3d.errors import UserError, is_machine_fault
from megatron3d.runtime.files import retried

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
BLOCK = 1 << 20
"""Entries of the index that are handled together."""
RUNS, RUN = 64, 1024
"""Number and length of the runs of entries that are checked on opening; a smaller index is checked whole."""
WHOLE = 1 << 24
"""Bytes of the largest file whose checksum is verified on opening, which takes some 10 ms."""

SUFFIX = ".manifest.json"

Tokens = npt.NDArray[Any]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """The tokenizer, the counts and the checksums of a corpus.

    Attributes:
        bin_sha256: of the token file, None in corpora older than checksums; `idx_sha256` likewise.
        job: identifies the job that a shard belongs to; None for a whole corpus.
        part: which shard it is, such as "2/3".
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tokenizer_type: Annotated[str, Field(pattern="^[A-Za-z0-9]{1,64}$")]
    vocab_size: Count
    fingerprint: Sha256
    num_documents: Count
    num_tokens: Count
    max_token_id: Count
    bin_sha256: Sha256 | None = None
    idx_sha256: Sha256 | None = None
    job: Sha256 | None = None
    part: Annotated[str, Field(pattern="^[0-9]{1,7}/[0-9]{1,7}$")] | None = None


def read_manifest(prefix: Path) -> Manifest | None:
    """Return the manifest of a corpus, None if there is none; raises UserError if it is damaged."""
    path = with_suffix(prefix, SUFFIX)
    try:
        require_regular(path)
        return Manifest.model_validate_json(retried(path, path.read_bytes))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        found = error.errors()[:3]
        details = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in found)
        raise UserError(f"{path}: damaged ({details}); make the corpus again") from error
    except OSError as error:
        if is_machine_fault(error):
            raise
        raise UserError(f"{path}: cannot be read ({error.strerror}); make the corpus again") from error


# Seconds between two looks at whether a token file has changed.
CHECK_S = 30.0


class IndexedDataset:
    """A memory-mapped token file, checked against its index when it is opened.

    Raises:
        UserError: a file is missing, empty, cut short, foreign, or disagrees with the other.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self._bin, self._idx = (with_suffix(self.prefix, suffix) for suffix in (".bin", ".idx"))
        for path in (self._bin, self._idx):
            self._require_content(path)
        dtype, num_sequences, document_entries = self._read_header()
        self.dtype = np.dtype(dtype)
        self.num_sequences, self.num_documents = num_sequences, document_entries - 1
        self._lengths = self._map("<i4", HEADER.size, num_sequences)
        self._offsets = self._map("<i8", HEADER.size + 4 * num_sequences, num_sequences)
        self._documents = self._map("<i8", HEADER.size + 12 * num_sequences, document_entries)
        modes_begin = HEADER.size + 12 * num_sequences + 8 * document_entries
        self._modes = self._map("<i1", modes_begin, self._idx.stat().st_size - modes_begin)
        self.num_tokens = self._count_tokens()
        for start in _run_starts(num_sequences):
            self._check_sequences(start, min(start + RUN, num_sequences))
        for start in _run_starts(document_entries):
            self._check_documents(start, min(start + RUN, document_entries))
        self.manifest: Manifest | None = read_manifest(self.prefix)
        self._check_manifest()
        self._opened_state, self._next_check_s = self._file_state(), 0.0
        for path in (self._bin, self._idx):
            if path.stat().st_size <= WHOLE:
                deque(self.blocks(path.suffix), maxlen=0)
        self._tokens: Tokens = np.asarray(np.memmap(self._bin, self.dtype, "r"))
        self._descriptor = os.open(self._bin, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) of the whole corpus as stored, a view of the file."""
        assert 0 <= start <= stop <= self.num_tokens, f"[{start}, {stop}) is outside {self.num_tokens} tokens"
        return self._tokens[start:stop]

    def windows(self, offsets: npt.NDArray[np.int64], length: int) -> Tokens:
        """Return [offsets, length], the tokens from each offset on; raises UserError if the file has changed.

        It looks only every `CHECK_S` seconds: a file system answers thousands of ranks in turn.
        """
        if time.monotonic() >= self._next_check_s:
            self._require_unchanged()
            self._next_check_s = time.monotonic() + CHECK_S
        rows = np.empty((len(offsets), length), self.dtype)
        for row, offset in zip(rows, offsets.tolist(), strict=True):
            assert 0 <= offset <= self.num_tokens - length, f"tokens [{offset}, +{length}) of {self.num_tokens}"
            self._read_into(row, offset)
        return rows

    def _read_into(self, row: Tokens, offset: int) -> None:
        """Read tokens, not from the mapped file: where that has become shorter, that is SIGBUS, the process's end."""
        place = offset * self.dtype.itemsize
        if retried(self._bin, lambda: os.preadv(self._descriptor, [row.data], place)) != row.nbytes:
            raise self._damaged(self._bin, "the file has changed since it was opened")

    def sequences(self, document: int) -> list[Tokens]:
        """Return the sequences of a document: its sentences, or one; raises UserError if its entries are damaged."""
        assert 0 <= document < self.num_documents, f"document {document} of {self.num_documents}"
        self._check_documents(document, document + 2)
        first, last = int(self._documents[document]), int(self._documents[document + 1])
        if first < last:
            self._check_sequences(first, last)
        starts = (int(offset) // self.dtype.itemsize for offset in self._offsets[first:last])
        lengths = (int(length) for length in self._lengths[first:last])
        return [self.tokens(start, start + length) for start, length in zip(starts, lengths, strict=True)]

    def length_blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the lengths of all sequences in blocks, checked; raises UserError."""
        for start in range(0, self.num_sequences, BLOCK):
            stop = min(start + BLOCK, self.num_sequences)
            self._check_sequences(start, stop)
            yield self._lengths[start:stop].astype(np.int64)

    def document_blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield, in blocks, the number of sequences up to the end of each document, checked; raises UserError."""
        for start in range(0, self.num_documents, BLOCK):
            stop = min(start + BLOCK, self.num_documents)
            self._check_documents(start, stop + 1)
            yield self._documents[start + 1 : stop + 1].astype(np.int64)

    def document_lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the number of tokens of all documents in blocks; raises UserError where the index is damaged."""
        deque(self.length_blocks(), maxlen=0)
        size, end = self.dtype.itemsize, self.num_tokens
        before = 0
        for ends in self.document_blocks():
            inside = np.minimum(ends, self.num_sequences - 1)
            places = np.where(ends < self.num_sequences, self._offsets[inside] // size, end)
            yield np.diff(places, prepend=before)
            before = int(places[-1])

    def blocks(self, suffix: str) -> Iterator[bytes]:
        """Yield the bytes of the `.bin` or `.idx` file; raises UserError behind them if their sha256 is not the
        manifest's, or the file has changed."""
        digest = hashlib.sha256()
        for block in read_blocks(path := with_suffix(self.prefix, suffix)):
            digest.update(block)
            yield block
        self._require_unchanged()
        made, found = self.manifest, digest.hexdigest()
        promised = made and {".bin": made.bin_sha256, ".idx": made.idx_sha256}[suffix]
        if promised and found != promised:
            raise self._damaged(path, f"its sha256 is {found[:16]}..., but its manifest says {promised[:16]}...")

    def verify(self) -> None:
        """Check every entry of the index, and the checksums where a manifest has them; raises UserError."""
        deque(chain(self.length_blocks(), self.document_blocks(), *map(self.blocks, (".bin", ".idx"))), maxlen=0)

    def _require_unchanged(self) -> None:
        if self._file_state() != self._opened_state:
            raise self._damaged(self._bin, "the file has changed since it was opened")

    def _file_state(self) -> tuple[int, int] | None:
        """Return the size and modification time of the token file; None if it is missing."""
        try:
            status = retried(self._bin, self._bin.stat)
        except FileNotFoundError:
            return None
        return status.st_size, status.st_mtime_ns

    def _damaged(self, path: Path, problem: str) -> UserError:
        return UserError(f"{path}: {problem}; make the corpus again with tools/preprocess_data.py")

    def _require_content(self, path: Path) -> None:
        def read() -> bytes:
            require_regular(path)
            with path.open("rb") as file:
                return file.read(1)

        try:
            content = retried(path, read)
        except OSError as error:
            if is_machine_fault(error):
                raise
            raise UserError(
                f"data.data_path={self.prefix}: cannot read {path} ({error.strerror}); "
                "give the prefix of a .bin/.idx pair that tools/preprocess_data.py made, without the suffix"
            ) from error
        if not content:
            raise self._damaged(path, "the file is empty")

    def _read_header(self) -> tuple[str, int, int]:
        def read() -> bytes:
            with self._idx.open("rb") as file:
                return file.read(HEADER.size)

        header = retried(self._idx, read)
        if len(header) < HEADER.size:
            raise self._damaged(self._idx, f"cut short, {len(header)} bytes where the header has {HEADER.size}")
        magic, version, code, num_sequences, document_entries = HEADER.unpack(header)
        if magic != MAGIC:
            raise self._damaged(self._idx, f"not a Megatron index, it begins with {magic!r} instead of {MAGIC!r}")
        if version != 1:
            raise self._damaged(self._idx, f"version {version} of the index, only version 1 is known")
        if code not in DTYPES:
            known = ", ".join(f"{key} ({np.dtype(name).name})" for key, name in DTYPES.items())
            raise self._damaged(self._idx, f"dtype code {code} is no integer type of tokens; known are {known}")
        if not num_sequences or document_entries < 2:
            raise self._damaged(
                self._idx, f"no documents ({num_sequences} sequences, {document_entries} document entries)"
            )
        size, wanted = self._idx.stat().st_size, HEADER.size + 12 * num_sequences + 8 * document_entries
        if size not in (wanted, wanted + num_sequences):
            raise self._damaged(
                self._idx, f"{size} bytes where {num_sequences} sequences need {wanted}, cut short or damaged"
            )
        return DTYPES[code], num_sequences, document_entries

    def _map(self, dtype: str, first_byte: int, count: int) -> Tokens:
        if not count:
            return np.empty(0, dtype)
        return np.asarray(np.memmap(self._idx, dtype, "r", offset=first_byte, shape=(count,)))

    def _count_tokens(self) -> int:
        size, bin_bytes = self.dtype.itemsize, self._bin.stat().st_size
        end = int(self._offsets[-1]) + int(self._lengths[-1]) * size
        if end != bin_bytes:
            raise self._damaged(
                self._bin,
                f"{bin_bytes} bytes where the index counts {end // size} tokens of {size} bytes, cut short or foreign",
            )
        return end // size

    def _check_sequences(self, start: int, stop: int) -> None:
        """Require that each sequence lies in the file and begins where the one before ends."""
        lengths, places = self._lengths[start:stop].astype(np.int64), self._offsets[start:stop].astype(np.int64)
        size, end = self.dtype.itemsize, self.num_tokens * self.dtype.itemsize
        after = np.append(places[1:], self._offsets[stop] if stop < self.num_sequences else end)
        wrong = (lengths < 0) | (places < 0) | (after > end) | (places + lengths * size != after)
        if start == 0 and places[0] != 0:
            wrong[0] = True
        if wrong.any():
            first = start + int(wrong.argmax())
            raise self._damaged(self._idx, f"sequence {first} does not end where the next one, or the file, does")
        if (modes := self._modes[start:stop]).any():
            first = int((modes != 0).argmax())
            raise UserError(
                f"{self._idx}: a multimodal index of Megatron, whose sequence {start + first} has mode {modes[first]}; "
                "only text, of mode 0, can be read: make a corpus of the text with tools/preprocess_data.py"
            )

    def _check_documents(self, start: int, stop: int) -> None:
        """Require that documents are consecutive ranges of the sequences."""
        block = self._documents[max(start - 1, 0) : stop].astype(np.int64)
        if (np.diff(block) < 0).any() or block[0] < 0 or (start == 0 and block[0] > 0):
            raise self._damaged(self._idx, "the document array decreases, or does not begin at 0")
        if block[-1] > self.num_sequences or (stop > self.num_documents and block[-1] != self.num_sequences):
            raise self._damaged(self._idx, f"the document array ends at sequence {block[-1]} of {self.num_sequences}")

    def _check_manifest(self) -> None:
        made, counted = self.manifest, (self.num_documents, self.num_tokens)
        if made is not None and counted != (promised := (made.num_documents, made.num_tokens)):
            raise self._damaged(self._idx, f"{counted} documents and tokens, but its manifest says {promised}")


def _run_starts(count: int) -> list[int]:
    """Return the starts of the runs of entries to check on opening: all of a small index, always first and last."""
    if count <= RUNS * RUN:
        return list(range(0, count, RUN))
    return [int(start) for start in np.linspace(0, count - RUN, RUNS)]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which Megatron stores the tokens of a vocabulary."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")
