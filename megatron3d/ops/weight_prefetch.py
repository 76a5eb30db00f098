"""What one matmul leaves to others: gathers of weights are begun before their use, weight gradients end after it.

    forward    W of the next linear is gathered under this one's product
    backward   W of the linear before is gathered, and dW of the linear after is reduced, under this one's products

(Singh et al. 2024, arXiv:2305.13525, section 5: OAG and ORS.)  A schedule that splits the backward puts whole weight
gradients off (Qi et al. 2023, arXiv:2401.10241).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from megatron3d.comm.process_comm import Comm, Pending, ready
from megatron3d.ops.collectives import W_DIMS, gather
from megatron3d.ops.main_grad import add_grad
from megatron3d.ops.panels import Operand, WholeOperand, operand
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.panel_plan import Sweep
from megatron3d.parallel.tp_overlap import Direction, TPOverlap


class WeightGrads:
    """Weight gradients on their way to their parameters.

    Args:
        are_late: a gradient is waited for when the next one is on its way, or by `flush`; else at once.
    """

    def __init__(self, are_late: bool = False) -> None:
        self._are_late = are_late
        self._put_off: list[Callable[[], None]] | None = None
        self._coming: tuple[Tensor, Pending] | None = None

    @contextlib.contextmanager
    def put_off(self) -> Iterator[list[Callable[[], None]]]:
        """Collect the weight gradients of the backward in the body, to be called later in order, and then flushed."""
        put_off: list[Callable[[], None]] = []
        self._put_off = put_off
        yield put_off
        self._put_off = None

    @property
    def is_waiting(self) -> bool:
        """Whether weight gradients are put off now."""
        return self._put_off is not None

    def deliver(self, w: Tensor, compute: Callable[[], Pending | None]) -> Pending | None:
        """The gradient of `w` on its way; None where it comes later, or where `compute` has already summed it."""
        if self._put_off is not None:
            self._put_off.append(partial(self._arrive_late, w, compute))
        elif self._are_late:
            self._arrive_late(w, compute)
        else:
            return compute()
        return None

    def _arrive_late(self, w: Tensor, compute: Callable[[], Pending | None]) -> None:
        coming = compute()
        self.flush()
        self._coming = None if coming is None else (w, coming)
        if not self._are_late:
            self.flush()

    def flush(self) -> None:
        """Wait for the last gradient.  To be called when a backward is over: its parameter has to have it then."""
        if self._coming is not None:
            (w, coming), self._coming = self._coming, None
            add_grad(w, coming.wait())


class GatheredWeight:
    """A linear's W as its products need it, from where a gather begins to the last use.

    Args:
        shard: gives what is stored.
    """

    def __init__(self, shard: Callable[[], Tensor], plan: MatmulPlan, comm: Comm, overlap: TPOverlap) -> None:
        self._shard, self._table, self._comm, self._keeps = shard, plan.w, comm, overlap.keep_gathered_weights
        self._needs_whole = dict.fromkeys(Direction, overlap.num_panels == 1)
        self._next: dict[Direction, tuple[GatheredWeight, Callable[[], None]]] = {}
        self._ahead: Pending | None = None
        self._kept: Tensor | None = None
        self._num_users = 0

    def operand(self, at: Direction, sweep: Sweep, will_return: bool = False) -> Operand:
        """W on its way; then the gather of the next one begins, too.  With `will_return` a backward will follow."""
        self._needs_whole[at] = sweep.dim not in W_DIMS
        whole = self._whole(at, keep=self._keeps and will_return and not _in_backward())
        if whole is None:
            found = operand(self._shard().detach(), self._table, W_DIMS, self._comm, sweep)
        elif self._needs_whole[at]:
            found = WholeOperand(whole, sweep.num_panels)
        else:
            found = operand(whole.wait(), {}, W_DIMS, self._comm, sweep)
        self._begin_next(at)
        return found

    def _whole(self, at: Direction, keep: bool) -> Pending | None:
        """All of W, if it is here, is coming, or will be kept."""
        whole, self._ahead = self._ahead, None
        if self._kept is not None:
            whole = ready(self._kept)
        elif keep:
            coming = whole or self._gather()
            whole = Pending(lambda: self._keep(coming.wait()))
        self._num_users += keep
        if at is Direction.BACKWARD and self._kept is not None:
            self._num_users -= 1
            self._kept = self._kept if self._num_users else None
        return whole

    def _keep(self, whole: Tensor) -> Tensor:
        self._kept = whole
        return whole

    def _gather(self) -> Pending:
        return gather(self._shard().detach(), self._table, W_DIMS, self._comm)

    def _begin_next(self, at: Direction) -> None:
        """What is computed again in a backward gathers nothing ahead: no forward follows."""
        if at not in self._next or (at is Direction.FORWARD and _in_backward()):
            return
        other, make_ready = self._next[at]
        if other._needs_whole[at] and other._ahead is None and other._kept is None:
            make_ready()
            other._ahead = other._gather()

    def forget(self) -> None:
        """Drop what was gathered: the weights have changed."""
        self._ahead, self._kept, self._num_users = None, None, 0


def gather_ahead(weights: Sequence[tuple[GatheredWeight, Callable[[], None]]]) -> None:
    """Let the weights of linears that follow each other be gathered under their neighbours.

    Beside each weight stands what is called before its shard is read under a neighbour.
    """
    for (weight, _), after in pairwise(weights):
        weight._next[Direction.FORWARD] = after
    for before, (weight, _) in pairwise(weights):
        weight._next[Direction.BACKWARD] = before


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
