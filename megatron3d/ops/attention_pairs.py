"""Attention by pairs of query and key rows, merged by their log-sum-exp (Dao et al. 2022, arXiv:2205.14135; Liu et al.
2023, arXiv:2310.01889).

    out = sum over pairs of exp(lse_pair - lse) out_pair        lse = log of the sum of exp(lse_pair)

Backward calls each pair's kernel with the final output and log-sum-exp, so that the gradients of the pairs add up.
Letters: B sequences, N query heads, G key/value heads, L query rows, T key rows, D features of a head.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron3d.ops.attention_softmax import cap_slope, capped
from megatron3d.parallel.attention_pairs import Kind, Pair


class Grads(NamedTuple):
    """Gradients of a pair's queries [B, N, L, D], keys and values [B, G, T, D]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class PairKernel(Protocol):
    """Attention of one pair, and its gradients."""

    def forward(
        self, q_BNLD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, is_causal: bool, mask_LT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output [B, N, L, D] and the log-sum-exp [B, N, L], -inf in rows that see nothing.

        `mask_LT` is True where a query sees a key; None: everywhere, or up to the query where `is_causal`.
        """
        ...

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
        """Return the gradients, given the output and log-sum-exp over all pairs of these queries."""
        ...


KernelOf = Callable[[Pair], PairKernel]


class PlainKernel:
    """Plain matmuls: for any device and dtype, with the scores of one pair, capped at `softcap`, in memory."""

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    def forward(
        self, q_BNLD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, is_causal: bool, mask_LT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scores = _scores(q_BNLD, k_BGTD, is_causal, mask_LT, self._softcap)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num_(0.0).to(q_BNLD.dtype)
        return (self.dropped(weights) @ v_BGTD.unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)

    def dropped(self, weights: Tensor) -> Tensor:
        """Return weights or their gradients after dropout, of which there is none here."""
        return weights

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
        out, lse = merged
        groups = (k_BGTD.shape[1], -1)
        scores = _scores(q_BNLD, k_BGTD, is_causal, mask_LT, self._softcap, is_again=True)
        weights = (scores - lse.unflatten(1, groups).unsqueeze(-1)).exp()
        delta = (dy_BNLD.to(weights.dtype) * out).sum(-1, keepdim=True).unflatten(1, groups)
        q, dy = (t.unflatten(1, groups) for t in (q_BNLD, dy_BNLD))
        dweights = self.dropped(dy @ v_BGTD.unsqueeze(2).mT)
        dscores = weights * (dweights - delta)
        if self._softcap is not None:
            dscores *= cap_slope(scores, self._softcap)
        dscores = dscores.to(q.dtype) * q.shape[-1] ** -0.5
        dv = (self.dropped(weights).to(dy.dtype).mT @ dy).sum(2)
        return Grads((dscores @ k_BGTD.unsqueeze(2)).flatten(1, 2), (dscores.mT @ q).sum(2), dv)


def _scores(
    q_BNLD: Tensor,
    k_BGTD: Tensor,
    is_causal: bool,
    mask_LT: Tensor | None,
    softcap: float | None,
    is_again: bool = False,
) -> Tensor:
    """Return scores [B, G, N / G, L, T] in fp32 or wider, -inf where a query does not see a key."""
    q, keys = q_BNLD.unflatten(1, (k_BGTD.shape[1], -1)), k_BGTD.unsqueeze(2).mT
    product = _computed_again(q, keys) if is_again else q @ keys
    scores: Tensor = product.to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    scores = capped(scores, softcap)
    if is_causal:
        mask_LT = q.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores if mask_LT is None else scores.masked_fill(~mask_LT, -math.inf)


def _computed_again(q: Tensor, k: Tensor) -> Tensor:
    """Return q @ k by the operation whose FLOPs `FlopMemoryMeter` does not count, as those of fused kernels."""
    k = k.expand(*q.shape[:3], *k.shape[3:]).flatten(0, 2)
    product_LT: Tensor = torch.baddbmm(q.new_zeros((1, 1, 1)), q.flatten(0, 2), k, beta=0).unflatten(0, q.shape[:3])
    return product_LT


class CpuKernel:
    """torch's fused attention on CPUs."""

    def forward(
        self, q_BNLD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, is_causal: bool, mask_LT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        mask = None if mask_LT is None else _additive(mask_LT, q_BNLD.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNLD, k_BGTD, v_BGTD, 0.0, is_causal, attn_mask=mask
        )
        # The kernel says 0 of rows that see nothing.
        return out, lse if mask_LT is None else lse.masked_fill(~mask_LT.any(-1), -math.inf)

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
        mask = None if mask_LT is None else _additive(mask_LT, q_BNLD.dtype)
        return Grads(
            *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy_BNLD, q_BNLD, k_BGTD, v_BGTD, merged[0], merged[1], 0.0, is_causal, attn_mask=mask
            )
        )


def _additive(mask_LT: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask_LT, dtype=dtype).masked_fill_(~mask_LT, -math.inf)


class FlashKernel:
    """Flash attention on GPUs, for pairs without a mask in bf16 and fp16."""

    def forward(
        self, q_BNLD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, is_causal: bool, mask_LT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert mask_LT is None, "flash attention takes no mask"
        k, v = _for_each_query_head(q_BNLD, k_BGTD, v_BGTD)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_BNLD, k, v, 0.0, is_causal)
        return out, lse

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
        k, v = _for_each_query_head(q_BNLD, k_BGTD, v_BGTD)
        out, lse = merged[0], merged[1].contiguous()  # the kernel reads rows of the log-sum-exp without strides
        unused = torch.empty(2, dtype=torch.uint64, device=k.device)  # the random state of dropout, which is 0
        lengths = (q_BNLD.shape[2], k.shape[2])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dy_BNLD, q_BNLD, k, v, out, lse, None, None, *lengths, 0.0, is_causal, unused, unused[0]
        )
        groups = (k_BGTD.shape[1], -1)
        return Grads(dq, dk.unflatten(1, groups).sum(2), dv.unflatten(1, groups).sum(2))


def _for_each_query_head(q: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) if t.shape[1] != q.shape[1] else t for t in keys)


CPU, PLAIN, FLASH = CpuKernel(), PlainKernel(), FlashKernel()


def kernel_for(q: Tensor, kind: Kind) -> PairKernel:
    """Return the kernel of a pair on this device, for this dtype and size of heads."""
    if q.device.type == "cpu":
        return CPU
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return FLASH if fits and kind is not Kind.MASKED else PLAIN


def window_mask(pair: Pair, window: int, device: torch.device) -> Tensor:
    """Return a mask [L, T], True where a query sees a key: not after it, and fewer than `window` positions before."""
    queries = torch.arange(pair.queries[1] - pair.queries[0], device=device) + pair.distance
    distance_LT = queries.unsqueeze(1) - torch.arange(pair.keys[1] - pair.keys[0], device=device)
    return (distance_LT >= 0) & (distance_LT < window)


def _mask(pair: Pair, window: int | None, device: torch.device) -> Tensor | None:
    return window_mask(pair, window or sys.maxsize, device) if pair.kind is Kind.MASKED else None


def rows(x: Tensor, span: tuple[int, int], pair: Pair) -> Tensor:
    """Return rows `span` of dim 2 of a pair's sequences, a view of `x` [B, heads, rows, ...]."""
    x = x if pair.sequences is None else x[slice(*pair.sequences)]
    return x if span == (0, x.shape[2]) else x[:, :, slice(*span)]


class Merged:
    """Output [B, N, L, D], in fp32 or wider, and log-sum-exp [B, N, L] of the pairs added so far.

    Args:
        kernel: kernel of all pairs; None: the one of each kind on this device.
    """

    def __init__(self, q_BNLD: Tensor, window: int | None, kernel: PairKernel | None = None) -> None:
        self._q, self._window, self._kernel = q_BNLD, window, kernel
        self._wide = torch.promote_types(q_BNLD.dtype, torch.float32)
        self._merged: tuple[Tensor, Tensor] | None = None

    def add(self, kv: Tensor, pairs: tuple[Pair, ...], of_pair: KernelOf | None = None) -> None:
        """Add pairs with keys and values `kv` [2, B, G, T, D], in order."""
        for pair in pairs:
            q, (k, v) = rows(self._q, pair.queries, pair), (rows(t, pair.keys, pair) for t in kv)
            kernel = of_pair(pair) if of_pair else self._kernel or kernel_for(q, pair.kind)
            out, lse = kernel.forward(q, k, v, pair.kind is Kind.CAUSAL, _mask(pair, self._window, q.device))
            if self._merged is None and q is self._q:
                by_position = out.to(self._wide).transpose(1, 2).contiguous()  # as the output projection reads it
                self._merged = by_position.transpose(1, 2), lse
                continue
            merged, merged_lse = (rows(t, pair.queries, pair) for t in self.result())
            merge(merged, merged_lse, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp, zeros and -inf where no pair was added."""
        if self._merged is None:
            like = self._q.transpose(1, 2)  # memory as the output projection reads it
            out = torch.zeros_like(like, dtype=self._wide, memory_format=torch.contiguous_format).transpose(1, 2)
            self._merged = out, out.new_full(out.shape[:-1], -math.inf)
        return self._merged


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge the output and log-sum-exp of other keys into `out` and `lse`, in place."""
    weight = torch.sigmoid(new_lse - lse).nan_to_num_(0.0)  # not a number where neither sees a key
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


class MergedGrads:
    """Gradients of queries [B, N, L, D], in fp32 or wider, with the pairs added so far.

    Args:
        merged: final output and log-sum-exp of the queries.
        kernel: kernel of all pairs; None: the one of each kind on this device.
    """

    def __init__(
        self,
        dy: Tensor,
        q_BNLD: Tensor,
        merged: tuple[Tensor, Tensor],
        window: int | None,
        kernel: PairKernel | None = None,
    ) -> None:
        self._dy, self._q, self._merged, self._window, self._kernel = dy, q_BNLD, merged, window, kernel
        wide = torch.promote_types(q_BNLD.dtype, torch.float32)
        self.dq = torch.zeros_like(q_BNLD, dtype=wide, memory_format=torch.contiguous_format)

    def add(self, kv: Tensor, dkv: Tensor, pairs: tuple[Pair, ...], of_pair: KernelOf | None = None) -> None:
        """Add the gradients of pairs with `kv` [2, B, G, T, D] to those of the queries and to `dkv`, those of `kv`."""
        for pair in pairs:
            dy, q, out, lse = (rows(t, pair.queries, pair) for t in (self._dy, self._q, *self._merged))
            k, v = (rows(t, pair.keys, pair) for t in kv)
            kernel = of_pair(pair) if of_pair else self._kernel or kernel_for(q, pair.kind)
            seen = pair.kind is Kind.CAUSAL, _mask(pair, self._window, q.device)
            grads = kernel.backward(dy, q, k, v, (out, lse), *seen)
            rows(self.dq, pair.queries, pair).add_(grads.dq)
            rows(dkv[0], pair.keys, pair).add_(grads.dk)
            rows(dkv[1], pair.keys, pair).add_(grads.dv)
            del grads  # before those of the next pair
