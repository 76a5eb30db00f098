"""Rules of the logging section: traces, profiles and trackers must be possible with the other values."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.config.validate.facts import Facts


def logging_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per iteration, rank or output that the run does not have, and per unused key."""
    config, logging = facts.config, facts.config.logging
    last, profiled = config.train.train_iters, (logging.profile_step_start,) if logging.profile else ()
    for key, iterations in (("trace_iterations", logging.trace_iterations), ("profile_step_start", profiled)):
        if late := [iteration for iteration in iterations if iteration > last]:
            yield f"{facts.named(f'logging.{key}')}: {late[0]} is more than train.train_iters={last}; use 1 to {last}"
    asked = ("trace_iterations", logging.trace_iterations, "traces"), ("profile", logging.profile, "profiles")
    for key, _, what in (each for each in asked if each[1] and not config.checkpoint.save):
        yield f"{facts.named(f'logging.{key}')}: no folder to write {what} to; set checkpoint.save, or leave it out"
    yield from _profile_problems(facts)
    if not logging.wandb_project:
        for key, given in (("wandb_name", logging.wandb_name), ("wandb_mode", logging.wandb_mode == "offline")):
            if given:
                yield f"{facts.named(f'logging.{key}')}: no logging.wandb_project; name one, or leave {key} out"


def _profile_problems(facts: Facts) -> Iterator[str]:
    logging, world = facts.config.logging, facts.world_size
    if logging.record_memory_history and not logging.profile:
        where = facts.named("logging.record_memory_history")
        yield f"{where}: not used without logging.profile; use logging.profile=true, or leave it out"
    if not logging.profile:
        return
    if logging.profile_step_end <= logging.profile_step_start:
        yield (
            f"{facts.named('logging.profile_step_end')}: profiling starts at iteration "
            f"{logging.profile_step_start} and stops before this one; use {logging.profile_step_start + 1} or more"
        )
    if absent := [rank for rank in logging.profile_ranks if rank >= world]:
        yield (
            f"{facts.named('logging.profile_ranks')}: rank {absent[0]} is not one of the {world} ranks; "
            f"use 0 to {world - 1}"
        )
