"""All-gather of keys and values over context ranks, as Llama 3 does (arXiv:2407.21783, section 3.3.2).

With grouped queries keys and values are small; their gradients return by reduce-scatters.
Letters: B sequences, L positions of this rank, S positions of whole sequences, N query heads, G key/value heads,
D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.ops.attention_pairs import Merged, MergedGrads, PairKernel
from megatron3d.ops.context_heads import Grads, Operands, Result, by_position
from megatron3d.ops.position_order import PositionOrder, add_positions, cut_positions
from megatron3d.parallel.context_exchange import GatheredPairs, HeadPart, head_parts, num_parts
from megatron3d.parallel.mesh import Axes


class Gathered:
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

    def _uneven(self, part: HeadPart) -> list[int] | None:
        """Return the key/value head of each query head of a part, None where each serves equally many."""
        first, count = part.groups[0], part.groups[1] - part.groups[0]
        heads = [group - first for group in self._group_of_query[slice(*part.queries)]]
        is_even = heads == [place * count // len(heads) for place in range(len(heads))] and len(heads) % count == 0
        return None if is_even else heads

    def _for_queries(self, part: HeadPart, kv: Tensor) -> Tensor:
        heads = self._uneven(part)
        return kv if heads is None else kv[:, :, heads]

    def sinks(self, part: HeadPart, sink_N: Tensor | None) -> Tensor | None:
        return None if sink_N is None else sink_N[slice(*part.queries)]

    def send_output(self, y: Tensor) -> Callable[[], Tensor]:
        return lambda: y

    def join_output(self, parts: Sequence[Tensor]) -> Tensor:
        return by_position(parts)

    def kept_output(self, part: HeadPart, y: Tensor, y_BNLD: Tensor) -> Tensor:
        return y_BNLD[:, slice(*part.queries)]

    def bring_grad(self, part: HeadPart, dy_BNLD: Tensor) -> Callable[[], Tensor]:
        return lambda: dy_BNLD[:, slice(*part.queries)]

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
        heads = self._uneven(part)
        if heads is not None:
            index = torch.tensor(heads, device=dkv.device)
            dkv = torch.zeros_like(operands.kv, dtype=dkv.dtype).index_add_(2, index, dkv)
        return grads.dq, dkv

    def send_grads(self, part: HeadPart, grads: Operands) -> Callable[[], Grads]:
        by_rank, dq = self._order.scattered(grads.kv.transpose(0, 1).flatten(1, 2)), grads.q
        pending = self._comm.reduce_scatter(by_rank, self._axes, dim=0)

        def finish() -> Grads:  # which must not keep the gradients of whole sequences
            dk, dv = pending.wait().squeeze(0).chunk(2, dim=1)
            return dq, dk, dv

        return finish

    def join_grads(self, parts: Sequence[Grads]) -> Grads:
        dq, dk, dv = (by_position([part[place] for part in parts]) for place in range(3))
        return dq, dk.transpose(1, 2), dv.transpose(1, 2)


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
