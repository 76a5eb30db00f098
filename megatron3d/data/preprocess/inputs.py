"""The input of a preprocessing job as a list of chunks, the unit that is shuffled, sharded over tasks and counted.

    .jsonl .json          byte ranges of --piece-mb; a line belongs to the range in which it begins
    .jsonl.gz .jsonl.zst  a file
    .txt                  a file, which is one document
    .parquet              a row group
    a dataset             a shard of a Hugging Face dataset, by name or in a folder

The list depends on the input alone, not on the number of workers or on --shard, so that the tokens do not either.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from megatron3d.data.corpus.plan import permute
from megatron3d.data.option_table import HF_PREFIX
from megatron3d.data.token_files.files import BLOCK_BYTES
from megatron3d.errors import UserError
from megatron3d.runtime.arguments import MAX_SHARDS, shorten, whole_number


def parse_name(text: str) -> tuple[str, str | None, str]:
    """Return (name or folder, config, split) of `hf:NAME_OR_FOLDER[@CONFIG][:SPLIT]`; raises UserError."""
    whole = text.removeprefix(HF_PREFIX)
    is_folder = bool(whole) and Path(whole).is_dir()  # then : and @ belong to the folder's name
    name, _, split = (whole, "", "") if is_folder else whole.partition(":")
    name, _, config = (name, "", "") if is_folder else name.partition("@")
    if not text.startswith(HF_PREFIX) or not name:
        form = f"{HF_PREFIX}NAME_OR_FOLDER"
        raise UserError(f"{text}: not a dataset; write {form}, then @CONFIG and :SPLIT if needed")
    return name, config or None, split or "train"


@lru_cache(maxsize=4)
def open_dataset(text: str) -> Any:
    """Open a dataset of a folder, of the download cache, or of the hub as a stream; raises UserError."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{text}: needs the package datasets; pip install datasets") from error
    name, config, split = parse_name(text)
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(name)
            saved = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
            return saved.to_iterable_dataset(num_shards=max(1, min(len(saved), 64)))
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # of any type, as in open_shard
        why = _first_line(error)
        raise UserError(f"{text}: cannot be opened ({why}); name a folder with data files, or a dataset") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def num_shards(text: str) -> int:
    """Return the number of shards of a dataset."""
    return int(open_dataset(text).num_shards)


def open_shard(text: str, number: int, count: int, first_row: int) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a shard from `first_row` on; several may be open.  Raises UserError for a damaged file."""
    shard = open_dataset(text).shard(count, number)
    try:
        yield from shard.skip(first_row) if first_row else shard
    except Exception as error:  # of any type: those of pyarrow, of decompressors, of the file system
        raise UserError(
            f"{text}: shard {number} of {count} cannot be read ({_first_line(error)}); correct or remove its file: "
            "tools/preprocess_data.py --input with the files themselves names the line"
        ) from error


DEFAULT_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class InputChunk:
    """Consecutive documents of one file or dataset.

    Attributes:
        kind: a key of `readers._READERS`: lines, gzip, zstd, text, rows (of parquet) or dataset.
        path: path of the file, or name of the dataset as `parse_name` parses it.
        start: first byte, number of the row group, or number of the shard.
        stop: end of the byte range, or how many row groups or shards there are.
        num_bytes: approximate size of the input.
    """

    kind: str
    path: str
    start: int
    stop: int
    num_bytes: int

    @property
    def identity(self) -> str:
        """Text that jobs hash to recognize their input; it is stored, so it must not change."""
        return (
            f"Piece(kind={self.kind!r}, path={self.path!r}, start={self.start}, stop={self.stop}, "
            f"num_bytes={self.num_bytes})"
        )

    def describe(self, position: int) -> str:
        """Return where a position in this chunk is, for a message: file and line, or row."""
        if self.kind == "text":
            return self.path
        if self.kind in ("rows", "dataset"):
            return f"{self.path}, {'row group' if self.kind == 'rows' else 'shard'} {self.start}, row {position}"
        with open_decompressed(self.path, self.kind) as file:
            lines = 1
            while position > 0 and (block := file.read(min(position, BLOCK_BYTES))):
                lines, position = lines + block.count(b"\n"), position - len(block)
        return f"{self.path}:{lines}"


def open_decompressed(path: str, kind: str) -> BinaryIO:
    """Open a file and decompress it; raises OSError, also on reading a compressed file that is cut short."""
    if kind in ("gzip", "zstd"):
        import pyarrow

        compressed = pyarrow.CompressedInputStream(pyarrow.OSFile(path), kind)
        return cast(BinaryIO, io.BufferedReader(cast(Any, compressed), 1 << 20))
    return Path(path).open("rb", buffering=1 << 20)


@lru_cache(maxsize=1)
def open_parquet(path: str) -> Any:
    """Open a pyarrow ParquetFile; raises UserError where the file is not one."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"--input {path}: no parquet file ({error}); make it again or leave it out") from error


def _byte_ranges(path: Path, chunk_bytes: int) -> list[InputChunk]:
    size = path.stat().st_size
    ends = [(start, min(start + chunk_bytes, size)) for start in range(0, size, chunk_bytes)]
    return [InputChunk("lines", str(path), start, end, end - start) for start, end in ends]


def _whole_file(kind: str) -> Callable[[Path, int], list[InputChunk]]:
    return lambda path, _: [InputChunk(kind, str(path), 0, 2**62, path.stat().st_size)] if path.stat().st_size else []


def _row_groups(path: Path, _: int) -> list[InputChunk]:
    groups = open_parquet(str(path)).metadata
    count = groups.num_row_groups
    return [InputChunk("rows", str(path), i, count, groups.row_group(i).total_byte_size) for i in range(count)]


_SPLITTERS: Mapping[str, Callable[[Path, int], list[InputChunk]]] = {
    **dict.fromkeys((".jsonl", ".json"), _byte_ranges),
    **dict.fromkeys((".jsonl.gz", ".json.gz"), _whole_file("gzip")),
    **dict.fromkeys((".jsonl.zst", ".json.zst"), _whole_file("zstd")),
    ".parquet": _row_groups,
    ".txt": _whole_file("text"),
}


def _known_suffix(path: Path) -> str | None:
    return next((s for s in sorted(_SPLITTERS, key=len, reverse=True) if path.name.endswith(s)), None)


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Return the files that names, globs and folders stand for; those of a glob or folder are sorted.

    Raises UserError for a missing or unknown file, and for a folder without any known one.
    """
    paths = [path for pattern in patterns for path in _expand(pattern)]
    UserError.collect(
        [f"--input {path}: no such file" for path in paths if not path.exists()]
        + [f"--input {path}: a folder without {', '.join(_SPLITTERS)} files" for path in paths if path.is_dir()]
        + [
            f"--input {path}: unknown kind {path.suffix!r}; name it .jsonl (a document per line) or .txt (one document)"
            f", or one of {', '.join(_SPLITTERS)}"
            for path in paths
            if path.is_file() and _known_suffix(path) is None
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
            f"--input {pattern}: neither a file nor a pattern of files ({error}); use for example *.jsonl"
        ) from error
    return [file for each in found if not _is_ours(each) for file in _files(each)] or [path]


def _files(path: Path) -> list[Path]:
    """Return the path itself, or the known files of a folder; the folder where it has none."""
    if not path.is_dir():
        return [path]
    inside = (inner for inner in path.rglob("*") if inner.is_file() and _known_suffix(inner) and not _is_ours(inner))
    return sorted(inside) or [path]


def _is_ours(path: Path) -> bool:
    """Return whether a file is in the input folder only because token files are, or were, written there."""
    return path.name.endswith((".ledger.jsonl", ".manifest.json"))


def split_files(paths: Sequence[Path], chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> list[InputChunk]:
    """Split files into chunks, in order; an empty file has none.  Raises UserError."""
    try:
        return [chunk for path in paths for chunk in _SPLITTERS[str(_known_suffix(path))](path, chunk_bytes)]
    except OSError as error:
        raise UserError(f"--input {error.filename}: cannot be read ({error.strerror})") from error


def shuffle(chunks: Sequence[InputChunk], seed: int | None) -> list[InputChunk]:
    """Order the chunks by a permutation of the seed and their number; None keeps their order."""
    if seed is None or not chunks:
        return list(chunks)
    keys = np.full(len(chunks), np.uint64(seed % 2**64))
    return [chunks[index] for index in permute(np.arange(len(chunks)), len(chunks), keys)]


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `--shard i/n`, with i from 0 to n - 1 as SLURM counts its tasks; raises UserError."""
    first, _, second = text.partition("/")
    number, count = whole_number(first), whole_number(second)
    if number is None or count is None or not 0 <= number < count <= MAX_SHARDS:
        rule = f"not i/n with i from 0 to n - 1 and n up to {MAX_SHARDS}; use for example 0/8, 1/8 ... 7/8"
        raise UserError(f"--shard {shorten(text)}: {rule}")
    return number, count


def select_shard(chunks: Sequence[InputChunk], shard: tuple[int, int]) -> list[InputChunk]:
    """Return the consecutive chunks of shard i of n, about an n-th of the bytes; the shards partition the list."""
    number, count = shard
    sizes = [max(chunk.num_bytes, 1) for chunk in chunks]  # the sizes of a dataset's shards are not known
    total, before = sum(sizes), 0
    selected = []
    for chunk, size in zip(chunks, sizes, strict=True):
        if (2 * before + size) * count // (2 * total) == number:
            selected.append(chunk)
        before += size
    return selected
