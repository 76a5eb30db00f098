"""Fact: the fast and the plain GEMM agree, for operands of any strides, in every precision, and recipes in every role.

A recipe that stores each element as a mantissa and a scale shows that collectives move, and backward keeps, operands.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.linear import gemm
from megatron3d.linear.gemm import (
    GEMMS,
    NATIVE,
    Gemm,
    Kept,
    Operand,
    add_product,
    onednn_rule,
    product,
    put_product,
    uses_onednn,
)
from megatron3d.linear.matmul import Matmul
from megatron3d.linear.overlap_plan import Direction
from megatron3d.model.gpt import GPT
from megatron3d.model.stage_plan import StageAssignment, make_stages
from megatron3d.ops.plan import LossChunk
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from tests.support.matmuls import linear
from tests.support.shards import every_group
from tests.support.turn_ranks import run_turns
from tests.unit.linear.test_matmul import cases, errors


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def cpu_info(vendor: str, family: int) -> str:
    """Return the first lines of Linux's description of a CPU."""
    return f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\n"


CPUS = {
    "Sapphire Rapids": (cpu_info("GenuineIntel", 6), "none"),
    "Zen 4": (cpu_info("AuthenticAMD", 25), "Y and dX, not dW"),
    "Zen 5": (cpu_info("AuthenticAMD", 26), "all"),
    "unknown": (cpu_info("Sample", 1), "none"),
    "not Linux on x86": ("", "none"),
}


@pytest.fixture(params=[text for text, _ in CPUS.values()], ids=list(CPUS))
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as on each of the CPUs."""
    monkeypatch.setattr(gemm, "_rule_of_this_cpu", lambda: onednn_rule(request.param))


@pytest.mark.parametrize("name", CPUS)
def test_the_kernel_follows_from_the_cpu_alone(name: str) -> None:
    text, expected = CPUS[name]
    assert onednn_rule(text)[0] == expected


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 5e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 13, 5), (96, 160, 300), (64, 1, 33)])
def test_gemms_agree_with_float64(dtype: torch.dtype, tolerance: float, m: int, n: int, k: int) -> None:
    a, b, bias = normal(m, k), normal(n, k), normal(n)
    expected = F.linear(a, b, bias)
    turned = (a.T.contiguous().T, b.T.contiguous().T)
    for left in (a, turned[0]):
        for right in (b, turned[1]):
            got = product(left.to(dtype), right.to(dtype), bias.to(dtype))
            assert got.is_contiguous() and got.dtype == dtype
            assert (got.double() - expected).abs().max() <= tolerance * expected.abs().max()
            total = torch.full_like(got, torch.nan)
            put_product(total, left.to(dtype), right.to(dtype))
            total = add_product(total, left.to(dtype), right.to(dtype))
            exact = 2 * (a @ b.T)
            assert (total.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.usefixtures("cpu")
def test_a_linear_layer_has_torchs_gradients_in_fp32() -> None:
    alone = ProcessComm(Mesh((("t", 1),)), [])
    inputs = [normal(40, 24).float(), normal(56, 24).float(), normal(56).float()]
    ours, torchs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    y = linear(*ours, MatmulPlan(), alone)  # type: ignore[call-arg]
    expected = F.linear(*torchs)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)
    y.square().sum().backward()
    expected.square().sum().backward()
    for mine, theirs in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-2)


def test_only_fp32_on_a_cpu_uses_onednn() -> None:
    assert not uses_onednn(torch.device("cpu"), torch.float64)
    assert not uses_onednn(torch.device("cpu"), torch.bfloat16)
    assert not uses_onednn(torch.device("meta"), torch.float32)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_accumulated_gemms_of_slices_equal_the_whole_gemm(dtype: torch.dtype, tolerance: float) -> None:
    """bf16 accumulation is as accurate as one GEMM, since the sum is fp32.  Column slices are not contiguous."""
    a, b = (torch.randn(size, 640, generator=torch.Generator().manual_seed(size)).to(dtype) for size in (9, 5))
    total = product(a[:, :10], b[:, :10])
    for start in range(10, 640, 10):
        total = add_product(total, a[:, start : start + 10], b[:, start : start + 10])
    exact = a.double() @ b.double().T
    assert (total.to(dtype).double() - exact).abs().max() < tolerance * exact.abs().max()


class ScaledGemm(Gemm):
    """Stores each value as a mantissa below 1 and a power of two, its scale."""

    def x(self, x_MK: Tensor, is_kept: bool = False) -> Operand:
        mantissa, exponent = torch.frexp(x_MK)
        return Operand(mantissa, torch.ldexp(torch.ones_like(mantissa), exponent))

    def w(self, w_NK: Tensor, at: Direction = Direction.FORWARD) -> Operand:
        return self.x(w_NK)

    def dy(self, dy_MN: Tensor) -> Operand:
        return self.x(dy_MN)

    def keep(self, x_MK: Tensor, x: Operand, w_NK: Tensor) -> Kept:
        return x.data, x.scales, w_NK

    def kept(self, saved: Kept) -> tuple[Operand, Tensor]:
        data, scales, w_NK = saved
        assert data is not None and w_NK is not None, "both shards are kept"
        return Operand(data, scales), w_NK

    def y(self, x: Operand, w: Operand, bias_N: Tensor | None = None, into_MN: Tensor | None = None) -> Tensor:
        return super().y(values(x), values(w), bias_N, into_MN)

    def dx(self, dy: Operand, w: Operand, into_MK: Tensor | None = None) -> Tensor:
        return super().dx(values(dy), values(w), into_MK)

    def dw(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        return super().dw(values(dy), values(x), dtype)

    def dw_into(self, main_grad_NK: Tensor, dy: Operand, x: Operand, holds_gradient: bool) -> None:
        super().dw_into(main_grad_NK, values(dy), values(x), holds_gradient)


def values(operand: Operand) -> Operand:
    assert operand.scales is not None, "the scales are lost"
    return Operand(operand.data * operand.scales)


def wrong(rank: int, world_size: int) -> list[str]:
    comms = {mesh: every_group(mesh.at(rank)) for mesh in dict.fromkeys(mesh for _, mesh, _ in cases())}
    return [
        f"{name} on rank {rank}: {found}"
        for number, (name, mesh, plan) in enumerate(cases())
        for recipe in (ScaledGemm(), GEMMS["reference"])
        if not max((found := errors(Matmul(plan.on(mesh), comms[mesh], gemm=recipe), number % 3 != 0)).values()) < 1e-13
    ]


def test_every_plan_multiplies_operands_with_scales() -> None:
    assert run_turns(wrong, 8) == [[]] * 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("recipe", [ScaledGemm(), GEMMS["reference"]], ids=["scaled", "reference"])
def test_recipes_agree_in_every_role(recipe: Gemm, dtype: torch.dtype) -> None:
    x, w, dy, b = (normal(*shape).to(dtype) for shape in ((6, 5), (4, 5), (6, 4), (4,)))
    grad = normal(4, 5).to(torch.promote_types(dtype, torch.float32))

    def roles(gemm: Gemm) -> list[Tensor]:
        of_x, of_w, of_dy = gemm.x(x), gemm.w(w), gemm.dy(dy)
        sums = grad.clone(), torch.empty_like(grad)
        for total, holds_gradient in zip(sums, (True, False), strict=True):
            gemm.dw_into(total, of_dy, of_x, holds_gradient)
        written = gemm.y(of_x, of_w, into_MN=x.new_empty(6, 4)), gemm.dx(of_dy, of_w, into_MK=x.new_empty(6, 5))
        return [gemm.y(of_x, of_w, b), gemm.dx(of_dy, of_w), gemm.dw(of_dy, of_x, grad.dtype), *sums, *written]

    for found, expected in zip(roles(recipe), roles(NATIVE), strict=True):
        coarse = 2e-2 if dtype == torch.bfloat16 else 1e-12  # a CPU's kernel rounds dW to bf16 before main_grad
        torch.testing.assert_close(found, expected, rtol=coarse, atol=coarse)


SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24, "seq_length": 6}


def step(keys: dict[str, int], recipe: Gemm) -> list[Tensor]:
    """Return loss and gradients of a model whose linears multiply by a recipe."""
    arch = resolve_architecture(ModelConfig.model_validate(SIZES | keys), vocab_size=128)
    mode = build_mode(next(iter(MODES)), None, (1,))
    assignment = StageAssignment(make_stages([arch.num_layers]), (0,))
    comm = ProcessComm(Mesh((("pipeline", 1), ("replica", 1), ("data", 1), *mode.axes)), ())
    model = GPT(arch, mode, comm, assignment, LossChunk(5), gemm=recipe).to_empty(device="cpu").double()
    for param in model.parameters():
        param.data.copy_(normal(*param.shape) / 10)
    model.routers.allocate(torch.device("cpu"))
    tokens_BT = torch.arange(2 * 7).view(2, 7)
    loss = model(assignment.stages[0], None, model.begin(tokens_BT, 12, all_tokens=12))
    loss.sum().backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


@pytest.mark.parametrize("keys", [{}, {"num_moe_experts": 4, "moe_router_topk": 2}], ids=["dense", "experts"])
@pytest.mark.parametrize("recipe", [ScaledGemm(), GEMMS["reference"]], ids=["scaled", "reference"])
def test_a_model_trains_by_any_recipe(recipe: Gemm, keys: dict[str, int]) -> None:
    calls = []

    class Counted(type(recipe)):  # type: ignore[misc]
        def dw(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
            calls.append(dtype)
            return super().dw(dy, x, dtype)

    found, expected = step(keys, Counted()), step(keys, NATIVE)
    assert len(calls) == 2 * 4 if not keys else len(calls) >= 2 * (2 + 2 * 4), "every linear multiplies by the recipe"
    for ours, native in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, native, rtol=1e-12, atol=1e-12)
