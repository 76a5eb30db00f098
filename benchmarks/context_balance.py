"""Work of context ranks over packed documents: zigzag next to chunks by the documents' work.

Documents have log-normal lengths, as texts of the web (`web`, median 600 tokens) or as books and code (`long`, median
3,000).  Closed form: pairs of a query and a key that it sees, of the busiest rank over the mean.  Measured: FLOPs
and CPU time of each rank's attention, forward and backward, one rank after the other with `LoopbackComm`.

python benchmarks/context_balance.py --output benchmarks/results/context_balance.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from common.loopback import LoopbackComm
from common.report import Row, show, write

from megatron3d.attention.attention import AttentionHeads
from megatron3d.attention.context.attention import ContextAttention, context_attention
from megatron3d.attention.context.order import HeldPositions
from megatron3d.attention.context.plan import LOAD_BALANCERS, ZIGZAG, TokenOrder, imbalance, work_before
from megatron3d.attention.packed import Visible
from megatron3d.parallel.mesh import Mesh
from megatron3d.verify.flop_memory_meter import FlopMemoryMeter

HEADS, SIZE, AXES = 2, 64, ("context",)
LENGTHS = {"web": (6.4, 1.2), "long": (8.0, 1.8)}
CLOSED = ((8192, 4), (32768, 8), (131072, 8), (131072, 16))
Starts = tuple[int, ...]


def documents(kind: str, length: int, seed: int) -> Starts:
    """Return where the documents of a packed sequence begin after its first one."""
    draw, starts, place = random.Random(seed), list[int](), 0
    while (place := place + max(20, int(draw.lognormvariate(*LENGTHS[kind])))) < length:
        starts.append(place)
    return tuple(starts)


def order_of(balancer: str, num_ranks: int, rank: int = 0) -> TokenOrder:
    return TokenOrder((), AXES, Mesh(((AXES[0], num_ranks),)).at(rank), balancer != ZIGZAG)


def closed_form(kind: str, length: int, num_ranks: int, samples: int) -> Row:
    """Return mean and worst imbalance of both over some sequences."""
    every = [documents(kind, length, seed) for seed in range(samples)]
    found: dict[str, str | int] = {"texts": kind, "positions": length, "ranks": num_ranks}
    for balancer in LOAD_BALANCERS:
        order = order_of(balancer, num_ranks)
        ratios = [imbalance(order.held(length, starts), work_before(length, starts)) for starts in every]
        found[balancer] = f"{statistics.mean(ratios):.3f}"
        found[f"{balancer}, worst"] = f"{max(ratios):.2f}"
    return found


def attention(
    balancer: str, exchange: str, length: int, num_ranks: int, rank: int, starts: Starts
) -> Callable[[], None]:
    """Return forward and backward of one rank's attention."""
    order = order_of(balancer, num_ranks, rank)
    comm = LoopbackComm(order.mesh)
    held = HeldPositions(order, length, (starts,), torch.device("cpu")) if order.by_documents else None
    heads = AttentionHeads(HEADS, HEADS, SIZE, (), comm)
    at = ContextAttention(comm, order, heads, length, Visible((starts,)), held=held)
    shape = 1, length // num_ranks, HEADS, SIZE
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def step() -> None:
        context_attention(q, k, v, exchange, at).sum().backward()

    return step


def measured(kind: str, exchange: str, length: int, num_ranks: int, rounds: int) -> Row:
    """Return FLOPs and CPU time of the busiest rank over the mean, and its CPU time."""
    starts = documents(kind, length, 0)
    found: dict[str, str | int] = {"texts": kind, "exchange": exchange, "positions": length, "ranks": num_ranks}
    for balancer in LOAD_BALANCERS:
        flops, seconds = list[int](), list[float]()
        for rank in range(num_ranks):
            step = attention(balancer, exchange, length, num_ranks, rank, starts)
            with FlopMemoryMeter() as meter:
                step()
            flops.append(meter.flops)
            seconds.append(min(_cpu_time(step) for _ in range(rounds)))
        found[f"{balancer}: FLOPs, max / mean"] = f"{max(flops) / statistics.mean(flops):.3f}"
        found[f"{balancer}: time, max / mean"] = f"{max(seconds) / statistics.mean(seconds):.3f}"
        found[f"{balancer}: busiest, ms"] = f"{1e3 * max(seconds):.0f}"
    return found


def _cpu_time(step: Callable[[], None]) -> float:
    before = time.process_time()
    step()
    return time.process_time() - before


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute the closed form, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20, help="sequences of the closed form")
    parser.add_argument("--length", type=int, default=16384, help="positions of the measured sequence")
    parser.add_argument("--ranks", type=int, default=8, help="context ranks of the measured sequence")
    parser.add_argument("--rounds", type=int, default=3, help="times that each rank's attention is measured")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.samples, options.length, options.ranks, options.rounds = 1, 512, 2, 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    closed = CLOSED[:1] if options.quick else CLOSED
    rows = [closed_form(kind, *sizes, options.samples) for kind in LENGTHS for sizes in closed]
    show("busiest rank over the mean, closed form", rows)
    sizes = options.length, options.ranks, options.rounds
    timed = [measured(kind, exchange, *sizes) for kind in LENGTHS for exchange in ("all_gather", "p2p")]
    show("attention of one sequence, measured", timed)
    if options.output:
        write(options.output, [*rows, *timed])


if __name__ == "__main__":
    main()
