"""Compare the Triton kernel of quantization with torch's operations, and compile it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron3d.linear import triton_fp8
from megatron3d.linear.fp8 import Fp8Gemm, dequantized
from megatron3d.linear.fp8_plan import FORMATS, RECIPES, Fp8
from megatron3d.linear.gemm import Operand
from megatron3d.linear.overlap_plan import Direction
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from tests.support.shards import normal
from tests.support.triton_process import assemble
from tests.support.turn_ranks import make_comm

ONE = make_comm(Mesh((("x", 1),)), [])


def different(got: Operand, expected: Operand) -> int:
    """Return how many bits of data and scales differ; data of a block whose scale is NaN may."""
    data, scales = got.data, got.scales
    assert scales is not None and expected.scales is not None, "both are quantized"
    assert got.form == expected.form and data.is_contiguous() and scales.is_contiguous(), "both have the same form"
    values, right = dequantized(got), dequantized(expected)
    same_nan = values.isnan() == right.isnan()
    kinds = {1: torch.uint8, 4: torch.int32}
    finite = ~right.isnan()
    wrong = (data.view(torch.uint8) != expected.data.view(torch.uint8)) & finite
    bits = [each.nan_to_num(7.0) if each.itemsize > 1 else each for each in (scales, expected.scales)]
    wrong_scales = bits[0].view(kinds[scales.itemsize]) != bits[1].view(kinds[scales.itemsize])
    return int(wrong.sum() + wrong_scales.sum() + (~same_nan).sum())


def tensor(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return values of all sizes, some of which become 0, with an infinity and a NaN.

    Those of bf16 are not subnormal, which Triton's interpreter converts to other numbers.
    """
    smallest = -100 if dtype == torch.bfloat16 else -125
    sizes = torch.exp2(torch.linspace(smallest, 100, rows)).unsqueeze(1) * torch.logspace(1, -3, columns)
    t = normal(rows, columns, seed=1).clamp(-1.5, 1.5) * sizes
    t[5, 7], t[40, 33] = torch.inf, torch.nan
    return t.to(dtype)


def interpret() -> dict[str, int]:
    """Return the number of bits that differ, by recipe, format and dtype, and operand."""
    found: dict[str, int] = {}
    for recipe, m, k in (("blockwise", 128, 256), ("mxfp8", 96, 160)):
        for formats, dtype in product(FORMATS, (torch.float32, torch.bfloat16)):
            plain, fused = (gemm(Fp8(recipe, formats), MatmulPlan(), ONE) for gemm in (Fp8Gemm, Fused))
            x = tensor(m, k, dtype)
            got, expected = operands(fused, x), operands(plain, x)
            found |= {
                f"{recipe}, {formats}, {dtype}, {name}": different(got[name], expected[name]) for name in expected
            }
    return found


class Fused(Fp8Gemm):
    """GEMM whose operands Triton's kernel quantizes here too."""

    def fuses(self, t: Tensor) -> bool:
        return True


def operands(gemm: Fp8Gemm, t: Tensor) -> dict[str, Operand]:
    """Return all operands of a linear, of which a tensor is X, W and dY; and X where nothing is kept."""
    x, dy = gemm.x(t, is_kept=True), gemm.gathered(gemm.dy(t))
    kept, w = gemm.kept(gemm.keep(t, x, t))
    forms = {at.name: gemm.w(w, at) for at in Direction}
    return {"x": x, "x alone": gemm.x(t), "x of dW": kept, **forms, "dy of dX": dy[0], "dy of dW": dy[1]}


def compiled() -> dict[str, str]:
    """Return the PTX by recipe."""
    kernel, found = triton_fp8.quantize_kernel, {}
    for recipe, scale in (("blockwise", "*fp32"), ("mxfp8", "*u8")):
        rows, columns = RECIPES[recipe].x
        signature = {
            "x": "*bf16", "x_scales": "*fp32", "data": "*u8", "scales": scale, "turned_data": "*u8",
            "turned_scales": scale, "num_rows": "i32", "num_columns": "i32", "x_stride": "i32",
        }  # fmt: skip
        constants = {
            "HAS_SCALES": False, "ROWS": rows, "COLUMNS": columns, "TURNED_ROWS": columns, "TURNED_COLUMNS": rows,
            "LARGEST_EXPONENT": 8, "IS_BYTE": recipe == "mxfp8", "TILE": triton_fp8.TILE,
        }  # fmt: skip
        found[recipe] = assemble(kernel, signature, constants, triton_fp8.OPTIONS, 90)
    return found


CHECKS: Mapping[str, Callable[[], Mapping[str, Any]]] = {"interpret": interpret, "assemble": compiled}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(CHECKS[sys.argv[1]]()))
