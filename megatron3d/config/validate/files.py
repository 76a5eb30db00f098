"""Rules of data, checkpoints and logging, and of the files and folders that they name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron3d.config.schema import Config
from megatron3d.config.validate.facts import Facts, MissingHere, plain, unreadable
from megatron3d.config.validate.layout import file_problems
from megatron3d.data.corpus.plan import is_streamed, parse_paths, parse_split
from megatron3d.data.option_table import HF_PREFIX
from megatron3d.errors import UserError, is_machine_fault
from megatron3d.runtime.files import retried

LOADING = ("finetune", "no_load_optim", "accept_changed")


def checkpoint_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per contradiction between keys of the checkpoint section."""
    checkpoint = facts.config.checkpoint
    for key in LOADING if checkpoint.load is None else ():
        if getattr(checkpoint, key):
            yield f"{facts.named(f'checkpoint.{key}')}: no checkpoint to load; set checkpoint.load, or leave it out"
    if checkpoint.finetune and is_own(facts.config):
        yield (
            f"{facts.named('checkpoint.finetune')}: checkpoint.load={checkpoint.load} is also where this run saves, "
            "and finetuning counts iterations from 0; save to another folder, or use false to continue the run"
        )
    if checkpoint.finetune and checkpoint.no_load_optim:
        yield f"{facts.named('checkpoint.no_load_optim')}: checkpoint.finetune=true loads no optimizer; leave one out"
    short, long = checkpoint.non_persistent_save_interval, checkpoint.save_interval
    if checkpoint.save and short and long and short % long == 0:
        yield (
            f"{facts.named('checkpoint.non_persistent_save_interval')}: all of these checkpoints would be permanent, "
            f"since checkpoint.save_interval={long} divides it; use a smaller one, or leave it out"
        )
    if checkpoint.save and checkpoint.keep_best and not facts.config.train.eval_interval:
        where = facts.named("checkpoint.keep_best")
        yield f"{where}: no validation loss to compare; set train.eval_interval, or leave it out"
    yield from _rollback_problems(facts)


def _rollback_problems(facts: Facts) -> Iterator[str]:
    """Yield a message if a rollback would find no checkpoint from before the steps that went wrong."""
    train, checkpoint = facts.config.train, facts.config.checkpoint
    num_steps = max(train.rollback_nonfinite_steps or 0, 1 if train.rollback_loss_spike_score else 0)
    if not num_steps:
        return
    key = "rollback_nonfinite_steps" if train.rollback_nonfinite_steps else "rollback_loss_spike_score"
    if checkpoint.save is None:
        yield f"{facts.named(f'train.{key}')}: no checkpoint to roll back to; set checkpoint.save, or leave it out"
        return
    kept = checkpoint.keep_latest_k or (1 if checkpoint.save_retain_interval else None)
    needed = 1 + -(-num_steps // (checkpoint.save_interval or num_steps))
    if kept is not None and kept < needed:
        where = "keep_latest_k" if checkpoint.keep_latest_k else "save_retain_interval"
        yield (
            f"{facts.named(f'checkpoint.{where}')}: only the newest {kept} checkpoint(s) would be sure to stay, and "
            f"train.{key} may find the last {needed - 1} spoiled when it rolls back; use "
            f"checkpoint.keep_latest_k={needed}"
        )


def is_own(config: Config) -> bool:
    """Return whether the run loads from the folder that it saves to."""
    load, save = config.checkpoint.load, config.checkpoint.save
    return load is not None and save is not None and Path(load).absolute() == Path(save).absolute()


def holds_run(folder: Path) -> bool:
    """Return whether a run has saved a checkpoint to a folder.  Raises OSError for a fault of the machine."""
    places = [folder / place / TRACKER for place in (".", NON_PERSISTENT)]
    return any(retried(path, path.exists) for path in places)


def continues_own(config: Config) -> bool:
    """Return whether the run continues from the folder that it saves to, and does not start from `checkpoint.load`.

    It does where both are one folder, and where an earlier launch that started from `checkpoint.load` has saved.
    """
    load, save = config.checkpoint.load, config.checkpoint.save
    return is_own(config) or (load is not None and save is not None and holds_run(Path(save)))


def logging_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per rank or output that the run does not have."""
    config, logging = facts.config, facts.config.logging
    asked = ("trace_iterations", logging.trace_iterations, "traces"), ("profile", logging.profile, "profiles")
    for key, _, what in (each for each in asked if each[1] and not config.checkpoint.save):
        yield f"{facts.named(f'logging.{key}')}: no folder to write {what} to; set checkpoint.save, or leave it out"
    yield from _profile_problems(facts)


def _profile_problems(facts: Facts) -> Iterator[str]:
    logging, world = facts.config.logging, facts.world_size
    if not logging.profile:
        return
    if logging.profile_step_end <= logging.profile_step_start:
        yield (
            f"{facts.named('logging.profile_step_end')}: profiling starts at iteration "
            f"{logging.profile_step_start} and stops before this one; use {logging.profile_step_start + 1} or more"
        )
    if absent := [rank for rank in logging.profile_ranks if rank >= world]:
        use = f"0 to {world - 1}"
        yield f"{facts.named('logging.profile_ranks')}: rank {absent[0]} is not one of the {world} ranks; use {use}"


PATH_KEYS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def data_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per broken rule of the data section."""
    data = facts.config.data
    yield from _split_problems(facts) if data.train_data_path is None else _path_problems(facts)
    for key in PATH_KEYS[2:]:
        if getattr(data, key) is not None and data.train_data_path is None:
            where = facts.named(f"data.{key}")
            yield f"{where}: not used without data.train_data_path; give that in place of data_path, or leave {key} out"
    for key in PATH_KEYS:
        if (value := getattr(data, key)) is not None:
            try:
                parse_paths(f"data.{key}", value)
            except UserError as error:
                rule = str(error).partition(": ")[2]
                yield f"{facts.named(f'data.{key}')}: {rule}"
    yield from _stream_problems(facts)
    if data.reset_position_ids and facts.arch.position_embedding_type == "none":
        yield f"{facts.named('data.reset_position_ids')}: the model has no positions; use false"


def _stream_problems(facts: Facts) -> Iterator[str]:
    data = facts.config.data
    given = {key: value for key in PATH_KEYS if (value := getattr(data, key)) is not None}
    for key, value in given.items():
        if isinstance(value, tuple) and is_streamed(value):
            yield from _blend_problems(facts.named(f"data.{key}"), value)
    if data.data_path is not None and is_streamed(data.data_path):
        where = facts.named("data.data_path")
        yield f"{where}: a streamed dataset cannot be split; use data.train_data_path and data.valid_data_path"


def _blend_problems(where: str, value: tuple[str | float | int, ...]) -> Iterator[str]:
    with contextlib.suppress(UserError):  # reported with the other paths
        named = parse_paths("", value)
        if not all(name.startswith(HF_PREFIX) for name, _ in named):
            yield f"{where}: streamed datasets cannot be blended with token files; make token files of all"
        elif len(named) > 1 and any(weight is None for _, weight in named):
            yield f"{where}: the sizes of streamed datasets are not known; use weights, as [0.7, hf:a, 0.3, hf:b]"


def _split_problems(facts: Facts) -> Iterator[str]:
    config = facts.config
    try:
        train, valid, _ = parse_split(config.data.split)
    except UserError:
        yield f"{facts.named('data.split')}: not three weights of at least 0 for train, valid and test; use 969,30,1"
        return
    if not train:
        yield f"{facts.named('data.split')}: nothing is left to train on; use for example 969,30,1"
    if config.train.eval_interval and not valid:
        use = "for example 90,10,0, or eval_interval null"
        yield f"{facts.named('data.split')}: no validation split for {plain(config, 'train.eval_interval')}; use {use}"


def _path_problems(facts: Facts) -> Iterator[str]:
    config = facts.config
    if config.data.data_path is not None:
        yield f"{facts.named('data.data_path')}: not used with data.train_data_path; leave one of them out"
    if facts.is_set("data.split"):
        yield f"{facts.named('data.split')}: not used with data.train_data_path; leave it out"
    if config.train.eval_interval and config.data.valid_data_path is None:
        where = facts.named("data.train_data_path")
        remedy = "add data.valid_data_path, or use eval_interval null"
        yield f"{where}: no validation data for {plain(config, 'train.eval_interval')}; {remedy}"


TRACKER = "latest_checkpointed_iteration.txt"
# Folder of a run's short-lived checkpoints, in the run's folder.
NON_PERSISTENT = "non_persistent"
HUB_CONFIG = "config.json"


def check_files(config: Config, world_size: int, origins: Mapping[str, str] | None = None) -> list[str]:
    """Return the problems of the schedule file, corpus, tokenizer, and the folders to save to and load from.

    Those that another machine need not have are `MissingHere`.
    """
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
            yield type(problem)(f"{where}: {problem}; use a prefix that tools/preprocess_data.py wrote")


def _tokenizer(facts: Facts) -> Iterator[str]:
    data, where = facts.config.data, facts.named("data.tokenizer_model")
    if data.tokenizer_type == "ByteTokenizer":
        return
    if data.tokenizer_model is None:
        yield f"{where}: {data.tokenizer_type} needs a file; name one that tools/train_tokenizer.py wrote"
    elif problem := unreadable(Path(data.tokenizer_model), may_be_folder=True):
        yield type(problem)(f"{where}: {problem}; use a file that tools/train_tokenizer.py wrote")


def _outputs(facts: Facts) -> Iterator[str]:
    outputs = {"checkpoint.save": facts.config.checkpoint.save}
    outputs["logging.tensorboard_dir"] = facts.config.logging.tensorboard_dir
    for key, folder in outputs.items():
        if folder is None:
            continue
        try:
            there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
        except OSError as error:
            yield MissingHere(f"{facts.named(key)}: {error.strerror}; use another folder")
            continue
        if not there.is_dir():
            rule = f"{there} is not a folder; use a folder, or a path where one can be made"
            yield MissingHere(f"{facts.named(key)}: {rule}")
        elif not os.access(there, os.W_OK | os.X_OK):
            yield MissingHere(f"{facts.named(key)}: {there} cannot be written to; use a folder that you own")


def _load(facts: Facts) -> Iterator[str]:
    try:
        yield from _load_problems(facts)
    except OSError as error:
        if is_machine_fault(error):
            raise
        yield f"{facts.named('checkpoint.load')}: {error.filename}: {error.strerror}; use another folder"


def _load_problems(facts: Facts) -> Iterator[str]:
    load, save = facts.config.checkpoint.load, facts.config.checkpoint.save
    where = facts.named("checkpoint.load")
    if load is not None and is_hub_folder(Path(load)) and not facts.config.checkpoint.finetune:
        yield f"{where}: a Hugging Face folder holds weights only; set checkpoint.finetune=true to start with them"
    if continues_own(facts.config):
        return
    if save is not None and holds_run(Path(save)):
        yield (
            f"{facts.named('checkpoint.save')}: the folder already holds a run, which this one would overwrite; "
            f"set checkpoint.load={save} to continue it, or save to another folder"
        )
    if load is None:
        return
    if not Path(load).is_dir():
        rule = "there is no such folder; use one with a checkpoint, or null to start from scratch"
        yield MissingHere(f"{where}: {rule}")
    elif not os.access(load, os.R_OK | os.X_OK):
        yield f"{where}: the folder cannot be read; change its permissions, or load from another one"
