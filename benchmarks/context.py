"""Attention over context ranks, forward and backward: our exchanges next to torch's experimental ring attention.

All run in one process group on the same chunks (zigzag), in turns; outputs and gradients are compared first.  torch's
ring (torch.distributed.tensor.experimental) has no entry for the CPU, so that its template gets the CPU's kernels here.

python benchmarks/context.py --output benchmarks/results/context.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.report import Row, interleaved, milliseconds, show, times_faster, write
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as peer

from megatron3d.attention.attention import AttentionHeads
from megatron3d.attention.context.attention import ContextAttention, context_attention
from megatron3d.attention.context.plan import TokenOrder
from megatron3d.attention.packed import Visible
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.parallel.mesh import Mesh

BATCH, HEADS, SIZE, AXES = 1, 8, 64, ("context",)
TORCH_RING, TORCH_GATHER = "torch, ring", "torch, all-gather"
METHODS = {TORCH_RING: peer._RotateMethod.ALL_TO_ALL, TORCH_GATHER: peer._RotateMethod.ALL_GATHER}
TOLERANCE = 1e-4
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _TorchRing(torch.autograd.Function):
    """torch's template of ring attention around the CPU's fused attention; tensors are [B, heads, L, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, method: Any) -> Tensor:
        peer._cp_options.rotate_method = ctx.method = method
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse, *_ = peer._templated_ring_attention(_group(), 2, kernel, q, k, v, is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        peer._cp_options.rotate_method = ctx.method
        q, k, v, out, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = peer._templated_ring_attention_backward(
            _group(), 2, kernel, dy, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )
        return *grads[:3], None


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the rendezvous has made the group of all ranks"
    return group


def contestants(mesh: Mesh, length: int) -> Mapping[str, Attend]:
    """Return attention of this rank's positions, by [B, heads, L, D], of every contestant."""
    comm = ProcessComm(mesh, [AXES])
    at = ContextAttention(
        comm, TokenOrder((), AXES, mesh), AttentionHeads(HEADS, HEADS, SIZE, (), comm), length, Visible()
    )

    def ours(exchange: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_position = [t.transpose(1, 2) for t in (q, k, v)]
        y = context_attention(by_position[0], by_position[1], by_position[2], exchange, at)
        return y.view(by_position[0].shape).transpose(1, 2)

    def torchs(method: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _TorchRing.apply(q, k, v, method)
        return out

    exchanges = {name: partial(ours, name) for name in ("p2p", "all_gather", "a2a")}
    return exchanges | {name: partial(torchs, method) for name, method in METHODS.items()}


def rank_rows(rank: int, num_ranks: int, store: str, length: int, rounds: int, results: Any) -> None:
    """Compare the numbers of all contestants and time them; rank 0 sends the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    generator = torch.Generator().manual_seed(rank)
    shape = (BATCH, length // num_ranks, HEADS, SIZE)
    q, k, v, dy = (torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(4))
    leaves = [each.requires_grad_() for each in (q, k, v)]
    attend = contestants(Mesh(((AXES[0], num_ranks),), rank), length)

    def step(name: str) -> list[Tensor]:
        y = attend[name](q, k, v)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    numbers = {name: step(name) for name in attend}
    error = max(
        (a - b).abs().max().item() for each in numbers.values() for a, b in zip(each, numbers["p2p"], strict=True)
    )
    assert error < TOLERANCE, f"rank {rank}: contestants differ by {error}"
    turns = interleaved({name: partial(step, name) for name in attend}, rounds, 1, dist.barrier)
    if rank == 0:
        both = {"ranks": num_ranks, "positions": length, "difference": error}
        speed = {peer_name: {name: times_faster(turns, name, peer_name) for name in turns} for peer_name in METHODS}
        results.put(
            [
                both
                | {"exchange": name, **milliseconds(turns[name])}
                | {f"speed-up over {peer_name}": speed[peer_name][name] for peer_name in METHODS}
                for name in turns
            ]
        )
    dist.barrier()
    dist.destroy_process_group()


def measure(num_ranks: int, length: int, rounds: int) -> list[Row]:
    """Return the rows of all contestants on some ranks."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (num_ranks, f"{folder}/store", length, rounds, results)
        ranks = [context.Process(target=rank_rows, args=(rank, *args)) for rank in range(num_ranks)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        assert all(each.exitcode == 0 for each in ranks), "a rank has failed"
    rows: list[Row] = results.get()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each number of ranks and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--positions", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if args.quick:
        args.ranks, args.positions, args.rounds = [2], [64], 1
    rows = [row for ranks in args.ranks for length in args.positions for row in measure(ranks, length, args.rounds)]
    show("attention over context ranks, forward and backward", rows)
    if args.output:
        write(args.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
