"""Fact: parts of heads that overlap with attention, and a result that is kept, change no number of any exchange.

What is not overlapped is the closed form, and attention that is recomputed is neither computed nor sent again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common.loopback import LoopbackComm
from torch import Tensor

from megatron3d.attention import pairs as attention_pairs
from megatron3d.attention.attention import AttentionHeads
from megatron3d.attention.context import attention as context_attention_module
from megatron3d.attention.context import exchanges
from megatron3d.attention.context import plan as context_exchange
from megatron3d.attention.context.attention import ContextAttention, KeptResult, context_attention
from megatron3d.attention.context.plan import (
    CONTEXT_EXCHANGES,
    HEADS,
    ExchangeSizes,
    HeadPart,
    TokenOrder,
    exchange_traffic,
    head_parts,
    num_parts,
)
from megatron3d.attention.packed import Visible
from megatron3d.attention.pairs import Drop, Softmax
from megatron3d.comm.interface import Pending
from megatron3d.comm.recording import Recorder
from megatron3d.ops.recompute import recomputed
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Axes, Mesh
from tests.support.flash_attention import stand_in
from tests.support.turn_ranks import make_comm, run_turns
from tests.unit.attention.context.test_ring_attention import (
    BATCH,
    CONTEXT,
    LENGTH,
    SIZE,
    Case,
    cut,
    inputs,
    mesh_of,
    sets_of,
)
from tests.unit.attention.test_attention_pairs import error

CASE = Case(((0, 3, 22), (0, 17)), 11, num_heads=16, num_groups=8)


def attended(comm: Any, exchange: str, case: Case, recomputes: bool, drop: Drop | None = None) -> list[Tensor]:
    """Return output and gradients of this rank."""
    context = comm.mesh.nontrivial(CONTEXT)
    order, heads = TokenOrder((), context, comm.mesh), AttentionHeads(case.num_heads, case.num_groups, SIZE, (), comm)
    *leaves, dy = (cut(each, order.chunks(LENGTH)) for each in inputs(case))
    leaves = [each.requires_grad_() for each in leaves]
    sink_N = torch.linspace(-1, 1, case.num_heads, dtype=torch.float64).requires_grad_()
    kept = KeptResult() if recomputes else None

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        seen = Visible(case.starts, case.window)
        at = ContextAttention(comm, order, heads, LENGTH, seen, drop=drop, softmax=Softmax(None, sinks), kept=kept)
        return context_attention(q * 2, k * 2, v * 2, exchange, at).view(q.shape)

    given = leaves[0], leaves[1], leaves[2], sink_N
    y = recomputed(attend, *given) if recomputes else attend(*given)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, sink_N], dy)]


def run(
    rank: int, world_size: int, exchange: str, case: Case, recomputes: bool, drop: Drop | None = None
) -> tuple[list[Tensor], list[Traffic]]:
    mesh = mesh_of(world_size, exchange, rank)
    recorder = Recorder(make_comm(mesh, sets_of(mesh)))
    return attended(recorder, exchange, case, recomputes, drop), recorder.calls


def sizes_of(case: Case, world_size: int, **given: Any) -> ExchangeSizes:
    per_head = BATCH * LENGTH // world_size * SIZE
    return ExchangeSizes(per_head * case.num_heads, per_head * case.num_groups, case.num_groups, 8, **given)


@pytest.mark.parametrize("exchange", CONTEXT_EXCHANGES)
def test_parts_of_heads_and_recomputation(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world_size = 4
    in_parts = run_turns(run, world_size, exchange, CASE, False)
    again = run_turns(run, world_size, exchange, CASE, True)
    monkeypatch.setattr(context_exchange, "MOST_PARTS", 1)
    at_once = run_turns(run, world_size, exchange, CASE, False)
    for mine, other, whole in zip(in_parts, again, at_once, strict=True):
        assert [torch.equal(a, b) for a, b in zip(mine[0], other[0], strict=True)] == [True] * 5
        assert error(mine[0], whole[0]) < 1e-13  # strides are others, and so may be the last bits of a matmul


@pytest.mark.parametrize("recomputes", [False, True])
def test_whole_sequences_are_attended_by_one_kernel_on_gpus(recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents and a window are arguments of one call for each part of a rank's heads."""
    expected = run_turns(run, 2, HEADS, CASE, recomputes)
    calls = stand_in(monkeypatch)
    monkeypatch.setattr(exchanges, "has_flash", lambda q, k: True)
    for mine, other in zip(run_turns(run, 2, HEADS, CASE, recomputes), expected, strict=True):
        assert error(mine[0], other[0]) < 1e-12
    assert calls.count("forward") == calls.count("backward") == 2 * num_parts(CASE.num_groups // 2)


@pytest.mark.parametrize("exchange", CONTEXT_EXCHANGES)
def test_recomputation_sends_the_closed_form(exchange: str) -> None:
    """A ring sends nothing again; no exchange computes attention twice."""
    case = CASE._replace(starts=None, window=None)
    for rank, (_, calls) in enumerate(run_turns(run, 4, exchange, case, True)):
        mesh = mesh_of(4, exchange, rank)
        given = exchange, mesh.nontrivial(CONTEXT), sizes_of(case, 4), mesh
        expected = [
            *exchange_traffic(*given, backward=False).calls,
            *exchange_traffic(*given, backward=False, again=True).calls,
            *exchange_traffic(*given, backward=True).calls,
        ]
        assert sorted(calls) == sorted(expected)


class _Noted(LoopbackComm):
    """Communicator that notes when a collective starts and when it is waited for."""

    def __init__(self, mesh: Mesh, events: list[str]) -> None:
        super().__init__(mesh)
        self._events, self._count = events, 0

    def _noted(self, pending: Pending) -> Pending:
        number, self._count = self._count, self._count + 1
        self._events.append(f"start {number}")
        return Pending(lambda: (self._events.append(f"wait {number}"), pending.wait())[1])

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        return self._noted(super().all_gather(x, axes, dim))

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        return self._noted(super().reduce_scatter(x, axes, dim))

    def all_to_all(self, x: Tensor, axes: Axes) -> Pending:
        return self._noted(super().all_to_all(x, axes))


def bare(events: list[str]) -> list[int]:
    """Return the collectives between whose start and wait no pair is computed."""
    numbers = [int(event.split()[1]) for event in events if event.startswith("start")]
    spans = [(events.index(f"start {number}"), events.index(f"wait {number}")) for number in numbers]
    return [number for number, (low, high) in enumerate(spans) if "pair" not in events[low:high]]


@pytest.mark.parametrize("exchange", ["all_gather", "a2a"])
def test_what_is_exposed_is_the_closed_form(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    kernel = attention_pairs.kernel_for
    monkeypatch.setattr(attention_pairs, "kernel_for", lambda *args: (events.append("pair"), kernel(*args))[1])
    case, mesh = Case(num_heads=16, num_groups=8), mesh_of(2, exchange, 0)
    comm = _Noted(mesh, events)
    attended(comm, exchange, case, False)
    given = exchange, mesh.nontrivial(CONTEXT), sizes_of(case, 2), mesh
    sent = [exchange_traffic(*given, backward=backward) for backward in (False, True)]
    assert len(bare(events)) == sum(len(each.exposed) for each in sent)
    assert sum(len(each.calls) for each in sent) == (8 if exchange == "all_gather" else 16)


@pytest.mark.parametrize("exchange", ["p2p", "a2a", "a2a+p2p"])
def test_pieces_of_queries_have_the_dropout_of_whole_sequences(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_attention_module, "DROPOUT_ROWS", 8)
    monkeypatch.setattr(context_attention_module, "DROPOUT_PIECE", 3)
    for case in (CASE, CASE._replace(starts=None, window=None)):
        expected = run_turns(run, 4, "all_gather", case, False, Drop(0.3, 5, 2))
        for mine, whole in zip(run_turns(run, 4, exchange, case, True, Drop(0.3, 5, 2)), expected, strict=True):
            assert error(mine[0][:4], whole[0][:4]) < 1e-12  # ranks that exchange heads sum the sinks of others


def test_uneven_heads_are_in_parts_of_their_groups() -> None:
    assert head_parts([0, 0, 0, 1, 1, 2], 3) == (
        HeadPart((0, 3), (0, 1)),
        HeadPart((3, 5), (1, 2)),
        HeadPart((5, 6), (2, 3)),
    )
    assert [num_parts(groups) for groups in (1, 2, 3, 5, 6, 8)] == [1, 2, 3, 1, 3, 4]
