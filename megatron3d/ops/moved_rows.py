"""Rows that move between ranks, and whose gradients move back: collectives of autograd in two halves.

    forward     start | computation next to it | finish
    backward    finish starts the collective of the gradients | the same computation's backward | start waits for it

Autograd runs the backward of what was computed later first, so that what lies between the halves overlaps with both
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm, Counts, Pending
from megatron3d.parallel.mesh import Axes


class RowMove(NamedTuple):
    """A collective of rows, and the one of their gradients."""

    there: Callable[[Tensor], Pending]
    back: Callable[[Tensor], Pending]

    def reversed(self) -> RowMove:
        """Return the move that undoes this one."""
        return RowMove(self.back, self.there)


def gathering(axes: Axes, comm: Comm) -> RowMove:
    """Return the move of all ranks' rows to each; gradients are summed over the ranks."""

    def gather(x: Tensor) -> Pending:
        return comm.all_gather(x, axes, 0)

    def reduce(x: Tensor) -> Pending:
        return comm.reduce_scatter(x, axes, 0)

    return RowMove(gather, reduce)


def exchanging(sent: Counts, received: Counts, axes: Axes, comm: Comm) -> RowMove:
    """Return the move of the next `sent[i]` rows to the i-th rank, of which `received[i]` come."""

    def exchange(x: Tensor, there: Counts, here: Counts) -> Pending:
        return comm.all_to_all_rows(x, there, here, axes)

    return RowMove(partial(exchange, there=sent, here=received), partial(exchange, there=received, here=sent))


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
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.start(flight.move.there(x.contiguous()))
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.land(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.land()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.flight.start(ctx.flight.move.back(dy.contiguous()))
        return dy.new_empty(0), None


def start(x: Tensor, move: RowMove) -> Callable[[], Tensor]:
    """Start to move rows, and return what waits for them."""
    flight = _Flight(move)
    started = _Start.apply(x, flight)
    return lambda: _Finish.apply(started, flight)


def moved(x: Tensor, move: RowMove) -> Tensor:
    """Return the rows that this rank has after a move."""
    return start(x, move)()


def gather_rows(x: Tensor, axes: Axes, comm: Comm) -> Tensor:
    """Return the rows of all ranks of `axes`; gradients are summed over them."""
    return moved(x, gathering(axes, comm)) if axes else x


def reduce_rows(x: Tensor, axes: Axes, comm: Comm) -> Tensor:
    """Return this rank's rows of the sum over `axes`."""
    return moved(x, gathering(axes, comm).reversed()) if axes else x
