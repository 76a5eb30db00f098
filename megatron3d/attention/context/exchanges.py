"""Exchanges between context ranks on tensors: all-gather of keys and values, rings, and positions for heads.

all_gather  keys and values, small with grouped queries; gradients return by reduce-scatters (Llama 3, arXiv:2407.21783)
p2p         keys and values move round the ranks during attention (ring attention, Liu et al. 2023, arXiv:2310.01889)
              forward     kv of the next step in flight | pairs of this step, merged by log-sum-exp
              backward    kv of the next step and gradients of the step before in flight | gradients of this step
a2a         [B, N, L, D] of this rank's positions -> [B, N / c, S, D] of all (Jacobs et al. 2023, arXiv:2309.14509)

In a ring the gradients of keys and values travel with them, in fp32 or wider, and are sent home after the last step.
Half of a rank's own pairs are computed while the first block comes, the other half while its own gradients come home.
On one rank this is attention in chunks, whose memory grows with the length of sequences.

Letters: B sequences, L positions of this rank, S positions of all ranks that exchange heads, N query heads,
G key/value heads, D features of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron3d.attention.context.order import PositionOrder, add_positions, cut_positions
from megatron3d.attention.context.plan import GatheredPairs, HeadPart, RingPlan, head_parts, key_copies, num_parts
from megatron3d.attention.packed import VARIABLE_LENGTH, Visible, has_flash
from megatron3d.attention.pairs import DroppedPairs, KernelOf, Merged, MergedGrads, PairKernel
from megatron3d.attention.plan import Span
from megatron3d.comm.interface import Comm, Pending, completed
from megatron3d.parallel.mesh import Axes

Result = tuple[Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]


class Operands(NamedTuple):
    """Queries [B, n, L, D] of a part, and the keys and values [2, B, g, T, D] that a rank attends them to first."""

    q: Tensor
    kv: Tensor


class Exchange(ABC):
    """Exchange of queries, keys and values in parts of heads; outputs stay where they are computed, unless overridden.

    Methods that start a transfer return a function that waits for its result.

    Attributes:
        parts: parts of the heads that this rank computes.
    """

    parts: Sequence[HeadPart]

    @abstractmethod
    def bring(
        self, part: HeadPart, q_BNLD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, result: Result | None
    ) -> Callable[[], tuple[Operands, Result | None]]:
        """Start to bring a part's operands; with the result of this rank's positions, the part's output and lse."""

    @abstractmethod
    def attend(self, part: HeadPart, operands: Operands, kernel: PairKernel | None) -> Result:
        """Return the output of a part and its log-sum-exp."""

    def heads(self, part: HeadPart) -> Span:
        """Return the query heads of a part among those of this rank's positions."""
        return part.queries

    def sinks(self, part: HeadPart, sink_N: Tensor | None) -> Tensor | None:
        """Return the sinks of a part, a view of those of all heads of this rank's positions."""
        return None if sink_N is None else sink_N[slice(*self.heads(part))]

    def send_output(self, y: Tensor) -> Callable[[], Tensor]:
        """Start to send the output of a part to the ranks of its positions."""
        return lambda: y

    def join_output(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [B, N, L, D] of all parts, the heads of a position next to one another."""
        return by_position(parts)

    def kept_output(self, part: HeadPart, y: Tensor, y_BNLD: Tensor) -> Tensor:
        """Return a part's output for backward, given itself and that of all parts: of the latter, if it has it."""
        return y_BNLD[:, slice(*part.queries)]

    def bring_grad(self, part: HeadPart, dy_BNLD: Tensor) -> Callable[[], Tensor]:
        """Start to bring the gradient of a part's output."""
        return lambda: dy_BNLD[:, slice(*part.queries)]

    @abstractmethod
    def attend_backward(
        self, part: HeadPart, operands: Operands, result: Result, dy: Tensor, kernel: PairKernel | None
    ) -> Result:
        """Return the gradients of a part's operands; those that several pairs add to are in fp32 or wider."""

    @abstractmethod
    def send_grads(self, part: HeadPart, grads: Operands) -> Callable[[], Grads]:
        """Start to send the gradients of a part's operands home."""

    def join_grads(self, parts: Sequence[Grads]) -> Grads:
        """Return the gradients of queries [B, N, L, D], keys and values [B, L, G, D]."""
        dq, dk, dv = (by_position([part[place] for part in parts]) for place in range(3))
        return dq, dk.transpose(1, 2), dv.transpose(1, 2)


def by_position(parts: Sequence[Tensor]) -> Tensor:
    """Return parts [B, n, L, D] as [B, N, L, D], the heads of a position next to one another in memory."""
    return parts[0] if len(parts) == 1 else torch.cat([part.transpose(1, 2) for part in parts], dim=2).transpose(1, 2)


class _Blocks:
    """Keys and values of the steps of a plan, in order, each in flight while the one before is used."""

    def __init__(self, kv: Tensor, plan: RingPlan, axes: Axes, comm: Comm) -> None:
        self._axes, self._comm = axes, comm
        self._moves = list(plan.moves)
        self._sent: Tensor | None = None  # must live until the wait, and no longer
        self._pending = completed(kv)
        self._start(kv)

    def _start(self, kv: Tensor) -> None:
        self._sent = None
        if self._moves:
            self._sent, out = kv, torch.empty_like(kv)
            self._pending = self._comm.shift(kv, out, self._axes, self._moves.pop(0))

    def next(self) -> Tensor:
        """Wait for the block of the next step, and start to move it on to the step after it."""
        kv = self._pending.wait()
        self._start(kv)
        return kv


class Ring(Exchange):
    """Keys and values round a ring of the ranks over `axes`, all heads in one part.

    Args:
        num_heads, num_groups: query and key/value heads of this rank's attention.
        dropped: kernels of pairs whose weights have dropout; None: they have none.
    """

    def __init__(
        self,
        num_heads: int,
        num_groups: int,
        plan: RingPlan,
        axes: Axes,
        comm: Comm,
        *,
        dropped: DroppedPairs | None = None,
        count: int = 1,
    ) -> None:
        self._plan, self._axes, self._comm, self._dropped = plan, axes, comm, dropped
        self.parts = head_parts([head * num_groups // num_heads for head in range(num_heads)], count)

    def bring(
        self, part: HeadPart, q_BNLD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, result: Result | None
    ) -> Callable[[], tuple[Operands, Result | None]]:
        operands = Operands(q_BNLD, torch.stack((k_BLGD.transpose(1, 2), v_BLGD.transpose(1, 2))))
        return lambda: (operands, result)

    def attend(self, part: HeadPart, operands: Operands, kernel: PairKernel | None) -> Result:
        plan, blocks = self._plan, _Blocks(operands.kv, self._plan, self._axes, self._comm)
        merged = Merged(operands.q, plan.window, kernel)
        merged.add(operands.kv, plan.own, self._kernels(part, 0))
        for step in plan.steps:
            merged.add(blocks.next(), step.pairs, self._kernels(part, step.behind))
        return merged.result()

    def _kernels(self, part: HeadPart, behind: int) -> KernelOf | None:
        """Return the kernels of a part's pairs with keys of the rank `behind` places back; None: no dropout."""
        return self._dropped.of(self.heads(part), behind) if self._dropped else None

    def kept_output(self, part: HeadPart, y: Tensor, y_BNLD: Tensor) -> Tensor:
        return y

    def attend_backward(
        self, part: HeadPart, operands: Operands, result: Result, dy: Tensor, kernel: PairKernel | None
    ) -> Result:
        (q, kv), plan = operands, self._plan
        grads, blocks = MergedGrads(dy, q, result, plan.window, kernel), _Blocks(kv, plan, self._axes, self._comm)
        own = torch.zeros_like(kv, dtype=grads.dq.dtype)
        grads.add(kv, own, plan.own_parts[0], self._kernels(part, 0))
        travelling = self._travel_home(part, grads, blocks) if plan.steps else None
        grads.add(kv, own, plan.own_parts[1], self._kernels(part, 0))
        if travelling is not None:
            own += travelling.wait()
        return grads.dq, own

    def _travel_home(self, part: HeadPart, grads: MergedGrads, blocks: _Blocks) -> Pending:
        """Compute the steps of other ranks' keys and values; return the gradients of this rank's that they computed."""
        before: Pending | None = None
        sent: Tensor | None = None
        plan = self._plan
        homeward = plan.size - plan.steps[-1].behind
        for step, move in zip(plan.steps, (*plan.moves[1:], homeward), strict=True):
            kv = blocks.next()
            dkv = torch.zeros_like(kv, dtype=grads.dq.dtype)
            grads.add(kv, dkv, step.pairs, self._kernels(part, step.behind))
            if before is not None:
                dkv += before.wait()
            before, sent = self._comm.shift(dkv, torch.empty_like(dkv), self._axes, move), dkv
        assert before is not None and sent is not None, "a ring has a step"
        last, kept = before, sent  # what is sent must live until the wait
        return Pending(lambda: (last.wait(), kept)[0])

    def send_grads(self, part: HeadPart, grads: Operands) -> Callable[[], Grads]:
        dq, (dk, dv) = grads.q, grads.kv
        return lambda: (dq, dk, dv)


class HeadExchange:
    """Exchange over `axes`.  Each method starts an exchange, and returns a function that waits for its result.

    Args:
        order: of the positions of all ranks over `axes`.
    """

    def __init__(self, order: PositionOrder, axes: Axes, comm: Comm) -> None:
        self._order, self._axes, self._comm = order, axes, comm
        self.num_ranks = comm.mesh.size(axes)

    @property
    def rank(self) -> int:
        """Index of this rank, whose share of the heads has the same index."""
        return self._comm.mesh.index(self._axes)

    def whole_positions(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Exchange blocks of several tensors at once for this rank's heads at all positions, [B, N / c, S, D] each."""
        sizes = [each.shape[2] for each in tensors]
        pending = self._comm.all_to_all(torch.cat(tensors, dim=2), self._axes)
        return lambda: [self._order.gathered(each) for each in pending.wait().split(sizes, dim=2)]

    def own_positions(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Exchange [B, N / c, S, D] of several tensors at once for all heads at this rank's positions, in blocks."""
        sizes = [each.shape[1] for each in tensors]
        pending = self._comm.all_to_all(self._order.scattered(torch.cat(tensors, dim=1)), self._axes)
        return lambda: list(pending.wait().split(sizes, dim=2))


class RingAndHeads(Ring):
    """Positions for heads over some context axes (`moved`), and keys and values round a ring over the others.

    Args:
        num_heads, num_groups: query and key/value heads at this rank's positions.
        whole: documents and window where a rank has whole sequences, which GPUs attend in by one kernel; else None.
    """

    def __init__(
        self,
        num_heads: int,
        num_groups: int,
        moved: HeadExchange,
        plan: RingPlan,
        axes: Axes,
        comm: Comm,
        *,
        dropped: DroppedPairs | None = None,
        whole: Visible | None = None,
    ) -> None:
        self._moved, self._whole, ranks = moved, whole, moved.num_ranks
        self._copies, self._num_heads = key_copies(num_groups, ranks), num_heads // ranks
        groups = num_groups * self._copies // ranks
        super().__init__(self._num_heads, groups, plan, axes, comm, dropped=dropped, count=num_parts(groups))

    def bring(
        self, part: HeadPart, q_BNLD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, result: Result | None
    ) -> Callable[[], tuple[Operands, Result | None]]:
        k, v = (t.transpose(1, 2) for t in (k_BLGD, v_BLGD))
        copies = self._copies
        k, v = (t.repeat_interleave(copies, dim=1) if copies > 1 else t for t in (k, v))
        queries = [q_BNLD] if result is None else [q_BNLD, result[0]]
        blocks = [*(self._blocks(t, part.queries) for t in queries), *(self._blocks(t, part.groups) for t in (k, v))]
        wait = self._moved.whole_positions(blocks)

        def finish() -> tuple[Operands, Result | None]:
            *queries, k, v = wait()
            done = None if result is None else (queries[1], result[1][:, slice(*part.queries)])
            return Operands(queries[0], torch.stack((k, v))), done

        return finish

    def _blocks(self, x_BNLD: Tensor, heads: Span) -> Tensor:
        """Return a part of each rank's heads, [c, B, n, L, D]."""
        blocks: Tensor = x_BNLD.unflatten(1, (self._moved.num_ranks, -1)).movedim(1, 0)
        return blocks[:, :, slice(*heads)]

    def attend(self, part: HeadPart, operands: Operands, kernel: PairKernel | None) -> Result:
        if self._whole is None or not has_flash(operands.q, operands.kv[0]):
            return super().attend(part, operands, kernel)
        return VARIABLE_LENGTH.forward(operands.q, operands.kv[0], operands.kv[1], self._whole)

    def attend_backward(
        self, part: HeadPart, operands: Operands, result: Result, dy: Tensor, kernel: PairKernel | None
    ) -> Result:
        if self._whole is None or not has_flash(operands.q, operands.kv[0]):
            return super().attend_backward(part, operands, result, dy, kernel)
        saved = (operands.q, operands.kv[0], operands.kv[1], *result)
        dq, dk, dv = VARIABLE_LENGTH.backward(dy, saved, self._whole)
        return dq, torch.stack((dk, dv))

    def heads(self, part: HeadPart) -> Span:
        first = self._moved.rank * self._num_heads
        return first + part.queries[0], first + part.queries[1]

    def send_output(self, y: Tensor) -> Callable[[], Tensor]:
        wait = self._moved.own_positions([y])
        return lambda: wait()[0]

    def join_output(self, parts: Sequence[Tensor]) -> Tensor:
        return _from_blocks(parts)

    def bring_grad(self, part: HeadPart, dy_BNLD: Tensor) -> Callable[[], Tensor]:
        wait = self._moved.whole_positions([self._blocks(dy_BNLD, part.queries)])
        return lambda: wait()[0]

    def send_grads(self, part: HeadPart, grads: Operands) -> Callable[[], Grads]:
        wait = self._moved.own_positions([grads.q, *grads.kv])

        def finish() -> Grads:
            dq, dk, dv = wait()
            return dq, dk, dv

        return finish

    def join_grads(self, parts: Sequence[Grads]) -> Grads:
        dq, dk, dv = (_from_blocks([part[place] for part in parts]) for place in range(3))
        if self._copies > 1:
            dk, dv = (t.unflatten(1, (-1, self._copies)).sum(2) for t in (dk, dv))
        return dq, dk.transpose(1, 2), dv.transpose(1, 2)


def _from_blocks(parts: Sequence[Tensor]) -> Tensor:
    """Return [B, N, L, D] of the parts [c, B, n, L, D] of c ranks' heads, the heads of a position together."""
    ranks, batch, heads, length, size = parts[0].shape
    whole = parts[0].new_empty((batch, length, ranks, len(parts), heads, size))
    for place, part in enumerate(parts):
        whole[:, :, :, place] = part.permute(1, 3, 0, 2, 4)
    return whole.flatten(2, 4).transpose(1, 2)


class Gathered(Exchange):
    """Exchange that gathers keys and values of all ranks, in the order of positions.

    Args:
        axes: context axes.
        order: of the positions of all ranks.
        group_of_query: for each query head of this rank, its key/value head.
        seen: pairs of this rank's queries with all keys.
    """

    def __init__(
        self,
        axes: Axes,
        order: PositionOrder,
        group_of_query: Sequence[int],
        seen: GatheredPairs,
        window: int | None,
        comm: Comm,
    ) -> None:
        self._axes, self._comm = comm.mesh.nontrivial(axes), comm
        self._order, self._group_of_query = order, group_of_query
        self._seen, self._window = seen, window
        self.parts = head_parts(group_of_query, num_parts(group_of_query[-1] + 1))

    def bring(
        self, part: HeadPart, q_BNLD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, result: Result | None
    ) -> Callable[[], tuple[Operands, Result | None]]:
        groups, queries = slice(*part.groups), slice(*part.queries)
        kv = torch.cat([t[:, :, groups].transpose(1, 2) for t in (k_BLGD, v_BLGD)], dim=1)
        pending = self._comm.all_gather(kv.unsqueeze(0), self._axes, dim=0)
        done = None if result is None else (result[0][:, queries], result[1][:, queries])

        def finish() -> tuple[Operands, Result | None]:
            whole = self._order.gathered(pending.wait())
            return Operands(q_BNLD[:, queries], whole.unflatten(1, (2, -1)).transpose(0, 1)), done

        return finish

    def attend(self, part: HeadPart, operands: Operands, kernel: PairKernel | None) -> Result:
        merged, kv = Merged(operands.q, self._window, kernel), self._for_queries(part, operands.kv)
        if self._seen.own:
            merged.add(cut_positions(kv, self._seen.chunks, dim=3), self._seen.own)
        merged.add(kv, self._seen.others)
        return merged.result()

    def _uneven(self, part: HeadPart) -> list[Span] | None:
        """Return the query heads that each key/value head of a part serves, None where each serves equally many."""
        heads = self._group_of_query[slice(*part.queries)]
        spans = [(bisect_left(heads, group), bisect_right(heads, group)) for group in range(*part.groups)]
        return spans if len({high - low for low, high in spans}) > 1 else None

    def _for_queries(self, part: HeadPart, kv: Tensor) -> Tensor:
        """Return keys and values of the part's query heads where each needs its own, else of the key/value heads."""
        spans = self._uneven(part)
        if spans is None:
            return kv
        copies = [kv[:, :, place, None].expand(-1, -1, high - low, -1, -1) for place, (low, high) in enumerate(spans)]
        return torch.cat(copies, dim=2)

    def attend_backward(
        self, part: HeadPart, operands: Operands, result: Result, dy: Tensor, kernel: PairKernel | None
    ) -> Result:
        grads, kv = MergedGrads(dy, operands.q, result, self._window, kernel), self._for_queries(part, operands.kv)
        dkv = torch.zeros_like(kv, dtype=grads.dq.dtype)
        if self._seen.own:
            kv_own = cut_positions(kv, self._seen.chunks, dim=3)
            dkv_own = torch.zeros_like(kv_own, dtype=dkv.dtype)
            grads.add(kv_own, dkv_own, self._seen.own)
            add_positions(dkv, self._seen.chunks, 3, dkv_own)
            del kv_own, dkv_own  # before those of other ranks
        grads.add(kv, dkv, self._seen.others)
        spans = self._uneven(part)
        if spans is not None:
            dkv = torch.stack([dkv[:, :, low:high].sum(2) for low, high in spans], dim=2)
        return grads.dq, dkv

    def send_grads(self, part: HeadPart, grads: Operands) -> Callable[[], Grads]:
        by_rank, dq = self._order.scattered(grads.kv.transpose(0, 1).flatten(1, 2)), grads.q
        pending = self._comm.reduce_scatter(by_rank, self._axes, dim=0)

        def finish() -> Grads:  # which must not keep the gradients of whole sequences
            dk, dv = pending.wait().squeeze(0).chunk(2, dim=1)
            return dq, dk, dv

        return finish


def gather_positions(x_BLND: Tensor, axes: Axes, order: PositionOrder, comm: Comm) -> Tensor:
    """All-gather [B, L, N, D] over the context ranks to [B, N, S, D] in the order of positions."""
    whole: Tensor = _GatherPositions.apply(x_BLND, comm.mesh.nontrivial(axes), order, comm)
    return whole


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLND: Tensor, axes: Axes, order: PositionOrder, comm: Comm) -> Tensor:
        ctx.order, ctx.axes, ctx.comm = order, axes, comm
        return order.gathered(comm.all_gather(x_BLND.transpose(1, 2).unsqueeze(0), axes, dim=0).wait())

    @staticmethod
    def backward(ctx: Any, dy_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.comm.reduce_scatter(ctx.order.scattered(dy_BNSD), ctx.axes, dim=0).wait().squeeze(0)
        return dx.transpose(1, 2), None, None, None
