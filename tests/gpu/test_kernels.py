"""Fact: every kernel of a step computes on the GPU what the CPU computes in float64, within the rounding of its dtype.

Sizes are odd on purpose: kernels for tensor cores pad, and a wrong stride or tail shows there.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron3d.attention.attention import attention
from megatron3d.attention.packed import Visible, choose, packed_attention
from megatron3d.attention.pairs import Softmax, capped
from megatron3d.attention.rotary import rotary_tables, rotate
from megatron3d.attention.rotary_spec import Rotary
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.schema import OptimizerConfig
from megatron3d.hardware.devices import NAMES, usable
from megatron3d.linear.gemm import add_product, put_product
from megatron3d.linear.gemm import product as gemm
from megatron3d.ops.cross_entropy import LOSS_KERNELS, VocabShard, cross_entropy_
from megatron3d.ops.embedding import embedding
from megatron3d.ops.norm import norm
from megatron3d.optim.adamw import ParamGroup, update_chunked, update_fused, update_with_triton
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime.machine import has_triton
from tests.support.shards import normal

# A thread of autograd whose first kernel is cuBLAS's has no CUDA context yet, and torch says so.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
# A few units in the last place of each dtype: sums of a hundred terms round more than once.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
LOW = (torch.bfloat16, torch.float16)


def rounded(x: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `x` in `dtype` on the device, and the same values in float64 on the CPU."""
    low = x.detach().to(dtype)
    return low.to(device, copy=True).requires_grad_(x.requires_grad), low.double().requires_grad_(x.requires_grad)


def check(got: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Compare with the largest expected value, or with 1: some gradients of a single position are 0."""
    assert got is not None and expected is not None, "both sides have the tensor"
    difference = (got.detach().cpu().double() - expected.detach()).abs().max().item()
    assert difference < tolerance * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("strides", list(product("NT", repeat=2)), ids="".join)
@pytest.mark.parametrize("shape", [(128, 256, 64), (129, 257, 65), (1, 33, 7)], ids=str)
def test_a_gemm_into_fp32(
    device: torch.device, dtype: torch.dtype, strides: tuple[str, str], shape: tuple[int, int, int]
) -> None:
    """beta 0 overwrites what is not a number, beta 1 adds; the result is not rounded to bf16 on the way."""
    m, n, k = shape
    a, wide_a = rounded(normal(m, k, seed=1) if strides[0] == "N" else normal(k, m, seed=1).T, dtype, device)
    b, wide_b = rounded(normal(n, k, seed=2) if strides[1] == "N" else normal(k, n, seed=2).T, dtype, device)
    total = torch.full((m, n), torch.nan, dtype=torch.promote_types(dtype, torch.float32), device=device)
    rounds = dtype in LOW and device.type == "cpu"
    tolerance = TOLERANCES[dtype] if rounds else TOLERANCES[total.dtype]
    put_product(total, a, b)
    check(total, wide_a @ wide_b.T, tolerance)
    assert add_product(total, a, b) is total
    check(total, 2 * wide_a @ wide_b.T, tolerance)
    check(gemm(a, b), wide_a @ wide_b.T, TOLERANCES[dtype])


BACKENDS = [backend for backend in NAMES if backend is not SDPBackend.OVERRIDEABLE]


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES.get)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
def test_attention(device: torch.device, backend: SDPBackend, dtype: torch.dtype, masked: bool) -> None:
    """Grouped queries, forward and backward, at even and odd lengths, by every kernel that takes them."""
    heads: Any = SimpleNamespace(are_even=True)
    for seq, (num_heads, num_groups) in product((1, 17, 128), ((4, 4), (8, 2))):
        values = [normal(2, seq, count, 64, seed=count) for count in (num_heads, num_groups, num_groups)]
        qkv, wide = zip(*(rounded(each.requires_grad_(), dtype, device) for each in values), strict=True)
        mask = documents(seq) if masked else None
        low_mask = None if mask is None else mask.to(device)
        with sdpa_kernel(backend):
            q, k, v = qkv
            if not usable(q.transpose(1, 2), k.transpose(1, 2), None if low_mask is None else low_mask.unsqueeze(1)):
                continue
            y = attention(q, k, v, heads, None, low_mask)
        dy, wide_dy = rounded(normal(*y.shape, seed=9), dtype, device)
        y.backward(dy)
        with sdpa_kernel(SDPBackend.MATH):
            expected = attention(wide[0], wide[1], wide[2], heads, None, mask)
        expected.backward(wide_dy)
        check(y, expected, TOLERANCES[dtype])
        for got, right in zip(qkv, wide, strict=True):
            check(got.grad, right.grad, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("starts", [None, ((3, 4, 60), ())], ids=["whole", "documents"])
def test_attention_within_documents_and_windows(
    device: torch.device, dtype: torch.dtype, window: int | None, starts: tuple[tuple[int, ...], ...] | None
) -> None:
    """Variable-length flash in bf16 and fp16, plain matmuls in wider dtypes; on the CPU the dense mask in float64."""
    visible = Visible(starts, window).within(129)
    if visible is None:
        return
    see = torch.stack([visible.mask(row, range(129), range(129), torch.device("cpu")) for row in range(2)])
    for num_groups, size in ((4, 64), (2, 64), (2, 36)):
        values = [normal(2, 129, count, size, seed=count) for count in (4, num_groups, num_groups)]
        qkv, wide = zip(*(rounded(each.requires_grad_(), dtype, device) for each in values), strict=True)
        q, k, v = (t.transpose(1, 2) for t in qkv)
        y = packed_attention(q, k, v, visible)
        q64, k64, v64 = (t.transpose(1, 2) for t in wide)
        expected = F.scaled_dot_product_attention(q64, k64, v64, see.unsqueeze(1), enable_gqa=True)
        dy, wide_dy = rounded(normal(*y.shape, seed=9), dtype, device)
        y.backward(dy)
        expected.backward(wide_dy)
        check(y, expected, TOLERANCES[dtype])
        for got, right in zip(qkv, wide, strict=True):
            check(got.grad, right.grad, TOLERANCES[dtype])
        on_gpu = "variable-length" if dtype in LOW and size % 8 == 0 else "plain"
        assert choose(q, k).name.startswith("flash by pairs" if device.type == "cpu" else on_gpu)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["sinks", "capped, sinks"])
@pytest.mark.parametrize("window", [None, 20])
def test_attention_sinks(device: torch.device, dtype: torch.dtype, softcap: float | None, window: int | None) -> None:
    """In every kernel's own shape of the log-sum-exp; on the CPU plain matmuls in float64."""
    for size in (64, 36):
        values = [normal(2, 129, count, size, seed=count) for count in (4, 2, 2)]
        qkv, wide = zip(*(rounded(each.requires_grad_(), dtype, device) for each in values), strict=True)
        sinks, wide_sinks = rounded(normal(4, seed=5).requires_grad_(), dtype, device)
        q, k, v = (t.transpose(1, 2) for t in qkv)
        y = packed_attention(q, k, v, Visible(None, window), Softmax(softcap, sinks))
        q, k, v = (t.transpose(1, 2) for t in wide)
        see = Visible(None, window).mask(0, range(129), range(129), torch.device("cpu"))
        scores = q @ k.repeat_interleave(2, 1).mT * size**-0.5
        scores = capped(scores, softcap).masked_fill(~see, -torch.inf)
        scores = torch.cat((scores, wide_sinks.view(4, 1, 1).expand(2, 4, 129, 1)), -1)
        expected = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
        dy, wide_dy = rounded(normal(*y.shape, seed=9), dtype, device)
        y.backward(dy)
        expected.backward(wide_dy)
        check(y, expected, TOLERANCES[dtype])
        for got, right in zip((*qkv, sinks), (*wide, wide_sinks), strict=True):
            check(got.grad, right.grad, TOLERANCES[dtype])


def documents(seq: int) -> Tensor:
    """Return the causal mask [1, S, S] of two documents."""
    document = torch.arange(seq) >= seq // 3
    return (document.unsqueeze(1) == document).tril().unsqueeze(0)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_bias", [False, True], ids=["RMSNorm", "LayerNorm"])
def test_norms(device: torch.device, dtype: torch.dtype, has_bias: bool) -> None:
    comm: Any = None
    pairs = [rounded(normal(*shape, seed=7).requires_grad_(), dtype, device) for shape in ((33, 129), (129,), (129,))]
    (x, wide_x), (weight, wide_weight), (bias, wide_bias) = pairs
    y = norm(x, weight, bias if has_bias else None, 1e-5, (), comm)
    expected = norm(wide_x, wide_weight, wide_bias if has_bias else None, 1e-5, (), comm)
    dy, wide_dy = rounded(normal(33, 129, seed=8), dtype, device)
    y.backward(dy)
    expected.backward(wide_dy)
    check(y, expected, TOLERANCES[dtype])
    for got, right in pairs[: 2 + has_bias]:
        check(got.grad, right.grad, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rotary_embedding(device: torch.device, dtype: torch.dtype) -> None:
    x, wide = rounded(normal(2, 65, 3, 32, seed=3), dtype, device)
    got = rotate(x, rotary_tables(65, Rotary(1e4, 32), x))
    check(got, rotate(wide, rotary_tables(65, Rotary(1e4, 32), wide)), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_embedding_sums_the_gradients_of_repeated_tokens(device: torch.device, dtype: torch.dtype) -> None:
    comm = ProcessComm(Mesh((("x", 1),)), [])
    tokens = torch.randint(7, (301,), generator=torch.Generator().manual_seed(4))
    w, wide_w = rounded(normal(11, 33, seed=5).requires_grad_(), dtype, device)
    dy, wide_dy = rounded(normal(301, 33, seed=6), dtype, device)
    embedding(tokens.to(device), w, 11, MatmulPlan(), comm).backward(dy)
    embedding(tokens, wide_w, 11, MatmulPlan(), comm).backward(wide_dy)
    check(w.grad, wide_w.grad, TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_loss_kernels(device: torch.device, name: str, dtype: torch.dtype | None) -> None:
    """Ignored labels and a padded vocabulary; on CPUs torch's operations stand for Triton's kernels."""
    shard = VocabShard(0, 1003, (), ProcessComm(Mesh((("x", 1),)), []))
    labels = torch.randint(1000, (37,), generator=torch.Generator().manual_seed(3))
    labels[::5] = -100
    logits, wide = rounded(normal(37, 1003, seed=4), torch.float32, device)
    logits[:, 1000:] = wide[:, 1000:] = float("-inf")
    kernel = LOSS_KERNELS[name if has_kernels(device) else "torch"]
    loss, grad = kernel(logits, labels.to(device), 30, 2.0, shard, dtype)
    right_loss, right_grad = cross_entropy_(wide, labels, 30, 2.0, shard, torch.float64)
    check(loss, right_loss, TOLERANCES[torch.float32])
    assert (grad is None) == (dtype is None)
    if dtype is not None:
        check(grad, right_grad, TOLERANCES[dtype])


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels run on the device."""
    return device.type != "cpu" and has_triton()


UPDATES = {"fused": update_fused, "chunked": update_chunked, "triton": update_with_triton}


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("fused", torch.float32),
        *((name, kind) for name in ("chunked", "triton") for kind in (torch.float32, torch.bfloat16)),
    ],
)
def test_adamw(device: torch.device, name: str, moments: torch.dtype) -> None:
    """Three updates of fp32 weights; a skipped one changes nothing."""
    update = UPDATES["chunked" if name == "triton" and not has_kernels(device) else name]
    config = OptimizerConfig(lr=1e-2)
    groups = [group(device, torch.float32, moments), group(torch.device("cpu"), torch.float64, torch.float64)]
    for place, rule in zip(groups, (update, update_chunked), strict=True):
        where = place.mains[0].device
        for step in range(3):
            count = torch.tensor(float(step), device=where)
            rule(place, config, 1e-2, count, torch.tensor(0.0, device=where))
        before = place.mains[0].clone()
        rule(place, config, 1e-2, torch.tensor(3.0, device=where), torch.tensor(1.0, device=where))
        assert torch.equal(before, place.mains[0])
    check(groups[0].mains[0], groups[1].mains[0], 1e-6 if moments is torch.float32 else 1e-3)
    check(groups[0].states[0][0], groups[1].states[0][0], TOLERANCES[moments])


def group(device: torch.device, dtype: torch.dtype, moments: torch.dtype) -> ParamGroup:
    """Return one flat tensor of odd length, with a gradient and empty moments."""
    weight, grad = (normal(1001, seed=seed).to(device, torch.float32).to(dtype) for seed in (1, 2))
    return ParamGroup(0.1, [weight], [grad], states=tuple([torch.zeros_like(weight, dtype=moments)] for _ in range(2)))
