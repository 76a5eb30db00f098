"""Writes token files with bounded memory, resumably, and joins them; the format is in indexed.py.

prefix.bin.partial         tokens, as they will be
prefix.lengths.partial     i32 per finished sequence
prefix.documents.partial   i64 per finished document: the number of sequences up to its end
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron3d.data.token_files.files import PARTIAL, AppendOnlyFile, blocks, checksum, replacing, with_suffix
from megatron3d.data.token_files.indexed import BLOCK, DTYPES, HEADER, MAGIC, IndexedDataset, Tokens
from megatron3d.data.token_files.manifest import Manifest, read_manifest, write_manifest
from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.errors import UserError

CONTINUES, ENDS_SEQUENCE, ENDS_DOCUMENT = 0, 1, 2
"""How a run of tokens ends: not at all, its sequence (a sentence) does, or its document too."""
MAX_SEQUENCE = 2**31 - 1
Ints = npt.NDArray[Any]


@dataclass(frozen=True)
class WrittenCounts:
    """How far a corpus is written: all that is needed to go on from there.

    Attributes:
        open_tokens: tokens at the end of the file whose sequence goes on.
    """

    num_tokens: int = 0
    num_sequences: int = 0
    num_documents: int = 0
    open_tokens: int = 0
    max_token_id: int = 0


class IndexedWriter:
    """Appends documents to a corpus; nothing has its final name before `finish`, nothing is left without it."""

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any], written: WrittenCounts | None = None) -> None:
        self.prefix, self._dtype, self.written = Path(prefix), dtype, written or WrittenCounts()
        self._files: dict[str, AppendOnlyFile] = {}
        try:
            for name, size in file_sizes(self.written, dtype).items():
                self._files[name] = AppendOnlyFile(part_path(self.prefix, name), size)
        except UserError:
            self.close() if self.written.num_sequences else self.discard()
            raise

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    @property
    def num_documents(self) -> int:
        """Finished documents."""
        return self.written.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self.written.num_tokens

    def add(self, tokens: Tokens, lengths: Ints, marks: Ints | None = None) -> None:
        """Append runs of tokens: all their tokens, the length of each, and how each ends; default: a document."""
        assert tokens.dtype == self._dtype, f"{tokens.dtype} tokens for a file of {self._dtype}"
        assert int(lengths.sum()) == len(tokens), f"lengths add up to {lengths.sum()}, not to {len(tokens)} tokens"
        if not len(lengths):
            return
        marks = np.full(len(lengths), ENDS_DOCUMENT, np.int8) if marks is None else marks
        sequences, marks, open_tokens = self._sequences(lengths.astype(np.int64), marks)
        documents = self.written.num_sequences + 1 + np.flatnonzero(marks == ENDS_DOCUMENT)
        self._files["bin"].append(tokens.tobytes())
        self._files["lengths"].append(sequences.astype("<i4").tobytes())
        self._files["documents"].append(documents.astype("<i8").tobytes())
        self.written = WrittenCounts(
            self.written.num_tokens + len(tokens),
            self.written.num_sequences + len(sequences),
            self.written.num_documents + len(documents),
            open_tokens,
            max(self.written.max_token_id, int(tokens.max(initial=0))),
        )

    def _sequences(self, lengths: Ints, marks: Ints) -> tuple[Ints, Ints, int]:
        """Lengths and marks of the sequences that end here, and the length of the one that does not."""
        last = np.flatnonzero(marks != CONTINUES)
        ends = self.written.open_tokens + np.cumsum(lengths)
        sequences, marks = np.diff(ends[last], prepend=0), marks[last]
        open_tokens = int(ends[-1] - (ends[last[-1]] if len(last) else 0))
        while (sequences > MAX_SEQUENCE).any():  # an i32 holds no more: such a document becomes several sequences
            index = int(np.argmax(sequences > MAX_SEQUENCE))
            rest = sequences[index] - MAX_SEQUENCE
            sequences = np.concatenate((sequences[:index], [MAX_SEQUENCE, rest], sequences[index + 1 :]))
            marks = np.insert(marks, index, ENDS_SEQUENCE)
        return sequences, marks, open_tokens

    def copy(self, data: IndexedDataset) -> None:
        """Append all documents of another corpus."""
        assert self.written.open_tokens == 0, "a corpus is appended after a whole document"
        assert data.dtype == self._dtype, f"{data.dtype} tokens for a file of {self._dtype}"
        written, top = self.written, self.written.max_token_id
        for block in blocks(with_suffix(data.prefix, ".bin")):
            top = max(top, int(np.frombuffer(block, self._dtype).max()))
            self._files["bin"].append(block)
        for lengths in data.length_blocks():
            self._files["lengths"].append(lengths.astype("<i4").tobytes())
        for ends in data.document_blocks():
            self._files["documents"].append((ends + written.num_sequences).astype("<i8").tobytes())
        self.written = WrittenCounts(
            written.num_tokens + data.num_tokens,
            written.num_sequences + data.num_sequences,
            written.num_documents + data.num_documents,
            0,
            top,
        )

    def sync(self) -> None:
        """Make everything so far survive a crash of the machine."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Close the files and keep them, to go on later."""
        for file in self._files.values():
            file.close()

    def discard(self) -> None:
        """Close and delete what has no final name yet."""
        for file in self._files.values():
            file.discard()

    def finish(self, tokenizer: Tokenizer, **more: str | None) -> None:
        """Publish the corpus, as `publish` does."""
        manifest = manifest_of(self.written, type(tokenizer).__name__, tokenizer.vocab_size, tokenizer.fingerprint)
        publish(self.prefix, self._dtype, self.written, manifest.model_copy(update=more))
        self.close()


def part_path(prefix: Path, name: str) -> Path:
    """Where one of the three growing files lies."""
    return with_suffix(prefix, f".{name}{PARTIAL}")


def file_sizes(written: WrittenCounts, dtype: np.dtype[Any]) -> Mapping[str, int]:
    """Bytes of each growing file."""
    return {
        "bin": written.num_tokens * dtype.itemsize,
        "lengths": written.num_sequences * 4,
        "documents": written.num_documents * 8,
    }


def reaches(prefix: Path, written: WrittenCounts, dtype: np.dtype[Any]) -> bool:
    """Whether the growing files hold at least so much."""
    sizes = file_sizes(written, dtype)
    return all(_size(part_path(prefix, name)) >= size for name, size in sizes.items())


def can_publish(prefix: Path, written: WrittenCounts, dtype: np.dtype[Any]) -> bool:
    """Whether the growing files hold just so much, the tokens perhaps under their name, or all is done already."""
    wanted = file_sizes(written, dtype)
    found = {name: _size(part_path(prefix, name)) for name in wanted}
    if found["lengths"] < 0 and with_suffix(prefix, ".idx").exists():
        made = read_manifest(prefix)
        return made is not None and (made.num_documents, made.num_tokens) == (written.num_documents, written.num_tokens)
    if found["bin"] < 0:
        found["bin"] = _size(with_suffix(prefix, ".bin"))
    return found == wanted


def _size(path: Path) -> int:
    """Bytes; -1 where there is no such file."""
    return path.stat().st_size if path.exists() else -1


def manifest_of(written: WrittenCounts, tokenizer_type: str, vocab_size: int, fingerprint: str) -> Manifest:
    """The manifest of what is written, without checksums yet."""
    return Manifest(
        tokenizer_type=tokenizer_type,
        vocab_size=vocab_size,
        fingerprint=fingerprint,
        num_documents=written.num_documents,
        num_tokens=written.num_tokens,
        max_token_id=written.max_token_id,
    )


def publish(prefix: Path, dtype: np.dtype[Any], written: WrittenCounts, manifest: Manifest | None) -> None:
    """Give the files of a corpus their names; may be repeated after it was killed at any point.

    The index comes last, so that a reader never sees a mixture with an older corpus.  Without a manifest it is as if
    Megatron had made it.
    """
    assert written.open_tokens == 0, "the last document has no end"
    idx, tokens, partial = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin"), part_path(prefix, "bin")
    if part_path(prefix, "lengths").exists():  # else this was done before
        with replacing(idx) as file:
            _write_index(file, prefix, dtype, written)
            file.flush()
            if partial.exists():
                idx.unlink(missing_ok=True)
                partial.replace(tokens)
            if manifest is not None:
                sums = {"bin_sha256": checksum(tokens), "idx_sha256": checksum(with_suffix(idx, PARTIAL))}
                manifest = manifest.model_copy(update=sums)
            write_manifest(prefix, manifest)
    for name in ("lengths", "documents"):
        part_path(prefix, name).unlink(missing_ok=True)


def _write_index(file: BinaryIO, prefix: Path, dtype: np.dtype[Any], written: WrittenCounts) -> None:
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    file.write(HEADER.pack(MAGIC, 1, code, written.num_sequences, written.num_documents + 1))
    for lengths in _entries(part_path(prefix, "lengths"), "<i4"):
        file.write(lengths.tobytes())
    end = 0
    for lengths in _entries(part_path(prefix, "lengths"), "<i4"):
        ends = end + np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
        file.write((ends - lengths.astype(np.int64) * dtype.itemsize).astype("<i8").tobytes())
        end = int(ends[-1])
    file.write(np.zeros(1, "<i8").tobytes())
    for documents in _entries(part_path(prefix, "documents"), "<i8"):
        file.write(documents.tobytes())


def _entries(path: Path, dtype: str) -> Iterator[Ints]:
    size = np.dtype(dtype).itemsize
    with path.open("rb") as file:
        while block := file.read(size * BLOCK):
            yield np.frombuffer(block, dtype)
