"""Fact: recomputed activations give the same gradients bit for bit, and are not kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron3d.ops.recompute import OutputAgain, recompute_from_input, recomputed

SIZE = 16


def plain(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w)), w)


def repeated_whole(x: Tensor, w: Tensor) -> Tensor:
    return recomputed(plain, x, w)


def repeated_activation(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    a = F.gelu(y)
    with recompute_from_input(F.gelu, y, a):
        return F.linear(a, w)


def gradients(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, w = (torch.randn(SIZE, SIZE, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2))
    y = function(x * 1, w)
    y.sum().backward()
    assert x.grad is not None and w.grad is not None, "no gradient"
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("function", [repeated_whole, repeated_activation])
def test_recomputation_gives_the_same_bits(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    for got, expected in zip(gradients(function), gradients(plain), strict=True):
        assert torch.equal(got, expected)


def test_recomputed_activations_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return which outputs of gelu are alive between forward and backward."""
    made: list[StorageWeakRef] = []
    gelu = F.gelu

    def note(x: Tensor) -> Tensor:
        y = gelu(x)
        made.append(StorageWeakRef(y.untyped_storage()))
        return y

    monkeypatch.setattr(F, "gelu", note)
    x, w = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE, requires_grad=True)
    for function, keeps in ((plain, True), (repeated_activation, False), (repeated_whole, False)):
        y = function(x, w)
        assert made.pop().expired() is not keeps, function.__name__
        y.sum().backward()
        made.clear()


def test_nothing_is_kept_without_gradients() -> None:
    y = torch.randn(SIZE)
    with torch.no_grad(), recompute_from_input(F.gelu, y, F.gelu(y)) as entered:
        assert entered is None


def test_an_output_that_several_save_is_recomputed_once_and_freed() -> None:
    """Two linears read a norm; the first one that runs backward recomputes its output, and the last one frees it."""
    made = list[Tensor]()

    def norm(x_MH: Tensor) -> Tensor:
        made.append(F.rms_norm(x_MH, (8,)))
        return made[-1]

    x_MH, weights = torch.randn(4, 8, dtype=torch.float64), torch.randn(2, 8, 8, dtype=torch.float64)
    found = list[list[Tensor]]()
    for is_again in (False, True):
        x, w = x_MH.clone().requires_grad_(), weights.clone().requires_grad_()
        y = norm(x)
        again = OutputAgain(norm, x, y) if is_again else None
        parts = list[Tensor]()
        for each in w.unbind():
            with again.context() if again else nullcontext():
                parts.append(F.linear(y, each))
        total = parts[0].square().sum() + parts[1].sum()
        forgotten = StorageWeakRef(y.untyped_storage())
        made.clear()
        del y
        assert forgotten.expired() == is_again
        total.backward()
        assert len(made) == is_again
        again_made = [StorageWeakRef(each.untyped_storage()) for each in made]
        made.clear()
        assert all(each.expired() for each in again_made), "what is recomputed is freed"
        assert x.grad is not None and w.grad is not None
        found.append([x.grad, w.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
