"""Checks of a SLURM job before and after its ranks (scripts/slurm/pretrain.sbatch): `python -m megatron3d.launch WHEN`.

before   on every node: check the configuration, its files, and the GPUs; the first node records the launch
after    on one node: exit with code 0 if the job should be requeued
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import sys
from pathlib import Path

from megatron3d.config.arguments import ConfigParser
from megatron3d.config.cli import resolve
from megatron3d.config.read import read_config
from megatron3d.errors import UserError
from megatron3d.launch.health import find_gpus, node_problems
from megatron3d.launch.requeue import (
    LaunchEnd,
    decide_requeue,
    newest_iteration,
    record_launch,
    run_folder,
    start_iterations,
)
from megatron3d.runtime import process
from megatron3d.runtime.arguments import whole
from megatron3d.runtime.exit_codes import ExitCode
from megatron3d.runtime.limits import MAX_RANKS


def main() -> int:
    """Run one of the two checks and return its exit code."""
    typed = parse_args(sys.argv[1:])
    return {"before": before, "after": after}[typed.when](typed)


def before(typed: argparse.Namespace) -> int:
    """Return 1 if this node is unfit; raise UserError if the configuration or, on the first node, a file is wrong.

    A file that is wrong on another node only counts as that node's fault.
    """
    job, is_first = process.slurm_job(), process.launcher_env().rank == 0
    problems: list[str] = []
    try:
        config = resolve(typed.config, typed.overrides, typed.world_size).config
        root = run_folder(config)
    except UserError as error:
        if is_first:
            raise
        problems += error.problems
    else:
        if is_first:
            launch = record_launch(root, job)
            where = f"on {launch.nodes}, from iteration {launch.iteration}"
            print(f"> launch {launch.requeue + 1} of job {launch.job}, {where}", flush=True)
    problems += node_problems(job.num_gpus, find_gpus(job.num_gpus))
    for problem in problems:
        print(f"node {job.node}: {problem}; or submit with --exclude={job.node}", file=sys.stderr)
    return ExitCode.CRASH if problems else ExitCode.DONE


def after(typed: argparse.Namespace) -> int:
    """Return 0 if the job should be requeued, else 1; print why."""
    root = run_folder(read_config(typed.config, typed.overrides).config)
    end = LaunchEnd(typed.code, typed.before_limit)
    starts = start_iterations(root, process.slurm_job())
    should_requeue, reason = decide_requeue(end, starts, newest_iteration(root))
    print(f"> {reason}", flush=True)
    return ExitCode.DONE if should_requeue else ExitCode.CRASH


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse `WHEN [--code N] [--before-limit] --config FILE [section.key=value ...]`."""
    parser = ConfigParser("megatron3d.launch", "Checks around the ranks of a SLURM job.")
    parser.add_argument("when", choices=("before", "after"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--world-size", type=whole(1, MAX_RANKS), default=1, help="ranks of the job")
    parser.add_argument("--code", type=whole(0, 255), help="exit code of the ranks")
    parser.add_argument("--before-limit", action="store_true", help="SLURM has warned of the time limit")
    parser.add_overrides("values that replace those in the file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(process.run_program(main))
