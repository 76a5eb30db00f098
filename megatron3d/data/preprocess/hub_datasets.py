"""Hugging Face datasets, by name or in a local folder, read as streams: the rows of one shard from any row on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron3d.errors import UserError

HF_PREFIX = "hf:"
"""Distinguishes the name of a dataset from the prefix of token files."""


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
