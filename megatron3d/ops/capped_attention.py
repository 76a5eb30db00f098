"""Attention whose scores are capped (`attention_softmax.py`): plain matmuls, since no fused kernel caps scores.

Queries are computed in pieces, so that the scores in memory are at most `LONGEST` rows.
Letters: B sequences, N query heads, G key/value heads, L query rows, T key rows, D features of a head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron3d.ops.attention_pairs import Grads, PairKernel, PlainKernel
from megatron3d.parallel.attention_pairs import LONGEST

Rows = tuple[slice, slice, slice]


def capped_kernel(softcap: float | None) -> PairKernel | None:
    """Return the kernel of pairs with capped scores on any device; None without a cap: any kernel will do."""
    return None if softcap is None else InPieces(PlainKernel(softcap))


class InPieces:
    """Another kernel for at most `longest` queries of a pair after another, so that few scores are in memory."""

    def __init__(self, kernel: PairKernel, longest: int = LONGEST) -> None:
        self._kernel, self._longest = kernel, longest

    def forward(
        self, q_BNLD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, is_causal: bool, mask_LT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if q_BNLD.shape[2] <= self._longest:
            return self._kernel.forward(q_BNLD, k_BGTD, v_BGTD, is_causal, mask_LT)
        found = [
            self._kernel.forward(q_BNLD[queries], k_BGTD[keys], v_BGTD[keys], False, mask)
            for queries, keys, mask in self._pieces(q_BNLD, k_BGTD, is_causal, mask_LT)
        ]
        return torch.cat([out for out, _ in found], dim=2), torch.cat([lse for _, lse in found], dim=2)

    def backward(
        self,
        dy_BNLD: Tensor,
        q_BNLD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        merged: tuple[Tensor, Tensor],
        is_causal: bool,
        mask_LT: Tensor | None,
    ) -> Grads:
        if q_BNLD.shape[2] <= self._longest:
            return self._kernel.backward(dy_BNLD, q_BNLD, k_BGTD, v_BGTD, merged, is_causal, mask_LT)
        wide = torch.promote_types(k_BGTD.dtype, torch.float32)
        dk, dv = torch.zeros_like(k_BGTD, dtype=wide), torch.zeros_like(v_BGTD, dtype=wide)
        dq = []
        for queries, keys, mask in self._pieces(q_BNLD, k_BGTD, is_causal, mask_LT):
            final = merged[0][queries], merged[1][queries]
            grads = self._kernel.backward(
                dy_BNLD[queries], q_BNLD[queries], k_BGTD[keys], v_BGTD[keys], final, False, mask
            )
            dq.append(grads.dq)
            dk[keys] += grads.dk
            dv[keys] += grads.dv
        return Grads(torch.cat(dq, dim=2), dk, dv)

    def _pieces(
        self, q_BNLD: Tensor, k_BGTD: Tensor, is_causal: bool, mask_LT: Tensor | None
    ) -> Iterator[tuple[Rows, Rows, Tensor | None]]:
        """Yield queries, the keys that they may see, and which they see."""
        every, length = slice(None), q_BNLD.shape[2]
        for low in range(0, length, self._longest):
            high = min(low + self._longest, length)
            mask, last = None if mask_LT is None else mask_LT[..., low:high, :], k_BGTD.shape[2]
            if is_causal:
                mask, last = q_BNLD.new_ones((high - low, high), dtype=torch.bool).tril(low), high
            yield (every, every, slice(low, high)), (every, every, slice(0, last)), mask
