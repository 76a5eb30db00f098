"""Attention by pairs of query and key rows: their kernels, the softmax, and how pairs are merged.

    weight_j = exp(c tanh(s_j / c)) / (exp(sink) + sum over k of exp(c tanh(s_k / c)))
    out      = sum over pairs of exp(lse_pair - lse) out_pair        lse = log of the sum of exp(lse_pair)

Merging by the log-sum-exp: Dao et al. 2022 (arXiv:2205.14135), Liu et al. 2023 (arXiv:2310.01889).  Backward calls each
pair's kernel with the final output and log-sum-exp, so that the gradients of the pairs add up.

Cap c of the scores: Gemma Team 2024 (arXiv:2408.00118), section 2; no fused kernel caps, so plain matmuls do.  Learned
sinks: OpenAI 2025 (arXiv:2508.10925), section 2.2; of 0 (off by one): Miller 2023, "Attention is off by one".  A sink
is one more key, whose value is 0: out <- out sigmoid(lse - sink), lse <- log(exp(lse) + exp(sink)), for every kernel.

Dropout of weights: masks are a function of (seed, step, layer, sequence, head, positions of query and key), so that
each pair makes its part of the mask of one process.  The log-sum-exp is that of the weights before dropout.

Letters: B sequences, N query heads, G key/value heads, L query rows, T key rows, D features of a head.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron3d.attention.context.plan import Chunks
from megatron3d.attention.plan import LONGEST, HeadSplit, Kind, Pair, Span, cut
from megatron3d.ops.dropout import dropout, keep_mask

VANILLA = "vanilla"


class Softmax(NamedTuple):
    """How scores become weights.

    Attributes:
        softcap: c of c tanh(score / c), before the mask; None: scores are not capped.
        sink_N: logit of each query head of this rank that joins the denominators; None: none does.
    """

    softcap: float | None = None
    sink_N: Tensor | None = None

    @property
    def is_vanilla(self) -> bool:
        """Whether it is the softmax of the scores alone."""
        return self.softcap is None and self.sink_N is None


PLAIN_SOFTMAX = Softmax()


@dataclass(frozen=True)
class Drop:
    """Dropout of attention weights.

    Attributes:
        rate: probability that a weight becomes 0.
        key: seed of the masks of this layer and step.
        first_sequence: index in the global batch of this rank's first sequence.
    """

    rate: float
    key: int
    first_sequence: int

    def keep(
        self, sequences: Span, heads: tuple[Span, int], seq_length: int, queries_L: Tensor, keys_T: Tensor
    ) -> Tensor:
        """Return bool [B, N, L, T], a function of global indices alone, for sequences and heads of this rank.

        `heads` are a range of them and the number of heads of the model; queries and keys are positions.
        """
        (first, last), (span, num_heads) = sequences, heads
        sequence = torch.arange(first, last, device=keys_T.device).unsqueeze(1) + self.first_sequence
        by_head = sequence * num_heads + torch.arange(*span, device=keys_T.device)
        rows = (by_head.unsqueeze(-1) * seq_length + queries_L).flatten()
        keep_MT = keep_mask(self.key, rows, keys_T, self.rate)
        keep_BNLT: Tensor = keep_MT.unflatten(0, (last - first, span[1] - span[0], len(queries_L)))
        return keep_BNLT


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Return c tanh(scores / c), or the scores themselves without a cap."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def cap_slope(scores: Tensor, softcap: float) -> Tensor:
    """Return the derivative of the cap, given capped scores, 0 where they are masked: 1 - tanh^2."""
    return 1 - (scores.clamp(min=-softcap) / softcap).square()


def add_sink(out_BNLD: Tensor, lse: Tensor, sink_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp [B, N, L] over the keys and the sink, each in its dtype."""
    if sink_N is None:
        return out_BNLD, lse
    sink = sink_N.to(lse.dtype).unsqueeze(-1)
    share_BNL = torch.sigmoid(lse - sink)
    return (out_BNLD * share_BNL.unsqueeze(-1)).to(out_BNLD.dtype), torch.logaddexp(lse, sink)


def sink_grad(dy_BNLD: Tensor, out_BNLD: Tensor, lse: Tensor, sink_N: Tensor | None) -> Tensor | None:
    """Return the gradient of the sinks [N], given the output and the log-sum-exp with them: -weight (dy . out)."""
    if sink_N is None:
        return None
    weight_BNL = (sink_N.to(lse.dtype).unsqueeze(-1) - lse).exp()
    along_BNL = (dy_BNLD.to(lse.dtype) * out_BNLD).sum(-1)
    return -(weight_BNL * along_BNL).sum((0, 2)).to(sink_N.dtype)


class Grads(NamedTuple):
    """Gradients of a pair's queries [B, N, L, D], keys and values [B, G, T, D]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class PairInputs(NamedTuple):
    """Queries, keys and values of a pair, and which keys a query sees.

    Attributes:
        is_causal: it sees those up to itself.
        mask_LT: True where it sees a key; None: everywhere, or up to itself.
        window: keys that it sees before and behind the one at its place, counted from the last query and the last key,
            in place of a mask; None: all.
    """

    q_BNLD: Tensor
    k_BGTD: Tensor
    v_BGTD: Tensor
    is_causal: bool = False
    mask_LT: Tensor | None = None
    window: tuple[int, int] | None = None


class PairKernel(Protocol):
    """Attention of one pair, and its gradients."""

    def forward(self, pair: PairInputs) -> tuple[Tensor, Tensor]:
        """Return the output [B, N, L, D] and the log-sum-exp [B, N, L], -inf in rows that see nothing."""
        ...

    def backward(self, pair: PairInputs, dy_BNLD: Tensor, merged: tuple[Tensor, Tensor]) -> Grads:
        """Return the gradients, given the output and log-sum-exp over all pairs of these queries."""
        ...


KernelOf = Callable[[Pair], PairKernel]


class PlainKernel:
    """Plain matmuls: for any device and dtype, with the scores of one pair, capped at `softcap`, in memory.

    Scores and their gradients are in fp32 or wider, as in fused kernels.  Query heads that share keys are rows of one
    matmul, so that no key is copied.

    Args:
        keep_BNLT: makes the mask of weights that dropout at a `rate` keeps; None: there is no dropout.
        scale: factor of the scores; None: D^-0.5.
    """

    def __init__(
        self,
        softcap: float | None = None,
        keep_BNLT: Callable[[torch.device], Tensor] | None = None,
        rate: float = 0.0,
        scale: float | None = None,
    ) -> None:
        self._softcap, self._keep, self._rate, self._scale = softcap, keep_BNLT, rate, scale

    def forward(self, pair: PairInputs) -> tuple[Tensor, Tensor]:
        scores = self._scores(pair)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num_(0.0).to(pair.q_BNLD.dtype)
        out_BNLD = _by_query_head(_rows(self._dropped(weights)) @ pair.v_BGTD, weights)
        return out_BNLD, lse.flatten(1, 2)

    def _dropped(self, weights: Tensor) -> Tensor:
        """Return weights or their gradients after dropout."""
        if self._keep is None:
            return weights
        return dropout(weights, self._keep(weights.device).unflatten(1, weights.shape[1:3]), self._rate)

    def backward(self, pair: PairInputs, dy_BNLD: Tensor, merged: tuple[Tensor, Tensor]) -> Grads:
        q_BNLD, k_BGTD, v_BGTD, *_ = pair
        out, lse = merged
        groups = (k_BGTD.shape[1], -1)
        scores = self._scores(pair, is_again=True)
        weights = (scores - lse.unflatten(1, groups).unsqueeze(-1)).exp()
        delta = (dy_BNLD.to(weights.dtype) * out).sum(-1, keepdim=True).unflatten(1, groups)
        q, dy = (_rows(t.unflatten(1, groups)) for t in (q_BNLD, dy_BNLD))
        dweights = self._dropped(wide_matmul(dy, v_BGTD.mT).view_as(weights))
        dscores = weights * (dweights - delta)
        if self._softcap is not None:
            dscores *= cap_slope(scores, self._softcap)
        rows = _rows(dscores.mul_(self._scale_of(pair)).to(q.dtype))
        dv = _rows(self._dropped(weights).to(dy.dtype)).mT @ dy
        return Grads(_by_query_head(rows @ k_BGTD, weights), rows.mT @ q, dv)

    def _scale_of(self, pair: PairInputs) -> float:
        return pair.q_BNLD.shape[-1] ** -0.5 if self._scale is None else self._scale

    def _scores(self, pair: PairInputs, is_again: bool = False) -> Tensor:
        """Return scores [B, G, N / G, L, T] in fp32 or wider, -inf where a query does not see a key."""
        q_BNLD, k_BGTD, _, is_causal, mask_LT, _ = pair
        q = q_BNLD.unflatten(1, (k_BGTD.shape[1], -1))
        product = wide_matmul(_rows(q), k_BGTD.mT, is_again).mul_(self._scale_of(pair))
        scores = capped(product.unflatten(2, q.shape[2:4]), self._softcap)
        if is_causal:
            mask_LT = q.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores if mask_LT is None else scores.masked_fill(~mask_LT, -math.inf)


def _rows(x: Tensor) -> Tensor:
    """Return [B, G, n L, ...] from [B, G, n, L, ...]."""
    return x.flatten(2, 3)


def _by_query_head(rows: Tensor, weights: Tensor) -> Tensor:
    """Return [B, N, L, D] from the rows [B, G, n L, D] of n heads for each key head."""
    found: Tensor = rows.unflatten(2, weights.shape[2:4]).flatten(1, 2)
    return found


def wide_matmul(x: Tensor, y: Tensor, is_again: bool = False) -> Tensor:
    """Return x [B, G, L, D] @ y [B, G, D, T] in fp32 or wider, not rounded to the dtype of x.

    Args:
        is_again: by the operation whose FLOPs `FlopMemoryMeter` does not count, as those of fused kernels; it has no
            output wider than its operands.
    """
    wide, (a, b) = torch.promote_types(x.dtype, torch.float32), (t.flatten(0, 1) for t in (x, y))
    if x.device.type == "cpu":  # where no matmul has an output wider than its operands
        a, b = a.to(wide), b.to(wide)
    if a.dtype != wide:
        product = torch.bmm(a, b, out_dtype=wide)
    else:
        product = torch.baddbmm(a.new_zeros((1, 1, 1)), a, b, beta=0) if is_again else torch.bmm(a, b)
    found: Tensor = product.unflatten(0, x.shape[:2])
    return found


class WideMatmul(torch.autograd.Function):
    """`wide_matmul` whose gradients have the dtypes of its operands; keeps them by head, as torch's matmul does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        by_head = x.flatten(0, 1).unsqueeze(0), y.flatten(0, 1).unsqueeze(0)
        ctx.save_for_backward(*by_head)
        return wide_matmul(*by_head).view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        grad = dy.to(x.dtype).flatten(0, 1)
        grads = grad @ y.squeeze(0).mT, x.squeeze(0).mT @ grad
        return grads[0].unflatten(0, dy.shape[:2]), grads[1].unflatten(0, dy.shape[:2])


class CpuKernel:
    """torch's fused attention on CPUs."""

    def forward(self, pair: PairInputs) -> tuple[Tensor, Tensor]:
        q_BNLD, k_BGTD, v_BGTD, is_causal, mask_LT, _ = pair
        mask = None if mask_LT is None else _additive(mask_LT, q_BNLD.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNLD, k_BGTD, v_BGTD, 0.0, is_causal, attn_mask=mask
        )
        # The kernel says 0 of rows that see nothing.
        return out, lse if mask_LT is None else lse.masked_fill(~mask_LT.any(-1), -math.inf)

    def backward(self, pair: PairInputs, dy_BNLD: Tensor, merged: tuple[Tensor, Tensor]) -> Grads:
        q_BNLD, k_BGTD, v_BGTD, is_causal, mask_LT, _ = pair
        mask = None if mask_LT is None else _additive(mask_LT, q_BNLD.dtype)
        return Grads(
            *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy_BNLD, q_BNLD, k_BGTD, v_BGTD, merged[0], merged[1], 0.0, is_causal, attn_mask=mask
            )
        )


def _additive(mask_LT: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask_LT, dtype=dtype).masked_fill_(~mask_LT, -math.inf)


class FlashKernel:
    """Flash attention on GPUs in bf16 and fp16, with windows in place of masks; query heads share keys uncopied."""

    def forward(self, pair: PairInputs) -> tuple[Tensor, Tensor]:
        assert pair.mask_LT is None, "flash attention takes no mask"
        q, k, v = (t.transpose(1, 2) for t in pair[:3])
        lengths = q.shape[1], k.shape[1]
        rest, sides = (None, None, *lengths, 0.0, pair.is_causal, False), _sides(pair.window)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *rest, **sides)
        return out.transpose(1, 2), lse

    def backward(self, pair: PairInputs, dy_BNLD: Tensor, merged: tuple[Tensor, Tensor]) -> Grads:
        dy, q, k, v, out = (t.transpose(1, 2) for t in (dy_BNLD, *pair[:3], merged[0]))
        lse = merged[1].contiguous()  # the kernel reads rows of the log-sum-exp without strides
        unused = torch.empty(2, dtype=torch.uint64, device=k.device)  # the random state of dropout, which is 0
        lengths, sides = (q.shape[1], k.shape[1]), _sides(pair.window)
        rest = (None, None, *lengths, 0.0, pair.is_causal, unused, unused)
        grads = torch.ops.aten._flash_attention_backward(dy, q, k, v, out, lse, *rest, **sides)
        return Grads(*(grad.transpose(1, 2) for grad in grads))


def _sides(window: tuple[int, int] | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window[0], "window_size_right": window[1]}


CPU, PLAIN, FLASH = CpuKernel(), PlainKernel(), FlashKernel()


def kernel_for(q: Tensor) -> PairKernel:
    """Return the kernel of pairs on this device, for this dtype and size of heads."""
    if q.device.type == "cpu":
        return CPU
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return FLASH if fits else PLAIN


def kernel_name(q: Tensor, softcap: float | None, dropout: float) -> str:
    """Return the name in the start-up report of the kernel of pairs on context ranks."""
    if softcap is not None or dropout > 0:
        return "plain matmuls"
    kernel = kernel_for(q)
    return "plain matmuls, windows by a mask" if kernel is PLAIN else "flash attention"


def window_mask(pair: Pair, window: int, device: torch.device) -> Tensor:
    """Return a mask [L, T], True where a query sees a key: not after it, and fewer than `window` positions before."""
    queries = torch.arange(pair.queries[1] - pair.queries[0], device=device) + pair.distance
    distance_LT = queries.unsqueeze(1) - torch.arange(pair.keys[1] - pair.keys[0], device=device)
    return (distance_LT >= 0) & (distance_LT < window)


def _calls(
    q: Tensor, pairs: Sequence[Pair], window: int | None, kernel: PairKernel | None, of_pair: KernelOf | None
) -> Iterator[tuple[Pair, PairKernel]]:
    """Yield the pairs that kernels take at once, pieces of those that need a mask, with the kernel of each."""
    for pair in pairs:
        alike = kernel or kernel_for(q)
        takes_it = pair.kind is not Kind.MASKED or (alike is FLASH and of_pair is None)
        for piece in (pair,) if takes_it else cut(pair, window):
            yield piece, of_pair(piece) if of_pair else alike


def _inputs(q: Tensor, k: Tensor, v: Tensor, pair: Pair, window: int | None, kernel: PairKernel) -> PairInputs:
    """Return the inputs of a kernel, which sees a window by a mask, or where it can by the distances of its sides."""
    if pair.kind is not Kind.MASKED:
        return PairInputs(q, k, v, pair.kind is Kind.CAUSAL)
    window = window or sys.maxsize
    if kernel is not FLASH:
        return PairInputs(q, k, v, False, window_mask(pair, window, q.device))
    behind = pair.distance + q.shape[2] - k.shape[2]
    return PairInputs(q, k, v, window=(window - 1 - behind, behind))


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
        for pair, kernel in _calls(self._q, pairs, self._window, self._kernel, of_pair):
            q, (k, v) = rows(self._q, pair.queries, pair), (rows(t, pair.keys, pair) for t in kv)
            out, lse = kernel.forward(_inputs(q, k, v, pair, self._window, kernel))
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
        for pair, kernel in _calls(self._q, pairs, self._window, self._kernel, of_pair):
            dy, q, out, lse = (rows(t, pair.queries, pair) for t in (self._dy, self._q, *self._merged))
            k, v = (rows(t, pair.keys, pair) for t in kv)
            grads = kernel.backward(_inputs(q, k, v, pair, self._window, kernel), dy, (out, lse))
            rows(self.dq, pair.queries, pair).add_(grads.dq)
            rows(dkv[0], pair.keys, pair).add_(grads.dk)
            rows(dkv[1], pair.keys, pair).add_(grads.dv)
            del grads  # before those of the next pair


Rows = tuple[slice, slice, slice]


def capped_kernel(softcap: float | None) -> PairKernel | None:
    """Return the kernel of pairs with capped scores on any device; None without a cap: any kernel will do."""
    return None if softcap is None else InPieces(PlainKernel(softcap))


class InPieces:
    """Another kernel for at most `longest` queries of a pair after another, so that few scores are in memory."""

    def __init__(self, kernel: PairKernel, longest: int = LONGEST) -> None:
        self._kernel, self._longest = kernel, longest

    def forward(self, pair: PairInputs) -> tuple[Tensor, Tensor]:
        if pair.q_BNLD.shape[2] <= self._longest:
            return self._kernel.forward(pair)
        found = [self._kernel.forward(piece) for piece, _, _ in self._pieces(pair)]
        return torch.cat([out for out, _ in found], dim=2), torch.cat([lse for _, lse in found], dim=2)

    def backward(self, pair: PairInputs, dy_BNLD: Tensor, merged: tuple[Tensor, Tensor]) -> Grads:
        if pair.q_BNLD.shape[2] <= self._longest:
            return self._kernel.backward(pair, dy_BNLD, merged)
        wide = torch.promote_types(pair.k_BGTD.dtype, torch.float32)
        dk, dv = (torch.zeros_like(each, dtype=wide) for each in (pair.k_BGTD, pair.v_BGTD))
        dq = []
        for piece, queries, keys in self._pieces(pair):
            grads = self._kernel.backward(piece, dy_BNLD[queries], (merged[0][queries], merged[1][queries]))
            dq.append(grads.dq)
            dk[keys] += grads.dk
            dv[keys] += grads.dv
        return Grads(torch.cat(dq, dim=2), dk, dv)

    def _pieces(self, pair: PairInputs) -> Iterator[tuple[PairInputs, Rows, Rows]]:
        """Yield queries with the keys that they may see, and the rows of both in the pair."""
        q_BNLD, k_BGTD, v_BGTD, is_causal, mask_LT, _ = pair
        every, length = slice(None), q_BNLD.shape[2]
        for low in range(0, length, self._longest):
            high = min(low + self._longest, length)
            mask, last = None if mask_LT is None else mask_LT[..., low:high, :], k_BGTD.shape[2]
            if is_causal:
                mask, last = q_BNLD.new_ones((high - low, high), dtype=torch.bool).tril(low), high
            queries, keys = (every, every, slice(low, high)), (every, every, slice(0, last))
            yield PairInputs(q_BNLD[queries], k_BGTD[keys], v_BGTD[keys], False, mask), queries, keys


@dataclass(frozen=True)
class DroppedPairs:
    """Kernels of the pairs of one rank of a ring.

    Attributes:
        heads: of this rank.
        num_sequences: sequences of this rank.
        chunks: positions of each rank of the ring, of each sequence, or once for all.
        place: this rank's place in the ring.
    """

    drop: Drop
    softcap: float | None
    heads: HeadSplit
    num_sequences: int
    seq_length: int
    chunks: tuple[Chunks, ...]
    place: int

    def of(self, heads: Span, behind: int) -> Callable[[Pair], PairKernel]:
        """Return the kernel of each pair of these heads of this rank with the keys of the rank `behind` places back."""
        first, last = (self.heads.query_span[0] + head for head in heads)
        return lambda pair: PlainKernel(self.softcap, partial(self._keep, pair, (first, last), behind), self.drop.rate)

    def _keep(self, pair: Pair, heads: Span, behind: int, device: torch.device) -> Tensor:
        """Return bool [B, N, L, T] of a pair with the keys of the rank `behind` places back."""
        sequences = pair.sequences or (0, self.num_sequences)
        held = self.chunks[sequences[0] % len(self.chunks)]
        queries = _positions(held[self.place], pair.queries, device)
        keys = _positions(held[self.place - behind], pair.keys, device)
        return self.drop.keep(sequences, (heads, self.heads.num_heads), self.seq_length, queries, keys)


def _positions(chunks: Sequence[Span], rows: Span, device: torch.device) -> Tensor:
    """Return the positions of rows of a rank."""
    every = torch.cat([torch.arange(*chunk, device=device) for chunk in chunks])
    return every[slice(*rows)]
