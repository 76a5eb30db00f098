"""Fact: flat shards that cut blocks anywhere are quantized to the bits of the whole weights."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from megatron3d.linear.fp8 import Fp8Gemm
from megatron3d.linear.fp8_plan import RECIPES, Blocks, Fp8
from megatron3d.linear.overlap_plan import Direction
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.zero.fp8_shard import Fp8Shard, Held, StoredWeight
from tests.support.shards import normal
from tests.support.turn_ranks import make_comm

CPU = torch.device("cpu")
# Local shapes, and matrices one below the other.
WEIGHTS = {"dense": ((24, 16), 1), "experts": ((3 * 8, 12), 3), "one block": ((4, 4), 1)}
SIZES = [math.prod(shape) for shape, _ in WEIGHTS.values()]
EDGES = dict(zip(WEIGHTS, pairwise(accumulate(SIZES, initial=0)), strict=True))
TOTAL = max(high for _, high in EDGES.values())


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "blockwise", replace(RECIPES["blockwise"], x=Blocks(1, 4), w=Blocks(4, 4)))


def gemms(recipe: str) -> dict[str, Fp8Gemm]:
    return {name: Fp8Gemm(Fp8(recipe, "e4m3"), MatmulPlan(), make_comm(Mesh((("x", 1),)), [])) for name in WEIGHTS}


def shard(cut: slice, recipe: str, dtype: torch.dtype) -> Fp8Shard:
    """Return the quantization of a rank that has the elements `cut` of the flat buffer."""
    held, of = {}, gemms(recipe)
    for name, (shape, count) in WEIGHTS.items():
        low, high = EDGES[name]
        start, stop = (min(max(edge, low), high) for edge in (cut.start, cut.stop))
        first = max(start - cut.start, 0)
        held[name] = Held(StoredWeight(of[name], count), shape, start - low, slice(first, first + stop - start))
    return Fp8Shard(held, dtype, CPU)


def values() -> Tensor:
    """Return master weights of very different sizes, so that a wrong block has another scale."""
    return (
        normal(TOTAL, seed=1).float()
        * torch.logspace(-4, 3, TOTAL)[torch.randperm(TOTAL, generator=torch.Generator().manual_seed(2))]
    )


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 100])
def test_cut_blocks_have_the_bits_of_whole_ones(recipe: str, dtype: torch.dtype, num_ranks: int) -> None:
    main, part = values(), -(-TOTAL // num_ranks)
    cuts = [slice(rank * part, (rank + 1) * part) for rank in range(num_ranks)]
    shards, mains = [shard(cut, recipe, dtype) for cut in cuts], [torch.zeros(part) for _ in cuts]
    for each, mine, cut in zip(shards, mains, cuts, strict=True):
        mine[: len(main[cut])] = main[cut]
        each.measure(mine)
    largest = torch.stack([each.all_largest for each in shards]).amax(0)
    stored = torch.zeros(num_ranks * part, dtype=torch.float8_e4m3fn)
    for each, mine, cut in zip(shards, mains, cuts, strict=True):
        each.all_largest.copy_(largest)
        each.quantize(mine, stored[cut])
    for name, (shape, count) in WEIGHTS.items():
        low, high = EDGES[name]
        whole, of = main[low:high].view(shape).to(dtype), shards[-1].weights[name].stored.gemm
        tables = shards[-1].scales[name].chunk(count)
        expected = gemms(recipe)[name]
        for w_NK, kept, scales in zip(
            whole.chunk(count), stored[low:high].view(shape).chunk(count), tables, strict=True
        ):
            w = expected.w(w_NK)
            assert w.scales is not None and torch.equal(kept.view(torch.uint8), w.data.view(torch.uint8))
            assert torch.equal(scales, w.scales)
        for at in Direction if count == 1 else ():
            got, wanted = of.w(stored[low:high].view(shape), at), expected.w(whole, at)
            assert got.form == wanted.form and got.scales is not None and wanted.scales is not None
            assert torch.equal(got.data.view(torch.uint8), wanted.data.view(torch.uint8))
            assert torch.equal(got.scales, wanted.scales)


def test_recipes_whose_second_form_is_another_are_refused() -> None:
    for recipe in ("rowwise", "mxfp8"):
        with pytest.raises(AssertionError, match="quantized from the values of W"):
            gemms(recipe)["dense"].hold_scales(torch.ones(24, 1), torch.bfloat16)
