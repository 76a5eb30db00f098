"""Compare fused norms over sharded features with torch's operations, and compile their kernels for GPUs.

Whether Triton interprets kernels on the CPU is decided when it is imported: `python -m tests.support.fused_norm CHECK`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron3d.comm.interface import Comm
from megatron3d.ops import triton_kernels
from megatron3d.ops.norm import SHARDED_NORMS
from megatron3d.parallel.mesh import Mesh
from tests.support.shards import cut, normal
from tests.support.triton_process import assemble
from tests.support.turn_ranks import make_comm, run_turns

AXES = ("a", "b")
# The interpreter cuts bf16 off, where a GPU rounds to the nearest.
STEPS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


def difference(fused: Tensor, slow: Tensor) -> float:
    """Return the largest difference, where 1 is a step of the dtype at the largest value."""
    assert fused.dtype == slow.dtype and fused.shape == slow.shape, "dtype or shape differ"
    apart = (fused.double() - slow.double()).abs().max() / slow.double().abs().max()
    return apart.item() / STEPS[slow.dtype]


def compare(comm: Comm, centred: bool, dtype: torch.dtype, tokens: int, is_strided: bool) -> dict[str, float]:
    """Return differences of Y and all gradients, of features far from 0 whose mean cancels."""
    features, mesh = 264, comm.mesh
    wide = (normal(tokens, features, seed=1) + 2).to(dtype), normal(tokens, features, seed=2).to(dtype)
    x_MH, dy_MH = (cut(each, ((), AXES), mesh) for each in wide)
    weight_H, bias_H = (cut(normal(features, seed=seed).to(dtype) + 1, (AXES,), mesh) for seed in (3, 4))
    results = []
    for name in ("torch", "triton"):
        x = x_MH.T.contiguous().T if is_strided else x_MH.clone()
        given = [x.requires_grad_(), weight_H.clone().requires_grad_()]
        bias = bias_H.clone().requires_grad_() if centred else None
        y = SHARDED_NORMS[name].apply(*given, bias, 1e-5, AXES, comm)
        y.backward(dy_MH.T.contiguous().T if is_strided else dy_MH)
        results.append([y.detach(), *(each.grad for each in (*given, bias) if each is not None)])
    names = ("Y", "dX", "dweight", "dbias")
    return {name: difference(fused, slow) for name, slow, fused in zip(names, *results, strict=False)}


def one_rank(rank: int, num_ranks: int) -> dict[str, float]:
    """Return differences by case: tokens that fill no tile, features that fill no block, strided rows."""
    comm = make_comm(Mesh((("a", 2), ("b", num_ranks // 2)), rank), [AXES])
    return {
        f"{kind} {dtype} {tokens} {strided}: {name}": value
        for kind, centred in (("LayerNorm", True), ("RMSNorm", False))
        for dtype, tokens, strided in (
            (torch.float32, 37, False),
            (torch.bfloat16, 5, False),
            (torch.float16, 16, True),
        )
        for name, value in compare(comm, centred, dtype, tokens, strided).items()
    }


class Operators(TorchDispatchMode):
    """Counts torch's operators that run a kernel; Triton's kernels and collectives are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returns = str(func), func._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None
        if not is_view and not name.startswith(("c10d", "aten.detach", "aten.empty", "aten.new_empty")):
            self.names.append(name)
        return func(*args, **kwargs or {})


LAUNCHES = ("write_norm_statistics", "write_normalized", "write_sums", "weight_grads", "write_input_grad")


def count(centred: bool) -> list[str]:
    """Return the kernels of a forward and backward: Triton's by their launches, and torch's operators around them."""
    from tests.support.shards import every_group, pretended_world

    launched: list[str] = []
    kept = {name: getattr(triton_kernels, name) for name in LAUNCHES}

    def noted(name: str) -> Callable[..., Any]:
        def launch(*args: Any, **named: Any) -> Any:
            launched.append(name)
            with torch.utils._python_dispatch._disable_current_modes():
                return kept[name](*args, **named)

        return launch

    for name in LAUNCHES:
        setattr(triton_kernels, name, noted(name))
    with pretended_world(0, 2):
        comm = every_group(Mesh((("a", 2),)))
        x, weight = torch.ones(3, 4, requires_grad=True), torch.ones(4, requires_grad=True)
        bias, dy = torch.ones(4, requires_grad=True) if centred else None, torch.ones(3, 4)
        with Operators() as operators:
            SHARDED_NORMS["triton"].apply(x, weight, bias, 1e-5, ("a",), comm).backward(dy)
    for name in LAUNCHES:
        setattr(triton_kernels, name, kept[name])
    return launched + operators.names


def interpret() -> Mapping[str, Any]:
    """Return all differences, in units of what rounding explains, and the kernels of one norm."""
    triton_kernels.BLOCK, triton_kernels.MAX_GROUPS = 32, 2
    found: dict[str, Any] = {
        f"{num_ranks} ranks, rank {rank}, {name}": value
        for num_ranks in (2, 4)
        for rank, cases in enumerate(run_turns(one_rank, num_ranks))
        for name, value in cases.items()
    }
    return {"differences": found, "kernels": {str(centred): count(centred) for centred in (False, True)}}


def compiled() -> Mapping[str, str]:
    """Return the PTX of every kernel by name and compute capability."""
    size, rows = {"num_tokens": "i32", "features": "i32"}, {"x": "*bf16", "dy": "*bf16", "mean_scale": "*fp32"}
    strides = {"x_stride": "i32", "dy_stride": "i32"}
    weight = {"weight": "*bf16"}
    tiles = {"ROWS": triton_kernels.TILE_ROWS, "COLUMNS": triton_kernels.TILE_COLUMNS}
    block = {"BLOCK": triton_kernels.BLOCK}
    signatures: Mapping[str, tuple[Mapping[str, str], Mapping[str, Any]]] = {
        "norm_statistics": ({"x": "*bf16", "statistics": "*fp32", **size, "row_stride": "i32"}, block),
        "normalize": (
            {"x": "*bf16", "statistics": "*fp32", **weight, "bias": "*bf16", "y": "*bf16", "mean_scale": "*fp32"}
            | {**size, "ranks": "i32", "eps": "fp32", "x_stride": "i32", "y_stride": "i32"},
            block,
        ),
        "sums": ({**rows, **weight, "sums": "*fp32", **size, **strides}, block),
        "weight_grads": ({**rows, "partial": "*fp32", **size, "group_tokens": "i32", **strides}, tiles),
        "input_grad": (
            {**rows, **weight, "sums": "*fp32", "dx": "*bf16", **size, "all_features": "i32", **strides}
            | {"dx_stride": "i32"},
            block,
        ),
    }
    return {
        f"{name} {centred} sm_{sm}": assemble(
            getattr(triton_kernels, f"{name}_kernel"),
            given,
            {"CENTRED": centred, **constants},
            triton_kernels.OPTIONS,
            sm,
        )
        for name, (given, constants) in signatures.items()
        for centred in (0, 1)
        for sm in (90,)
    }


CHECKS: Mapping[str, Callable[[], Mapping[str, Any]]] = {"interpret": interpret, "assemble": compiled}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(CHECKS[sys.argv[1]]()))
