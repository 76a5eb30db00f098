"""Fact: experts multiply the fp8 values of each row and of each expert's matrix, and keep rows as fp8 for backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.experts.grouped_matmul import GroupedMatmul
from megatron3d.experts.rows import Rows, groups_of, ranges
from megatron3d.linear.fp8 import dequantized
from megatron3d.linear.fp8_plan import RECIPES, Fp8
from megatron3d.linear.fp8_rows import Fp8RowsGemm
from megatron3d.linear.gemm import Operand
from megatron3d.linear.main_grad import MainGrads
from megatron3d.linear.overlap_plan import Direction
from megatron3d.linear.scaled_mm import ScaledKernel
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from tests.support.saved_tensors import saved_beside
from tests.support.shards import normal
from tests.support.turn_ranks import make_comm

COUNTS = (3, 0, 5, 1)
E, R, N, K = len(COUNTS), sum(COUNTS), 256, 128
GROUPS = groups_of(COUNTS, torch.tensor(COUNTS))


def gemm_of(recipe: str) -> Fp8RowsGemm:
    return Fp8RowsGemm(Fp8(recipe, "hybrid"), MatmulPlan(), make_comm(Mesh((("x", 1),)), []))


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return X, W of all experts, and dY, with rows and experts of very different sizes."""
    rows, experts = torch.logspace(-3, 3, R).double(), torch.logspace(2, -2, E).double().repeat_interleave(N)
    shapes = ((R, K), (E * N, K), (R, N))
    x, w, dy = (normal(*shape, seed=seed).double() for seed, shape in enumerate(shapes))
    return (x * rows[:, None]).to(dtype), (w * experts[:, None]).to(dtype), (dy * rows.flip(0)[:, None]).to(dtype)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_experts_multiply_the_values_of_their_own_rows_and_matrix(recipe: str, dtype: torch.dtype) -> None:
    gemm, (x, w, dy) = gemm_of(recipe), inputs(dtype)
    x, w = x.requires_grad_(), w.requires_grad_()
    y = GroupedMatmul(E, MainGrads(), gemm=gemm)(Rows(x), w, GROUPS)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    for part, w_NK, dw_NK in zip(ranges(COUNTS), w.detach().chunk(E), dw.chunk(E), strict=True):
        rows, grads = gemm.x(x[part].detach()), gemm.gathered(gemm.dy(dy[part]))[0]
        ahead, back = (dequantized(gemm.w(w_NK, at)).double() for at in Direction)
        values = dequantized(rows).double()
        wanted = {
            "Y": (y[part], values @ ahead.T),
            "dX": (dx[part], dequantized(grads).double() @ back.T),
            "dW": (dw_NK, dy[part].double().T @ values),
        }
        for name, (got, exact) in wanted.items():
            tolerance = 1e-12 if dtype == torch.float64 else 0.02
            torch.testing.assert_close(
                got.double(),
                exact,
                rtol=tolerance,
                atol=tolerance * float(exact.abs().max() if len(exact) else 0),
                msg=partial("{}: {}".format, name),
            )
    assert y.dtype == dx.dtype == dw.dtype == dtype


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_scaled_kernel_multiplies_what_is_restored_without(recipe: str) -> None:
    """The kernel is that of rows, which CPUs have."""
    kernel = ScaledKernel("rowwise", ((0, 0), (99, 0)), (0, 0), takes_e5m2=True)
    comm = make_comm(Mesh((("x", 1),)), [])
    scaled = Fp8RowsGemm(
        Fp8(recipe, "hybrid"), MatmulPlan(), comm, lambda name, *_: kernel if name == "rowwise" else None
    )
    x, w, dy = inputs(torch.bfloat16)
    results = []
    for gemm in (scaled, gemm_of(recipe)):
        x, w = (each.detach().requires_grad_() for each in (x, w))
        y = GroupedMatmul(E, MainGrads(), gemm=gemm)(Rows(x), w, GROUPS)
        results.append((y.detach(), *torch.autograd.grad(y, (x, w), dy)))
    for got, wanted in zip(*results, strict=True):
        of_row = wanted.abs().amax(1, keepdim=True)
        assert ((got - wanted).abs() <= 2.0**-6 * of_row).all() and of_row.any()
    assert torch.equal(results[0][2], results[1][2]), "dW is multiplied in the network's dtype"


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_row_or_expert_changes_the_scales_of_another(recipe: str) -> None:
    """Which rows meet on a rank depends on the layout; the bits of a row do not."""
    gemm, (x, _, dy) = gemm_of(recipe), inputs(torch.float32)

    def along_n(dy: Tensor) -> Operand:
        return gemm.gathered(gemm.dy(dy))[0]

    for t, quantize in ((x, gemm.x), (dy, along_n)):
        whole, alone = quantize(t), [quantize(row) for row in t.split(1)]
        for which in ("data", "scales"):
            bits = [getattr(each, which).view(torch.uint8) for each in (whole, *alone)]
            assert torch.equal(bits[0], torch.cat(bits[1:]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_backward_keeps_rows_in_fp8(recipe: str) -> None:
    x, w, _ = inputs(torch.bfloat16)
    gemm, x, w = gemm_of(recipe), x.requires_grad_(), torch.nn.Parameter(w)
    with saved_beside([w]) as saved:
        GroupedMatmul(E, MainGrads(), gemm=gemm)(Rows(x), w, GROUPS)
    block = RECIPES[recipe].block or K
    assert saved.num_bytes == R * K + R * (K // block) * RECIPES[recipe].scale_bytes


MODEL = {
    "family": "llama",
    "hidden_size": 512,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 512,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "seq_length": 512,
    "vocab_size": 64,
}


def problems(model: dict[str, Any], parallel: dict[str, Any], **train: Any) -> list[str]:
    train = {"micro_batch_size": 1, "global_batch_size": 4, "precision": "bf16", "fp8": "e4m3", **train}
    return check(Config.model_validate({"model": MODEL | model, "parallel": parallel, "train": train}), 4)


def test_split_experts_have_whole_blocks() -> None:
    etp = {"expert_tensor_parallel_size": 2}
    assert problems({}, etp) == []
    found = problems({"moe_ffn_hidden_size": 128}, etp)
    names = ("gate of mlp.experts.fc1", "up of mlp.experts.fc1", "input of mlp.experts.fc2")
    for problem, name in zip(found, names, strict=True):
        assert f"128 features of {name} are divided among 2 ranks into shards of 64; use a multiple of 256" in problem
    assert problems({"moe_ffn_hidden_size": 128}, etp, fp8_recipe="mxfp8") == []
    assert problems({"moe_ffn_hidden_size": 120}, etp, fp8_recipe="rowwise") == []


def test_experts_can_stay_wide() -> None:
    assert problems({"moe_ffn_hidden_size": 120}, {}, fp8_exclude=["*.experts.*"]) == []
