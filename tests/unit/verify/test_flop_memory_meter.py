"""Fact: the meter counts the FLOPs of a model's GEMMs and attention, forward and backward, and every live byte once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron3d.verify.flop_memory_meter import FlopMemoryMeter, flop_formulas


def test_flops_of_a_linear_are_those_of_torch() -> None:
    """Forward, dgrad and wgrad: 6 M N K, as torch's own counter reports."""
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(11, 7, requires_grad=True)
    with FlopMemoryMeter() as meter:
        F.linear(x, w).sum().backward()
    with FlopCounterMode(display=False) as counter:
        F.linear(x, w).sum().backward()
    assert meter.flops == counter.get_total_flops() == 6 * 5 * 11 * 7


def test_accumulating_into_main_grad_counts() -> None:
    """torch has no formula for the in-place addmm_."""
    grad, dy, x = torch.zeros(3, 4), torch.randn(5, 3), torch.randn(5, 4)
    with FlopMemoryMeter() as meter:
        grad.addmm_(dy.t(), x)
    assert meter.flops == 2 * 3 * 5 * 4


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_two_gemms_forward_and_four_backward(is_causal: bool, kv_heads: int) -> None:
    """FLOPs of the model: recomputed scores of the backward kernel are not counted, masked scores are."""
    q, k, v = (torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (6, kv_heads, kv_heads))
    gemm = 2 * (2 * 6) * 16 * 16 * 8
    with FlopMemoryMeter() as meter:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=kv_heads < 6)
        forward = meter.flops
        y.sum().backward()
    assert (forward, meter.flops) == (2 * gemm, 6 * gemm)


def test_packed_sequences_with_shared_heads_count_scores_within_each() -> None:
    """A call of the GPU's kernel: two sequences of 5 and 11 tokens, three heads of q per head of k and v."""
    q, k, v = (torch.empty(16, heads, 8) for heads in (6, 2, 2))
    bounds = torch.tensor([0, 5, 16], dtype=torch.int32)
    formula = flop_formulas()[torch.ops.aten._flash_attention_forward]
    assert formula(q, k, v, bounds, bounds, 11, 11, 0.0, True, False, out_val=None) == 4 * 6 * (5**2 + 11**2) * 8


def test_live_bytes_and_their_peak() -> None:
    """A view costs nothing, a freed tensor still counts in the peak, and a resized storage is measured when queried."""
    held, gathered = torch.zeros(4), torch.zeros(6)
    with FlopMemoryMeter([held, gathered], [gathered]) as meter:
        assert meter.num_bytes == 40
        x = held + 1
        assert meter.num_bytes == 56 and x.view(2, 2).untyped_storage().nbytes() == 16
        del x
        gathered.untyped_storage().resize_(0)
        assert (meter.num_bytes, meter.peak_bytes) == (16, 56)
        meter.reset_peak()
        assert meter.peak_bytes == 16
