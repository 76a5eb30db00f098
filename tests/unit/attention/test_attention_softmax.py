"""Fact: capped scores and attention sinks equal a softmax that is written down, forward and backward, in float64.

They do in attention by pairs, with dropout of weights, with a KV cache and in pieces of queries, which keep few scores.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron3d.attention.attention import (
    AttentionHeads,
    WeightDropout,
    absorbed_attention,
    attention_with_dropout,
    masked_attention,
)
from megatron3d.attention.packed import Visible, packed_attention
from megatron3d.attention.pairs import (
    CPU,
    PLAIN,
    Drop,
    InPieces,
    PairInputs,
    PairKernel,
    PlainKernel,
    Softmax,
)
from megatron3d.attention.plan import LONGEST
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.parallel.mesh import Mesh
from tests.support.shards import normal
from tests.unit.attention.test_attention_pairs import dense_mask
from tests.unit.attention.test_packed_attention import Largest

B, S, N, G, D = 2, 37, 4, 2, 6
CAPS, SINKS = (None, 0.8), (None, 1)
SEEN = {"causal": Visible(), "documents and a window": Visible(((5, 9), ()), 6)}


def leaves(has_sink: bool) -> list[Tensor]:
    """Return q, k, v [B, heads, S, D] and, if wanted, sinks [N]."""
    found = [normal(B, heads, S, D, seed=seed) for seed, heads in enumerate((N, G, G))]
    return [each.requires_grad_() for each in (*found, *([normal(N, seed=7)] if has_sink else []))]


def softmax_of(softcap: float | None, tensors: list[Tensor]) -> Softmax:
    return Softmax(softcap, tensors[3] if len(tensors) == 4 else None)


def written_down(tensors: list[Tensor], softcap: float | None, see: Tensor) -> Tensor:
    """Return attention [B, N, S, D] by one exponential after another; `see` is [B, 1, S, S]."""
    q, k, v = tensors[:3]
    k, v = (t.repeat_interleave(N // G, dim=1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(D)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    powers = scores.exp() * see
    extra = tensors[3].exp().view(N, 1, 1) if len(tensors) == 4 else 0.0
    return powers @ v / (powers.sum(-1, keepdim=True) + extra)


def errors(got: Tensor, expected: Tensor, tensors: list[Tensor]) -> float:
    """Return the largest error of the output and the gradients."""
    dy = normal(*got.shape, seed=9)
    found, wanted = ([y, *torch.autograd.grad(y, tensors, dy)] for y in (got, expected))
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("softcap", "has_sink", "seen"), list(product(CAPS, SINKS, SEEN)))
def test_attention_by_pairs(softcap: float | None, has_sink: bool, seen: str) -> None:
    tensors, visible = leaves(bool(has_sink)), SEEN[seen]
    q, k, v = tensors[:3]
    y = packed_attention(q, k, v, visible, softmax_of(softcap, tensors))
    see = dense_mask(visible.starts, visible.window, S, B)
    assert errors(y, written_down(tensors, softcap, see), tensors) < 1e-13


@pytest.mark.parametrize(("softcap", "has_sink"), list(product(CAPS, SINKS)))
def test_attention_with_dropout_of_weights(softcap: float | None, has_sink: bool) -> None:
    """At a rate so low that no weight is dropped, and none is scaled to float64's precision."""
    tensors = leaves(bool(has_sink))
    heads = AttentionHeads(N, G, D, (), ProcessComm(Mesh((("data", 1),)), ()))
    at = WeightDropout(Drop(1e-18, 3, 0), heads, S, Visible(), softmax_of(softcap, tensors))
    q, k, v = tensors[:3]
    y = attention_with_dropout(q, k, v, at)
    assert errors(y, written_down(tensors, softcap, dense_mask(None, None, S, B)), tensors) < 1e-13


@pytest.mark.parametrize(("softcap", "has_sink"), list(product(CAPS, SINKS)))
def test_queries_of_a_kv_cache(softcap: float | None, has_sink: bool) -> None:
    tensors, see = leaves(bool(has_sink)), dense_mask(((5, 9), ()), 6, S, B)
    q, k, v = tensors[:3]
    y = masked_attention(q, k, v, see[:, 0], softmax_of(softcap, tensors))
    assert (y - written_down(tensors, softcap, see)).abs().max() < 1e-13


@pytest.mark.parametrize("is_causal", [True, False])
def test_pieces_of_queries(is_causal: bool) -> None:
    q, k, v = (t.detach() for t in leaves(False))
    mask = None if is_causal else dense_mask(None, 6, S, 1)[0, 0]
    whole, pieces = PlainKernel(0.8), InPieces(PlainKernel(0.8), 10)
    pair = PairInputs(q, k, v, is_causal, mask)
    merged = whole.forward(pair)
    dy = normal(*q.shape, seed=9)
    expected = (*merged, *whole.backward(pair, dy, merged))
    got = (*pieces.forward(pair), *pieces.backward(pair, dy, merged))
    assert max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)) < 1e-14


def test_no_tensor_has_all_scores() -> None:
    """1,024 rows of the scores of 4,096 positions exist at once, and their distances in int64."""
    length = 4 * LONGEST
    q, k, v = (torch.empty(1, 1, length, D, requires_grad=True) for _ in range(3))
    kernel = InPieces(PlainKernel(3.0))
    with Largest() as seen, torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        packed_attention(q, k, v, Visible(), Softmax(3.0)).sum().backward()
        with torch.no_grad():
            pair = PairInputs(q, k, v, True)
            merged = kernel.forward(pair)
            kernel.backward(pair, merged[0], merged)
            masked_attention(q, k, v, torch.ones(1, length, length, dtype=torch.bool), Softmax(3.0))
    assert seen.largest <= 8 * LONGEST * length < 4 * length**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_near(dtype: torch.dtype) -> None:
    exact = leaves(True)
    narrow = [t.detach().to(dtype).requires_grad_() for t in exact]
    q, k, v, sinks = narrow
    got = packed_attention(q, k, v, Visible(None, 9), Softmax(0.8, sinks))
    expected = written_down(exact, 0.8, dense_mask(None, 9, S, B))
    dy = normal(*got.shape, seed=9).to(dtype)
    found = [got, *torch.autograd.grad(got, narrow, dy)]
    wanted = [expected, *torch.autograd.grad(expected, exact, dy.double())]
    assert all(a.dtype == dtype for a in found)
    bound = 8 * torch.finfo(dtype).eps
    assert all((a - b).abs().max() < bound * b.abs().max() for a, b in zip(found, wanted, strict=True))


def half_precision_error(kernel: PairKernel) -> float:
    """Return the largest relative error in bf16 of the output and the gradients, of scores with a deviation of 9."""
    exact = [3 * normal(1, heads, 256, 64, seed=seed) for seed, heads in enumerate((N, G))]
    exact += [normal(1, heads, 256, 64, seed=seed) for seed, heads in ((2, G), (3, N))]
    narrow = [each.bfloat16() for each in exact]
    found = []
    for q, k, v, dy in (narrow, [each.double() for each in narrow]):
        pair = PairInputs(q, k, v, True)
        of = kernel if q is narrow[0] else CPU
        merged = of.forward(pair)
        found.append((merged[0], *of.backward(pair, dy, merged)))
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True))


def test_plain_matmuls_are_as_exact_as_fused_attention_in_half_precision() -> None:
    """Scores that are rounded to bf16 before they are widened lose four times as much, 2.3 %."""
    plain, fused = (half_precision_error(kernel) for kernel in (PLAIN, CPU))
    assert plain < 7e-3 and plain < 1.2 * fused


def test_heads_share_the_cached_latents_without_a_copy() -> None:
    """Decoding 64 heads with 2,048 cached positions makes nothing near the size of the cache for each head."""
    heads, length, latent, position = 64, 2048, 16, 4
    q, q_pos = torch.empty(B, 1, heads, D), torch.empty(B, 1, heads, position)
    weights = torch.empty(heads, D, latent), torch.empty(heads, D, latent)
    latents = torch.empty(B, length, latent + position)
    see = torch.ones(B, 1, length, dtype=torch.bool)
    with Largest() as seen, torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        absorbed_attention((q, q_pos), latents, weights, see, 0.5)
    assert seen.largest <= 4 * B * heads * length  # one score of each head and position, in fp32
