"""Step time of two pipeline ranks: our engine and torch.distributed.pipelining on the same stages; and our bubbles.

python benchmarks/pipeline.py [--sizes 6M 25M] [--output benchmarks/results/pipeline.json]

The same two processes, one thread each, run all contestants interleaved; a step takes as long as the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common.report import Row, interleaved, milliseconds, show, times_faster, write
from common.shapes import CPU, Ours, Size
from peers.torch_executor import PEERS, TorchExecutor
from tensor_parallel import check_same_loss, slowest_rank
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from megatron3d.pipeline.actions import Schedule
from megatron3d.pipeline.schedules import SCHEDULES
from megatron3d.pipeline.simulate import num_virtual_stages, peak_activations, simulate_mean_durations
from megatron3d.train.monitor.profiling import TraceRecorder, gather_timeline

NUM_RANKS = 2
FIRST = "1f1b"
COLUMNS = ("bubble_pct", "predicted_pct", "in_flight", "planned")
SCHEDULE_NAMES = (FIRST, "interleaved", "gpipe", "zb-h1", "zb-h2", "zb-v")
# A head as large as a layer, all of it the last stage's work, would be what the other ranks mostly wait for.
SIZES: Mapping[str, Size] = {
    "tiny": Size(4, 64, 4, 256, 64, 8, 4),
    "6M": Size(8, 256, 4, 512, 256, 8, 8),
    "25M": Size(8, 512, 8, 512, 256, 8, 8),
}


@dataclass(frozen=True)
class Contestant:
    """A schedule under one of the engines."""

    schedule: str
    engine: str
    run: Ours

    @property
    def name(self) -> str:
        """Unique name among the contestants."""
        return f"{self.schedule}, {self.engine}"

    @property
    def order(self) -> Schedule:
        """Schedule of all ranks."""
        return self.run.state.executor.pipeline.schedule

    @property
    def most_in_flight(self) -> float:
        """Most microbatches in flight on this rank, all of its stages counted as one."""
        return self.run.state.executor.peak_in_flight / num_virtual_stages(self.order)


def contestants(size: Size) -> list[Contestant]:
    """Return every schedule of ours, and those that torch has."""
    found = []
    for name in SCHEDULE_NAMES:
        parallel = {"pipeline_model_parallel_size": NUM_RANKS, "pipeline_schedule": name}
        if SCHEDULES[name].min_virtual > 1:
            parallel["virtual_pipeline_model_parallel_size"] = SCHEDULES[name].min_virtual
        for engine in ("ours", "torch") if name in PEERS else ("ours",):
            run = Ours(size, size.config("fp32", parallel), NUM_RANKS, dist.get_rank())
            if engine == "torch":
                num_tokens = size.num_tokens // size.num_microbatches
                run.state.executor = TorchExecutor(run.state.model, run.state.executor.pipeline, name, num_tokens)  # type: ignore[assignment]
            found.append(Contestant(name, engine, run))
    return found


def measure(size_name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row per contestant, the same on both ranks."""
    size = SIZES[size_name]
    tokens, everyone = size.tokens(), contestants(size)
    check_same_loss({each.name: float(each.run.step(tokens)) for each in everyone})
    steps = {each.name: partial(each.run.step, tokens) for each in everyone}
    turns = slowest_rank(interleaved(steps, options.rounds, options.warmup, dist.barrier))
    traces = bubbles([each for each in everyone if each.engine == "ours"], tokens, options)
    return [
        {
            "size": size_name,
            "schedule": each.schedule,
            "engine": each.engine,
            "ours_over_this": times_faster(turns, f"{each.schedule}, ours", each.name),
            "1f1b_over_this": times_faster(turns, f"{FIRST}, ours", each.name),
            **milliseconds(turns[each.name]),
            **traces.get(each.name, dict.fromkeys(COLUMNS)),
        }
        for each in everyone
    ]


def bubbles(ours: list[Contestant], tokens: Tensor, options: argparse.Namespace) -> Mapping[str, Row]:
    """Return medians of measured and predicted bubbles over traced steps, and the most microbatches in flight."""
    found: dict[str, list[tuple[float, float]]] = {each.name: [] for each in ours}

    def step(each: Contestant) -> None:
        recording = TraceRecorder(each.run.recorder, CPU)
        each.run.step(tokens, recording.observe)
        measured = gather_timeline(recording, each.run.recorder)
        if measured is not None:
            found[each.name].append((measured.idle_rate, simulate_mean_durations(each.order, measured).idle_rate))

    interleaved({each.name: partial(step, each) for each in ours}, options.rounds, 0, dist.barrier)
    rows: dict[str, Row] = {}
    for each in ours:
        in_flight = torch.tensor(each.most_in_flight)
        dist.all_reduce(in_flight, dist.ReduceOp.MAX)
        bubble = [100 * statistics.median(values) for values in zip(*found[each.name], strict=True)] or [0.0, 0.0]
        planned = max(peak_activations(each.order)) / num_virtual_stages(each.order)
        rows[each.name] = dict(zip(COLUMNS, (*bubble, in_flight.item(), planned), strict=True))
    return rows


def run_rank(rank: int, store: str, options: argparse.Namespace) -> None:
    """Measure all sizes on one of the ranks; rank 0 prints and writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    rows: list[Row] = []
    for name in options.sizes:
        found = measure(name, options)
        if rank == 0:
            microbatches = f"{SIZES[name].num_microbatches} microbatches"
            show(f"{name}, fp32, {NUM_RANKS} ranks of 1 thread over gloo, {microbatches}", found)
        rows += found
    if rank == 0 and options.output:
        write(options.output, rows, rounds=options.rounds, sizes={name: vars(SIZES[name]) for name in options.sizes})
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (str(Path(folder) / "store"), options), nprocs=NUM_RANKS)


def arguments() -> argparse.Namespace:
    """Parse the options; `--quick` is a round of the smallest size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["6M", "25M"])
    parser.add_argument("--rounds", type=int, default=15, help="timed steps per contestant; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds = ["tiny"], 1
        options.warmup = 1
    return options


if __name__ == "__main__":
    main()
