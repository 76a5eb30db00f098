"""Fact: scaled kernels multiply what the reference restores, are taken where the table says, and read their scales."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from megatron3d.linear.fp8 import Fp8Gemm, dequantized
from megatron3d.linear.fp8_plan import FORMATS, RECIPES, Blocks, Fp8
from megatron3d.linear.gemm import Form, Operand
from megatron3d.linear.scaled_mm import (
    E4M3,
    E5M2,
    E8M0,
    KERNELS,
    GemmDevice,
    ScaledKernel,
    arranged,
    as_mx_scales,
    describe_fp8,
    fits,
    gemm_device,
    kernel_of,
    kernel_on,
    outer_first,
    padded,
    swizzled,
)
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from tests.support.shards import error, normal
from tests.support.turn_ranks import make_comm
from tests.unit.linear.test_fp8 import products_of

CPU = torch.device("cpu")


def kernel(recipe: str, has_fp32: bool = True) -> ScaledKernel:
    """Return torch's kernel on CPUs, which has blocks of a row or the whole tensor alone."""
    return ScaledKernel(recipe, ((0, 0), (99, 0)), (0, 0), has_fp32, takes_e5m2=True)


def gemm_with(recipe: str, formats: str, scaled: ScaledKernel | None) -> Fp8Gemm:
    return Fp8Gemm(Fp8(recipe, formats), MatmulPlan(), make_comm(Mesh((("x", 1),)), []), lambda *_: scaled)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("has_fp32", [True, False])
def test_the_kernels_of_cpus_multiply_what_the_reference_restores(recipe: str, formats: str, has_fp32: bool) -> None:
    """All roles: rounding of bf16 in Y and dX; dW is fp32 where the kernel returns it."""
    m, n, k = 96, 80, 64
    x, w, dy = (normal(*shape, seed=s).bfloat16() for s, shape in enumerate(((m, k), (n, k), (m, n))))
    got = products_of(gemm_with(recipe, formats, kernel(recipe, has_fp32)), x, w, dy)
    expected = products_of(gemm_with(recipe, formats, None), x.double(), w.double(), dy.double())
    for role, y, wide in zip(("y", "dx", "dw"), got, expected, strict=True):
        bound = 1e-6 if role == "dw" and has_fp32 else 2.0**-8
        assert 0 < error(y.double(), wide.double()) < bound, role


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_bias_is_added_and_main_grad_accumulates(recipe: str) -> None:
    scaled, reference = gemm_with(recipe, "e4m3", kernel(recipe)), gemm_with(recipe, "e4m3", None)
    x, w, bias = normal(32, 64, seed=1).bfloat16(), normal(48, 64, seed=2).bfloat16(), normal(48, seed=3).bfloat16()
    y, without = (scaled.y(scaled.x(x), scaled.w(w), each) for each in (bias, None))
    assert torch.equal(y, without + bias)
    dy = scaled.gathered(scaled.dy(normal(32, 48, seed=4).bfloat16()))[1]
    kept = scaled.kept(scaled.keep(x, scaled.x(x), w))[0]
    got, expected = torch.full((48, 64), torch.nan), torch.zeros(48, 64)
    for gemm, total in ((scaled, got), (reference, expected)):
        gemm.dw_into(total, dy, kept, holds_gradient=False)
        gemm.dw_into(total, dy, kept, holds_gradient=True)
    assert error(got.double(), expected.double()) < (1e-6 if recipe == "tensorwise" else 2.0**-8)
    assert error(got.double(), 2 * scaled.dw(dy, kept, torch.float32).double()) == 0


# The table.

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)
# Recipe: by compute capability and CUDA whether there is a kernel (+), one that returns bf16 alone (b), takes 1 x 32
# blocks in their place (m), or none (-).
EXPECTED = {
    "tensorwise": "-++++++",
    "rowwise": "-bb+bbb",
    "blockwise": "---+mmm",
    "mxfp8": "----+++",
}
MACHINES = [
    GemmDevice("A100", (8, 0), (13, 0)),
    GemmDevice("L40S", ADA, (13, 0)),
    GemmDevice("H100", HOPPER, (12, 8)),
    GemmDevice("H100", HOPPER, (13, 0)),
    GemmDevice("B200", BLACKWELL, (12, 8)),
    GemmDevice("B300", (10, 3), (13, 0)),
    GemmDevice("RTX 5090", (12, 0), (13, 0)),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_machines_have_the_kernels_of_the_table(recipe: str) -> None:
    def sign(found: ScaledKernel | None) -> str:
        return "-" if found is None else "m" if found.as_mx else "+" if found.has_fp32 else "b"

    assert "".join(sign(kernel_on(machine, recipe)) for machine in MACHINES) == EXPECTED[recipe]
    assert kernel_on(gemm_device(CPU), recipe) is None


def test_wider_runs_and_fp16_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron3d.linear.scaled_mm.gemm_device", lambda device: MACHINES[3])
    gpu = torch.device("meta")  # stands for one that no other test asks about
    for dtype in (torch.float64, torch.float32, torch.float16):
        assert all(kernel_of(recipe, gpu, dtype) is None for recipe in RECIPES)
    assert kernel_of("blockwise", gpu, torch.bfloat16) == KERNELS[3]


@pytest.mark.parametrize(
    ("formats", "sizes", "is_taken"),
    [
        ((E4M3, E4M3), (1, 16, 32), True),
        ((E5M2, E4M3), (17, 16, 32), False),
        ((E4M3, E4M3), (0, 16, 32), False),
        ((E4M3, E4M3), (16, 24, 32), False),
        ((E4M3, E4M3), (16, 16, 24), False),
    ],
)
def test_a_kernel_takes_formats_and_sizes_that_fit(
    formats: tuple[torch.dtype, torch.dtype], sizes: tuple[int, int, int], is_taken: bool
) -> None:
    m, n, k = sizes
    a, b = (Operand(torch.empty(rows, k, dtype=fp8)) for rows, fp8 in zip((m, n), formats, strict=True))
    assert fits(KERNELS[3], a, b) == is_taken
    assert fits(KERNELS[0], a, b) == (is_taken or formats[0] == E5M2)


@pytest.mark.parametrize(
    ("machine", "recipe", "formats", "dtype", "expected"),
    [
        (MACHINES[3], "blockwise", "e4m3", torch.bfloat16, "fp8 blockwise, e4m3: torch's scaled GEMM"),
        (
            MACHINES[3],
            "blockwise",
            "hybrid",
            torch.bfloat16,
            "fp8 blockwise, hybrid: Y by torch's scaled GEMM; dX and dW restored to bfloat16 and multiplied, since "
            "that takes e4m3 alone",
        ),
        (
            MACHINES[4],
            "blockwise",
            "e4m3",
            torch.bfloat16,
            "fp8 blockwise, e4m3: torch's scaled GEMM of 1 x 32 blocks",
        ),
        (
            MACHINES[0],
            "tensorwise",
            "e4m3",
            torch.bfloat16,
            "fp8 tensorwise, e4m3: restored to float32 and multiplied; there is no scaled GEMM for it with bfloat16 on "
            "A100",
        ),
        (
            gemm_device(CPU),
            "mxfp8",
            "e4m3",
            torch.float32,
            "fp8 mxfp8, e4m3: restored to float32 and multiplied; there is no scaled GEMM for it with float32 on CPUs",
        ),
    ],
)
def test_the_start_says_what_multiplies(
    machine: GemmDevice, recipe: str, formats: str, dtype: torch.dtype, expected: str
) -> None:
    assert describe_fp8(Fp8(recipe, formats), machine, dtype) == expected


# Layouts of scales, against loops over cuBLAS's formulas.


def offsets(scales: Tensor) -> Tensor:
    """Return the elements of scales in the order of memory."""
    return scales.as_strided((scales.untyped_storage().nbytes() // scales.element_size(),), (1,))


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (1, 1), (129, 3), (300, 9), (32, 12)])
def test_scales_of_1_x_32_lie_in_tiles(rows: int, blocks: int) -> None:
    scales = torch.randint(1, 254, (rows, blocks), dtype=torch.uint8)
    got = swizzled(scales.view(E8M0)).view(torch.uint8)
    tiles_across = -(-blocks // 4)
    expected = torch.zeros(128 * -(-rows // 128) * 4 * tiles_across, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            tile = (row // 128) * tiles_across + block // 4
            expected[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4] = scales[row, block]
    assert got.is_contiguous() and torch.equal(got, expected)


@pytest.mark.parametrize(("rows", "blocks"), [(256, 3), (128, 1), (256, 8)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_scales_of_1_x_128_have_the_rows_of_a_block_side_by_side(rows: int, blocks: int, is_transposed: bool) -> None:
    scales = torch.rand(blocks, rows).T if is_transposed else torch.rand(rows, blocks)
    got = outer_first(scales)
    assert torch.equal(got, scales) and got.stride() == (1, rows)
    assert all(offsets(got)[block * rows + row] == scales[row, block] for row in range(rows) for block in range(blocks))


@pytest.mark.parametrize(("rows", "blocks"), [(2, 3), (1, 1), (3, 8)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_scales_of_128_x_128_are_padded_to_16_bytes(rows: int, blocks: int, is_transposed: bool) -> None:
    wide = -(-blocks // 4) * 4
    scales = torch.rand(blocks, rows).T if is_transposed else torch.rand(rows, blocks)
    got = padded(scales)
    assert got.shape == (wide, rows) and got.stride() == (1, wide)
    assert all(offsets(got)[row * wide + block] == scales[row, block] for row in range(rows) for block in range(blocks))


@pytest.mark.parametrize("blocks", [Blocks(1, 128), Blocks(128, 128)])
def test_blocks_of_128_are_restored_as_blocks_of_32(blocks: Blocks) -> None:
    assert blocks.rows and blocks.summed
    data = normal(256, 384, seed=1).to(E4M3)
    scales = torch.exp2(torch.randint(-118, 119, (256 // blocks.rows, 3)).float())
    scales[0, 1] = torch.nan
    form = Form(blocks.rows, blocks.summed, torch.float32)
    as_mx = as_mx_scales(scales, form)
    assert as_mx.shape == (256, 12) and as_mx.dtype == E8M0
    expected = dequantized(Operand(data, scales, form))
    restored = dequantized(Operand(data, as_mx, Form(1, 32, torch.float32)))
    assert torch.equal(restored.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_every_recipe_has_a_layout() -> None:
    for recipe in RECIPES.values():
        for blocks in (recipe.x, recipe.w):
            rows, summed = (size or 256 for size in blocks)
            scales = torch.ones(256 // rows, 256 // summed).to(E8M0 if recipe.scale_bytes == 1 else torch.float32)
            operand = Operand(torch.empty(256, 256, dtype=E4M3), scales, Form(*blocks, torch.bfloat16))
            scaling, _, layout = arranged(operand)
            assert isinstance(scaling, ScalingType) and layout.dtype == scales.dtype


def test_torch_has_what_the_kernels_are_called_by() -> None:
    """Names of 2.11, the oldest release that this runs with."""
    assert callable(F.scaled_mm)
    assert {"TensorWise", "RowWise", "BlockWise1x32", "BlockWise1x128", "BlockWise128x128"} <= set(
        ScalingType.__members__
    )
