"""Fact: attention by pairs of rows, merged by log-sum-exp, is attention with the dense mask, as are its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.attention.context.plan import Starts, ring_plan
from megatron3d.attention.pairs import (
    CPU,
    FLASH,
    PLAIN,
    Merged,
    MergedGrads,
    PairInputs,
    PairKernel,
    kernel_for,
    kernel_name,
    merge,
    window_mask,
)
from megatron3d.attention.plan import Kind, Pair
from megatron3d.verify.flop_memory_meter import FlopMemoryMeter
from tests.support.flash_attention import stand_in

B, N, G, S, D = 3, 4, 2, 48, 8
CASES = {
    "causal": (None, None),
    "documents": (((0, 5, 29), (0,), (0,)), None),
    "window": (None, 7),
    "window over documents": (((0, 13), (0, 13), (0, 1, 2, 40)), 6),
    "window of one": (None, 1),
}


def dense_mask(starts: Starts, window: int | None, length: int = S, batch: int = B) -> Tensor:
    """Return what each query sees, [B, 1, S, S]."""
    places = torch.arange(length)
    distance = places.unsqueeze(1) - places
    found = ((distance >= 0) & (distance < (window or length))).expand(batch, length, length)
    if starts is not None:
        documents = torch.stack([torch.bucketize(places, torch.tensor(each), right=True) for each in starts])
        found = found & (documents.unsqueeze(1) == documents.unsqueeze(2))
    return found.unsqueeze(1)


def inputs(dtype: torch.dtype = torch.float64, length: int = S) -> list[Tensor]:
    """Return q, k, v and dy of whole sequences."""
    generator = torch.Generator().manual_seed(3)
    heads = (N, G, G, N)
    return [torch.randn(B, each, length, D, generator=generator, dtype=torch.float64).to(dtype) for each in heads]


def whole(starts: Starts, window: int | None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return output and gradients of q, k and v by the dense mask."""
    *leaves, dy = inputs(dtype)
    q, k, v = (each.requires_grad_() for each in leaves)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(starts, window), enable_gqa=True)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), dy)]


def in_pairs(starts: Starts, window: int | None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    q, k, v, dy = inputs(dtype)
    kv, plan = torch.stack((k, v)), ring_plan((((0, 20), (20, S)),), 0, starts, window)
    merged = Merged(q, window)
    merged.add(kv, plan.own)
    out, lse = merged.result()
    grads, dkv = MergedGrads(dy, q, (out.to(dtype), lse), window), torch.zeros_like(kv, dtype=out.dtype)
    for part in plan.own_parts:
        grads.add(kv, dkv, part)
    return [out, grads.dq, *dkv]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kernel", [CPU, PLAIN, FLASH], ids=["fused", "plain", "flash on GPUs"])
@pytest.mark.parametrize("case", CASES)
def test_one_rank(case: str, kernel: PairKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr("megatron3d.attention.pairs.kernel_for", lambda q: kernel)
    assert error(in_pairs(*CASES[case]), whole(*CASES[case])) < 1e-12


@pytest.mark.parametrize("kernel", [CPU, PLAIN], ids=["fused", "plain"])
def test_bf16_is_as_near_as_the_dense_mask(kernel: PairKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron3d.attention.pairs.kernel_for", lambda q: kernel)
    case, exact = CASES["window over documents"], whole(*CASES["window over documents"])
    ours, dense = (error(each(*case, torch.bfloat16), exact) for each in (in_pairs, whole))
    assert ours < 1.5 * dense


@pytest.mark.parametrize("kernel", [CPU, PLAIN], ids=["fused", "plain"])
def test_a_row_that_sees_nothing(kernel: PairKernel) -> None:
    """Its log-sum-exp is -inf, and merging leaves the other output, whichever comes first."""
    q, k, v, _ = inputs()
    mask = window_mask(Pair((0, S), (0, S), Kind.MASKED, 20), 12, torch.device("cpu"))
    assert not mask[-1].any()
    out, lse = kernel.forward(PairInputs(q, k, v, False, mask))
    assert lse[:, :, -1].eq(-torch.inf).all()
    other, other_lse = kernel.forward(PairInputs(q, k, v))
    for first, second in (((out, lse), (other, other_lse)), ((other, other_lse), (out, lse))):
        merged, merged_lse = (t.clone() for t in first)
        merge(merged, merged_lse, *second)
        assert torch.equal(merged[:, :, -1], other[:, :, -1])
        assert torch.equal(merged_lse[:, :, -1], other_lse[:, :, -1])


def test_scores_whose_exponential_overflows_are_merged() -> None:
    """The log-sum-exp of scores near 1e4 is exact: nothing larger than the weights is exponentiated."""
    q, k, v, _ = inputs()
    out, lse = CPU.forward(PairInputs(1e4 * q, k, v))
    parts = [CPU.forward(PairInputs(1e4 * q, k[:, :, rows], v[:, :, rows])) for rows in (slice(20), slice(20, S))]
    merge(*parts[0], *parts[1])
    assert lse.max() > 1e4 and error(list(parts[0]), [out, lse]) < 1e-9


def test_a_window_counts_the_query_itself() -> None:
    mask = window_mask(Pair((0, 4), (0, 4), Kind.MASKED), 2, torch.device("cpu"))
    assert mask.tolist() == [[j in (i - 1, i) for j in range(4)] for i in range(4)]


def test_kernels_of_a_gpu() -> None:
    """Flash attention in half precision, for heads that it takes; else plain matmuls."""
    half, single = (torch.empty(1, 2, 3, 64, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32))
    assert kernel_for(half) is FLASH
    assert kernel_for(single) is PLAIN
    assert kernel_for(half[..., :20]) is PLAIN
    assert kernel_name(half, None, 0.0) == "flash attention"
    assert {kernel_name(half, 5.0, 0.0), kernel_name(half, None, 0.1)} == {"plain matmuls"}
    assert kernel_name(single, None, 0.0) == "plain matmuls, windows by a mask"


def test_flash_attention_takes_a_window_of_two_chunks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for each chunk, and one for the keys before the later chunk; no mask is made."""
    calls = stand_in(monkeypatch)
    monkeypatch.setattr("megatron3d.attention.pairs.kernel_for", lambda q: FLASH)
    monkeypatch.setattr("megatron3d.attention.pairs.window_mask", None)
    assert error(in_pairs(*CASES["window"]), whole(*CASES["window"])) < 1e-12
    assert calls == ["forward"] * 3 + ["backward"] * 3


def test_flops_of_flash_attention() -> None:
    """Two matmuls forward, four backward, of shared keys as well; torch's formula takes heads for rows."""
    q, k, v = (torch.empty(B, heads, S, D, dtype=torch.bfloat16, device="meta") for heads in (N, G, G))
    pair = PairInputs(q, k, v, True)
    with FlopMemoryMeter() as forward:
        merged = FLASH.forward(pair)
    with FlopMemoryMeter() as backward:
        FLASH.backward(pair, q, merged)
    assert (forward.flops, backward.flops) == (2 * 2 * B * N * S * S * D, 4 * 2 * B * N * S * S * D)


def test_flash_attention_has_the_shapes_of_plain_matmuls() -> None:
    """On meta tensors: a GPU computes the same numbers in tests/gpu."""
    q, k, v = (torch.empty(B, heads, S, D, dtype=torch.bfloat16, device="meta") for heads in (N, G, G))
    out, lse = FLASH.forward(PairInputs(q, k, v, True))
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (B, N, S), torch.float32)
    grads = FLASH.backward(PairInputs(q, k, v, True), out, (out, lse))
    assert [each.shape for each in grads] == [q.shape, k.shape, v.shape]
