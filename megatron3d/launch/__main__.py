"""What a SLURM job asks around its ranks (scripts/slurm/pretrain.sbatch): `python -m megatron3d.launch WHEN ...`.

before   on every node: is the configuration right, are its files here, is the node fit?  The first notes the start.
after    on one node: is the job to be queued again?  Exit code 0 if so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron3d.config.cli import resolve
from megatron3d.config.read import read_config
from megatron3d.errors import UserError
from megatron3d.launch.health import find_gpus, node_problems
from megatron3d.launch.requeue import Ended, begun_at, newest_iteration, note_start, run_folder, verdict
from megatron3d.runtime import process
from megatron3d.runtime.exit_codes import ExitCode


def main() -> int:
    """The exit code of one of both."""
    typed = parse_args(sys.argv[1:])
    return {"before": before, "after": after}[typed.when](typed)


def before(typed: argparse.Namespace) -> int:
    """2 where the configuration or, on the first node, a file is wrong; 1 where the node is.

    What only another node finds wrong with files is that node's fault.
    """
    allocation, is_first = process.slurm_job(), process.launcher_env().rank == 0
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
            start = note_start(root, allocation)
            where = f"on {start.nodes}, from iteration {start.iteration}"
            print(f"> start {start.requeue + 1} of job {start.job}, {where}", flush=True)
    problems += node_problems(allocation.num_gpus, find_gpus(allocation.num_gpus))
    for problem in problems:
        print(f"node {allocation.node}: {problem}; or submit with --exclude={allocation.node}", file=sys.stderr)
    return ExitCode.CRASH if problems else ExitCode.DONE


def after(typed: argparse.Namespace) -> int:
    """0 where the job is to be queued again, else 1; says why."""
    root = run_folder(read_config(typed.config, typed.overrides).config)
    ended = Ended(typed.code, typed.before_limit)
    again, why = verdict(ended, begun_at(root, process.slurm_job()), newest_iteration(root))
    print(f"> {why}", flush=True)
    return ExitCode.DONE if again else ExitCode.CRASH


def parse_args(argv: list[str]) -> argparse.Namespace:
    """`WHEN [--code N] [--before-limit] --config FILE [section.key=value ...]`."""
    parser = argparse.ArgumentParser("megatron3d.launch", description="Around a SLURM job.", allow_abbrev=False)
    parser.add_argument("when", choices=("before", "after"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--world-size", type=int, default=1, help="ranks of the job")
    parser.add_argument("--code", type=int, help="that the ranks ended with")
    parser.add_argument("--before-limit", action="store_true", help="SLURM has warned of the time limit")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(process.run_program(main))
