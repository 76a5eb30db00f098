"""Fact: bf16 attention on CPUs has gradients as exact as those of attention that is not fused, with grouped queries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron3d.attention import attention as bf16_cpu_attention
from megatron3d.attention.attention import MAX_SEQ_LENGTH, causal_attention, recomputes_softmax
from megatron3d.model.local_sizes import KERNELS


def errors(attend, inputs, dy):
    """Return the largest error of the output and of each gradient against float64, relative to the largest value."""
    q, k, v = wide = [x.double().detach().requires_grad_() for x in inputs]
    num_shared = inputs[0].shape[1] // inputs[1].shape[1]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_shared > 1)
    narrow = [x.detach().requires_grad_() for x in inputs]
    got = attend(*narrow)
    pairs = [(got, expected)]
    pairs += zip(torch.autograd.grad(got, narrow, dy), torch.autograd.grad(expected, wide, dy.double()), strict=True)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]


def not_fused(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT * q.shape[3] ** -0.5).masked_fill(later, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(("heads", "groups", "seq"), [(4, 4, 64), (6, 2, 33), (3, 3, 2)])
@pytest.mark.parametrize("chunk", [1, 2**20])
def test_gradients_are_those_of_attention(monkeypatch, heads, groups, seq, chunk):
    monkeypatch.setattr(bf16_cpu_attention, "_CHUNK", chunk)
    draw = torch.Generator().manual_seed(seq)

    def normal(num_heads):
        return torch.randn(3, seq, num_heads, 16, generator=draw).bfloat16().transpose(1, 2)

    inputs, dy = [normal(heads), normal(groups), normal(groups)], normal(heads)
    for ours, eager in zip(errors(causal_attention, inputs, dy), errors(not_fused, inputs, dy), strict=True):
        assert ours <= max(1.5 * eager, 2**-7)


def test_long_sequences_and_other_dtypes_use_the_fused_kernel():
    assert recomputes_softmax("cpu", torch.bfloat16, MAX_SEQ_LENGTH)
    assert not recomputes_softmax("cpu", torch.bfloat16, MAX_SEQ_LENGTH + 1)
    assert not recomputes_softmax("cpu", torch.float32, 8)
    assert not recomputes_softmax("cuda", torch.bfloat16, 8)
    assert KERNELS["cpu"].softmax_again == MAX_SEQ_LENGTH and KERNELS["gpu"].softmax_again == 0
