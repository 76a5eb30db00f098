"""Section of gpu_day.py about fp8: GEMMs and quantization of each recipe next to bf16, and steps of the 8B shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from common.loopback import LoopbackComm
from gpu.gpu_steps import steps_of
from gpu.gpu_timing import Place, Row
from torch import Tensor

from megatron3d.linear.fp8 import Fp8Gemm
from megatron3d.linear.fp8_plan import RECIPES, Fp8
from megatron3d.linear.gemm import NATIVE, Gemm
from megatron3d.linear.overlap_plan import Direction
from megatron3d.linear.scaled_mm import describe_fp8, gemm_device
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh

BF16 = torch.bfloat16
TOKENS = 8192
# Input and output features of the linears of an 8B layer.
LINEARS: Mapping[str, tuple[int, int]] = {
    "qkv": (4096, 6144),
    "proj": (4096, 4096),
    "fc1": (4096, 28672),
    "fc2": (14336, 4096),
}
TINY: Mapping[str, tuple[int, int]] = {"tiny": (128, 256)}


def fp8(place: Place) -> Iterator[Row]:
    """Yield what multiplies, rates of GEMMs by role, time of quantization, and steps, of bf16 and of each recipe."""
    for name in RECIPES:
        yield {"line": describe_fp8(Fp8(name, "e4m3"), gemm_device(place.device), BF16)}
    gemms: dict[str, Gemm] = {"bf16": NATIVE}
    comm = LoopbackComm(Mesh((("x", 1),)))
    gemms |= {name: Fp8Gemm(Fp8(name, "e4m3"), MatmulPlan(), comm) for name in RECIPES}
    for linear, (k, n) in (TINY if place.quick else LINEARS).items():
        m = 128 if place.quick else TOKENS
        for name, gemm in gemms.items():
            what = {"linear": linear, "recipe": name, "m": m, "k": k, "n": n}
            try:
                yield {**what, **rates(place, gemm, m, k, n)}
            except (RuntimeError, ValueError) as error:
                yield {**what, "error": str(error).splitlines()[0][:200]}
    yield from step_rows(place)


def rates(place: Place, gemm: Gemm, m: int, k: int, n: int) -> Row:
    """Return TFLOP/s of the three roles, and microseconds to quantize X in both forms, W in each, and dY."""
    x, w, dy = (torch.randn(shape, device=place.device).to(BF16) for shape in ((m, k), (n, k), (m, n)))
    main_grad = torch.zeros(n, k, device=place.device)
    of_x, of_w = gemm.x(x, is_kept=True), gemm.w(w)
    kept, shard = gemm.kept(gemm.keep(x, of_x, w))
    turned_w = gemm.w(shard, Direction.BACKWARD)
    of_dx, of_dw = gemm.gathered(gemm.dy(dy))
    products: dict[str, Callable[[], object]] = {
        "Y": partial(gemm.y, of_x, of_w),
        "dX": partial(gemm.dx, of_dx, turned_w),
        "dW": partial(gemm.dw_into, main_grad, of_dw, kept, True),
    }
    found: Row = {role: 2e-12 * m * n * k / place.seconds(call) for role, call in products.items()}
    if gemm is NATIVE:
        return found
    made: dict[str, Callable[[], object]] = {
        "X": lambda: gemm.keep(x, gemm.x(x, is_kept=True), w),
        "W": partial(gemm.w, w),
        "W^T": partial(gemm.w, w, Direction.BACKWARD),
        "dY": lambda: gemm.gathered(gemm.dy(dy)),
    }
    made |= {} if place.quick else {"X compiled": compiled(gemm, x)}
    return {**found, **{f"{name}_us": 1e6 * place.seconds(call) for name, call in made.items()}}


def compiled(gemm: Gemm, x_MK: Tensor) -> Callable[[], object]:
    """Return the quantization of X as a compiled graph has it, before its transpose."""
    assert gemm.traceable is not None, "the recipe quantizes inside compiled graphs"
    return partial(torch.compile(gemm.traceable.x, dynamic=False), x_MK)


def step_rows(place: Place) -> Iterator[Row]:
    """Yield step time, MFU and memory of the 8B shape with 10 layers, in bf16 and in each recipe.

    Small forms have features that are no multiples of a block, so that a quick command has recipes without blocks.
    """
    names = [name for name, recipe in RECIPES.items() if recipe.block is None or not place.quick]
    for name in ("bf16", *names):
        keys = () if name == "bf16" else ("train.fp8=e4m3", f"train.fp8_recipe={name}")
        try:
            yield {"step": name, **steps_of(place, "8b", "model.num_layers=10", *keys, num_microbatches=2).measured()}
        except (RuntimeError, ValueError) as error:
            yield {"step": name, "error": str(error).splitlines()[0][:200]}
        finally:
            place.free()
