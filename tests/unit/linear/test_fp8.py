"""Fact: fp8 operands have the same bits in every layout, before and after an all-gather, and those that others publish.

Peers: torchao's tensorwise, rowwise and mxfp8 recipes, and DeepSeek's blocks, written here from the mathematics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torchao.float8 import config as torchao_config
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from megatron3d.comm.interface import Comm
from megatron3d.linear.collectives import W_DIMS, X_DIMS, Y_DIMS, gather_operand
from megatron3d.linear.fp8 import DTYPES, SMALLEST, Fp8Gemm, dequantized, largest_of_blocks, scales_of
from megatron3d.linear.fp8_plan import FORMATS, RECIPES, Blocks, Fp8, largest_value_axes
from megatron3d.linear.gemm import Form, Gemm, Operand
from megatron3d.linear.matmul import Matmul
from megatron3d.linear.overlap_plan import Direction
from megatron3d.linear.scaled_mm import E4M3, E5M2
from megatron3d.parallel.layout import Layout
from megatron3d.parallel.matmul_plan import MatmulPlan, moves
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from tests.support.shards import cut, error, every_group, normal
from tests.support.turn_ranks import make_comm, run_turns

ONE = Mesh((("x", 1),))
NAMES = [(recipe, formats) for recipe in RECIPES for formats in FORMATS]


def gemm_of(recipe: str, formats: str = "e4m3", plan: MatmulPlan | None = None, comm: Comm | None = None) -> Fp8Gemm:
    """Return the GEMM of a linear, by default on one rank."""
    return Fp8Gemm(Fp8(recipe, formats), plan or MatmulPlan(), comm or make_comm(ONE, []))


def values(seed: int, *shape: int) -> Tensor:
    """Return values of very different sizes in rows and columns, so that a wrong block has another scale."""
    t = normal(*shape, seed=seed)
    return t * torch.logspace(-6, 2, shape[0]).unsqueeze(1) * torch.logspace(1, -3, shape[1])


class Sizes(NamedTuple):
    """Global sizes of a matmul that every plan on eight ranks cuts at multiples of a block."""

    m: int
    n: int
    k: int

    @classmethod
    def of(cls, recipe: str) -> Sizes:
        """Return the smallest sizes of a recipe."""
        block = RECIPES[recipe].block or 3
        return cls(8 * block, 8 * block, 8 * block)


def plans() -> Iterator[tuple[str, Mesh, MatmulPlan]]:
    """Yield the plans of linears of every form on eight ranks."""
    for name, entry in MODES.items():
        for form in entry.forms:
            mode = build_mode(name, form, entry.default_shape(8))
            for which in ("expand", "contract", "latent"):
                yield f"{name} {form} {which}", Mesh(mode.axes), getattr(mode, which)


def same(got: Operand, expected: Operand, layout: Layout, mesh: Mesh) -> bool:
    """Return whether an operand is the box of the whole tensor's operand that a layout gives this rank, bit for bit."""
    form = expected.form
    assert form is not None and got.scales is not None and expected.scales is not None, "both are quantized"
    layout = layout[::-1] if form.is_transposed else layout
    data = cut(expected.data.view(torch.uint8), layout, mesh)
    split = tuple(axes if size is not None else () for size, axes in zip(form[:2], layout, strict=True))
    scales = cut(expected.scales, split, mesh)
    return got.form == form and torch.equal(got.data.view(torch.uint8), data) and same_scales(got.scales, scales)


def same_scales(got: Tensor, expected: Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(got.float(), expected.float())


def different(rank: int, world_size: int, recipe: str, formats: str) -> list[str]:
    """Return the operands of each plan that are not those of one rank."""
    m, n, k = Sizes.of(recipe)
    x_MK, w_NK, dy_MN = values(1, m, k), values(2, n, k), values(3, m, n)
    one, found = gemm_of(recipe, formats), []
    of_x, of_dx = one.x(x_MK), one.gathered(one.dy(dy_MN))
    of_dw = one.kept(one.keep(x_MK, of_x, w_NK))[0]
    for name, mesh, plan in plans():
        mesh, plan = mesh.at(rank), plan.on(mesh)
        comm = every_group(mesh)
        gemm = gemm_of(recipe, formats, plan, comm)
        x, w, dy = cut(x_MK, plan.x_layout, mesh), cut(w_NK, plan.w_layout, mesh), cut(dy_MN, plan.y_layout, mesh)
        mine = gemm.x(x)
        kept = gemm.kept(gemm.keep(x, mine, w))[0]
        shards = {
            "X": (mine, of_x, plan.x_layout, (plan.m, plan.k), plan.x, X_DIMS),
            "X^T": (kept, of_dw, plan.x_layout, (plan.m, plan.k), plan.x, X_DIMS),
        }
        for at in Direction:
            shards[f"W {at.value}"] = (gemm.w(w, at), one.w(w_NK, at), plan.w_layout, (plan.n, plan.k), plan.w, W_DIMS)
        for which, (shard, whole, stored, gathered, table, dims) in shards.items():
            if not same(shard, whole, stored, mesh):
                found.append(f"{name}: shard of {which}")
            if not same(gather_operand(shard, table, dims, comm).wait(), whole, gathered, mesh):
                found.append(f"{name}: gathered {which}")
        forms = gemm.gathered(gather_operand(gemm.dy(dy), plan.dy, Y_DIMS, comm).wait())
        for which, got, expected in zip(("dX", "dW"), forms, of_dx, strict=True):
            if not same(got, expected, (plan.m, plan.n), mesh):
                found.append(f"{name}: dY of {which}")
    return found


@pytest.mark.parametrize(("recipe", "formats"), NAMES)
def test_every_layout_quantizes_to_the_same_bits(recipe: str, formats: str) -> None:
    assert run_turns(different, 8, recipe, formats) == [[]] * 8


def test_largest_values_are_reduced_over_the_declared_axes() -> None:
    """The groups of a run are those that quantization communicates over, of every plan and recipe."""

    def communicates(rank: int, world_size: int, recipe: str) -> list[str]:
        size, found = Sizes.of(recipe), []
        for name, mesh, plan in plans():
            mesh, plan = mesh.at(rank), plan.on(mesh)
            declared = largest_value_axes(RECIPES[recipe], plan, mesh)
            moved = {axes for table in (plan.x, plan.w, plan.dy) for axes in [(axis,) for axis in table]}
            comm = make_comm(mesh, [*declared, *moved, *_groups(plan)])
            gemm = gemm_of(recipe, "e4m3", plan, comm)
            matmul = Matmul(plan, comm, gemm=gemm)
            x = cut(values(1, size.m, size.k), plan.x_layout, mesh).requires_grad_()
            w = cut(values(2, size.n, size.k), plan.w_layout, mesh).requires_grad_()
            matmul(x, w).sum().backward()
            found += [name] if x.grad is None or w.grad is None else []
        return found

    for recipe, entry in RECIPES.items():
        if entry.block is None:
            assert run_turns(communicates, 8, recipe) == [[]] * 8
        else:
            assert not any(largest_value_axes(entry, plan.on(mesh), mesh) for _, mesh, plan in plans())


def _groups(plan: MatmulPlan) -> Iterator[tuple[str, ...]]:
    for table in (plan.x, plan.w, plan.y, plan.dy, {axis: plan.x.get(axis) for axis in plan.n}):
        yield from (move.axes for move in moves(table))


def products_of(gemm: Gemm, x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """Return Y, dX and dW of a linear on one rank."""
    of_x, (along_n, along_m) = gemm.x(x), gemm.gathered(gemm.dy(dy))
    kept, shard = gemm.kept(gemm.keep(x, of_x, w))
    return [
        gemm.y(of_x, gemm.w(w)),
        gemm.dx(along_n, gemm.w(shard, Direction.BACKWARD)),
        gemm.dw(along_m, kept, torch.float64),
    ]


@pytest.mark.parametrize(("recipe", "formats"), NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_three_roles_multiply_the_quantized_values(recipe: str, formats: str, dtype: torch.dtype) -> None:
    m, n, k = 256, 384, 128
    x, w, dy = (normal(*shape, seed=s).to(dtype) for s, shape in enumerate(((m, k), (n, k), (m, n))))
    gemm = gemm_of(recipe, formats)
    y, dx, dw = products_of(gemm, x, w, dy)
    exact = [x.double() @ w.double().T, dy.double() @ w.double(), dy.double().T @ x.double()]
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    # Rounding to 3 bits of mantissa, or to 2: a relative error of at most 2^-4 or 2^-3 in each of two factors, whose
    # sum over terms of random signs is far below.
    worst = 0.06 if formats == "e4m3" else 0.09
    assert all(0.005 < error(got.double(), wide) < worst for got, wide in zip((y, dx, dw), exact, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bias_in_bf16_is_added_to_wider_values(recipe: str) -> None:
    x, w, bias = (normal(*shape, seed=s).bfloat16() for s, shape in enumerate(((128, 128), (256, 128), (256,))))
    gemm = gemm_of(recipe)
    y, without = (gemm.y(gemm.x(x), gemm.w(w), each) for each in (bias, None))
    torch.testing.assert_close(y, without + bias, rtol=2.0**-7, atol=0.1)
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("blocks", [Blocks(1, 32), Blocks(32, 32), Blocks(1, None), Blocks(None, None)])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("has_powers", [False, True])
def test_scales_fill_the_format(blocks: Blocks, fp8: torch.dtype, has_powers: bool) -> None:
    """A block's largest value is at the format's end, or within a factor of 2 of it."""
    bound, t = torch.finfo(fp8).max, values(1, 64, 96).float()
    largest = largest_of_blocks(t, blocks)
    factor, inverse = scales_of(largest, fp8, has_powers)
    reached = largest * factor
    assert (reached <= bound * (1 + 1e-6)).all() and (reached > bound / 2 * (1 - 1e-6)).all()
    assert has_powers or (reached > bound * (1 - 1e-6)).all()
    torch.testing.assert_close(factor * inverse, torch.ones_like(factor), rtol=0 if has_powers else 1e-6, atol=0)


def test_powers_of_2_are_found_at_every_size() -> None:
    """The largest power of 2 that keeps a value within the format, at the edges of powers and of the format."""
    ends = torch.tensor([1.0, 1.75, 1.75 + 2**-23, 2 - 2**-23, 1 + 2**-23])
    sizes = torch.ldexp(ends.repeat(200), torch.arange(-100, 100).repeat_interleave(5)).float()
    for fp8 in (E4M3, E5M2):
        factor, _ = scales_of(sizes, fp8, has_powers=True)
        exact = torch.exp2(torch.floor(torch.log2(torch.finfo(fp8).max / sizes.double())))
        assert torch.equal(factor.double(), exact)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_code_is_restored_as_torch_converts_it(fp8: torch.dtype, dtype: torch.dtype) -> None:
    """CPUs shift codes into fp16; scales of all sizes, the smallest of which make bf16 of less than its 8 bits."""
    codes = torch.arange(256, dtype=torch.uint8).view(fp8)
    codes = codes[codes.float().isfinite()].repeat(8, 1)
    scales = torch.exp2(torch.tensor([-100, -37, -1, 0, 1, 30, 77, 110])).float()[:, None]
    restored = dequantized(Operand(codes, scales, Form(1, None, dtype)), dtype)
    assert torch.equal(restored, (codes.double() * scales).to(dtype))


@pytest.mark.parametrize(("recipe", "formats"), NAMES)
@pytest.mark.parametrize("transposes", [False, True])
def test_bf16_quantizes_to_the_bits_of_wider_values(recipe: str, formats: str, transposes: bool) -> None:
    """Bf16 is multiplied by powers of 2 as it is; the values have every size that it has, some too small for fp8."""
    sizes = torch.exp2(torch.linspace(-133, 127, 256))[:, None]
    x = (normal(256, 384, seed=3).clamp(-1.5, 1.5) * sizes).bfloat16()
    gemm = gemm_of(recipe, formats)

    def operand(t: Tensor) -> Operand:
        return gemm._quantized(t, gemm.recipe.x, gemm.dy_format, ((), ()), transposes=transposes)

    got, expected = operand(x), operand(x.float())
    assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert same_scales(*(quantized.scales for quantized in (got, expected) if quantized.scales is not None))
    assert torch.equal(gemm._values(got).data.double(), gemm._values(expected).data.double())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite_stay_so(recipe: str, bad: float) -> None:
    """An overflow must not become the format's end, since the run would go on with a wrong gradient."""
    x = normal(128, 128, seed=1)
    x[3, 5] = bad
    gemm = gemm_of(recipe)
    assert not gemm.y(gemm.x(x), gemm.w(normal(128, 128, seed=2)))[3].isfinite().any()
    assert (
        not gemm.dw(gemm.gathered(gemm.dy(normal(128, 128, seed=3)))[1], kept_x(gemm, x), torch.float64)[:, 5]
        .isfinite()
        .any()
    )


def kept_x(gemm: Gemm, x: Tensor) -> Operand:
    """Return X as backward multiplies it for dW."""
    return gemm.kept(gemm.keep(x, gemm.x(x), x))[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_tiny_values_have_finite_scales(recipe: str) -> None:
    gemm = gemm_of(recipe)
    for size in (0.0, SMALLEST / 1e5, 1e-30):
        x = gemm.x(torch.full((128, 128), size, dtype=torch.float32))
        assert x.scales is not None and x.scales.float().isfinite().all()
        torch.testing.assert_close(dequantized(x), torch.full((128, 128), size), rtol=0.07, atol=SMALLEST)


# Peers


def torchao_operand(t: Tensor, granularity: Any, dim: int, rounds: bool) -> tuple[Tensor, Tensor]:
    """Return the data and the factor of a tensor as torchao's Float8Linear quantizes it."""
    factor = tensor_to_scale(
        t, E4M3, scaling_granularity=granularity, axiswise_dim=dim, round_scales_to_power_of_2=rounds
    )
    return to_fp8_saturated(t.float() * factor, E4M3), factor


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operands_equal_torchaos(recipe: str, dtype: torch.dtype) -> None:
    """Element by element, X, W and dY in both of their forms."""
    granularity = torchao_config.ScalingGranularity
    kind = granularity.TENSORWISE if recipe == "tensorwise" else granularity.AXISWISE
    x, w, dy = (values(seed, 128, 128).to(dtype) for seed in range(3))
    gemm = gemm_of(recipe)
    pairs = [(gemm.x(x), x), (gemm.w(w), w), (gemm.w(w, Direction.BACKWARD), w.T), (kept_x(gemm, x), x.T)]
    pairs += list(zip(gemm.gathered(gemm.dy(dy)), (dy, dy.T), strict=True))
    for got, t in pairs:
        data, factor = torchao_operand(t, kind, -1, rounds=recipe == "rowwise")
        assert torch.equal(got.data.float(), data.float())
        assert got.scales is not None
        torch.testing.assert_close(got.scales, factor.reciprocal().view(got.scales.shape), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp8_operands_equal_torchaos(dtype: torch.dtype) -> None:
    x, w, dy = (values(seed, 64, 96).to(dtype) for seed in range(3))
    gemm = gemm_of("mxfp8")
    pairs = [(gemm.x(x), x), (gemm.w(w), w), (gemm.w(w, Direction.BACKWARD), w.T), (kept_x(gemm, x), x.T)]
    pairs += list(zip(gemm.gathered(gemm.dy(dy)), (dy, dy.T), strict=True))
    for got, t in pairs:
        scales, data = to_mx(t.contiguous(), E4M3, 32, ScaleCalculationMode.RCEIL)
        assert torch.equal(got.data.float(), data.float())
        assert got.scales is not None
        assert torch.equal(got.scales.view(torch.uint8), scales.view(torch.uint8))


def deepseek_blocks(t: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the data and the scales of DeepSeek's blocks of `rows` x 128, block by block.

    DeepSeek-V3 (arXiv:2412.19437, 3.3) divides by the largest value over 448, which V3.1 rounds up to a power of 2.
    """
    data, scales = torch.empty(t.shape), torch.empty(len(t) // rows, t.shape[1] // 128)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            at = slice(row * rows, (row + 1) * rows), slice(column * 128, (column + 1) * 128)
            scales[row, column] = 2 ** torch.ceil(torch.log2(t[at].double().abs().max() / 448))
            data[at] = (t[at].double() / scales[row, column]).float().to(E4M3).float()
    return data, scales


def test_blockwise_operands_equal_deepseeks() -> None:
    x, w, dy = values(1, 256, 256), values(2, 256, 384), values(3, 256, 256)
    gemm = gemm_of("blockwise")
    first = gemm.dy(dy)
    pairs = [(gemm.x(x), x, 1), (gemm.w(w), w, 128), (gemm.w(w, Direction.BACKWARD), w.T, 128)]
    pairs += [(kept_x(gemm, x), x.T, 1), (first, dy, 1), (gemm.gathered(first)[1], dequantized(first).T, 1)]
    for got, t, rows in pairs:
        data, scales = deepseek_blocks(t, rows)
        assert torch.equal(got.data.float(), data)
        assert got.scales is not None and torch.equal(got.scales, scales)


def test_hybrid_has_output_gradients_in_e5m2() -> None:
    for recipe in RECIPES:
        gemm = gemm_of(recipe, "hybrid")
        x, w, dy = values(1, 128, 128), values(2, 128, 128), values(3, 128, 128)
        assert gemm.x(x).data.dtype == gemm.w(w).data.dtype == kept_x(gemm, x).data.dtype == DTYPES["e4m3"]
        assert {form.data.dtype for form in gemm.gathered(gemm.dy(dy))} == {DTYPES["e5m2"]}


def test_a_traced_operand_has_memory_of_its_own() -> None:
    """The scales of one row of blocks are their own transpose, whose memory a compiler reuses for other values."""
    data, scales = torch.ones(128, 128).to(E4M3), torch.ones(1, 128)
    made = gemm_of("blockwise").traced(data, scales, torch.float32, is_transposed=True)
    assert made.scales is not None
    pairs = (made.data, data), (made.scales, scales)
    assert all(a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() for a, b in pairs)
