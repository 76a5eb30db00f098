"""Rules for saving and loading that can be checked without the file system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron3d.config.schema import Config
from megatron3d.config.validate.facts import Facts

SAVING = (
    "save_interval",
    "non_persistent_save_interval",
    "keep_latest_k",
    "save_retain_interval",
    "async_save",
)
LOADING = ("finetune", "no_load_optim", "accept_changed")


def checkpoint_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per unused key and per contradiction between keys of the checkpoint section."""
    checkpoint = facts.config.checkpoint
    for keys, folder, missing in ((SAVING, "save", "no folder to save to"), (LOADING, "load", "no checkpoint to load")):
        for key in keys if getattr(checkpoint, folder) is None else ():
            if getattr(checkpoint, key):
                yield f"{facts.named(f'checkpoint.{key}')}: {missing}; set checkpoint.{folder}, or leave it out"
    if checkpoint.finetune and is_own(facts.config):
        yield (
            f"{facts.named('checkpoint.finetune')}: checkpoint.load={checkpoint.load} is also where this run saves, "
            "and finetuning counts iterations from 0; save to another folder, or use false to continue the run"
        )
    if checkpoint.finetune and checkpoint.no_load_optim:
        yield f"{facts.named('checkpoint.no_load_optim')}: checkpoint.finetune=true loads no optimizer; leave one out"
    short, long = checkpoint.non_persistent_save_interval, checkpoint.save_interval
    if short and long and short % long == 0:
        yield (
            f"{facts.named('checkpoint.non_persistent_save_interval')}: all of these checkpoints would be permanent, "
            "since "
            f"checkpoint.save_interval={long} divides it; use a smaller one, or leave it out"
        )
    retain = checkpoint.save_retain_interval
    if retain and retain % (long or retain):
        yield (
            f"{facts.named('checkpoint.save_retain_interval')}: not a multiple of checkpoint.save_interval={long}, so "
            "that some checkpoints to retain would never be saved; use for example "
            f"{-(-retain // (long or 1)) * (long or 1)}"
        )


def is_own(config: Config) -> bool:
    """Return whether the run loads from the folder that it saves to."""
    load, save = config.checkpoint.load, config.checkpoint.save
    return load is not None and save is not None and Path(load).absolute() == Path(save).absolute()
