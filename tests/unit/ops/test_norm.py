"""Fact: norms over sharded features equal torch's norms over whole ones, gradients included, without cancellation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron3d.ops.norm import norm
from megatron3d.parallel.mesh import Axes, Mesh
from tests.support.shards import cut, error, every_group, normal, pretended_world
from tests.support.turn_ranks import run_turns

MESH = Mesh((("x", 2), ("y", 2), ("z", 2)))
SPLITS: list[Axes] = [("x",), ("y", "z"), ("x", "y", "z")]


def reference(x_MH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
    """Compute the norms by definition, from sums over the whole row."""
    centred = x_MH if bias_H is None else x_MH - x_MH.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight_H + (
        0 if bias_H is None else bias_H
    )


def parameters(centred: bool) -> list[Tensor]:
    return [1 + normal(24, seed=2) / 2, *([normal(24, seed=3)] if centred else [])]


def split_errors(rank: int, world_size: int) -> dict[str, float]:
    mesh, found = MESH.at(rank), {}
    comm = every_group(mesh)
    x_MH, dy_MH = normal(6, 24, seed=1) + 3, normal(6, 24, seed=4)
    for axes in SPLITS:
        for centred in (True, False):
            whole = [t.requires_grad_() for t in (x_MH.clone(), *parameters(centred))]
            mine = [cut(t.detach(), ((),) * (t.ndim - 1) + (axes,), mesh).requires_grad_() for t in whole]
            bias: list[Tensor | None] = [None] * (not centred)
            expected = reference(*whole, *bias, 1e-5)  # type: ignore[call-arg]
            got = norm(*mine, *bias, 1e-5, axes, comm)  # type: ignore[call-arg]
            expected.backward(dy_MH)
            got.backward(cut(dy_MH, ((), axes), mesh))
            found[f"y {axes} {centred}"] = error(got.detach(), cut(expected.detach(), ((), axes), mesh))
            for name, part, full in zip("xwb", mine, whole, strict=False):
                assert part.grad is not None and full.grad is not None, f"{name} has no gradient"
                layout = ((),) * (full.ndim - 1) + (axes,)
                found[f"d{name} {axes} {centred}"] = error(part.grad, cut(full.grad, layout, mesh))
    return found


def precision_loss(rank: int, world_size: int) -> tuple[float, float]:
    """Return the largest error of values far from zero, in standard deviations, and the result's itemsize."""
    mesh = MESH.at(rank)
    x_MH = (1e4 + 1e-2 * normal(4, 512, seed=5)).float()
    weight_H, bias_H = torch.ones(512), torch.zeros(512)
    expected = reference(x_MH.double(), weight_H.double(), bias_H.double(), 1e-5)
    layout = ((), ("x", "y", "z"))
    mine = (cut(x_MH, layout, mesh), cut(weight_H, layout[1:], mesh), cut(bias_H, layout[1:], mesh))
    got = norm(*mine, 1e-5, ("x", "y", "z"), every_group(mesh))
    return (got.double() - cut(expected, layout, mesh)).abs().max().item(), got.dtype.itemsize


def bf16_error(rank: int, world_size: int) -> float:
    mesh, axes = MESH.at(rank), ("x", "y", "z")
    x_MH = normal(4, 512, seed=6).bfloat16()
    weight_H = (1 + normal(512, seed=7) / 4).bfloat16()
    got = norm(cut(x_MH, ((), axes), mesh), cut(weight_H, (axes,), mesh), None, 1e-5, axes, every_group(mesh))
    assert got.dtype == torch.bfloat16, f"the residual stream became {got.dtype}"
    expected = reference(x_MH.double(), weight_H.double(), None, 1e-5)
    return ((got.double() - cut(expected, ((), axes), mesh)).abs() / expected.abs().amax()).max().item()


def test_sharded_norms_equal_whole_norms() -> None:
    for found in run_turns(split_errors, 8):
        assert max(found.values()) < 1e-13, found


def test_a_small_spread_on_a_large_mean_survives_fp32() -> None:
    """The mean is right to its last place, 2^-10 or a tenth of the standard deviation.

    The mean of squares minus the squared mean has no correct digit, since fp32 near 1e8 has a spacing of 8.
    """
    for found, itemsize in run_turns(precision_loss, 8):
        assert itemsize == 4 and found < 0.1


def test_statistics_of_bf16_are_computed_in_fp32() -> None:
    """The error is at most half a unit in the last place of the result."""
    assert max(run_turns(bf16_error, 8)) < 2**-8


@pytest.mark.parametrize("centred", [True, False])
def test_on_one_rank_it_equals_torch(centred: bool) -> None:
    nobody: Any = None
    bias: list[Tensor | None] = [None] * (not centred)
    inputs = [t.requires_grad_() for t in (normal(6, 24, seed=1), *parameters(centred))]
    got = norm(*inputs, *bias, 1e-5, (), nobody)  # type: ignore[call-arg]
    assert error(got.detach(), reference(*inputs, *bias, 1e-5).detach()) < 1e-13  # type: ignore[call-arg]
    assert got.grad_fn is not None and "SplitNorm" not in got.grad_fn.name()


NO_KERNEL = ("c10d", "aten.detach", "aten.empty", "aten.new_empty", "aten.promote_types")


class Kernels(TorchDispatchMode):
    """Counts operators that return no view; collectives of a fake group are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        if not (returns and returns[0].alias_info) and not str(func).startswith(NO_KERNEL):
            self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("centred", "most"), [(False, 17), (True, 25)])
def test_a_sharded_norm_has_few_kernels(centred: bool, most: int) -> None:
    """Would catch a mean of zeros that RMSNorm subtracts, and a stack of one sum."""
    with pretended_world(0, 2):
        comm = every_group(Mesh((("a", 2),)))
        x, weight = torch.ones(3, 4, requires_grad=True), torch.ones(4, requires_grad=True)
        bias = torch.ones(4, requires_grad=True) if centred else None
        dy = torch.ones(3, 4)
        with Kernels() as kernels:
            norm(x, weight, bias, 1e-5, ("a",), comm).backward(dy)
    assert len(kernels.names) <= most, f"{len(kernels.names)}: {kernels.names}"
