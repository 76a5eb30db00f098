"""Time and bytes of the optimizer's step: Muon and SOAP at home ranks or computed by all, AdamW against torch's.

python benchmarks/optimizers.py [--sizes 30M 300M] [--ranks 1 2 4] [--output benchmarks/results/optimizers.json]

The same processes, one thread each, run all contestants interleaved; the time of a step is that of the slowest rank.
"alone" is a rule on one rank, which is what each rank would do if it computed all matrices itself.  Where there are
fewer cores than ranks, CPU time says what the ranks would take side by side.  Of ten steps of SOAP one refreshes bases:
"soap refresh" is that one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common.report import Row, Turns, interleaved, milliseconds
from common.shapes import CPU, LR, SIZES, Size
from data_parallel import measure_on_ranks
from tensor_parallel import slowest_rank
from torch import Tensor

from megatron3d.comm.recording import Recorder
from megatron3d.config.run_spec import RunSpec
from megatron3d.train.state import build_state, connect

TORCH = "torch.optim.AdamW, fused"
# Rule and number of earlier steps, by contestant.
STEPS = {"muon": ("muon", 0), "soap": ("soap", 10), "soap refresh": ("soap", 9), "adam": ("adam", 0)}
ON_MATRICES = ("muon", "soap", "soap refresh")
BASELINES = {**{step: f"{step} alone" for step in ON_MATRICES}, "adam": TORCH}


class Ours:
    """A step of our optimizer, with the bytes that this rank sent in the last one."""

    def __init__(self, size: Size, step: str, num_ranks: int, rank: int, zero_stage: int) -> None:
        rule, self._iteration = STEPS[step]
        config = size.config("fp32", {"zero_stage": zero_stage})
        optimizer = config.optimizer.model_copy(update={"optimizer": rule})
        batch = config.train.model_copy(update={"global_batch_size": num_ranks * config.train.micro_batch_size})
        config = config.model_copy(update={"optimizer": optimizer, "train": batch})
        spec = RunSpec(config, num_ranks, size.vocab_size, rank)
        self._recorder = Recorder(connect(spec))
        self._state = build_state(spec, self._recorder, CPU)
        self._state.buffers.settle()
        generator = torch.Generator().manual_seed(rank)
        for _, _, values in self._state.buffers.shards("grad"):
            values.normal_(generator=generator)
        self._norm = torch.tensor(1.0)

    def __call__(self) -> None:
        self._recorder.calls.clear()
        self._state.optimizer.step(self._norm, LR, iteration=self._iteration)
        self._state.buffers.settle()

    @property
    def sent_bytes(self) -> float:
        """Bytes of the last step's collectives."""
        return sum(call.wire_bytes for call in self._recorder.calls)


class Torchs:
    """A step of torch's fused AdamW on this rank's share of equally many parameters."""

    sent_bytes = 0.0

    def __init__(self, size: Size) -> None:
        numel = sum(values.numel() for _, _, values in Ours(size, "adam", 1, 0, 0)._state.buffers.shards("main"))
        param = torch.nn.Parameter(torch.randn(numel))
        param.grad = torch.randn(numel)
        self._optimizer = torch.optim.AdamW([param], lr=LR, fused=True)

    def __call__(self) -> None:
        self._optimizer.step()


def measure(size_name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row per contestant, the same on all ranks."""
    num_ranks, rank, size = dist.get_world_size(), dist.get_rank(), SIZES[size_name]
    builds: dict[str, Callable[[], Ours | Torchs]] = {
        f"{step}, ZeRO {stage}": partial(Ours, size, step, num_ranks, rank, stage)
        for step in STEPS
        for stage in (0, 1)[:num_ranks]
    }
    for step in ON_MATRICES if num_ranks > 1 else ():
        builds[BASELINES[step]] = partial(Ours, size, step, 1, 0, 0)
    builds[TORCH] = partial(Torchs, size)
    steps = {name: build() for name, build in builds.items()}
    turns = slowest_rank(interleaved(steps, options.rounds, options.warmup, dist.barrier))
    rows: list[Row] = []
    for name, made in steps.items():
        baseline = BASELINES[name.partition(",")[0].removesuffix(" alone")] if isinstance(made, Ours) else TORCH
        row = {"ranks": num_ranks, "size": size_name, "contestant": name, **milliseconds(turns[name])}
        row |= {"baseline": baseline, "cpu_times_faster": cpu_times_faster(turns, name, baseline)}
        rows.append(row | {"sent_mb": mean_over_ranks(made.sent_bytes) / 1e6})
    return rows


def cpu_times_faster(turns: Turns, ours: str, baseline: str) -> float:
    """Return the median of the baseline's CPU time over ours; 1 where it is not measured."""
    if baseline not in turns:
        return 1.0
    return statistics.median(p.cpu_s / o.cpu_s for p, o in zip(turns[baseline], turns[ours], strict=True))


def mean_over_ranks(value: float) -> float:
    """Return the mean of the ranks' values."""
    total: Tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def arguments() -> argparse.Namespace:
    """Parse the options; `--quick` is a round of the tiny size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["30M"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="timed steps per contestant; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=1, help="untimed steps before; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.ranks, options.rounds = ["tiny"], [2], 1
    return options


if __name__ == "__main__":
    measure_on_ranks(arguments(), measure)
