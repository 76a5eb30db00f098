"""Linears inside compiled graphs: two operators per model, whose weight gradients accumulate in main_grad.

    linear(x, w, bias, number)         ->  Y = X W^T + b
    linear_grads(dy, x, w, number)     ->  dX = dY W,    and main_grad of linear `number` += dY^T X

A compiled graph could only return dW to autograd, rounded to the parameter's dtype.  The operators run the GEMMs of
`ops.matmul` instead, which a compiler would not fuse either.  They see which linear they compute from an int64 scalar
on the CPU: one graph serves all layers, and the number is an input of it.  That linear_grads writes to main_grad is no
part of its schema, since main_grad may not exist before backward; dX, which every graph uses, keeps it in the graph.
Letters: M tokens, K input features, N output features.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from megatron3d.ops.gemm import product
from megatron3d.ops.main_grad import MainGrads

NAMESPACE = "megatron3d"
CompiledLinear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class CompiledLinears:
    """Operators of the plain linears of one model, for use inside compiled graphs; they live as long as this."""

    def __init__(self, main_grads: MainGrads) -> None:
        self._main_grads = main_grads
        self._weights: list[Callable[[], Tensor]] = []
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        self._linear = _define(self._library, weakref.ref(self))

    def linear(self, weight: Callable[[], Tensor]) -> CompiledLinear:
        """Return Y(x, w, bias) of a linear whose parameter is `weight()`."""
        number = torch.tensor(len(self._weights), device="cpu")
        self._weights.append(weight)

        def linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
            return self._linear(x_MK, w_NK, bias_N, number)  # through self, without which the operators are gone

        return linear

    def grads(self, dy_MN: Tensor, x_MK: Tensor, w_NK: Tensor, number: Tensor) -> Tensor:
        """Return dX, and add dW to main_grad."""
        dx_MK = product(dy_MN, w_NK.T)
        param = self._weights[int(number)]()
        if not self._main_grads.accumulate(param, dy_MN.T, x_MK.T):
            self._main_grads.add(param, product(dy_MN.T, x_MK.T))
        return dx_MK


def _define(library: torch.library.Library, owner: weakref.ref[CompiledLinears]) -> Callable[..., Tensor]:
    """Register the operators under names that are free, and return `linear`."""
    operators = getattr(torch.ops, NAMESPACE)
    index = next(n for n in count() if not hasattr(operators, f"linear_{n}"))
    name, grads_name = f"linear_{index}", f"linear_grads_{index}"
    library.define(f"{name}(Tensor x, Tensor w, Tensor? bias, Tensor number) -> Tensor")
    library.define(f"{grads_name}(Tensor dy, Tensor x, Tensor w, Tensor number) -> Tensor")

    def grads(dy: Tensor, x: Tensor, w: Tensor, number: Tensor) -> Tensor:
        found = owner()
        assert found is not None, "the model of this graph no longer exists"
        return found.grads(dy, x, w, number)

    def fake(name: str, function: Callable[..., Tensor]) -> None:
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=library)

    library.impl(name, lambda x, w, bias, number: product(x, w, bias), "CompositeExplicitAutograd")
    library.impl(grads_name, grads, "CompositeExplicitAutograd")
    fake(name, lambda x, w, bias, number: x.new_empty(x.shape[0], w.shape[0]))
    fake(grads_name, lambda dy, x, w, number: x.new_empty(x.shape))
    linear, linear_grads = (getattr(operators, each).default for each in (name, grads_name))

    def save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], output: Tensor) -> None:
        x, w, bias, number = inputs
        ctx.save_for_backward(x, w, number)
        ctx.has_bias = bias is not None

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return linear_grads(dy, *ctx.saved_tensors), None, dy.sum(0) if ctx.has_bias else None, None

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=save, lib=library)
    operator: Callable[..., Tensor] = linear
    return operator
