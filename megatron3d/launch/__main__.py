"""Checks of a SLURM job before and after its ranks (scripts/slurm/pretrain.sbatch): `python -m megatron3d.launch WHEN`.

before   on every node: check the configuration, its files, and the GPUs; the first node records the launch
nodes    on one node: print the nodes whose ranks train, and below the others, of a job with spare nodes
after    on one node: exit with code 0 if the job should be requeued, 4 if it has failed and its run is complete

An unfit node would otherwise stall all others in their first collective, minutes later and unnamed.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron3d.config.cli import ConfigParser
from megatron3d.config.read import read_config
from megatron3d.config.resolve import resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.errors import ExitCode, UserError
from megatron3d.launch import requeue, spare_nodes
from megatron3d.runtime import process
from megatron3d.runtime.arguments import MAX_RANKS, whole
from megatron3d.runtime.culprits import add_unfit

if TYPE_CHECKING:
    import torch

# Fraction of a GPU's memory that must be free.
MIN_FREE = 0.9
# Exit code of `after` for a run that is complete, though ranks were lost.
COMPLETE = 4
# Rows and columns of the test GEMM.
SIZE = 1024


@dataclass(frozen=True)
class Gpu:
    """GPU that torch can see; `fault` is what is wrong with its results, None if they are right."""

    name: str
    free_bytes: int
    total_bytes: int
    fault: str | None = None


def node_problems(expected: int, found: Sequence[Gpu]) -> Iterator[str]:
    """Yield what is wrong with a node on which the job has `expected` GPUs."""
    if len(found) < expected:
        yield (
            f"torch sees {len(found)} of the {expected} GPUs that SLURM gave: one is lost, or torch is a CPU build or "
            "does not fit the driver; compare nvidia-smi"
        )
    for index, gpu in enumerate(found):
        if gpu.fault:
            yield f"GPU {index} ({gpu.name}) computes wrongly or not at all: {gpu.fault}"
        if gpu.free_bytes < MIN_FREE * gpu.total_bytes:
            held = (gpu.total_bytes - gpu.free_bytes) / 2**30
            yield (
                f"GPU {index} ({gpu.name}): another process holds {held:.1f} of {gpu.total_bytes / 2**30:.1f} GiB; "
                "end it (nvidia-smi names it)"
            )


def find_gpus(expected: int) -> list[Gpu]:
    """Test and return every GPU of this node; torch is not imported if none is expected."""
    if expected == 0:
        return []
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    return [probe(torch.device(kind.type, index)) for index in range(torch.accelerator.device_count())] if kind else []


def probe(device: torch.device) -> Gpu:
    """Return a device's memory, read before anything is allocated, and whether its GEMM is right."""
    import torch

    module = torch.get_device_module(device)
    name, (free, total) = module.get_device_name(device), module.mem_get_info(device)
    return Gpu(name, free, total, fault_of(device))


def fault_of(device: torch.device) -> str | None:
    """Return what is wrong with a GEMM of integers, which is exact in every precision that a device may choose.

    Entries are 0 to 6, and sums of `SIZE` products of them are below 2^24.
    """
    import torch

    numbers = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE)
    a_MK, b_KN = ((numbers * step % 7).float() for step in (3, 5))
    try:
        c_MN = (a_MK.to(device) @ b_KN.to(device)).cpu()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    wrong = int((c_MN != a_MK @ b_KN).sum())
    return f"{wrong} of {c_MN.numel()} entries of a matrix product" if wrong else None


def main() -> int:
    """Run one of the checks and return its exit code."""
    typed = parse_args(sys.argv[1:])
    return STEPS[typed.when](typed)


def before(typed: argparse.Namespace) -> int:
    """Return 1 if this node is unfit; raise UserError if the configuration or, on the first node, a file is wrong.

    A file that is wrong on another node only counts as that node's fault.
    """
    job, is_first = process.slurm_job(), process.launcher_env().rank == 0
    problems: list[str] = []
    try:
        config = resolve(typed.config, typed.overrides, typed.world_size).config
        root = requeue.run_folder(config)
    except UserError as error:
        if is_first:
            raise
        problems += error.problems
    else:
        if is_first:
            launch = requeue.record_launch(root, job)
            where = f"on {launch.nodes}, from iteration {launch.iteration}"
            print(f"> launch {launch.requeue + 1} of job {launch.job}, {where}", flush=True)
    problems += node_problems(job.num_gpus, find_gpus(job.num_gpus))
    if problems and typed.spares:
        with contextlib.suppress(UserError, OSError):
            root = requeue.run_folder(read_config(typed.config, typed.overrides).config)
            add_unfit(root, job, "; ".join(problems))
    for problem in problems:
        print(f"node {job.node}: {problem}; or submit with --exclude={job.node}", file=sys.stderr)
    return ExitCode.CRASH if problems else ExitCode.DONE


def nodes(typed: argparse.Namespace) -> int:
    """Print the names of the nodes whose ranks train, those of spare ones below, and what is left out on stderr."""
    config = read_config(typed.config, typed.overrides).config
    root = requeue.run_folder(config)
    allocated = typed.nodes.split(",")
    choice = spare_nodes.choose_nodes(root, process.slurm_job(), allocated, typed.spares, config.train.elastic)
    for node, why in choice.left_out.items():
        print(f"> node {node} is left out: {why}", file=sys.stderr)
    spare = [node for node in allocated if node not in choice.nodes and node not in choice.left_out]
    print(",".join(choice.nodes), ",".join(spare), sep="\n")
    return ExitCode.DONE


def after(typed: argparse.Namespace) -> int:
    """Return 0 if the job should be requeued, `COMPLETE` if its run is complete, else 1; print why."""
    config = read_config(typed.config, typed.overrides).config
    root = requeue.run_folder(config)
    starts = requeue.start_iterations(root, process.slurm_job())
    newest = requeue.newest_iteration(root)
    if typed.code > ExitCode.STOPPED and config.train.elastic and newest >= RunSpec(config).train_iters:
        print(f"> done: ranks were lost (exit code {typed.code}), and the others have reached iteration {newest}")
        return COMPLETE
    should_requeue, reason = requeue.decide_requeue(typed.code, typed.before_limit, starts, newest)
    print(f"> {reason}", flush=True)
    return ExitCode.DONE if should_requeue else ExitCode.CRASH


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse `WHEN [--code N] [--before-limit] --config FILE [section.key=value ...]`."""
    parser = ConfigParser("megatron3d.launch", "Checks around the ranks of a SLURM job.")
    parser.add_argument("when", choices=STEPS)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--world-size", type=whole(1, MAX_RANKS), default=1, help="ranks of the job")
    parser.add_argument("--code", type=whole(0, 255), help="exit code of the ranks")
    parser.add_argument("--nodes", metavar="A,B", help="names of all nodes of the job")
    parser.add_argument("--spares", type=whole(0, MAX_RANKS), default=0, help="nodes of them that are spare")
    parser.add_argument("--before-limit", action="store_true", help="SLURM has warned of the time limit")
    parser.add_overrides("values that replace those in the file")
    return parser.parse_args(argv)


STEPS: Mapping[str, Callable[[argparse.Namespace], int]] = {"before": before, "nodes": nodes, "after": after}

if __name__ == "__main__":
    sys.exit(process.run_program(main))
