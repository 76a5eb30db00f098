"""What an exchange between context ranks does with one part of the heads, and the exchanges by rings and over heads.

Letters: B sequences, L positions of this rank, S positions of all ranks that exchange heads, N query heads,
G key/value heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.ops.attention_pairs import PairKernel
from megatron3d.ops.dropped_attention import DroppedPairs
from megatron3d.ops.head_exchange import HeadExchange
from megatron3d.ops.ring_attention import OfStep, ring_attention, ring_gradients
from megatron3d.parallel.context_exchange import HeadPart, head_parts, key_copies, num_parts
from megatron3d.parallel.context_ring import RingPlan
from megatron3d.parallel.mesh import Axes

Result = tuple[Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]


class Operands(NamedTuple):
    """Queries [B, n, L, D] of a part, and the keys and values [2, B, g, T, D] that a rank attends them to first."""

    q: Tensor
    kv: Tensor


class Exchange(Protocol):
    """Exchange of queries, keys and values in parts of heads.

    Methods that start a transfer return a function that waits for its result.
    """

    @property
    def parts(self) -> Sequence[HeadPart]:
        """Parts of the heads that this rank computes."""
        ...

    def bring(
        self, part: HeadPart, q_BNLD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, result: Result | None
    ) -> Callable[[], tuple[Operands, Result | None]]:
        """Start to bring a part's operands; with the result of this rank's positions, the part's output and lse."""
        ...

    def attend(self, part: HeadPart, operands: Operands, kernel: PairKernel | None) -> Result:
        """Return the output of a part, in fp32 or wider, and its log-sum-exp."""
        ...

    def sinks(self, part: HeadPart, sink_N: Tensor | None) -> Tensor | None:
        """Return the sinks of a part, a view of those of all heads of this rank's positions."""
        ...

    def send_output(self, y: Tensor) -> Callable[[], Tensor]:
        """Start to send the output of a part to the ranks of its positions."""
        ...

    def join_output(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [B, N, L, D] of all parts, the heads of a position next to one another."""
        ...

    def kept_output(self, part: HeadPart, y: Tensor, y_BNLD: Tensor) -> Tensor:
        """Return a part's output for backward, given itself and that of all parts: of the latter, if it has it."""
        ...

    def bring_grad(self, part: HeadPart, dy_BNLD: Tensor) -> Callable[[], Tensor]:
        """Start to bring the gradient of a part's output."""
        ...

    def attend_backward(
        self, part: HeadPart, operands: Operands, result: Result, dy: Tensor, kernel: PairKernel | None
    ) -> Result:
        """Return the gradients of a part's operands, in fp32 or wider."""
        ...

    def send_grads(self, part: HeadPart, grads: Operands) -> Callable[[], Grads]:
        """Start to send the gradients of a part's operands home."""
        ...

    def join_grads(self, parts: Sequence[Grads]) -> Grads:
        """Return the gradients of queries [B, N, L, D], keys and values [B, L, G, D]."""
        ...


def by_position(parts: Sequence[Tensor]) -> Tensor:
    """Return parts [B, n, L, D] as [B, N, L, D], the heads of a position next to one another in memory."""
    return parts[0] if len(parts) == 1 else torch.cat([part.transpose(1, 2) for part in parts], dim=2).transpose(1, 2)


class RingAndHeads:
    """Positions for heads over some context axes (`moved`), and keys and values round a ring over the others.

    Args:
        num_heads, num_groups: query and key/value heads at this rank's positions.
        dropped: kernels of pairs whose weights have dropout; None: they have none.
    """

    def __init__(
        self,
        num_heads: int,
        num_groups: int,
        moved: HeadExchange | None,
        plan: RingPlan,
        ring: Axes,
        comm: Comm,
        dropped: DroppedPairs | None = None,
    ) -> None:
        self._moved, self._plan, self._ring, self._comm = moved, plan, ring, comm
        self._dropped = dropped
        ranks = moved.num_ranks if moved else 1
        self._copies, self._num_heads = key_copies(num_groups, ranks), num_heads // ranks
        groups, heads = num_groups * self._copies // ranks, self._num_heads
        count = num_parts(groups) if moved else 1
        self.parts = head_parts([head * groups // heads for head in range(heads)], count)

    def bring(
        self, part: HeadPart, q_BNLD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, result: Result | None
    ) -> Callable[[], tuple[Operands, Result | None]]:
        k, v = (t.transpose(1, 2) for t in (k_BLGD, v_BLGD))
        if self._moved is None:
            operands = Operands(q_BNLD, torch.stack((k, v)))
            return lambda: (operands, result)
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

    def _blocks(self, x_BNLD: Tensor, heads: tuple[int, int]) -> Tensor:
        """Return a part of each rank's heads, [c, B, n, L, D]."""
        assert self._moved is not None, "only heads that are exchanged are in blocks"
        blocks: Tensor = x_BNLD.unflatten(1, (self._moved.num_ranks, -1)).movedim(1, 0)
        return blocks[:, :, slice(*heads)]

    def attend(self, part: HeadPart, operands: Operands, kernel: PairKernel | None) -> Result:
        return ring_attention(*operands, self._plan, self._ring, self._comm, kernel, self._of_step(part))

    def _heads(self, part: HeadPart) -> tuple[int, int]:
        """Return the query heads of a part among those of this rank's positions."""
        first = self._moved.rank * self._num_heads if self._moved else 0
        return first + part.queries[0], first + part.queries[1]

    def _of_step(self, part: HeadPart) -> OfStep:
        dropped = self._dropped
        return lambda behind: dropped.of(self._heads(part), behind) if dropped else None

    def sinks(self, part: HeadPart, sink_N: Tensor | None) -> Tensor | None:
        return None if sink_N is None else sink_N[slice(*self._heads(part))]

    def send_output(self, y: Tensor) -> Callable[[], Tensor]:
        if self._moved is None:
            return lambda: y
        wait = self._moved.own_positions([y])
        return lambda: wait()[0]

    def join_output(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if self._moved is None else _from_blocks(parts)

    def kept_output(self, part: HeadPart, y: Tensor, y_BNLD: Tensor) -> Tensor:
        return y

    def bring_grad(self, part: HeadPart, dy_BNLD: Tensor) -> Callable[[], Tensor]:
        if self._moved is None:
            return lambda: dy_BNLD
        wait = self._moved.whole_positions([self._blocks(dy_BNLD, part.queries)])
        return lambda: wait()[0]

    def attend_backward(
        self, part: HeadPart, operands: Operands, result: Result, dy: Tensor, kernel: PairKernel | None
    ) -> Result:
        of_step = self._of_step(part)
        return ring_gradients(dy, operands, result, self._plan, self._ring, self._comm, kernel, of_step)

    def send_grads(self, part: HeadPart, grads: Operands) -> Callable[[], Grads]:
        dq, (dk, dv) = grads.q, grads.kv
        if self._moved is None:
            return lambda: (dq, dk, dv)
        wait = self._moved.own_positions([dq, dk, dv])

        def finish() -> Grads:
            dq, dk, dv = wait()
            return dq, dk, dv

        return finish

    def join_grads(self, parts: Sequence[Grads]) -> Grads:
        if self._moved is None:
            ((dq, dk, dv),) = parts
        else:
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
