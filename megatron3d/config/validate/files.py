"""Check the files and folders that a configuration names; only a pipeline schedule is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron3d.config.schema import Config
from megatron3d.config.validate.data import PATH_KEYS
from megatron3d.config.validate.facts import Facts, unreadable
from megatron3d.config.validate.pipeline import file_problems
from megatron3d.data.corpus.blend import parse_paths
from megatron3d.data.preprocess.hub_datasets import HF_PREFIX
from megatron3d.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
# Folder of a run's short-lived checkpoints, in the run's folder.
NON_PERSISTENT = "non_persistent"
HUB_CONFIG = "config.json"


def check_files(config: Config, world_size: int, origins: Mapping[str, str] | None = None) -> list[str]:
    """Return the problems of the schedule file, corpus, tokenizer, and the folders to save to and load from."""
    facts = Facts(config, world_size, origins=origins or {})
    return [*file_problems(facts), *_corpus(facts), *_tokenizer(facts), *_outputs(facts), *_load(facts)]


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder holds a model of Hugging Face, and no run of ours."""
    return (folder / HUB_CONFIG).is_file() and not (folder / TRACKER).exists()


def _corpus(facts: Facts) -> Iterator[str]:
    given = {key: path for key in PATH_KEYS if (path := getattr(facts.config.data, key)) is not None}
    if "data_path" not in given and "train_data_path" not in given:
        where = facts.named("data.data_path")
        yield f"{where}: no corpus; name the prefix of a .bin and .idx that tools/preprocess_data.py wrote"
    for key, value in given.items():
        try:
            prefixes = [prefix for prefix, _ in parse_paths(key, value)]
        except UserError:  # data_problems reports it
            continue
        yield from (problem for prefix in prefixes for problem in _token_files(prefix, facts.named(f"data.{key}")))


def _token_files(prefix: str, where: str) -> Iterator[str]:
    if prefix.startswith(HF_PREFIX):  # a dataset of the Hugging Face hub, not a file
        return
    if prefix.endswith((".bin", ".idx")):
        yield f"{where}: a file, but the common prefix of .bin and .idx is needed; use {prefix[:-4]}"
        return
    for suffix in (".bin", ".idx"):
        if problem := unreadable(Path(prefix + suffix)):
            yield f"{where}: {problem}; use a prefix that tools/preprocess_data.py wrote"


def _tokenizer(facts: Facts) -> Iterator[str]:
    data, where = facts.config.data, facts.named("data.tokenizer_model")
    if data.tokenizer_type == "ByteTokenizer":
        return
    if data.tokenizer_model is None:
        yield f"{where}: {data.tokenizer_type} needs a file; name one that tools/train_tokenizer.py wrote"
    elif problem := unreadable(Path(data.tokenizer_model), may_be_folder=True):
        yield f"{where}: {problem}; use a file that tools/train_tokenizer.py wrote"


def _outputs(facts: Facts) -> Iterator[str]:
    outputs = {"checkpoint.save": facts.config.checkpoint.save}
    outputs["logging.tensorboard_dir"] = facts.config.logging.tensorboard_dir
    for key, folder in outputs.items():
        if folder is None:
            continue
        try:
            there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
        except OSError as error:
            yield f"{facts.named(key)}: {error.strerror}; use another folder"
            continue
        if not there.is_dir():
            yield f"{facts.named(key)}: {there} is not a folder; use a folder, or a path where one can be made"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield f"{facts.named(key)}: {there} cannot be written to; use a folder that you own"


def _load(facts: Facts) -> Iterator[str]:
    try:
        yield from _load_problems(facts)
    except OSError as error:
        yield f"{facts.named('checkpoint.load')}: {error.filename}: {error.strerror}; use another folder"


def _load_problems(facts: Facts) -> Iterator[str]:
    load, save = facts.config.checkpoint.load, facts.config.checkpoint.save
    where = facts.named("checkpoint.load")
    if load is not None and is_hub_folder(Path(load)) and not facts.config.checkpoint.finetune:
        yield f"{where}: a Hugging Face folder holds weights only; set checkpoint.finetune=true to start with them"
    if load is not None and save is not None and Path(load).absolute() == Path(save).absolute():
        return
    if save is not None and any((Path(save) / place / TRACKER).exists() for place in (".", NON_PERSISTENT)):
        yield (
            f"{facts.named('checkpoint.save')}: the folder already holds a run, which this one would overwrite; "
            f"set checkpoint.load={save} to continue it, or save to another folder"
        )
    if load is None:
        return
    if not Path(load).is_dir():
        yield f"{where}: there is no such folder; use one with a checkpoint, or null to start from scratch"
    elif not os.access(load, os.R_OK | os.X_OK):
        yield f"{where}: the folder cannot be read; change its permissions, or load from another one"
