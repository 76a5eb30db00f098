"""Write token files in bounded memory, resumably, and join them; indexed.py describes the format.

prefix.bin.partial         tokens, in their final form
prefix.lengths.partial     i32 per finished sequence
prefix.documents.partial   i64 per finished document: the number of sequences up to its end

The counts of what is written hold a checksum of each file, which publishing verifies while it reads them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron3d.data.token_files.files import PARTIAL, AppendOnlyFile, read_blocks, replace_output, sha256, with_suffix
from megatron3d.data.token_files.indexed import DTYPES, HEADER, MAGIC, SUFFIX, IndexedDataset, Manifest, read_manifest
from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.errors import UserError

CONTINUES, ENDS_SEQUENCE = 0, 1
ENDS_DOCUMENT = 2
"""What ends with a run of tokens: nothing, its sequence (a sentence), or its document too."""
MAX_SEQUENCE = 2**31 - 1
GROWING = ("bin", "lengths", "documents")
Ints = npt.NDArray[Any]


@dataclass(frozen=True)
class WrittenCounts:
    """Progress of writing a corpus: the counts that a writer needs to resume.

    Attributes:
        open_tokens: tokens at the end of the file whose sequence is not finished.
        crc32: of each of the GROWING files.
    """

    num_tokens: int = 0
    num_sequences: int = 0
    num_documents: int = 0
    open_tokens: int = 0
    max_token_id: int = 0
    crc32: tuple[int, ...] = (0, 0, 0)


class IndexedWriter:
    """Appends documents to a corpus; as a context manager it deletes what `finish` or `publish` has not published."""

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any], written: WrittenCounts | None = None) -> None:
        self.prefix, self._dtype = Path(prefix), dtype
        self.written = written or WrittenCounts()
        self._files: dict[str, AppendOnlyFile] = {}
        try:
            for name, size in file_sizes(self.written, dtype).items():
                self._files[name] = AppendOnlyFile(part_path(self.prefix, name), size)
        except UserError:
            self.close() if self.written.num_tokens else self.discard()
            raise

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def add(self, tokens: Ints, lengths: Ints, marks: Ints | None = None) -> None:
        """Append runs of tokens: all their tokens, the length and mark of each; by default each is a document."""
        assert tokens.dtype == self._dtype, f"{tokens.dtype} tokens for a file of {self._dtype}"
        assert int(lengths.sum()) == len(tokens), f"lengths add up to {lengths.sum()}, not to {len(tokens)} tokens"
        if not len(lengths):
            return
        marks = np.full(len(lengths), ENDS_DOCUMENT, np.int8) if marks is None else marks
        sequences, marks, open_tokens = self._sequences(lengths.astype(np.int64), marks)
        documents = self.written.num_sequences + 1 + np.flatnonzero(marks == ENDS_DOCUMENT)
        self._append(tokens, sequences, documents, open_tokens)

    def _append(self, tokens: Ints, sequences: Ints, documents: Ints, open_tokens: int = 0) -> None:
        """Append tokens, lengths of finished sequences and ends of finished documents, and count them."""
        data = tokens.tobytes(), sequences.astype("<i4").tobytes(), documents.astype("<i8").tobytes()
        for name, content in zip(GROWING, data, strict=True):
            self._files[name].append(content)
        before = self.written
        self.written = WrittenCounts(
            before.num_tokens + len(tokens),
            before.num_sequences + len(sequences),
            before.num_documents + len(documents),
            open_tokens,
            max(before.max_token_id, int(tokens.max(initial=0))),
            tuple(map(zlib.crc32, data, before.crc32)),
        )

    def _sequences(self, lengths: Ints, marks: Ints) -> tuple[Ints, Ints, int]:
        """Join runs to sequences: the lengths and marks of finished ones, and the length of the unfinished one."""
        last = np.flatnonzero(marks != CONTINUES)
        ends = self.written.open_tokens + np.cumsum(lengths)
        sequences, marks = np.diff(ends[last], prepend=0), marks[last]
        open_tokens = int(ends[-1] - (ends[last[-1]] if len(last) else 0))
        while (sequences > MAX_SEQUENCE).any():  # beyond the index's i32: such a document becomes several sequences
            index = int(np.argmax(sequences > MAX_SEQUENCE))
            rest = sequences[index] - MAX_SEQUENCE
            sequences = np.concatenate((sequences[:index], [MAX_SEQUENCE, rest], sequences[index + 1 :]))
            marks = np.insert(marks, index, ENDS_SEQUENCE)
        return sequences, marks, open_tokens

    def copy(self, data: IndexedDataset) -> None:
        """Append all documents of another corpus, checked while they are read; raises UserError."""
        assert self.written.open_tokens == 0, "a corpus is appended after a whole document"
        assert data.dtype == self._dtype, f"{data.dtype} tokens for a file of {self._dtype}"
        deque(data.blocks(".idx"), maxlen=0)
        num_sequences, nothing = self.written.num_sequences, np.empty(0, np.int64)
        for block in data.blocks(".bin"):
            self._append(np.frombuffer(block, self._dtype), nothing, nothing)
        for lengths in data.length_blocks():
            self._append(nothing, lengths, nothing)
        for ends in data.document_blocks():
            self._append(nothing, nothing, ends + num_sequences)

    def sync(self) -> None:
        """Make everything written so far survive a crash of the machine."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Close the files and keep them, to resume later."""
        for file in self._files.values():
            file.close()

    def discard(self) -> None:
        """Close the files, and delete those that are not published."""
        for file in self._files.values():
            file.discard()

    def finish(self, tokenizer: Tokenizer) -> None:
        """Publish the corpus, as `publish` does."""
        publish(self.prefix, self._dtype, self.written, make_manifest(self.written, tokenizer))
        self.close()


def corpus_files(prefix: Path) -> tuple[Path, ...]:
    """Return the files of a published corpus."""
    return tuple(with_suffix(prefix, suffix) for suffix in (".bin", ".idx", SUFFIX))


def part_path(prefix: Path, name: str) -> Path:
    """Return the path of one of the three growing files."""
    return with_suffix(prefix, f".{name}{PARTIAL}")


def file_sizes(written: WrittenCounts, dtype: np.dtype[Any]) -> Mapping[str, int]:
    """Return the size in bytes of each growing file."""
    return {
        "bin": written.num_tokens * dtype.itemsize,
        "lengths": written.num_sequences * 4,
        "documents": written.num_documents * 8,
    }


def is_on_disk(prefix: Path, written: WrittenCounts, dtype: np.dtype[Any]) -> bool:
    """Return whether the growing files hold at least what the counts say."""
    sizes = file_sizes(written, dtype)
    return all(_size(part_path(prefix, name)) >= size for name, size in sizes.items())


def can_publish(prefix: Path, written: WrittenCounts, dtype: np.dtype[Any]) -> bool:
    """Return whether the growing files hold exactly what the counts say (the tokens perhaps under their final name),
    or the corpus is published already."""
    wanted = file_sizes(written, dtype)
    found = {name: _size(part_path(prefix, name)) for name in wanted}
    if found["lengths"] < 0 and with_suffix(prefix, ".idx").exists():
        made = read_manifest(prefix)
        return made is not None and (made.num_documents, made.num_tokens) == (written.num_documents, written.num_tokens)
    if found["bin"] < 0:
        found["bin"] = _size(with_suffix(prefix, ".bin"))
    return found == wanted


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def make_manifest(written: WrittenCounts, tokenizer: Tokenizer) -> Manifest:
    """Return the manifest of what is written, without checksums."""
    return Manifest(
        tokenizer_type=type(tokenizer).__name__,
        vocab_size=tokenizer.vocab_size,
        fingerprint=tokenizer.fingerprint,
        num_documents=written.num_documents,
        num_tokens=written.num_tokens,
        max_token_id=written.max_token_id,
    )


def publish(prefix: Path, dtype: np.dtype[Any], written: WrittenCounts, manifest: Manifest | None) -> None:
    """Rename the files of a corpus to their final names; may be repeated after a kill at any point.

    The index comes last, so that a reader never sees a mixture with an older corpus.  A manifest of None stands for a
    corpus that Megatron made.
    """
    assert written.open_tokens == 0, "the last document has no end"
    tokens, idx, described = corpus_files(prefix)
    partial = part_path(prefix, "bin")
    if part_path(prefix, "lengths").exists():  # otherwise an earlier call did this
        with ExitStack() as stack:
            index = stack.enter_context(replace_output(idx))
            bin_sha256 = sha256(_verified_blocks(partial if partial.exists() else tokens, written.crc32[0]))
            _write_index(index, prefix, dtype, written)
            _flush(index)
            if manifest is not None:
                sums = {"bin_sha256": bin_sha256, "idx_sha256": sha256(read_blocks(with_suffix(idx, PARTIAL)))}
                file = stack.enter_context(replace_output(described))
                described_by = manifest.model_copy(update=sums).model_dump(exclude_none=True)
                file.write((json.dumps(described_by, indent=2) + "\n").encode())
                _flush(file)
            idx.unlink(missing_ok=True)  # from here on the disk cannot be full
            described.unlink(missing_ok=True)
            if partial.exists():
                partial.replace(tokens)
    for name in ("lengths", "documents"):
        part_path(prefix, name).unlink(missing_ok=True)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _write_index(file: BinaryIO, prefix: Path, dtype: np.dtype[Any], written: WrittenCounts) -> None:
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    file.write(HEADER.pack(MAGIC, 1, code, written.num_sequences, written.num_documents + 1))
    lengths_path, documents_path = part_path(prefix, "lengths"), part_path(prefix, "documents")
    for block in _verified_blocks(lengths_path, written.crc32[1]):
        file.write(block)
    end = 0
    for block in read_blocks(lengths_path):
        lengths = np.frombuffer(block, "<i4")
        ends = end + np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
        file.write((ends - lengths.astype(np.int64) * dtype.itemsize).astype("<i8").tobytes())
        end = int(ends[-1])
    file.write(np.zeros(1, "<i8").tobytes())
    for block in _verified_blocks(documents_path, written.crc32[2]):
        file.write(block)


def _verified_blocks(path: Path, crc32: int) -> Iterator[bytes]:
    """Yield the blocks of a growing file; raises UserError behind them if their checksum differs."""
    found = 0
    for block in read_blocks(path):
        found = zlib.crc32(block, found)
        yield block
    if found != crc32:
        raise UserError(
            f"{path}: damaged since it was written (crc32 {found:08x} instead of {crc32:08x}); make the corpus again"
        )
