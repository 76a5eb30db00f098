"""Fact: every exchange between context ranks gives the attention of one process, forward and backward, in float64.

It does so for documents of uneven lengths, windows, and fewer key/value heads than ranks, with any collective as late
as it may be; it sends the bytes of its closed form.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from common.loopback import LoopbackComm
from torch import Tensor

from megatron3d.attention import pairs as attention_pairs
from megatron3d.attention.attention import AttentionHeads
from megatron3d.attention.context.attention import ContextAttention, attend_by, context_attention
from megatron3d.attention.context.exchanges import Ring
from megatron3d.attention.context.plan import (
    CONTEXT_EXCHANGES,
    Chunks,
    ExchangeSizes,
    Starts,
    TokenOrder,
    exchange_traffic,
    key_copies,
    ring_plan,
)
from megatron3d.attention.packed import Visible
from megatron3d.comm.host_comm import LaggingComm
from megatron3d.comm.interface import Comm, Pending
from megatron3d.comm.recording import Recorder
from megatron3d.parallel.mesh import Axes, Mesh
from tests.support.pool import Pool
from tests.support.turn_ranks import make_comm, run_turns
from tests.unit.attention.test_attention_pairs import dense_mask, error

BATCH, LENGTH, SIZE = 2, 32, 8
CONTEXT: Axes = ("context", "context_inner")


class Case(NamedTuple):
    """Documents, window, and the numbers of query and key/value heads."""

    starts: Starts = None
    window: int | None = None
    num_heads: int = 4
    num_groups: int = 2


CASES = {
    "causal": Case(),
    "one key/value head": Case(num_groups=1),
    "uneven documents": Case(((0, 3, 22), (0, 17))),
    "short documents": Case((tuple(range(0, LENGTH, 2)), tuple(range(0, LENGTH, 4)))),
    "short window": Case(window=3),
    "long window over documents": Case(((0, 9), (0, 1, 2)), 11),
    "heads of their own": Case(num_heads=12, num_groups=12),
    "three key/value heads": Case(num_heads=12, num_groups=3),
}


def inputs(case: Case) -> list[Tensor]:
    """Return q, k, v and dy of whole sequences, [B, S, heads, D]."""
    generator, heads = torch.Generator().manual_seed(5), (case.num_heads, *[case.num_groups] * 2, case.num_heads)
    return [torch.randn(BATCH, LENGTH, each, SIZE, generator=generator, dtype=torch.float64) for each in heads]


def alone(case: Case) -> list[Tensor]:
    """Return output and gradients of one process, [B, S, heads, D]."""
    *leaves, dy = inputs(case)
    q, k, v = (each.requires_grad_() for each in leaves)
    mask = dense_mask(case.starts, case.window, LENGTH, BATCH)
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, enable_gqa=True).transpose(1, 2)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def cut(whole: Tensor, chunks: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([whole[:, low:high] for low, high in chunks], dim=1)


def mesh_of(world_size: int, exchange: str, rank: int) -> Mesh:
    inner = 2 if exchange == "a2a+p2p" else 1
    return Mesh(((CONTEXT[0], world_size // inner), (CONTEXT[1], inner)), rank)


def sets_of(mesh: Mesh) -> list[Axes]:
    return [CONTEXT, *((axis,) for axis in CONTEXT)]


def exchanged(case: Case, exchange: str, comm: Comm) -> list[Tensor]:
    """Return this rank's output and gradients, [B, L, heads, D]."""
    mesh = comm.mesh
    context = mesh.nontrivial(CONTEXT)
    order, heads = TokenOrder((), context, mesh), AttentionHeads(case.num_heads, case.num_groups, SIZE, (), comm)
    chunks = order.chunks(LENGTH)
    *leaves, dy = (cut(each, chunks) for each in inputs(case))
    q, k, v = (each.requires_grad_() for each in leaves)
    at = ContextAttention(comm, order, heads, LENGTH, Visible(case.starts, case.window))
    y = context_attention(q, k, v, exchange, at).view(q.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def run_exchange(rank: int, world_size: int, exchange: str, names: list[str], lag_s: float | None = None) -> list[Any]:
    mesh = mesh_of(world_size, exchange, rank)
    comm = make_comm(mesh, sets_of(mesh))
    comm = comm if lag_s is None else LaggingComm(comm, lag_s)
    return [[each.numpy() for each in exchanged(CASES[name], exchange, comm)] for name in names]


def wrong(exchange: str, names: list[str], ranks: list[list[Any]]) -> list[str]:
    """Return the cases whose numbers are not those of one process."""
    found = []
    for place, name in enumerate(names):
        whole = alone(CASES[name])
        for rank, results in enumerate(ranks):
            mesh = mesh_of(len(ranks), exchange, rank)
            chunks = TokenOrder((), mesh.nontrivial(CONTEXT), mesh).chunks(LENGTH)
            expected = [cut(each, chunks) for each in whole]
            difference = error([torch.from_numpy(each) for each in results[place]], expected)
            found += [f"{exchange}, {name}, rank {rank}: {difference:.1e}"] if not difference < 1e-12 else []
    return found


EVERY = CONTEXT_EXCHANGES


@pytest.mark.parametrize(("exchange", "num_ranks"), list(product(EVERY, (2, 4))))
def test_ranks_that_take_turns(exchange: str, num_ranks: int) -> None:
    names = list(CASES)
    assert wrong(exchange, names, run_turns(run_exchange, num_ranks, exchange, names)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "num_ranks"), [("p2p", 2), ("p2p", 4), ("a2a", 4), ("a2a+p2p", 4)])
@pytest.mark.parametrize("lag_s", [None, 0.001], ids=["gloo", "lagging"])
def test_processes(pool: Pool, exchange: str, num_ranks: int, lag_s: float | None) -> None:
    names = ["causal", "uneven documents", "short window"]
    assert wrong(exchange, names, pool.run(run_exchange, num_ranks, exchange, names, lag_s)) == []


def contiguous(rank: int, world_size: int) -> list[Any]:
    """Attend in a ring whose ranks hold one chunk each, of different lengths in the rings' order of positions."""
    case, mesh = CASES["uneven documents"], Mesh(((CONTEXT[0], world_size),), rank)
    step = LENGTH // world_size
    chunks: Chunks = tuple(((place * step, (place + 1) * step),) for place in range(world_size))
    *leaves, dy = (cut(each, chunks[rank]) for each in inputs(case))
    q, k, v = (each.requires_grad_() for each in leaves)
    plan = ring_plan(chunks, rank, case.starts)
    comm = make_comm(mesh, [CONTEXT[:1]])
    ring = Ring(case.num_heads, case.num_groups, plan, CONTEXT[:1], comm)
    y = attend_by(ring, q.transpose(1, 2), k, v)[0].transpose(1, 2)
    return [each.numpy() for each in (y.detach(), *torch.autograd.grad(y, leaves, dy))]


def test_a_ring_of_contiguous_chunks() -> None:
    whole = alone(CASES["uneven documents"])
    for rank, found in enumerate(run_turns(contiguous, 4)):
        expected = [cut(each, ((rank * 8, rank * 8 + 8),)) for each in whole]
        assert error([torch.from_numpy(each) for each in found], expected) < 1e-12


def bytes_sent(rank: int, world_size: int, exchange: str, name: str) -> list[str]:
    """Return how the recorded traffic differs from the closed form."""
    case, mesh = CASES[name], mesh_of(world_size, exchange, rank)
    recorder = Recorder(make_comm(mesh, sets_of(mesh)))
    exchanged(case, exchange, recorder)
    per_head = BATCH * LENGTH // world_size * SIZE
    context = mesh.nontrivial(CONTEXT)
    steps = None
    if case.window or case.starts:
        held = tuple(TokenOrder((), context, mesh).chunks(LENGTH, each) for each in range(world_size))
        steps = len(ring_plan(held, rank, case.starts, case.window).steps)
    sizes = ExchangeSizes(per_head * case.num_heads, per_head * case.num_groups, case.num_groups, 8, steps)
    expected = [
        each for backward in (False, True) for each in exchange_traffic(exchange, context, sizes, mesh, backward).calls
    ]
    return [] if sorted(recorder.calls) == sorted(expected) else [f"{recorder.calls} instead of {expected}"]


@pytest.mark.parametrize("name", ["causal", "one key/value head", "three key/value heads"])
@pytest.mark.parametrize("exchange", EVERY)
def test_the_bytes_are_the_closed_form(exchange: str, name: str) -> None:
    assert run_turns(bytes_sent, 4, exchange, name) == [[]] * 4


@pytest.mark.parametrize("name", ["short documents", "short window"])
def test_a_ring_sends_nothing_that_no_rank_sees(name: str) -> None:
    assert run_turns(bytes_sent, 4, "p2p", name) == [[]] * 4


class _Noted(LoopbackComm):
    """Communicator that notes when a shift starts and when it is waited for."""

    def __init__(self, mesh: Mesh, events: list[str]) -> None:
        super().__init__(mesh)
        self._events = events

    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        self._events.append("start")
        pending = super().shift(x, out, axes, by)
        return Pending(lambda: (self._events.append("wait"), pending.wait())[1])


def test_every_transfer_is_in_flight_while_a_rank_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    kernel = attention_pairs.kernel_for
    monkeypatch.setattr(attention_pairs, "kernel_for", lambda *args: (events.append("pair"), kernel(*args))[1])
    exchanged(CASES["causal"], "p2p", _Noted(mesh_of(4, "p2p", 1), events))
    keys = ["start", "pair", "wait"]
    forward = [*keys, *keys, *keys, "pair"]
    steps = ["pair", "start", "wait", "start", "pair", "wait", "start", "wait", "pair", "wait", "start"]
    backward = ["start", "pair", "wait", "start", *steps, "pair", "pair", "wait"]
    assert events == forward + backward


def test_copies_of_key_heads_are_as_few_as_possible() -> None:
    assert [key_copies(*each) for each in ((1, 4), (2, 4), (4, 4), (8, 4), (3, 4), (6, 4))] == [4, 2, 1, 1, 4, 2]
