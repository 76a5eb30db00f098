"""Where the gradients of a leaf are summed, beside autograd: products that no reduction awaits go straight there.

So a gradient of bf16 operands is summed in fp32 without being rounded on the way, and without memory of its own.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from megatron3d.ops.gemm import add_product, put_product


class Sink(Protocol):
    """Memory for the sum of one leaf's gradients."""

    def room(self) -> tuple[Tensor, bool]:
        """Where the next gradient goes, and whether it is added to what is there."""
        ...

    def arrived(self) -> None:
        """Note that it is all there."""
        ...


def give_sink(leaf: Tensor, sink: Sink) -> None:
    """Let a leaf's gradients be summed there."""
    leaf.grad_sink = sink  # type: ignore[attr-defined]


def sink_of(leaf: Tensor) -> Sink | None:
    """Where they are, if not in the leaf's own `grad`."""
    return cast("Sink | None", getattr(leaf, "grad_sink", None))


def add_grad(leaf: Tensor, grad: Tensor) -> None:
    """Add a gradient that was computed outside of autograd's own pass."""
    sink = sink_of(leaf)
    if sink is None:
        leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        return
    into, has_values = sink.room()
    (into.add_ if has_values else into.copy_)(grad)
    sink.arrived()


class SinkResult:
    """A product's result that is neither cut nor reduced, and stays where its leaf's gradients are summed."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._room: Tensor | None = None

    def multiply(self, panel: int, a_MK: Tensor, b_NK: Tensor) -> None:
        """Take a b^T as a part of the sum."""
        is_begun = self._room is not None
        if self._room is None:
            self._room, is_begun = self._sink.room()
        (add_product if is_begun else put_product)(self._room, a_MK, b_NK)

    def finish(self) -> None:
        """Nothing is on its way."""
        self._sink.arrived()
