"""The input of a job as a list of pieces, each a run of documents: what is shared out, shuffled, and counted.

    .jsonl .json          ranges of --piece-mb bytes; a line belongs to the range that it begins in
    .jsonl.gz .jsonl.zst  a file
    .txt                  a file, which is one document
    .parquet              a row group
    a dataset             a shard of a Hugging Face dataset, by name or in a folder

The list depends on the input alone, neither on workers nor on --shard, so that the tokens do not either.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from megatron3d.data.permutation import permute
from megatron3d.data.token_files.files import BLOCK_BYTES
from megatron3d.errors import UserError

DEFAULT_PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """A run of documents.

    Attributes:
        kind: one of KINDS, or "dataset".
        path: of the file, or the dataset as `hub.HubName` reads it.
        start: first byte, number of the row group, or number of the shard.
        stop: byte behind the last line's begin, or how many row groups or shards there are.
        num_bytes: of input, about.
    """

    kind: str
    path: str
    start: int
    stop: int
    num_bytes: int

    def place(self, position: int) -> str:
        """Where a position of this piece is, for a person."""
        if self.kind == "text":
            return self.path
        if self.kind in ("rows", "dataset"):
            return f"{self.path}, {'row group' if self.kind == 'rows' else 'shard'} {self.start}, row {position}"
        with open_stream(self.path, self.kind) as file:
            lines = 1
            while position > 0 and (block := file.read(min(position, BLOCK_BYTES))):
                lines, position = lines + block.count(b"\n"), position - len(block)
        return f"{self.path}:{lines}"


def open_stream(path: str, kind: str) -> BinaryIO:
    """The bytes of a file, decompressed; raises OSError, also on reading where a compressed file is cut short."""
    if kind in ("gzip", "zstd"):
        import pyarrow

        compressed = pyarrow.CompressedInputStream(pyarrow.OSFile(path), kind)
        return cast(BinaryIO, io.BufferedReader(cast(Any, compressed), 1 << 20))
    return Path(path).open("rb", buffering=1 << 20)


def _ranges(path: Path, piece_bytes: int) -> list[Piece]:
    size = path.stat().st_size
    starts = range(0, size, piece_bytes)
    return [Piece("lines", str(path), s, min(s + piece_bytes, size), min(s + piece_bytes, size) - s) for s in starts]


def _whole(kind: str) -> Callable[[Path, int], list[Piece]]:
    return lambda path, _: [Piece(kind, str(path), 0, 2**62, path.stat().st_size)] if path.stat().st_size else []


def _row_groups(path: Path, _: int) -> list[Piece]:
    groups = open_parquet(str(path)).metadata
    count = groups.num_row_groups
    return [Piece("rows", str(path), i, count, groups.row_group(i).total_byte_size) for i in range(count)]


@lru_cache(maxsize=1)
def open_parquet(path: str) -> Any:
    """pyarrow's ParquetFile; raises UserError where it is none."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"--input {path}: no parquet file ({error}); make it again or leave it out") from error


_SPLIT: Mapping[str, Callable[[Path, int], list[Piece]]] = {
    ".jsonl": _ranges,
    ".json": _ranges,
    ".jsonl.gz": _whole("gzip"),
    ".json.gz": _whole("gzip"),
    ".jsonl.zst": _whole("zstd"),
    ".json.zst": _whole("zstd"),
    ".parquet": _row_groups,
    ".txt": _whole("text"),
}


def _suffix(path: Path) -> str | None:
    """The longest known suffix of a file."""
    return next((s for s in sorted(_SPLIT, key=len, reverse=True) if path.name.endswith(s)), None)


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files that names, globs and folders mean, a glob's and a folder's known ones in sorted order.

    Raises UserError for a missing or unknown file, and for a folder without any known one.
    """
    paths = [path for pattern in patterns for path in _expand(pattern)]
    UserError.collect(
        [f"--input {path}: no such file" for path in paths if not path.exists()]
        + [f"--input {path}: a folder without {', '.join(_SPLIT)} files" for path in paths if path.is_dir()]
        + [
            f"--input {path}: unknown kind {path.suffix!r}; name it .jsonl (a document per line) or .txt (one document)"
            f", or one of {', '.join(_SPLIT)}"
            for path in paths
            if path.is_file() and _suffix(path) is None
        ]
    )
    return paths


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern)
    if not pattern:
        raise UserError("--input: an empty name; give files, folders or globs")
    if path.exists():
        return _files(path)
    try:
        found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    except ValueError as error:
        raise UserError(
            f"--input {pattern}: neither a file nor a pattern of files ({error}); use such as *.jsonl"
        ) from error
    return [file for each in found if not _is_ours(each) for file in _files(each)] or [path]


def _files(path: Path) -> list[Path]:
    """A file, or those of a folder."""
    if not path.is_dir():
        return [path]
    inside = (inner for inner in path.rglob("*") if inner.is_file() and _suffix(inner) and not _is_ours(inner))
    return sorted(inside) or [path]


def _is_ours(path: Path) -> bool:
    """Whether it lies beside the input because token files are, or were, written there."""
    return path.name.endswith((".ledger.jsonl", ".manifest.json"))


def split_files(paths: Sequence[Path], piece_bytes: int = DEFAULT_PIECE_BYTES) -> list[Piece]:
    """The pieces of files, in order; empty files have none."""
    try:
        return [piece for path in paths for piece in _SPLIT[str(_suffix(path))](path, piece_bytes)]
    except OSError as error:
        raise UserError(f"--input {error.filename}: cannot be read ({error.strerror})") from error


def shuffled(pieces: Sequence[Piece], seed: int | None) -> list[Piece]:
    """The pieces in an order that is a function of the seed and their number; None keeps theirs."""
    if seed is None or not pieces:
        return list(pieces)
    keys = np.full(len(pieces), np.uint64(seed % 2**64))
    return [pieces[index] for index in permute(np.arange(len(pieces)), len(pieces), keys)]


def parse_part(text: str) -> tuple[int, int]:
    """(i, n) of `--shard i/n`, i from 0 to n - 1 as SLURM counts its tasks; raises UserError."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise UserError(f"--shard {text}: not i/n with i from 0 to n - 1; use such as 0/8, 1/8 ... 7/8")
    return int(number), int(count)


def part_of(pieces: Sequence[Piece], part: tuple[int, int]) -> list[Piece]:
    """Neighbouring pieces of about an n-th of the bytes; all parts one after another are the whole list."""
    number, count = part
    sizes = [max(piece.num_bytes, 1) for piece in pieces]  # those of a dataset's shards are not known
    total, before, mine = sum(sizes), 0, []
    for piece, size in zip(pieces, sizes, strict=True):
        if (2 * before + size) * count // (2 * total) == number:
            mine.append(piece)
        before += size
    return mine
