"""Fact: fp8 operands have the same bits on the GPU as on the CPU, and each role multiplies them as float64 does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron3d.linear.fp8 import Fp8Gemm
from megatron3d.linear.fp8_plan import FORMATS, RECIPES, Fp8
from megatron3d.linear.gemm import Operand
from megatron3d.linear.overlap_plan import Direction
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from tests.support.shards import error, normal
from tests.support.turn_ranks import make_comm

# Rounding of bf16, and of a kernel whose tensor cores sum in fewer bits than fp32.
BF16, FAST = 2.0**-8, 2.0**-9
SIZES = [(256, 384, 128), (384, 128, 1280), (512, 1024, 256)]  # M, N, K; the second has padded scales of 128 x 128


def bits(operand: Operand) -> list[Tensor]:
    """Return data and scales of an operand as integers on the CPU."""
    assert operand.scales is not None, "the operand is quantized"
    kinds = {1: torch.uint8, 4: torch.int32}
    return [t.view(kinds[t.element_size()]).cpu() for t in (operand.data, operand.scales)]


def operands(gemm: Fp8Gemm, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, tuple[Operand, Operand]]:
    """Return the two operands of each role on one rank."""
    of_x, (along_n, along_m) = gemm.x(x), gemm.gathered(gemm.dy(dy))
    kept, shard = gemm.kept(gemm.keep(x, of_x, w))
    return {
        "y": (of_x, gemm.w(w)),
        "dx": (along_n, gemm.w(shard, Direction.BACKWARD)),
        "dw": (along_m, kept),
    }


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_role_multiplies_the_bits_of_the_cpu(
    device: torch.device, recipe: str, formats: str, sizes: tuple[int, int, int]
) -> None:
    """Rows and features differ in size by powers of 2, so that a scale of another block shows."""
    m, n, k = sizes
    gemm = Fp8Gemm(Fp8(recipe, formats), MatmulPlan(), make_comm(Mesh((("x", 1),)), []))

    def tensor(rows: int, columns: int, seed: int) -> Tensor:
        t = normal(rows, columns, seed=seed)
        return (t * torch.logspace(-3, 1, rows).unsqueeze(1) * torch.logspace(1, -1, columns)).bfloat16()

    tensors = tensor(m, k, 1), tensor(n, k, 2), tensor(m, n, 3)
    got, expected = operands(gemm, *(t.to(device) for t in tensors)), operands(gemm, *tensors)
    wide = operands(gemm, *(t.double() for t in tensors))
    for role, pair in got.items():
        for on_device, on_cpu in zip(pair, expected[role], strict=True):
            assert all(map(torch.equal, bits(on_device), bits(on_cpu))), role
    products = {"y": gemm.y(*got["y"]), "dx": gemm.dx(*got["dx"])}
    exact = {"y": gemm.y(*wide["y"]), "dx": gemm.dx(*wide["dx"])}
    for role, y in products.items():
        assert y.dtype == torch.bfloat16 and error(y.cpu().double(), exact[role]) < BF16, role
    total = torch.full((n, k), torch.nan, device=device)
    gemm.dw_into(total, *got["dw"], holds_gradient=False)
    gemm.dw_into(total, *got["dw"], holds_gradient=True)
    dw = gemm.dw(*wide["dw"], torch.float64)
    assert error(total.cpu().double(), 2 * dw) < (BF16 if device.type == "cpu" or recipe == "rowwise" else FAST)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_that_overflowed_is_not_a_number(device: torch.device, recipe: str) -> None:
    """A run must see an overflow, also by way of scaled kernels, whose scales are then not finite."""
    x, w = normal(256, 256, seed=1).bfloat16().to(device), normal(256, 256, seed=2).bfloat16().to(device)
    gemm = Fp8Gemm(Fp8(recipe, "e4m3"), MatmulPlan(), make_comm(Mesh((("x", 1),)), []))
    x[3, 5] = torch.inf
    assert not gemm.y(gemm.x(x), gemm.w(w))[3].isfinite().any()
