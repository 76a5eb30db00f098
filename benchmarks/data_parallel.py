"""Step time and memory of data-parallel ranks: our ZeRO stages, torch's DistributedDataParallel and FSDP2.

python benchmarks/data_parallel.py [--sizes 3M 30M] [--ranks 2 4] [--output benchmarks/results/data_parallel.json]

The same processes, one thread each, run all contestants interleaved; the time of a step is that of the slowest rank.
"alone" is the same program on the same sequences without other ranks: the difference is the cost of data parallelism.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.live import Live
from common.report import Row, Turns, interleaved, milliseconds, show, times_faster, write
from common.shapes import CPU, LR, SEED, SIZES, Size
from peers.plain_gpt import PlainGPT, gpt2_weights, plain_loss
from tensor_parallel import check_same_loss, slowest_rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from megatron3d.comm.interface import Pending, completed
from megatron3d.comm.recording import Recorder
from megatron3d.data.loader import Microbatch
from megatron3d.parallel.mesh import Axes
from megatron3d.train.state import TrainState, build_state, connect
from megatron3d.train.step import StepSettings, train_step

Step = Callable[[Tensor], Tensor]
# Returns the rows of a size, the same on all ranks.
Measure = Callable[[str, argparse.Namespace], list[Row]]


class Patient(Recorder):
    """Communicator that waits for each collective before it returns: the baseline without overlap."""

    def all_gather_into(self, whole: Tensor, axes: Axes) -> Pending:
        return completed(super().all_gather_into(whole, axes).wait())

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        return completed(super().reduce_scatter(x, axes, dim).wait())

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        return completed(super().all_reduce(x, axes, op).wait())


def build_ours(size: Size, num_ranks: int, rank: int, zero_stage: int, wrap: type[Recorder] = Recorder) -> TrainState:
    """Build our state, for one microbatch of a rank's share."""
    whole = replace(size, batch_size=num_ranks * size.batch_size, num_microbatches=num_ranks)
    spec = whole.spec(whole.config("fp32", {"zero_stage": zero_stage}), num_ranks, rank)
    return build_state(spec, wrap(connect(spec)), CPU)


def ours(size: Size, num_ranks: int, rank: int, zero_stage: int = 0, wrap: type[Recorder] = Recorder) -> Step:
    """Return our training step on this rank's rows of a batch."""
    state = build_ours(size, num_ranks, rank, zero_stage, wrap)
    settings = StepSettings(SEED, num_ranks * size.num_tokens, num_ranks * size.batch_size)

    def step(tokens: Tensor) -> Tensor:
        return train_step(state, [Microbatch(tokens, rank * size.batch_size)], LR, settings).loss

    return step


def plain(size: Size, num_ranks: int, rank: int, wrap: Callable[[PlainGPT], nn.Module], fused: bool) -> Step:
    """Return the step of the wrapped plain GPT with our initial weights; the loss is each rank's own mean."""
    model = PlainGPT(size.spec(size.config("fp32")).arch)
    initial = build_ours(size, 1, 0, zero_stage=0)
    model.load_state_dict(gpt2_weights({name: value.detach() for name, value in initial.model.named_parameters()}))
    wrapped = wrap(model)
    adamw = torch.optim.AdamW(wrapped.parameters(), lr=LR, fused=fused or None)

    def step(tokens: Tensor) -> Tensor:
        loss = plain_loss(wrapped, tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        assert num_ranks == 1 or not isinstance(norm, DTensor) or norm.full_tensor() > 0, "there are no gradients"
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def ddp(model: PlainGPT) -> nn.Module:
    """Wrap with DDP; gradients are views of the buckets, which is faster and smaller than the default."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: PlainGPT, reshard_after_forward: bool = True) -> nn.Module:
    """Wrap with FSDP2, one unit per layer and one for the rest; without resharding after forward it is ZeRO 2."""
    for block in model.h:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, reshard_after_forward=reshard_after_forward)  # type: ignore[return-value]


def unwrapped(model: PlainGPT) -> nn.Module:
    """Return the model without data parallelism."""
    return model


@dataclass(frozen=True)
class Contestant:
    """Training step that is built from (size of a rank's part, number of ranks, rank), and the names of its baselines.

    Attributes:
        ours: our step that keeps and sends the same bytes.
        alone: the same program without other ranks.
    """

    name: str
    build: Callable[[Size, int, int], Step]
    ours: str
    alone: str


def contestants(fused_peer: bool) -> Iterator[Contestant]:
    """Return ours by stage, with and without overlap, the peers, and each program alone."""
    for stage in range(4):
        yield Contestant(f"ZeRO {stage}", partial(ours, zero_stage=stage), f"ZeRO {stage}", "ours alone")
    for stage in (0, 3):
        patient = partial(ours, zero_stage=stage, wrap=Patient)
        yield Contestant(f"ZeRO {stage}, no overlap", patient, f"ZeRO {stage}", "ours alone")
    yield Contestant("ours alone", lambda size, *_: ours(size, 1, 0), "ours alone", "ours alone")
    wraps = {"DDP": (ddp, 0), "FSDP2, ZeRO 2": (partial(fsdp, reshard_after_forward=False), 2), "FSDP2": (fsdp, 3)}
    for suffix, fused in (("", False), (", fused AdamW", True))[: 1 + fused_peer]:
        program = f"plain alone{suffix}"
        for name, (wrap, stage) in wraps.items():
            build = partial(plain, wrap=wrap, fused=fused)  # type: ignore[arg-type]
            yield Contestant(f"{name}{suffix}", build, f"ZeRO {stage}", program)
        lonely = partial(plain, wrap=unwrapped, fused=fused)
        yield Contestant(program, lambda size, *_, lonely=lonely: lonely(size, 1, 0), "ours alone", program)


def measure(size_name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row per contestant, the same on all ranks."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = SIZES[size_name]
    part = replace(whole, batch_size=whole.batch_size // num_ranks)
    tokens = whole.tokens().chunk(num_ranks)[rank]
    everyone = list(contestants(options.fused_peer))
    builds = {each.name: partial(each.build, part, num_ranks, rank) for each in everyone}
    peaks = {name: peak_memory(build, tokens) for name, build in builds.items()}
    steps = {name: partial(build(), tokens) for name, build in builds.items()}
    check_same_loss({each.name: mean_loss(each, steps[each.name]()) for each in everyone})
    turns = slowest_rank(interleaved(steps, options.rounds, options.warmup, dist.barrier))
    return [row(each, turns, {"ranks": num_ranks, "size": size_name}, peaks) for each in everyone]


def row(each: Contestant, turns: Turns, case: Mapping[str, Any], peaks: Mapping[str, int]) -> Row:
    """Return the reported numbers of a contestant."""
    return {
        **case,
        "contestant": each.name,
        "ours": each.ours,
        "ours_over_this": times_faster(turns, each.ours, each.name),
        "over_alone": times_faster(turns, each.alone, each.name),
        **milliseconds(turns[each.name]),
        "peak_tensor_mb": peaks[each.name] / 1e6,
    }


def mean_loss(each: Contestant, loss: Tensor) -> float:
    """Return the mean loss over ranks: ours is that already, a peer's is that of its own share."""
    total = loss.clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def peak_memory(build: Callable[[], Step], tokens: Tensor) -> int:
    """Return the peak bytes of tensors in the second step, on the rank with the most."""
    with Live() as live:
        step = build()
        step(tokens)
        gc.collect()
        live.peak = live.now
        step(tokens)
    peak = torch.tensor(live.peak)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def run_rank(rank: int, num_ranks: int, folder: str, options: argparse.Namespace, measure: Measure) -> None:
    """Measure all sizes on one of the ranks; rank 0 prints, and writes its rows to the folder."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store{num_ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    rows: list[Row] = []
    for name in options.sizes:
        found = measure(name, options)
        if rank == 0:
            show(f"{name}, fp32, {num_ranks} ranks of 1 thread over gloo", found)
        rows += found
    if rank == 0:
        Path(folder, f"rows{num_ranks}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure_on_ranks(options: argparse.Namespace, measure: Measure) -> None:
    """Start the ranks, once for each number of them, and write their rows."""
    rows: Sequence[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in options.ranks:
            spawn(run_rank, (num_ranks, folder, options, measure), nprocs=num_ranks)
            rows = [*rows, *json.loads(Path(folder, f"rows{num_ranks}.json").read_text())]
    if options.output:
        sizes = {name: vars(SIZES[name]) for name in options.sizes}
        write(options.output, rows, rounds=options.rounds, sizes=sizes)


def arguments() -> argparse.Namespace:
    """Parse the options; `--quick` is a round of the tiny size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["3M", "30M"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps per contestant; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before; default: %(default)s")
    parser.add_argument("--fused-peer", action="store_true", help="also the peers with torch's fused AdamW")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.ranks = ["tiny"], [2]
        options.rounds, options.warmup = 1, 1
    return options


if __name__ == "__main__":
    measure_on_ranks(arguments(), measure)
