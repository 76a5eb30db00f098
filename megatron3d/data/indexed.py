"""Megatron's token files: `prefix.bin` is all tokens one after another, `prefix.idx` says where documents begin.

    .idx   magic (9 bytes) | version u64 = 1 | dtype code u8 | sequences u64 | documents + 1 u64
           length of each sequence i32 | its byte offset i64 | documents as ranges of sequences i64 | [mode i8 each]

Everything little endian, from Megatron-LM's megatron/core/datasets/indexed_dataset.py.  `prefix.manifest.json` is ours.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron3d.data.files import PARTIAL, open_for_writing, replacing, with_suffix
from megatron3d.data.manifest import Manifest, read_manifest, write_manifest
from megatron3d.data.tokenizer import Tokenizer
from megatron3d.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
BLOCK = 1 << 20
"""Entries of the index handled at one time."""

Tokens = npt.NDArray[Any]


class IndexedDataset:
    """A memory-mapped token file, checked completely against its index when it is opened.

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
        self.num_documents = document_entries - 1
        self._check_index_size(num_sequences, document_entries)
        self.num_tokens = self._check_sequences(num_sequences)
        self._check_documents(num_sequences, document_entries)
        self.manifest: Manifest | None = read_manifest(self.prefix)
        self._check_manifest()
        self._tokens: Tokens = np.asarray(np.memmap(self._bin, self.dtype, "r"))

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the whole corpus, as stored; a view of the file."""
        assert 0 <= start <= stop <= self.num_tokens, f"[{start}, {stop}) is outside {self.num_tokens} tokens"
        return self._tokens[start:stop]

    def windows(self, offsets: npt.NDArray[np.int64], length: int) -> Tokens:
        """[offsets, length]: a window of tokens from each offset."""
        return np.lib.stride_tricks.sliding_window_view(self._tokens, length)[offsets]

    def _fail(self, path: Path, problem: str) -> UserError:
        return UserError(f"{path}: {problem}; make the corpus again with tools/preprocess_data.py")

    def _require_content(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                content = file.read(1)
        except OSError as error:
            raise UserError(
                f"data.data_path={self.prefix}: cannot read {path} ({error.strerror}); "
                "give the prefix of a .bin/.idx pair that tools/preprocess_data.py made, without the suffix"
            ) from error
        if not content:
            raise self._fail(path, "the file is empty")

    def _read_header(self) -> tuple[str, int, int]:
        with self._idx.open("rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise self._fail(self._idx, f"cut short, {len(header)} bytes where the header has {HEADER.size}")
        magic, version, code, num_sequences, document_entries = HEADER.unpack(header)
        if magic != MAGIC:
            raise self._fail(self._idx, f"not a Megatron index, it begins with {magic!r} instead of {MAGIC!r}")
        if version != 1:
            raise self._fail(self._idx, f"version {version} of the index, only version 1 is known")
        if code not in DTYPES:
            known = ", ".join(f"{key} ({np.dtype(name).name})" for key, name in DTYPES.items())
            raise self._fail(self._idx, f"dtype code {code} is no integer type of tokens; known are {known}")
        if not num_sequences or document_entries < 2:
            raise self._fail(
                self._idx, f"no documents ({num_sequences} sequences, {document_entries} document entries)"
            )
        return DTYPES[code], num_sequences, document_entries

    def _check_index_size(self, num_sequences: int, document_entries: int) -> None:
        size = self._idx.stat().st_size
        wanted = HEADER.size + 12 * num_sequences + 8 * document_entries
        if size not in (wanted, wanted + num_sequences):
            raise self._fail(
                self._idx, f"{size} bytes where {num_sequences} sequences need {wanted}, cut short or damaged"
            )

    def _blocks(self, dtype: str, first_byte: int, count: int) -> Iterator[Tokens]:
        array = np.asarray(np.memmap(self._idx, dtype, "r", offset=first_byte, shape=(count,)))
        for start in range(0, count, BLOCK):
            yield array[start : start + BLOCK].astype(np.int64)

    def _check_sequences(self, num_sequences: int) -> int:
        num_tokens, number, size = 0, 0, self.dtype.itemsize
        offsets = self._blocks("<i8", HEADER.size + 4 * num_sequences, num_sequences)
        for lengths, places in zip(self._blocks("<i4", HEADER.size, num_sequences), offsets, strict=True):
            ends = num_tokens + np.cumsum(lengths)
            wrong = (lengths < 0) | (places != (ends - lengths) * size)
            if wrong.any():
                raise self._fail(
                    self._idx, f"sequence {number + int(wrong.argmax())} does not begin where the one before ends"
                )
            num_tokens, number = int(ends[-1]), number + len(lengths)
        bin_bytes = self._bin.stat().st_size
        if bin_bytes != num_tokens * size:
            raise self._fail(
                self._bin,
                f"{bin_bytes} bytes where the index counts {num_tokens} tokens of {size} bytes, cut short or foreign",
            )
        return num_tokens

    def _check_documents(self, num_sequences: int, document_entries: int) -> None:
        last = 0
        for block in self._blocks("<i8", HEADER.size + 12 * num_sequences, document_entries):
            if (np.diff(block, prepend=last) < 0).any():
                raise self._fail(self._idx, "the document array decreases")
            last = int(block[-1])
        if last != num_sequences:
            raise self._fail(self._idx, f"the document array ends at sequence {last} of {num_sequences}")

    def _check_manifest(self) -> None:
        if self.manifest is None:
            return
        counted = (self.num_documents, self.num_tokens)
        promised = (self.manifest.num_documents, self.manifest.num_tokens)
        if counted != promised:
            raise self._fail(
                self._idx,
                f"{counted} documents and tokens, but its manifest says {promised}",
            )


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that Megatron stores tokens of a vocabulary in."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


class IndexedWriter:
    """Writes a corpus with bounded memory; nothing has its final name before `finish`, nothing is left without it."""

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        self._prefix = Path(prefix)
        self._dtype = dtype
        self._bin = open_for_writing(with_suffix(self._prefix, ".bin" + PARTIAL))
        self._lengths = open_for_writing(with_suffix(self._prefix, ".lengths" + PARTIAL))
        self.num_documents = 0
        self.num_tokens = 0
        self._max_token_id = 0

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._bin, self._lengths):
            file.close()
            Path(file.name).unlink(missing_ok=True)

    def add(self, tokens: Tokens, lengths: npt.NDArray[np.int32]) -> None:
        """Append documents: their tokens one after another, and the length of each."""
        assert tokens.dtype == self._dtype, f"{tokens.dtype} tokens for a file of {self._dtype}"
        assert int(lengths.sum()) == len(tokens), f"lengths add up to {lengths.sum()}, not to {len(tokens)} tokens"
        self._bin.write(tokens.tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)
        self._max_token_id = max(self._max_token_id, int(tokens.max(initial=0)))

    def finish(self, tokenizer: Tokenizer) -> None:
        """Publish the corpus; the index comes last, so that a reader never sees a mixture with an older corpus."""
        assert self.num_documents > 0, "a corpus needs a document"
        manifest = Manifest(
            type(tokenizer).__name__,
            tokenizer.vocab_size,
            tokenizer.fingerprint,
            self.num_documents,
            self.num_tokens,
            self._max_token_id,
        )
        idx = with_suffix(self._prefix, ".idx")
        with replacing(idx) as file:
            self._write_index(file)
            idx.unlink(missing_ok=True)
            self._bin.close()
            Path(self._bin.name).replace(with_suffix(self._prefix, ".bin"))
            write_manifest(self._prefix, manifest)

    def _write_index(self, file: BinaryIO) -> None:
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == self._dtype)
        file.write(HEADER.pack(MAGIC, 1, code, self.num_documents, self.num_documents + 1))
        for lengths in self._length_blocks():
            file.write(lengths.tobytes())
        end = 0
        for lengths in self._length_blocks():
            ends = end + np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
            file.write((ends - lengths.astype(np.int64) * self._dtype.itemsize).astype("<i8").tobytes())
            end = int(ends[-1])
        for start in range(0, self.num_documents + 1, BLOCK):
            file.write(np.arange(start, min(start + BLOCK, self.num_documents + 1), dtype="<i8").tobytes())

    def _length_blocks(self) -> Iterator[npt.NDArray[np.int32]]:
        self._lengths.seek(0)
        while block := self._lengths.read(4 * BLOCK):
            yield np.frombuffer(block, "<i4")
