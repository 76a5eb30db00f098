"""Memory of a collective in flight, as strict as NCCL on a stream of its own.

start    the collective may read its input from now on, and has not written its output: the output holds NaN
wait     until here, nobody writes the input or the output, or frees or resizes their storage
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

POISON = -1  # of integers; floating-point memory holds NaN


class _Place(NamedTuple):
    address: int
    num_bytes: int


class InFlight:
    """Tensors that a collective reads and writes; the constructor is its start.

    Args:
        what: description of the collective, for messages.
        reads: input that must stay as it is until the wait.
        writes: output, which is poisoned at the start; it may hold the input as well.
    """

    def __init__(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        self._what, self._writes = what, list(writes)
        self._reads = [(x, x.detach().clone()) for x in reads]
        self._places = [(x, _place(x)) for x in (*(x for x, _ in self._reads), *self._writes)]
        for x in self._writes:
            _poison(x)

    def check(self) -> None:
        """Assert, at the wait, that nobody has touched the memory since the start."""
        for x, place in self._places:
            assert _place(x) == place, f"memory of {self._what} was freed or resized before the wait"
        for x, kept in self._reads:
            assert _same(x, kept), f"the input of {self._what} changed before the wait"
        for x in self._writes:
            assert _is_poisoned(x), f"the output of {self._what} was written before the wait"


def _place(x: Tensor) -> _Place:
    storage = x.untyped_storage()
    return _Place(storage.data_ptr(), storage.nbytes())


@torch.no_grad()
def _poison(x: Tensor) -> None:
    x.fill_(torch.nan if x.is_floating_point() else POISON)


def _is_poisoned(x: Tensor) -> bool:
    wrong = ~x.isnan() if x.is_floating_point() else x != torch.tensor(POISON, dtype=x.dtype)
    return not wrong.any()


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
