"""Speed-up by each overlap of our matmul, by kept weights and rounds: training steps of every mode.

python benchmarks/overlaps.py [--ranks 2 4 8] [--wires-gb-per-s 0.1 0.3 1] [--forms sequence_parallel ...]
    [--executions "all overlaps" "in rounds" ...] [--output benchmarks/results/overlaps.json]

Variants of a form are interleaved; a step takes as long as the slowest rank.  Over gloo the CPU cores that compute
also copy, and there may be fewer cores than ranks, so that overlaps gain little.  Hence each rank also simulates the
step on a core of its own and a link that needs no core: its clock is the CPU time of the computing thread, transfers
queue on the link, and a `wait` adds what is left of a transfer on that clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.report import Row, Turns, interleaved, milliseconds, show, times_faster, write
from common.shapes import CPU, LR, SEED, SIZES, Size
from tensor_parallel import slowest_rank
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from megatron3d.comm import matmul_rounds
from megatron3d.comm.interface import Comm, GatheredProduct, Pending, PutProduct
from megatron3d.comm.recording import Recorder
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import Microbatch
from megatron3d.errors import UserError
from megatron3d.linear.overlap_plan import async_plan
from megatron3d.parallel.layout import span
from megatron3d.parallel.mesh import Axes
from megatron3d.parallel.modes import MODES
from megatron3d.train.state import build_state, connect
from megatron3d.train.step import StepSettings, train_step

NOTHING = "no overlap"
OFF = {f"tp_comm_overlap_{what}": False for what in ("input_grad", "weight_grad", "weight_gather")}
# What every form has, what only those have that gather weights, and those whose collectives fit their own GEMM.
EXECUTIONS: Mapping[str, Mapping[str, Any]] = {
    NOTHING: OFF,
    "all overlaps": {},
    "only dX under dW": {**OFF, "tp_comm_overlap_input_grad": True},
}
OF_ROUNDS: Mapping[str, Mapping[str, Any]] = {"in rounds": {"tp_comm_overlap": True}}
OF_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "only dW late": {**OFF, "tp_comm_overlap_weight_grad": True},
    "only W ahead": {**OFF, "tp_comm_overlap_weight_gather": True},
    "all overlaps, W kept": {"tp_keep_gathered_weights": True},
}


@dataclass
class Wire:
    """One simulated link, on the clock of a rank that waits for it."""

    gb_per_s: float
    free_at: float = 0.0
    waited_s: float = 0.0

    @property
    def now(self) -> float:
        """Return the CPU time of this thread plus the time it has waited."""
        return time.thread_time() + self.waited_s

    def send(self, num_bytes: float) -> float:
        """Return when a transfer that starts now is finished."""
        self.free_at = max(self.now, self.free_at) + num_bytes / self.gb_per_s / 1e9
        return self.free_at

    def wait(self, until: float) -> None:
        """Advance the clock to the end of a transfer."""
        self.waited_s += max(0.0, until - self.now)


class Wires(Recorder):
    """Communicator that forwards every call and keeps the clocks of several simulated links."""

    def __init__(self, comm: Comm, gb_per_s: Sequence[float]) -> None:
        super().__init__(comm)
        self.wires, self.waited_s = [Wire(each) for each in gb_per_s], 0.0

    def _timed(self, pending: Pending) -> Pending:
        """Return the last recorded collective, in flight."""
        over = [wire.send(self.calls[-1].wire_bytes) for wire in self.wires]

        def finish() -> Tensor:
            start = time.perf_counter()
            out = pending.wait()
            self.waited_s += time.perf_counter() - start
            for wire, until in zip(self.wires, over, strict=True):
                wire.wait(until)
            return out

        return Pending(finish)

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        pending = super().all_gather(x, axes, dim)
        return self._timed(pending) if self.mesh.nontrivial(axes) else pending

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        pending = super().reduce_scatter(x, axes, dim)
        return self._timed(pending) if self.mesh.nontrivial(axes) else pending

    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        pending = super().shift(x, out, axes, by)
        return self._timed(pending) if self.mesh.nontrivial(axes) else pending

    def all_gather_matmul(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
        return matmul_rounds.all_gather_matmul(self, a_MK, b_NK, axes, put)

    def matmul_reduce_scatter(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
        return matmul_rounds.matmul_reduce_scatter(self, a_MK, b_NK, axes, dim, put)

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        pending = super().all_reduce(x, axes, op)
        return self._timed(pending) if self.mesh.nontrivial(axes) else pending


class Contestant:
    """Our training step on this rank.

    Attributes:
        steps_ms: of each step so far, milliseconds of waiting over gloo, and its duration over each simulated link.
    """

    def __init__(self, size: Size, config: Config, comm: Comm, gb_per_s: Sequence[float]) -> None:
        self.comm = Wires(comm, gb_per_s)
        spec = size.spec(config, comm.mesh.world_size, comm.mesh.rank)
        self.state = build_state(spec, self.comm, CPU)
        rows = slice(*span(size.batch_size, spec.mode.batch_axes, comm.mesh))
        self.batch = [Microbatch(size.tokens()[rows], 0)]
        self.settings = StepSettings(SEED, size.num_tokens, size.batch_size)
        self.steps_ms: list[list[float]] = []

    def clocks(self) -> list[float]:
        """Return seconds waited over gloo, and the time over each simulated link."""
        return [self.comm.waited_s, *(wire.now for wire in self.comm.wires)]

    def step(self) -> float:
        """Make a step; return the loss before the update."""
        self.comm.calls.clear()
        before = self.clocks()
        loss = float(train_step(self.state, self.batch, LR, self.settings).loss)
        self.steps_ms.append([1e3 * (new - old) for old, new in zip(before, self.clocks(), strict=True)])
        return loss


def forms(options: argparse.Namespace, num_ranks: int) -> Iterator[tuple[str, dict[str, Config]]]:
    """Return the chosen forms of every mode with their variants."""
    size = SIZES[options.size]
    for mode, entry in MODES.items():
        for form in entry.forms:
            if options.forms and form not in options.forms:
                continue
            shape = entry.default_shape(num_ranks)
            chosen = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_parallel_shape": shape}
            spec = size.spec(size.config("fp32", chosen), num_ranks)
            UserError.collect(check(spec.config, num_ranks, size.vocab_size))
            plans = [plan.on(spec.mesh) for plan in (spec.mode.expand, spec.mode.contract)]
            has_rounds = not all(async_plan(plan).is_empty for plan in plans)
            executions = {**EXECUTIONS, **(OF_WEIGHTS if plans[0].w else {}), **(OF_ROUNDS if has_rounds else {})}
            executions = {how: keys for how, keys in executions.items() if how in (NOTHING, *options.executions)}
            name = f"{mode} {form} {'x'.join(map(str, shape))}"
            yield name, {how: size.config("fp32", {**chosen, **keys}) for how, keys in executions.items()}


def measure(name: str, configs: Mapping[str, Config], options: argparse.Namespace) -> list[Row]:
    """Return a row per variant, the same on all ranks, over the same connections."""
    size, wires = SIZES[options.size], options.wires_gb_per_s
    comm = connect(size.spec(configs[NOTHING], dist.get_world_size(), dist.get_rank()))
    contestants = {how: Contestant(size, each, comm, wires) for how, each in configs.items()}
    losses = {how: contestant.step() for how, contestant in contestants.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, f"{name}: the losses differ: {losses}"
    steps = {how: contestant.step for how, contestant in contestants.items()}
    turns: Turns = slowest_rank(interleaved(steps, options.rounds, options.warmup, dist.barrier))
    clocks = {how: medians(contestant.steps_ms[-options.rounds :]) for how, contestant in contestants.items()}
    return [
        {
            "ranks": dist.get_world_size(),
            "form": name,
            "execution": how,
            "times_faster": times_faster(turns, how, NOTHING),
            **milliseconds(turns[how]),
            "waited_ms": clocks[how][0],
            "collectives": len(contestant.comm.calls),
            "sent_mb": sum(call.wire_bytes for call in contestant.comm.calls) / 1e6,
            **{f"ms at {wire:g} GB/s": ms for wire, ms in zip(wires, clocks[how][1:], strict=True)},
        }
        for how, contestant in contestants.items()
    ]


def medians(steps: Sequence[Sequence[float]]) -> list[float]:
    """Return the median over steps of each clock, the largest of any rank."""
    found = torch.tensor(steps, dtype=torch.float64).median(0).values
    dist.all_reduce(found, dist.ReduceOp.MAX)
    values: list[float] = found.tolist()
    return values


def run_rank(
    rank: int, num_ranks: int, folder: str, name: str, configs: Mapping[str, Config], options: argparse.Namespace
) -> None:
    """Measure a form on one of the ranks; rank 0 prints it and writes it to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    rows = measure(name, configs, options)
    if rank == 0:
        show(f"{options.size}, fp32, {num_ranks} ranks: {name}", [dict(list(row.items())[2:]) for row in rows])
        (Path(folder) / "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks once per form: idle connections of other groups would wake up during a measurement."""
    options = arguments()
    rows: list[Row] = []
    for num_ranks in options.ranks:
        for name, configs in forms(options, num_ranks):
            with tempfile.TemporaryDirectory() as folder:
                spawn(run_rank, (num_ranks, folder, name, configs, options), nprocs=num_ranks)
                rows += json.loads((Path(folder) / "rows").read_text())
            if options.output:
                write(options.output, rows, rounds=options.rounds, size=vars(SIZES[options.size]))


def arguments() -> argparse.Namespace:
    """Parse the options; `--quick` is a round of a form of a tiny size on two ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--forms", nargs="+", help="default: every form of every mode")
    every = [*EXECUTIONS, *OF_WEIGHTS, *OF_ROUNDS]
    parser.add_argument("--executions", nargs="+", choices=every, default=every, help="besides no overlap")
    parser.add_argument("--size", choices=SIZES, default="3M, 8 heads")
    parser.add_argument(
        "--wires-gb-per-s", nargs="+", type=float, default=[0.1, 0.3, 1.0], help="bandwidths of the simulated link"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed steps per execution; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.size, options.ranks, options.forms = "tiny", [2], ["sequence_parallel"]
        options.rounds, options.warmup = 1, 1
    return options


if __name__ == "__main__":
    main()
