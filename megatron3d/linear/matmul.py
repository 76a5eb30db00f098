"""The one matmul of every tensor-parallel mode (Singh et al. 2024, arXiv:2305.13525, algorithm 1), in three bodies.

    forward     gather X, gather W, multiply, reduce Y
    backward    gather dY, gather W, dX = dY W, reduce dX during the wgrad GEMM;  gather X, dW = dY^T X, reduce dW

`sharded`: the tables of the `MatmulPlan` name the axes of each gather and reduction; only shards are kept for backward.
Two hooks: `PrefetchedWeight` gathers W early, `WgradQueue` defers dW.  With `parallel.tp_comm_overlap` exposed
collectives run in rounds with their own GEMM: all-gather and GEMM, or GEMM and reduce-scatter (`overlap_plan.py`).
`plain`: without axes it is three GEMMs, with as little Python between them as possible; the objects for plans,
collectives and hooks cost several times as much as a small GEMM.  `compiled`: inside compiled graphs it is an operator.

All bodies multiply by the linear's `Gemm`.
Letters: M tokens, K input features, N output features; each means the global dimension, shard or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.interface import Comm, Pending, completed
from megatron3d.linear.collectives import W_DIMS, X_DIMS, Y_DIMS, PrefetchedWeight, gather_operand, reduce
from megatron3d.linear.gemm import NATIVE, Gemm, Operand, Traceable, put_product, uses_onednn
from megatron3d.linear.main_grad import MainGrads, WgradQueue
from megatron3d.linear.overlap_plan import NO_ROUNDS, OVERLAP_ALL, Direction, TPOverlap, async_plan
from megatron3d.parallel.matmul_plan import MatmulPlan, Move, moves

NAMESPACE = "megatron3d"
CompiledLinear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class CompiledLinears:
    """Operators of the plain linears of one model, for use inside compiled graphs; they live as long as this.

        linear(x, w, bias, number)           ->  Y = X W^T + b
        linear_grads(dy, x, w, number)       ->  dX = dY W,  and main_grad of linear `number` += dY^T X
        scaled_linear(X, w, bias, number)    ->  Y,  and X^T for dW
        scaled_linear_grads(dY, X^T, ...)    ->  dX, and main_grad

    A compiled graph could only return dW to autograd, rounded to the parameter's dtype.  The operators see which linear
    they compute from an int64 scalar on the CPU: one graph serves all layers, and the number is an input of it.  That
    linear_grads writes to main_grad is no part of its schema, since main_grad may not exist before backward; dX, which
    every graph uses, keeps it in the graph.

    The scaled ones take X and dY as data and scales that the graph itself makes (`Traceable`), which fuses quantization
    with what computes X and dY.  X^T comes from the operator, since a graph would make it a second time, not keep it.
    """

    def __init__(self, main_grads: MainGrads) -> None:
        self._main_grads = main_grads
        self._linears: list[tuple[Callable[[], Tensor], Gemm]] = []
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        self._linear = _define(self._library, weakref.ref(self))
        self._scaled_product, self._scaled = _define_scaled(self._library, weakref.ref(self))

    def linear(self, weight: Callable[[], Tensor], gemm: Gemm = NATIVE) -> CompiledLinear:
        """Return Y(x, w, bias) of a linear whose parameter is `weight()`."""
        number = torch.tensor(len(self._linears), device="cpu")
        self._linears.append((weight, gemm))

        def linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
            return self._linear(x_MK, w_NK, bias_N, number)  # through self, without which the operators are gone

        if (made_by := gemm.traceable) is None:
            return linear

        def scaled_linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
            y_MN: Tensor
            if torch.is_grad_enabled():
                y_MN = self._scaled.apply(x_MK, w_NK, bias_N, number, made_by)
            else:
                y_MN, *_ = self._scaled_product(
                    *made_by.x(x_MK), w_NK, bias_N, number, x_MK.dtype, made_by.scale_bytes, False
                )
            return y_MN

        return scaled_linear

    def grads(self, dy_MN: Tensor, x_MK: Tensor, w_NK: Tensor, number: Tensor) -> Tensor:
        """Return dX, and add dW to main_grad."""
        _, gemm = self._linears[int(number)]
        x, w_NK = gemm.kept(gemm.keep(x_MK, gemm.x(x_MK, is_kept=True), w_NK))
        return self._grads(*gemm.gathered(gemm.dy(dy_MN)), x, w_NK, number)

    def _grads(self, dy: Operand, dy_of_dw: Operand, x: Operand, w_NK: Tensor, number: Tensor) -> Tensor:
        weight, gemm = self._linears[int(number)]
        param, dx_MK = weight(), gemm.dx(dy, gemm.w(w_NK, Direction.BACKWARD))
        if not self._main_grads.accumulate(param, gemm, dy_of_dw, x):
            self._main_grads.add(param, gemm.dw(dy_of_dw, x, x.dtype))
        return dx_MK

    def scaled_grads(self, *given: Any) -> Tensor:
        """Return dX, and add dW to main_grad: of dY as `Forms`, data and scales of X^T, W, number, and dY's dtype."""
        dy, dy_scales, dy_of_dw, scales_of_dw, data_KM, scales, w_NK, number, dtype = given
        _, gemm = self._linears[int(number)]
        of_dx = gemm.traced(dy, dy_scales, dtype)
        of_dw = gemm.traced(dy_of_dw, scales_of_dw, dtype, is_transposed=True)
        x, w_NK = gemm.kept((data_KM, scales, w_NK))
        return self._grads(of_dx, of_dw, x, w_NK, number)

    def scaled_product(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return Y, and data and scales of X^T, empty unless they are kept; of X as `Forms`, W, bias, number."""
        x, x_scales, x_of_dw, scales_of_dw, w_NK, bias_N, number, dtype, _, is_kept = given
        _, gemm = self._linears[int(number)]
        y_MN = gemm.y(gemm.traced(x, x_scales, dtype), gemm.w(w_NK), bias_N)
        if not is_kept:
            return y_MN, x.new_empty(0), x_scales.new_empty(0)
        x_KM = gemm.traced(x_of_dw, scales_of_dw, dtype, is_transposed=True)
        assert x_KM.scales is not None, "the operand is quantized"
        return y_MN, x_KM.data, _as_bytes(x_KM.scales)

    def product(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, number: Tensor) -> Tensor:
        """Return Y."""
        _, gemm = self._linears[int(number)]
        return gemm.y(gemm.x(x_MK), gemm.w(w_NK), bias_N)


def _define(library: torch.library.Library, owner: weakref.ref[CompiledLinears]) -> Callable[..., Tensor]:
    """Register the operators under names that are free, and return `linear`."""
    operators = getattr(torch.ops, NAMESPACE)
    index = next(n for n in count() if not hasattr(operators, f"linear_{n}"))
    name, grads_name = f"linear_{index}", f"linear_grads_{index}"
    library.define(f"{name}(Tensor x, Tensor w, Tensor? bias, Tensor number) -> Tensor")
    library.define(f"{grads_name}(Tensor dy, Tensor x, Tensor w, Tensor number) -> Tensor")

    def model() -> CompiledLinears:
        found = owner()
        assert found is not None, "the model of this graph no longer exists"
        return found

    def fake(name: str, function: Callable[..., Tensor]) -> None:
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=library)

    library.impl(name, lambda *operands: model().product(*operands), "CompositeExplicitAutograd")
    library.impl(grads_name, lambda *operands: model().grads(*operands), "CompositeExplicitAutograd")
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


def _define_scaled(
    library: torch.library.Library, owner: weakref.ref[CompiledLinears]
) -> tuple[Callable[..., Any], Any]:
    """Register the operators of scaled operands; return that of Y, and the function that has its gradients."""
    operators = getattr(torch.ops, NAMESPACE)
    index = next(n for n in count() if not hasattr(operators, f"scaled_linear_{n}"))
    name, grads_name = f"scaled_linear_{index}", f"scaled_linear_grads_{index}"
    forms = "Tensor {0}, Tensor {0}_scales, Tensor {0}_of_dw, Tensor {0}_of_dw_scales"
    given = (
        f"({forms.format('x')}, Tensor w, Tensor? bias, Tensor number, ScalarType dtype, int scale_bytes, bool is_kept)"
    )
    library.define(f"{name}{given} -> (Tensor, Tensor, Tensor)")
    kept = "Tensor xt, Tensor xt_scales, Tensor w, Tensor number, ScalarType dtype"
    library.define(f"{grads_name}({forms.format('dy')}, {kept}) -> Tensor")

    def model() -> CompiledLinears:
        found = owner()
        assert found is not None, "the model of this graph no longer exists"
        return found

    def like_product(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, scales, x_of_dw, scales_of_dw, w, _, _, dtype, scale_bytes, is_kept = given
        y = w.new_empty(x.shape[0], w.shape[0], dtype=dtype)
        if not is_kept:
            return y, x.new_empty(0), scales.new_empty(0)
        stored = torch.uint8 if scale_bytes == 1 else scales.dtype
        return y, x.new_empty(x_of_dw.shape[::-1]), scales.new_empty(scales_of_dw.shape[::-1], dtype=stored)

    def like_dx(*given: Any) -> Tensor:
        dy, w, dtype = given[0], given[-3], given[-1]
        dx: Tensor = dy.new_empty(dy.shape[0], w.shape[1], dtype=dtype)
        return dx

    library.impl(name, lambda *given: model().scaled_product(*given), "CompositeExplicitAutograd")
    library.impl(grads_name, lambda *given: model().scaled_grads(*given), "CompositeExplicitAutograd")
    fake = partial(torch.library.register_fake, lib=library)
    fake(f"{NAMESPACE}::{name}", like_product)
    fake(f"{NAMESPACE}::{grads_name}", like_dx)
    product, product_grads = (getattr(operators, each).default for each in (name, grads_name))

    class ScaledLinear(torch.autograd.Function):
        """Linear that keeps X^T in fp8; compiled graphs trace both directions."""

        @staticmethod
        def forward(
            ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, number: Tensor, made_by: Traceable
        ) -> Tensor:
            y_MN: Tensor
            y_MN, *x_KM = product(*made_by.x(x_MK), w_NK, bias_N, number, x_MK.dtype, made_by.scale_bytes, True)
            ctx.save_for_backward(*x_KM, w_NK, number)
            ctx.made_by, ctx.has_bias, ctx.dtype = made_by, bias_N is not None, x_MK.dtype
            return y_MN

        @staticmethod
        def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
            dx_MK = product_grads(*ctx.made_by.dy(dy_MN), *ctx.saved_tensors, ctx.dtype)
            return dx_MK, None, dy_MN.sum(0) if ctx.has_bias else None, None, None

    return product, ScaledLinear


def _as_bytes(scales: Tensor) -> Tensor:
    """Return scales of a byte each as integers, since Inductor does not know e8m0."""
    return scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales


class _PlainMatmul(torch.autograd.Function):
    """The matmul of a linear without axes, where X requires a gradient and both parameters have a main_grad.

    Autograd sees X alone: the parameters travel in a tuple, so that it neither visits nor calls hooks of them.
    """

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, given: tuple[Tensor, Tensor | None, MainGrads, Gemm]) -> Tensor:
        ctx.given = given
        w_NK, bias_N, _, gemm = given
        x = gemm.x(x_MK, is_kept=True)
        ctx.save_for_backward(*gemm.keep(x_MK, x, w_NK))
        return gemm.y(x, gemm.w(w_NK), bias_N)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor, None]:
        param, bias_N, main_grads, gemm = ctx.given
        x, w_NK = gemm.kept(ctx.saved_tensors)
        dy, dy_of_dw = gemm.gathered(gemm.dy(dy_MN))
        dx_MK = gemm.dx(dy, gemm.w(w_NK, Direction.BACKWARD))
        main_grads.accumulate(param, gemm, dy_of_dw, x)
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
        gemm: recipe that multiplies.
    """

    def __init__(
        self,
        plan: MatmulPlan,
        comm: Comm,
        overlap: TPOverlap = OVERLAP_ALL,
        *,
        main_grads: MainGrads | None = None,
        wgrads: WgradQueue | None = None,
        weight: PrefetchedWeight | None = None,
        compiled: CompiledLinear | None = None,
        gemm: Gemm = NATIVE,
    ) -> None:
        self.plan, self.comm, self.gemm = plan, comm, gemm
        self.overlap, self.weight = overlap, weight
        self._rounds = async_plan(plan) if overlap.in_rounds else NO_ROUNDS
        self._compiled = compiled
        self.main_grads = main_grads or MainGrads()
        self.wgrads = wgrads or WgradQueue(self.main_grads)
        self.is_plain = not (plan.m or plan.k or plan.n or wgrads)

    def multiply_by(self, gemm: Gemm) -> None:
        """Multiply by a recipe from now on, outside compiled graphs."""
        self.gemm = gemm

    def __call__(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Return Y[M, N] = X W^T + bias; operands and Y are shards in the plan's layouts."""
        if self.is_plain and (y_MN := self._plain(x_MK, w_NK, bias_N)) is not None:
            return y_MN
        backward_follows = x_MK.requires_grad and torch.is_grad_enabled()
        planned_MN: Tensor = _Matmul.apply(x_MK, w_NK, bias_N, self, backward_follows)
        return planned_MN

    def _plain(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor | None:
        """Return Y by the shortest way that suffices without axes and hooks; None where none does."""
        gemm = self.gemm
        if torch.compiler.is_compiling():
            return self._compiled(x_MK, w_NK, bias_N) if self._compiled else F.linear(x_MK, w_NK, bias_N)
        if not torch.is_grad_enabled():
            return gemm.y(gemm.x(x_MK), gemm.w(w_NK), bias_N)
        if self.main_grads.buffer(w_NK) is None:
            is_torch = gemm is NATIVE and not uses_onednn(x_MK.device, x_MK.dtype)
            return F.linear(x_MK, w_NK, bias_N) if is_torch else None
        if not x_MK.requires_grad:
            return None
        plain_MN: Tensor = _PlainMatmul.apply(x_MK, (w_NK, bias_N, self.main_grads, gemm))
        return plain_MN

    def forward(self, x: Operand, w_NK: Tensor, bias_N: Tensor | None, backward_follows: bool) -> Tensor:
        """Return Y, with the bias added once: in the GEMM, or to the finished sum where K is split or rounds run."""
        plan, comm, rounds = self.plan, self.comm, self._rounds
        adds_bias_in_gemm = not (plan.k or rounds.x or rounds.y)
        gathered_x = gather_operand(x, _without(plan.x, rounds.x), X_DIMS, comm)
        gathered_w = self.gather_weight(Direction.FORWARD, w_NK, backward_follows)
        if rounds.x:
            x_MK, whole_w_NK = gathered_x.wait().data, gathered_w.wait().data
            whole_MN = comm.all_gather_matmul(x_MK, whole_w_NK, rounds.x.axes, put_product).product
            y = reduce(whole_MN, moves(plan.y), Y_DIMS, comm)
        elif rounds.y:
            y = self._scattered(gathered_x.wait().data, gathered_w.wait().data, moves(plan.y), Y_DIMS)
        else:
            bias_in_gemm = bias_N if adds_bias_in_gemm else None
            y_MN = self.gemm.y(gathered_x.wait(), gathered_w.wait(), bias_in_gemm)
            y = reduce(y_MN, moves(plan.y), Y_DIMS, comm)
        y_MN = y.wait()
        return y_MN if bias_N is None or adds_bias_in_gemm else y_MN.add_(bias_N)

    def backward(self, param: Tensor, x: Operand, w_NK: Tensor, dy_MN: Tensor, needs: tuple[bool, ...]) -> Grads:
        """Return the gradients that autograd needs of X, W and bias; dW is None where it goes to main_grad."""
        plan, comm, rounds = self.plan, self.comm, self._rounds
        needs_dx, needs_dw, needs_db = needs
        gathers = _without(plan.dy, rounds.dy if needs_dx else None)
        gathered_dy = gather_operand(self.gemm.dy(dy_MN), gathers, Y_DIMS, comm)
        gathered_w = self.gather_weight(Direction.BACKWARD, w_NK) if needs_dx else None
        wgrad_follows = needs_dw and not self.wgrads.is_deferring
        gathered_x = gather_operand(x, plan.x, X_DIMS, comm) if wgrad_follows else None
        db_N = dy_MN.sum(0) if needs_db else None
        dy, dx = self._dgrad(gathered_dy, gathered_w, wgrad_follows and self.overlap.input_grad)
        if dx and not self.overlap.input_grad:
            dx = completed(dx.wait())
        gathered_dy = completed(dy)  # waited for by the wgrad GEMM, so that a deferred dY is freed before dW is reduced
        del dy

        def wgrad() -> Pending | None:
            whole_x = gathered_x or gather_operand(x, plan.x, X_DIMS, comm)
            dw_NK = self._wgrad(
                param, gathered_dy.wait(), whole_x.wait()
            )  # its operands are freed before the reduction
            return None if dw_NK is None else reduce(dw_NK, moves(plan.w), W_DIMS, comm)

        dw = self.wgrads.submit(param, wgrad) if needs_dw else None
        return dx.wait() if dx else None, self._added(param, dw) if dw else None, db_N

    def _dgrad(
        self, gathered_dy: Pending[Operand], gathered_w: Pending[Operand] | None, wgrad_follows: bool
    ) -> tuple[Operand, Pending | None]:
        """Return the gathered dY as dW needs it, and dX in flight; None without W.

        Args:
            wgrad_follows: the reduction of dX will overlap with the wgrad GEMM.
        """
        plan, comm, rounds = self.plan, self.comm, self._rounds
        dy, dy_of_dw = self.gemm.gathered(gathered_dy.wait())
        if gathered_w is None:
            return dy_of_dw, None
        w = gathered_w.wait()
        if rounds.dy:
            whole_MN, dx_MK = comm.all_gather_matmul(dy.data, w.data.T, rounds.dy.axes, put_product)
            return Operand(whole_MN), reduce(dx_MK, plan.dx_moves, X_DIMS, comm)
        if rounds.dx and not wgrad_follows:
            return dy_of_dw, self._scattered(dy.data, w.data.T, plan.dx_moves, X_DIMS)
        return dy_of_dw, reduce(self.gemm.dx(dy, w), plan.dx_moves, X_DIMS, comm)

    def _scattered(self, a_MK: Tensor, b_NK: Tensor, steps: tuple[Move, ...], dims: Mapping[str, int]) -> Pending:
        """Return a b^T reduced by `steps`, the first of which runs in rounds with the GEMM."""
        first, *others = steps
        part = self.comm.matmul_reduce_scatter(a_MK, b_NK, first.axes, dims[str(first.dim)], put_product)
        return Pending(lambda: reduce(part.wait(), tuple(others), dims, self.comm).wait())

    def _added(self, param: Tensor, dw: Pending) -> Tensor | None:
        """Add dW to main_grad, past autograd, which would round it; without a buffer return it to autograd."""
        if self.main_grads.buffer(param) is None:
            return dw.wait()
        self.main_grads.add(param, dw.wait())
        return None

    def _wgrad(self, param: Tensor, dy: Operand, x: Operand) -> Tensor | None:
        """Return dY^T X; None where nothing reduces it, and it is accumulated in main_grad."""
        if not self.plan.w and self.main_grads.accumulate(param, self.gemm, dy, x):
            return None
        return self.gemm.dw(dy, x, self.main_grads.reduce_dtype(param, dy.dtype))

    def gather_weight(self, at: Direction, w_NK: Tensor, backward_follows: bool = False) -> Pending[Operand]:
        """Return the gathered W, through the prefetch hook where there is one."""
        if self.weight is None:
            return gather_operand(self.gemm.w(w_NK, at), self.plan.w, W_DIMS, self.comm)
        return self.weight.gather(at, backward_follows)


def _without(table: Mapping[str, str], move: Move | None) -> Mapping[str, str]:
    """Return a table of gathers without the one that runs in rounds."""
    return {axis: dim for axis, dim in table.items() if axis not in move.axes} if move else table


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, matmul: Matmul, backward_follows: bool
    ) -> Tensor:
        # The parameter itself names its main_grad; what is saved comes back as another tensor after recomputation.
        ctx.matmul, ctx.param = matmul, w_NK
        x = matmul.gemm.x(x_MK, is_kept=True)
        ctx.save_for_backward(*matmul.gemm.keep(x_MK, x, w_NK))
        return matmul.forward(x, w_NK, bias_N, backward_follows)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        matmul = ctx.matmul
        x, w_NK = matmul.gemm.kept(ctx.saved_tensors)
        grads: Grads = matmul.backward(ctx.param, x, w_NK, dy_MN, ctx.needs_input_grad[:3])
        return *grads, None, None
