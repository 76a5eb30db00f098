"""The one matmul of every tensor-parallel mode (Singh et al. 2024, arXiv:2305.13525, algorithm 1).

    forward     gather X, gather W, multiply, reduce Y
    backward    gather dY, gather W, dX = dY W, reduce dX during the wgrad GEMM;  gather X, dW = dY^T X, reduce dW

The tables of the `MatmulPlan` name the axes of each gather and reduction; without axes there is no communication.
Only shards are saved for backward.  Two hooks: `PrefetchedWeight` gathers W early, `WgradQueue` defers dW.
Letters: M tokens, K input features, N output features; each means the global dimension, shard or not.

Linears inside compiled graphs: two operators per model, whose weight gradients accumulate in main_grad.

    linear(x, w, bias, number)         ->  Y = X W^T + b
    linear_grads(dy, x, w, number)     ->  dX = dY W,    and main_grad of linear `number` += dY^T X

A compiled graph could only return dW to autograd, rounded to the parameter's dtype.  The operators run the GEMMs of
`Matmul` instead, which a compiler would not fuse either.  They see which linear they compute from an int64 scalar
on the CPU: one graph serves all layers, and the number is an input of it.  That linear_grads writes to main_grad is no
part of its schema, since main_grad may not exist before backward; dX, which every graph uses, keeps it in the graph.
Letters: M tokens, K input features, N output features.

The matmul of a linear that no axis shards: three GEMMs, and as little Python between them as possible.

    forward     Y = X W^T + b
    backward    dX = dY W,    main_grad of W += dY^T X,    main_grad of b += sum of dY over tokens

Kernels and numbers are those of `Matmul`.  Its objects for plans, collectives and hooks cost several times as much
as a small GEMM.  Letters: M tokens, K input features, N output features.

Matmul whose exposed collectives run in rounds with its own GEMMs (`parallel.tp_comm_overlap`).

    forward     all-gather and GEMM, or GEMM and reduce-scatter
    backward    all-gather of dY and dgrad GEMM; the gathered dY serves the wgrad GEMM as well
                dgrad GEMM and reduce-scatter of dX, where no wgrad GEMM follows that this can overlap with

`linear.overlap_plan` says which collectives fit; all others are those of `linear.matmul`.  Letters as there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.interface import Comm, Pending, completed
from megatron3d.linear.collectives import W_DIMS, X_DIMS, Y_DIMS, gather, reduce
from megatron3d.linear.gemm import product, product_in, product_of_rows, put_product, uses_onednn
from megatron3d.linear.main_grad import MainGrads, WgradQueue
from megatron3d.linear.overlap_plan import OVERLAP_ALL, Direction, TPOverlap, async_plan
from megatron3d.linear.weight_prefetch import PrefetchedWeight
from megatron3d.parallel.matmul_plan import MatmulPlan, Move, moves

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


Operands = tuple[Tensor, Tensor | None, MainGrads]


def plain_matmul(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, main_grads: MainGrads) -> Tensor:
    """Return Y[M, N] = X W^T + bias, where X requires a gradient and both parameters have a main_grad.

    Autograd sees X alone: the parameters travel in a tuple, so that it neither visits nor calls hooks of them.
    """
    y_MN: Tensor = _PlainMatmul.apply(x_MK, (w_NK, bias_N, main_grads))
    return y_MN


class _PlainMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, operands: Operands) -> Tensor:
        ctx.operands = operands
        w_NK, bias_N, _ = operands
        ctx.save_for_backward(x_MK, w_NK)
        return product(x_MK, w_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor, None]:
        param, bias_N, main_grads = ctx.operands
        x_MK, w_NK = ctx.saved_tensors
        dx_MK = product_of_rows(dy_MN, w_NK)
        main_grads.accumulate(param, dy_MN.T, x_MK.T)
        if bias_N is not None:
            main_grads.add(bias_N, dy_MN.sum(0))
        return dx_MK, None


Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


class Matmul:
    """A planned matmul; its plan names no axis of size 1.

    Args:
        main_grads: buffers that wgrad GEMMs accumulate in; None: gradients go back to autograd.
        wgrads: hook that defers weight gradients or keeps their reductions in flight; None: neither.
        weight: hook that prefetches or keeps the gathered W; None: W is gathered when it is needed.
        compiled: Y(x, w, bias) inside a compiled graph, where the matmul is plain; None: `F.linear`.
    """

    def __init__(
        self,
        plan: MatmulPlan,
        comm: Comm,
        overlap: TPOverlap = OVERLAP_ALL,
        main_grads: MainGrads | None = None,
        wgrads: WgradQueue | None = None,
        weight: PrefetchedWeight | None = None,
        compiled: CompiledLinear | None = None,
    ) -> None:
        self.plan, self.comm = plan, comm
        self.overlap, self.weight = overlap, weight
        self._compiled = compiled
        self.main_grads = main_grads or MainGrads()
        self.wgrads = wgrads or WgradQueue(self.main_grads)
        self.is_plain = not (plan.m or plan.k or plan.n or wgrads)

    def __call__(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Return Y[M, N] = X W^T + bias; operands and Y are shards in the plan's layouts."""
        if self.is_plain and (y_MN := self._plain(x_MK, w_NK, bias_N)) is not None:
            return y_MN
        backward_follows = x_MK.requires_grad and torch.is_grad_enabled()
        planned_MN: Tensor = _Matmul.apply(x_MK, w_NK, bias_N, self, backward_follows)
        return planned_MN

    def _plain(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor | None:
        """Return Y by the shortest way that suffices without axes and hooks; None where none does."""
        if torch.compiler.is_compiling():
            return self._compiled(x_MK, w_NK, bias_N) if self._compiled else F.linear(x_MK, w_NK, bias_N)
        if not torch.is_grad_enabled():
            return product(x_MK, w_NK, bias_N)
        if self.main_grads.buffer(w_NK) is None:
            return None if uses_onednn(x_MK.device, x_MK.dtype) else F.linear(x_MK, w_NK, bias_N)
        return plain_matmul(x_MK, w_NK, bias_N, self.main_grads) if x_MK.requires_grad else None

    def forward(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, backward_follows: bool) -> Tensor:
        """Return Y, with the bias added once: in the GEMM, or to the reduced sum where K is split."""
        plan, comm = self.plan, self.comm
        x = gather(x_MK, plan.x, X_DIMS, comm)
        w = self.gather_weight(Direction.FORWARD, w_NK, backward_follows)
        y = reduce(product(x.wait(), w.wait(), None if plan.k else bias_N), moves(plan.y), Y_DIMS, comm)
        y_MN = y.wait()
        return y_MN.add_(bias_N) if plan.k and bias_N is not None else y_MN

    def backward(self, param: Tensor, x_MK: Tensor, w_NK: Tensor, dy_MN: Tensor, needs: tuple[bool, ...]) -> Grads:
        """Return the gradients that autograd needs of X, W and bias; dW is None where it goes to main_grad."""
        plan, comm = self.plan, self.comm
        needs_dx, needs_dw, needs_db = needs
        dy_pending = self.start_dy(dy_MN, needs_dx)
        w = self.gather_weight(Direction.BACKWARD, w_NK) if needs_dx else None
        x = gather(x_MK, plan.x, X_DIMS, comm) if needs_dw and not self.wgrads.is_deferring else None
        db_N = dy_MN.sum(0) if needs_db else None
        wgrad_follows = needs_dw and not self.wgrads.is_deferring and self.overlap.input_grad
        dy, dx = self.dgrad(dy_pending, w, wgrad_follows)
        if dx and not self.overlap.input_grad:
            dx = completed(dx.wait())
        operands = [dy]  # taken by the wgrad GEMM, so that a deferred dY is freed before dW is reduced

        def wgrad() -> Pending | None:
            x_whole = (x or gather(x_MK, plan.x, X_DIMS, comm)).wait()
            return self._wgrad(param, operands.pop(), x_whole)

        dw = self.wgrads.submit(param, wgrad) if needs_dw else None
        return dx.wait() if dx else None, self._added(param, dw) if dw else None, db_N

    def start_dy(self, dy_MN: Tensor, needs_dx: bool) -> Pending:
        """Start to all-gather dY, for the dgrad GEMM where `needs_dx`, and for the wgrad GEMM."""
        return gather(dy_MN, self.plan.dy, Y_DIMS, self.comm)

    def dgrad(self, dy: Pending, w: Pending | None, wgrad_follows: bool) -> tuple[Tensor, Pending | None]:
        """Return the gathered dY, and dX in flight; None without W.

        Args:
            wgrad_follows: the reduction of dX will overlap with the wgrad GEMM.
        """
        plan, comm, dy_MN = self.plan, self.comm, dy.wait()
        return dy_MN, reduce(product(dy_MN, w.wait().T), plan.dx_moves, X_DIMS, comm) if w else None

    def _added(self, param: Tensor, dw: Pending) -> Tensor | None:
        """Add dW to main_grad, past autograd, which would round it; without a buffer return it to autograd."""
        if self.main_grads.buffer(param) is None:
            return dw.wait()
        self.main_grads.add(param, dw.wait())
        return None

    def _wgrad(self, param: Tensor, dy_MN: Tensor, x_MK: Tensor) -> Pending | None:
        """Multiply dY^T X and start to reduce it; accumulate it in main_grad where nothing reduces it."""
        if not self.plan.w and self.main_grads.accumulate(param, dy_MN.T, x_MK.T):
            return None
        dtype = self.main_grads.reduce_dtype(param, dy_MN.dtype)
        return reduce(product_in(dtype, dy_MN.T, x_MK.T), moves(self.plan.w), W_DIMS, self.comm)

    def gather_weight(self, at: Direction, w_NK: Tensor, backward_follows: bool = False) -> Pending:
        """Return the gathered W, through the prefetch hook where there is one."""
        if self.weight is None:
            return gather(w_NK, self.plan.w, W_DIMS, self.comm)
        return self.weight.gather(at, backward_follows)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, matmul: Matmul, backward_follows: bool
    ) -> Tensor:
        # The parameter itself names its main_grad; what is saved comes back as another tensor after recomputation.
        ctx.matmul, ctx.param = matmul, w_NK
        ctx.save_for_backward(x_MK, w_NK)
        return matmul.forward(x_MK, w_NK, bias_N, backward_follows)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        grads: Grads = ctx.matmul.backward(ctx.param, *ctx.saved_tensors, dy_MN, ctx.needs_input_grad[:3])
        return *grads, None, None


def linear(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: MatmulPlan, comm: Comm, wgrads: WgradQueue | None = None
) -> Tensor:
    """Return Y[M, N] = X W^T + bias by a `Matmul` that is made for this one call."""
    return Matmul(plan, comm, wgrads=wgrads)(x_MK, w_NK, bias_N)


class AsyncMatmul(Matmul):
    """A matmul that overlaps the collectives of an `AsyncPlan` with its own GEMMs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rounds = async_plan(self.plan)

    def forward(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, backward_follows: bool) -> Tensor:
        """Return Y; the bias is added once, to the finished sum."""
        plan, comm, rounds = self.plan, self.comm, self._rounds
        if not rounds.x and not rounds.y:
            return super().forward(x_MK, w_NK, bias_N, backward_follows)
        x = gather(x_MK, _without(plan.x, rounds.x), X_DIMS, comm)
        w = self.gather_weight(Direction.FORWARD, w_NK, backward_follows)
        if rounds.x:
            whole = comm.all_gather_matmul(x.wait(), w.wait(), rounds.x.axes, put_product).product
            y = reduce(whole, moves(plan.y), Y_DIMS, comm)
        else:
            y = self._scattered(x.wait(), w.wait(), moves(plan.y), Y_DIMS)
        y_MN = y.wait()
        return y_MN if bias_N is None else y_MN.add_(bias_N)

    def start_dy(self, dy_MN: Tensor, needs_dx: bool) -> Pending:
        return gather(dy_MN, _without(self.plan.dy, self._rounds.dy if needs_dx else None), Y_DIMS, self.comm)

    def dgrad(self, dy: Pending, w: Pending | None, wgrad_follows: bool) -> tuple[Tensor, Pending | None]:
        plan, rounds = self.plan, self._rounds
        if w and rounds.dy:
            dy_MN, dx_MK = self.comm.all_gather_matmul(dy.wait(), w.wait().T, rounds.dy.axes, put_product)
            return dy_MN, reduce(dx_MK, plan.dx_moves, X_DIMS, self.comm)
        if w and rounds.dx and not wgrad_follows:
            dy_MN = dy.wait()
            return dy_MN, self._scattered(dy_MN, w.wait().T, plan.dx_moves, X_DIMS)
        return super().dgrad(dy, w, wgrad_follows)

    def _scattered(self, a_MK: Tensor, b_NK: Tensor, steps: tuple[Move, ...], dims: Mapping[str, int]) -> Pending:
        """Return a b^T reduced by `steps`, the first of which runs in rounds with the GEMM."""
        first, *others = steps
        part = self.comm.matmul_reduce_scatter(a_MK, b_NK, first.axes, dims[str(first.dim)], put_product)
        return Pending(lambda: reduce(part.wait(), tuple(others), dims, self.comm).wait())


def _without(table: Mapping[str, str], move: Move | None) -> dict[str, str]:
    """Return a table of gathers without the one that runs in rounds."""
    return {axis: dim for axis, dim in table.items() if not move or axis not in move.axes}
