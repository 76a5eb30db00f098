"""What the overlaps and panels of our matmul are worth: training steps of every mode with each of them on and off.

python benchmarks/overlaps.py [--ranks 2 4 8] [--wire-gb-per-s 0.25] [--output benchmarks/results/overlaps.json]

Executions of a form take turns; a step's time is the slowest rank's.  Over gloo the processors that multiply also copy,
so that there is little to hide behind.  `--wire-gb-per-s` adds a wire that needs no processor: one for each rank, on
which transfers queue; `wait` sleeps until the transfer would be over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Row, Turns, interleaved, milliseconds, show, times_faster, write
from shapes import CPU, LR, SEED, SIZES, Size
from tensor_parallel import slowest_rank
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from megatron3d.comm import Comm, Pending
from megatron3d.config.derive import make_mesh, tensor_mode
from megatron3d.config.schema import Config
from megatron3d.data.loader import Microbatch
from megatron3d.layout import span
from megatron3d.mesh import Axes
from megatron3d.modes import MODES
from megatron3d.record import Recorder
from megatron3d.train.state import build_state, connect
from megatron3d.train.step import Settings, train_step

NOTHING = "no overlap"
OFF = {f"tp_comm_overlap_{what}": False for what in ("input_grad", "weight_grad", "weight_gather")}
# What every form has, and what only those have that gather weights.
EXECUTIONS: Mapping[str, Mapping[str, Any]] = {
    NOTHING: OFF,
    "all overlaps": {},
    "only dX under dW": {**OFF, "tp_comm_overlap_input_grad": True},
    "4 panels": {"tp_num_panels": 4},
    "4 panels, no overlap": {**OFF, "tp_num_panels": 4},
}
OF_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "only dW late": {**OFF, "tp_comm_overlap_weight_grad": True},
    "only W ahead": {**OFF, "tp_comm_overlap_weight_gather": True},
    "all overlaps, W kept": {"tp_keep_gathered_weights": True},
}


class Wire(Recorder):
    """Passes everything on, and counts what is waited for; with a bandwidth, a transfer takes as long as on a wire."""

    def __init__(self, comm: Comm, bytes_per_s: float | None) -> None:
        super().__init__(comm)
        self._bytes_per_s, self._free_at, self.waited_s = bytes_per_s, 0.0, 0.0

    def _timed(self, pending: Pending) -> Pending:
        """The last recorded call, on its way."""
        now = time.perf_counter()
        if self._bytes_per_s:
            self._free_at = max(now, self._free_at) + self.calls[-1].wire_bytes / self._bytes_per_s
        over_at = self._free_at

        def finish() -> Tensor:
            start = time.perf_counter()
            out = pending.wait()
            time.sleep(max(0.0, over_at - time.perf_counter()))
            self.waited_s += time.perf_counter() - start
            return out

        return Pending(finish)

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        pending = super().all_gather(x, axes, dim)
        return self._timed(pending) if self.mesh.nontrivial(axes) else pending

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        pending = super().reduce_scatter(x, axes, dim)
        return self._timed(pending) if self.mesh.nontrivial(axes) else pending

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        pending = super().all_reduce(x, axes, op)
        return self._timed(pending) if self.mesh.nontrivial(axes) else pending


class Contestant:
    """Our training step on this rank, over a wire.

    Attributes:
        waited_ms: of each step so far.
    """

    def __init__(self, size: Size, config: Config, bytes_per_s: float | None) -> None:
        arch, comm = connect(config, size.vocab_size, dist.get_world_size(), dist.get_rank())
        self.wire = Wire(comm, bytes_per_s)
        self.state = build_state(config, arch, self.wire, CPU)
        rows = slice(*span(size.batch_size, tensor_mode(config.parallel).batch_axes, comm.mesh))
        self.batch = [Microbatch(size.tokens()[rows], 0)]
        self.settings = Settings(SEED, size.num_tokens, size.batch_size)
        self.waited_ms: list[float] = []

    def step(self) -> float:
        """The loss before the update."""
        self.wire.calls.clear()
        before = self.wire.waited_s
        loss = float(train_step(self.state, self.batch, LR, self.settings).loss)
        self.waited_ms.append(1e3 * (self.wire.waited_s - before))
        return loss


def forms(size: Size) -> Iterator[tuple[str, dict[str, Config]]]:
    """Every mode and form with its executions."""
    for mode, entry in MODES.items():
        for form in entry.forms:
            shape = entry.default_shape(dist.get_world_size())
            chosen = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_parallel_shape": shape}
            parallel = size.config("fp32", chosen).parallel
            plan = tensor_mode(parallel).expand.on(make_mesh(parallel, dist.get_world_size()))
            executions = {**EXECUTIONS, **(OF_WEIGHTS if plan.w else {})}
            name = f"{mode} {form} {'x'.join(map(str, shape))}"
            yield name, {how: size.config("fp32", {**chosen, **keys}) for how, keys in executions.items()}


def measure(name: str, configs: Mapping[str, Config], options: argparse.Namespace) -> list[Row]:
    """A row per execution, the same on all ranks."""
    size, bandwidth = SIZES[options.size], options.wire_gb_per_s
    contestants = {how: Contestant(size, each, bandwidth and bandwidth * 1e9) for how, each in configs.items()}
    losses = {how: contestant.step() for how, contestant in contestants.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, f"{name}: the losses differ: {losses}"
    steps = {how: partial(contestant.step) for how, contestant in contestants.items()}
    turns: Turns = slowest_rank(interleaved(steps, options.rounds, options.warmup, dist.barrier))
    return [
        {
            "ranks": dist.get_world_size(),
            "form": name,
            "execution": how,
            "times_faster": times_faster(turns, how, NOTHING),
            **milliseconds(turns[how]),
            "waited_ms": statistics.median(contestant.waited_ms[-options.rounds :]),
            "collectives": len(contestant.wire.calls),
            "sent_mb": sum(call.wire_bytes for call in contestant.wire.calls) / 1e6,
        }
        for how, contestant in contestants.items()
    ]


def run_rank(rank: int, num_ranks: int, folder: str, options: argparse.Namespace) -> None:
    """All forms on one of the ranks; rank 0 shows them and leaves them in a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store{num_ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    rows: list[Row] = []
    for name, configs in forms(SIZES[options.size]):
        found = measure(name, configs, options)
        if rank == 0:
            show(f"{options.size}, fp32, wire {options.wire_gb_per_s or 'gloo alone'}", found)
        rows += found
    if rank == 0:
        (Path(folder) / f"rows{num_ranks}").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    options = arguments()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in options.ranks:
            spawn(run_rank, (num_ranks, folder, options), nprocs=num_ranks)
            rows += json.loads((Path(folder) / f"rows{num_ranks}").read_text())
    if options.output:
        details = {"rounds": options.rounds, "wire_gb_per_s": options.wire_gb_per_s, "size": vars(SIZES[options.size])}
        write(options.output, rows, **details)


def arguments() -> argparse.Namespace:
    """Options; `--quick` is two rounds of a tiny size on two ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--wire-gb-per-s", type=float, help="of the wire that is added; default: none")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps per execution; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="see that it works")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.size, options.ranks, options.rounds, options.warmup = "tiny", [2], 2, 1
    return options


if __name__ == "__main__":
    main()
