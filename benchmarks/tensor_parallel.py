"""Step time of two tensor-parallel ranks: our modes, and torch's own parallelize_module (DTensor).

python benchmarks/tensor_parallel.py [--sizes 3M 30M] [--all-modes] [--output benchmarks/results/NAME.json]

The same two processes, one thread each, run all contestants interleaved; a step takes as long as the slowest rank.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.report import Row, Turn, Turns, interleaved, milliseconds, show, times_faster, write
from common.shapes import SIZES, Ours, Size
from peers.dtensor_gpt import dtensor_step, parallelized
from peers.dtensor_traffic import FunctionalTraffic
from peers.plain_gpt import PlainGPT, gpt2_weights
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from megatron3d.parallel.modes import MODES

NUM_RANKS = 2
OURS = "1d sequence_parallel"


@dataclass(frozen=True)
class Contestant:
    """A step over both ranks, and the bytes of each collective of one further step."""

    step: Callable[[Tensor], Tensor]
    wire_bytes: Callable[[Tensor], list[float]]


def our_modes(size: Size, every: bool) -> Iterator[tuple[str, Contestant]]:
    """Return the mode to compare with, then every other mode and form over two ranks."""
    forms = [(mode, form) for mode, entry in MODES.items() for form in entry.forms]
    forms.sort(key=lambda names: " ".join(names) != OURS)
    for mode, form in forms if every else forms[:1]:
        shape = MODES[mode].default_shape(NUM_RANKS)
        parallel = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_parallel_shape": shape}
        yield f"{mode} {form}", ours(size, parallel)


def ours(size: Size, parallel: Mapping[str, Any]) -> Contestant:
    """Return our training step on this rank."""
    rank = Ours(size, size.config("fp32", parallel), NUM_RANKS, dist.get_rank())

    def wire_bytes(tokens: Tensor) -> list[float]:
        rank.recorder.calls.clear()
        rank.step(tokens)
        return [call.wire_bytes for call in rank.recorder.calls]

    return Contestant(rank.step, wire_bytes)


def dtensor(size: Size, fused: bool) -> Contestant:
    """Return the step of the plain GPT under parallelize_module."""
    config = size.config("fp32")
    model = PlainGPT(size.spec(config).arch)
    model.load_state_dict(gpt2_weights(Ours(size, config).weights()))
    step = dtensor_step(parallelized(model, init_device_mesh("cpu", (NUM_RANKS,))), fused)

    def wire_bytes(tokens: Tensor) -> list[float]:
        traffic = FunctionalTraffic()
        with traffic:
            step(tokens)
        return traffic.wire_bytes

    return Contestant(step, wire_bytes)


def run_rank(rank: int, store: str, options: argparse.Namespace) -> None:
    """Measure all sizes on one of the ranks; rank 0 prints and writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    rows: list[Row] = []
    for name in options.sizes:
        found = measure(name, options)
        if rank == 0:
            show(f"{name}, fp32, {NUM_RANKS} ranks of 1 thread over gloo", found)
        rows += found
    if rank == 0 and options.output:
        write(options.output, rows, rounds=options.rounds, sizes={name: vars(SIZES[name]) for name in options.sizes})
    dist.destroy_process_group()


def measure(size_name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row per contestant, the same on both ranks."""
    size = SIZES[size_name]
    tokens = size.tokens()
    contestants = dict(our_modes(size, options.all_modes)) | {"DTensor": dtensor(size, fused=False)}
    if options.fused_peer:
        contestants["DTensor, fused AdamW"] = dtensor(size, fused=True)
    check_same_loss({name: float(contestant.step(tokens)) for name, contestant in contestants.items()})
    sent = {name: contestant.wire_bytes(tokens) for name, contestant in contestants.items()}
    steps = {name: partial(contestant.step, tokens) for name, contestant in contestants.items()}
    turns = slowest_rank(interleaved(steps, options.rounds, options.warmup, dist.barrier))
    return [
        {
            "size": size_name,
            "contestant": name,
            "ours_over_this": times_faster(turns, OURS, name),
            **milliseconds(turns[name]),
            "collectives": len(sent[name]),
            "sent_mb": sum(sent[name]) / 1e6,
        }
        for name in contestants
    ]


def check_same_loss(losses: Mapping[str, float]) -> None:
    """Check that the first loss of every contestant is equal."""
    spread = max(losses.values()) - min(losses.values())
    assert spread < 1e-4, f"the contestants compute different losses: {losses}"
    if dist.get_rank() == 0:
        print(f"first losses agree within {spread:.1e}: {losses}")


def slowest_rank(turns: Turns) -> dict[str, list[Turn]]:
    """Return the larger time of the ranks for each step."""
    times = torch.tensor([list(turns[name]) for name in turns], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return {name: [Turn(*step) for step in steps] for name, steps in zip(turns, times.tolist(), strict=True)}


def main() -> None:
    """Start the ranks."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn(run_rank, (store, options), nprocs=NUM_RANKS)


def arguments() -> argparse.Namespace:
    """Parse the options; `--quick` is a round of the tiny size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["3M", "30M"])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps per contestant; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before; default: %(default)s")
    parser.add_argument("--all-modes", action="store_true", help="also every other mode and form of ours")
    parser.add_argument("--fused-peer", action="store_true", help="also DTensor with torch's fused AdamW")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds = ["tiny"], 1
        options.warmup = 1
    return options


if __name__ == "__main__":
    main()
