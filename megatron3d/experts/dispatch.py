"""Exchange of tokens between the ranks that the experts of a layer are distributed over: a table of dispatchers.

    start     sends tokens            | what is computed before `rows`, such as shared experts, overlaps with it
    rows      rows of this rank's experts and their weights, sorted by (expert, token, slot)
    combine   weighted outputs return, and those of each token are added in ascending order of experts

A move of rows is two operations of autograd, `start` and `finish`.  In backward `finish` starts the collective of the
gradients and `start` waits for it: autograd runs the backward of what was computed later first, so that what lies
between the two overlaps with both collectives.

Rows may be sent as bytes in fp8 (`Gemm.packed`); their gradients and the outputs are sent in the network's dtype.
Bytes in closed form and sources: `experts/plan.py`.  Letters: M tokens, H hidden, K experts of a token, R rows,
E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm, Counts, Pending, completed
from megatron3d.experts.plan import balanced, balanced_rows
from megatron3d.experts.router import Routes
from megatron3d.experts.rows import (
    Groups,
    RowCounts,
    RowOrder,
    Rows,
    add_rows,
    by_expert,
    groups_of,
    take_tokens,
    take_weights,
)
from megatron3d.parallel.mesh import Axes
from megatron3d.parallel.modes.mode import ALLGATHER, ALLTOALL


class RowMove(NamedTuple):
    """A collective of rows, and the one of their gradients."""

    there: Callable[[Tensor], Pending]
    back: Callable[[Tensor], Pending]

    def reversed(self) -> RowMove:
        """Return the move that undoes this one."""
        return RowMove(self.back, self.there)


def gathering(axes: Axes, comm: Comm) -> RowMove:
    """Return the move of all ranks' rows to each; gradients are summed over the ranks."""
    return RowMove(lambda x: comm.all_gather(x, axes, 0), lambda x: comm.reduce_scatter(x, axes, 0))


def exchanging(sent: Counts, received: Counts, axes: Axes, comm: Comm) -> RowMove:
    """Return the move of the next `sent[i]` rows to the i-th rank, of which `received[i]` come."""
    return RowMove(
        lambda x: comm.all_to_all_rows(x, sent, received, axes), lambda x: comm.all_to_all_rows(x, received, sent, axes)
    )


class _Flight:
    """Collectives in flight: the one of rows in forward, the one of their gradients in backward."""

    def __init__(self, move: RowMove) -> None:
        self.move = move
        self._pending: Pending | None = None

    def start(self, pending: Pending) -> None:
        self._pending = pending

    def land(self) -> Tensor:
        pending, self._pending = self._pending, None
        assert pending is not None, "rows are waited for that were not sent"
        return pending.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor | None, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.start(flight.move.there((x if packed is None else packed).contiguous()))
        return x.new_empty((0, *x.shape[1:]))

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.flight.land(), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, flight: _Flight, is_packed: bool) -> Rows:
        ctx.flight = flight
        ctx.set_materialize_grads(not is_packed)
        landed = flight.land()
        return Rows.of_packed(landed, started) if is_packed else Rows(landed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        ctx.flight.start(ctx.flight.move.back(dy.contiguous()))
        return dy.new_empty((0, *dy.shape[1:])), None, None


def start(rows: Rows, move: RowMove) -> Callable[[], Rows]:
    """Start to move rows, and return what waits for them."""
    flight, is_packed = _Flight(move), rows.packed is not None
    started = _Start.apply(*rows, flight)
    return lambda: Rows(*_Finish.apply(started, flight, is_packed))  # which keeps no row that was sent


def moved(x: Tensor, move: RowMove) -> Tensor:
    """Return the rows that this rank has after a move."""
    return start(Rows(x), move)().values


def gather_rows(x: Tensor, axes: Axes, comm: Comm) -> Tensor:
    """Return the rows of all ranks of `axes`; gradients are summed over them."""
    return moved(x, gathering(axes, comm)) if axes else x


def reduce_rows(x: Tensor, axes: Axes, comm: Comm) -> Tensor:
    """Return this rank's rows of the sum over `axes`."""
    return moved(x, gathering(axes, comm).reversed()) if axes else x


# Calls what counts rows, or returns what it has returned before, where a layer is recomputed.
Once = Callable[[Callable[[], RowCounts]], RowCounts]


class ExpertRanks:
    """Ranks of `axes`, in mesh order and of more than one rank, that hold `num_experts` experts, whole ones each."""

    def __init__(self, num_experts: int, axes: Axes, comm: Comm) -> None:
        self.axes, self.comm = axes, comm
        self.num_ranks, self.rank = comm.mesh.size(axes), comm.mesh.index(axes)
        self.num_experts, self.num_local = num_experts, num_experts // self.num_ranks


class Dispatched(Protocol):
    """Tokens on their way to the experts and back."""

    def rows(self) -> tuple[Rows, Tensor, Groups]:
        """Return the rows [R, H] of this rank's experts, their weights [R], and how many each expert has."""
        ...

    def combine(self, y_RH: Tensor) -> Tensor:
        """Return [M, H]: the sum of the chosen experts' weighted outputs for this rank's tokens."""
        ...


class GatheredTokens:
    """Tokens, choices and weights of all ranks on each, which adds the outputs of its own experts."""

    def __init__(self, tokens: Rows, routes: Routes, ranks: ExpertRanks, once: Once) -> None:
        axes, comm = ranks.axes, ranks.comm
        self._axes, self._comm = axes, comm
        chosen_MK = comm.all_gather(routes.experts_MK, axes, 0).wait() if axes else routes.experts_MK
        self._order = RowOrder(chosen_MK - ranks.rank * ranks.num_local, ranks.num_local)
        even = balanced(routes.experts_MK.numel(), ranks.num_local)
        self._counts = once(lambda: RowCounts(self._order.counts_E, even))
        # Collectives of one group run in the order of their calls: what is waited for at once goes before the tokens.
        self._weights_MK = gather_rows(routes.weights_MK, axes, comm)
        self._tokens = Pending(start(tokens, gathering(axes, comm))) if axes else completed(tokens)

    def rows(self) -> tuple[Rows, Tensor, Groups]:
        counts = self._counts.on_host
        weights_R = take_weights(self._weights_MK, self._order, sum(counts))
        groups = groups_of(counts, self._order.counts_E)
        return take_tokens(self._tokens.wait(), self._order, sum(counts)), weights_R, groups

    def combine(self, y_RH: Tensor) -> Tensor:
        return reduce_rows(add_rows(y_RH, self._order), self._axes, self._comm)


class ExchangedRows:
    """A row for each choice of this rank's tokens, and its weight, on the rank of its expert.

    The host needs the numbers of rows; they are on their way to it while the device takes the rows.
    """

    def __init__(self, tokens: Rows, routes: Routes, ranks: ExpertRanks, once: Once) -> None:
        self._order = RowOrder(routes.experts_MK, ranks.num_experts)
        counts = once(lambda: _exchanged_counts(self._order, routes, ranks))
        slots = take_tokens(tokens, self._order, self._order.num_slots)
        weights_S = take_weights(routes.weights_MK, self._order, self._order.num_slots)
        sent, received = counts.on_host[: ranks.num_ranks], counts.on_host[ranks.num_ranks :]
        size = ranks.num_local
        arrived = [sum(received[place : place + size]) for place in range(0, len(received), size)]
        self._move = exchanging(sent, arrived, ranks.axes, ranks.comm)
        self._weights = start(Rows(weights_S[: sum(sent)].unsqueeze(1)), self._move)
        self._rows = start(slots.first(sum(sent)), self._move)
        counts_CE = counts.numbers[ranks.num_ranks :].view(-1, size)
        self._groups = groups_of([sum(received[expert::size]) for expert in range(size)], counts_CE.sum(0))
        self._by_expert, self._by_rank = by_expert(counts_CE, sum(arrived))

    def rows(self) -> tuple[Rows, Tensor, Groups]:
        rows = self._by_expert(self._rows())
        return rows, self._by_expert(self._weights()).values.squeeze(1), self._groups

    def combine(self, y_RH: Tensor) -> Tensor:
        return add_rows(moved(self._by_rank(Rows(y_RH)).values, self._move.reversed()), self._order)


def _exchanged_counts(order: RowOrder, routes: Routes, ranks: ExpertRanks) -> RowCounts:
    """Return the rows to each rank, and those from each rank for each of this rank's experts."""
    there_CE = order.counts_E.unflatten(0, (ranks.num_ranks, ranks.num_local))
    here_CE = ranks.comm.all_to_all(there_CE, ranks.axes).wait()
    even = balanced_rows(routes.experts_MK.numel(), ranks.num_ranks, ranks.rank)
    even += [count for rows in even for count in balanced(rows, ranks.num_local)]
    return RowCounts(torch.cat((there_CE.sum(1), here_CE.flatten())), even)


def gather_tokens(tokens: Rows, routes: Routes, axes: Axes, comm: Comm) -> tuple[Rows, Routes]:
    """Return the tokens and their routes of all ranks of `axes`, which each hold a shard of the same experts.

    Their outputs are partial sums, to be reduce-scattered over `axes`.
    """
    if not axes:
        return tokens, routes
    chosen_MK = comm.all_gather(routes.experts_MK, axes, 0).wait()
    weights_MK = gather_rows(routes.weights_MK, axes, comm)
    tokens = start(tokens, gathering(axes, comm))()
    return tokens, routes._replace(experts_MK=chosen_MK, weights_MK=weights_MK)


Dispatch = Callable[[Rows, Routes, ExpertRanks, Once], Dispatched]
# Start to send the tokens [M, H] of this rank to the experts that were chosen for them.
DISPATCH: Mapping[str, Dispatch] = {ALLGATHER: GatheredTokens, ALLTOALL: ExchangedRows}
