"""Pretrain a GPT: `pretrain_gpt.py --config FILE [section.key=value ...]`, alone, under torchrun, or under srun.

Parse, build, loop.  Exit codes: 0 done, 2 user error (one message per problem, nothing written), 3 stopped on request
after saving (0 under torchrun), anything else a crash.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from megatron3d.config.cli import Arguments, parse_args
from megatron3d.errors import ExitCode, UserError
from megatron3d.runtime import process
from megatron3d.runtime.program import StartupPhases, StopSignal, outlive_readers

if TYPE_CHECKING:
    from megatron3d.config.run_spec import RunSpec
    from megatron3d.runtime.joining import Meeting

# Imported by every rank of a run; the last two by numpy.unique and by torch's first backward.
IMPORTED = (
    *("megatron3d.train.survival", "megatron3d.runtime.watchdog"),
    *("numpy.ma", "torch.fx.experimental.symbolic_shapes"),
)


def preload(argv: Sequence[str], world_size: int) -> bool:
    """Import what the ranks of a run need, in the process that they are forked from; raises what all of them would.

    Return whether the ranks go on when one of them has ended.
    """
    arguments = parse_args(argv)
    if arguments.check or arguments.dry_run:
        return False
    from megatron3d.forecast.search.restart import resolve_elastic

    counted_by = "the launcher's first argument"
    joined = joined_run(arguments)
    size = joined.world_size if joined else world_size
    resolved, _ = resolve_elastic(arguments.config, arguments.overrides, size, counted_by)
    print("> importing torch", file=sys.stderr, flush=True)
    for name in IMPORTED:
        import_module(name)
    return resolved.config.train.elastic


def main() -> int:
    """Parse the command line, then check the configuration, simulate a step, or train; return the exit code."""
    arguments = parse_args(sys.argv[1:])
    env = process.launcher_env()
    if arguments.check:
        from megatron3d.config.resolve import run_check

        return run_check(arguments, env.world_size, memory_at_worst)
    if arguments.dry_run:
        from megatron3d.verify.dry_run import run_dry

        return run_dry(arguments, env.world_size)
    return pretrain(arguments, env.world_size)


def memory_at_worst(spec: RunSpec) -> list[str]:
    """Return what a run with experts says about itself: its memory where some get more tokens, and its losses."""
    from megatron3d.experts.plan import router_notes
    from megatron3d.forecast.memory.step_spec import make_step_spec
    from megatron3d.forecast.memory.table import worst_load_lines
    from megatron3d.model.local_sizes import KERNELS

    lines = worst_load_lines(make_step_spec(spec, KERNELS["gpu"])) if spec.arch.vocab_size else []
    return lines + router_notes(spec.arch.balance)


def joined_run(arguments: Arguments) -> Meeting | None:
    """Return the elastic run under way that this launch joins, once it answers; None: it begins one."""
    if not arguments.join:
        return None
    from megatron3d.config.read import read_config
    from megatron3d.runtime.joining import find_meeting

    config = read_config(arguments.config, arguments.overrides).config
    if config.checkpoint.save is None or not config.train.elastic:
        raise UserError("--join: needs train.elastic=true and checkpoint.save, the folder of the run that is under way")
    return find_meeting(Path(config.checkpoint.save), 60 * config.train.distributed_timeout_minutes)


def pretrain(arguments: Arguments, world_size: int) -> int:
    """Build the run on this rank and train until its last iteration; return the exit code."""
    from megatron3d.forecast.search.restart import resolve_elastic

    env = process.launcher_env()
    run = joined_run(arguments)
    size = run.world_size if run else world_size
    resolved, changed = resolve_elastic(arguments.config, arguments.overrides, size, env.counted_by)
    if run is not None:
        UserError.collect(run.differences(resolved.config.model_dump(mode="json")))
    outlive_readers()
    phases = StartupPhases(printing=env.rank == 0)
    if changed is not None and env.rank == 0:
        print(f"> {changed}", flush=True)
    for remark in resolved.remarks if env.rank == 0 else ():
        print(f"> WARNING: {remark}", flush=True)
    with phases("importing torch"):
        from megatron3d.train.survival import Training

    settings = resolved.config.train
    timeout_s, deterministic = 60 * settings.distributed_timeout_minutes, settings.deterministic_mode
    elastic, joined = settings.elastic, Path(resolved.config.checkpoint.save or "") if run else None
    with (
        ExitStack() as ending,
        process.start(timeout_s, deterministic=deterministic, elastic=elastic, joined=joined) as here,
    ):
        stop = ending.enter_context(StopSignal(tells=here.rank == 0))
        training = Training(resolved, here, phases, stop)
        ending.callback(training.close)  # after the watchdog's end: an upload to wandb may take longer than it waits
        code = training.finish()
    if code == ExitCode.STOPPED and env.restarts_stopped:
        if env.rank == 0:
            print("> stopped on request; exit code 0, since torchrun would take 3 for a crash and restart", flush=True)
        return ExitCode.DONE
    return code


if __name__ == "__main__":
    sys.exit(process.run_program(main))
