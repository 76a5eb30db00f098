"""Modules that layers and the ends of a model consist of: linears, norms, MLP, dropout on the residual stream.

Activations that fuse gate and up projection [M, 2F]:

    swiglu          silu(gate) up                                       (Shazeer 2020, arXiv:2002.05202)
    clamped_swiglu  g sigmoid(1.702 g) (1 + u),  g = min(gate, 7),  u = clamp(up, -7, 7)      (gpt-oss, 2025)

`squared_relu` is by So et al. 2021, arXiv:2109.08668, and `xielu` by Huang and Schlag 2024, arXiv:2411.13010.
Letters: M tokens, K input and N output features, H hidden, F inner features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron3d.attention.context.plan import CONTEXT_EXCHANGES
from megatron3d.attention.largest_logits import LargestLogits
from megatron3d.comm.interface import Comm
from megatron3d.linear.collectives import PrefetchedWeight
from megatron3d.linear.fp8 import Fp8Gemm
from megatron3d.linear.fp8_plan import Fp8
from megatron3d.linear.gemm import NATIVE, Gemm, Operand
from megatron3d.linear.main_grad import MainGrads, WgradQueue
from megatron3d.linear.matmul import CompiledLinears, Matmul
from megatron3d.linear.overlap_plan import OVERLAP_ALL, Direction, TPOverlap
from megatron3d.model.linear_spec import FC1, FC2, linear_size
from megatron3d.model.microbatch import Pass
from megatron3d.model.router_state import RouterState
from megatron3d.model.spec import MLP_ACT, NO_RECOMPUTE, Architecture, Recompute
from megatron3d.ops.dropout import derive_seed, dropout, keep_mask
from megatron3d.ops.norm import TORCH_NORMS, NormKernels, norm
from megatron3d.ops.recompute import recompute_from_input, recomputed
from megatron3d.parallel.layout import ParamSpec, span
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Axes
from megatron3d.parallel.modes.mode import Mode


@dataclass(frozen=True, kw_only=True)
class Build:
    """Arguments of every module's constructor.

    Attributes:
        wgrads: defers weight gradients, or overlaps their reductions; None: linears compute them in backward.
        compiled: operators of linears inside compiled graphs; None: layers are not compiled.
        context_exchange: exchange of keys and values between context ranks.
        routers: state of routers; None: there are none.
        gemm: recipe of all GEMMs; fp8: that of the linears of layers that multiply in fp8, None: none does.
        logits: largest logits of attention; None: they are not recorded.
    """

    arch: Architecture
    mode: Mode
    comm: Comm
    specs: Mapping[str, ParamSpec]
    main_grads: MainGrads
    wgrads: WgradQueue | None = None
    recompute: Recompute = NO_RECOMPUTE
    overlap: TPOverlap = OVERLAP_ALL
    norm_kernels: NormKernels = TORCH_NORMS
    compiled: CompiledLinears | None = None
    context_exchange: str = CONTEXT_EXCHANGES[0]
    routers: RouterState | None = None
    gemm: Gemm = NATIVE
    fp8: Fp8 | None = None
    logits: LargestLogits | None = None

    def plan(self, plan: MatmulPlan) -> MatmulPlan:
        """Return the plan without axes of size 1."""
        return plan.on(self.comm.mesh)

    def gemm_of(self, path: str, plan: MatmulPlan, fp8_gemm: type[Fp8Gemm] = Fp8Gemm) -> Gemm:
        """Return the recipe of a linear by its path in the module tree."""
        return fp8_gemm(self.fp8, plan, self.comm) if self.fp8 is not None and self.fp8.takes(path) else self.gemm

    def live(self, axes: Axes) -> Axes:
        """Return the axes of more than one rank."""
        return self.comm.mesh.nontrivial(axes)

    def param(self, name: str) -> nn.Parameter:
        """Return a parameter of the table, without memory: `zero.Buffers` allocates it."""
        return nn.Parameter(torch.empty(self.specs[name].local_shape(self.comm.mesh), device="meta"))

    def optional(self, name: str) -> nn.Parameter | None:
        """Return a parameter of the table, None where the table has none."""
        return self.param(name) if name in self.specs else None


class Linear(nn.Module):
    """Tensor-parallel linear [M, K] -> [M, N] with its weight and bias, computed by a matmul plan."""

    def __init__(self, layer: str, name: str, build: Build) -> None:
        super().__init__()
        plan = build.plan(linear_size(build.arch, name).plan(build.mode))
        comm, overlap, gemm = build.comm, build.overlap, build.gemm_of(f"{layer}.{name}", plan)
        self.weight = build.param(f"{layer}.{name}.weight")
        self.bias = build.optional(f"{layer}.{name}.bias")
        weight = PrefetchedWeight(self._shard, plan, comm, overlap) if plan.w else None
        compiled = build.compiled.linear(lambda: self.weight, gemm) if build.compiled else None
        grads, wgrads = build.main_grads, build.wgrads
        self.matmul = Matmul(
            plan, comm, overlap, main_grads=grads, wgrads=wgrads, weight=weight, compiled=compiled, gemm=gemm
        )

    def _shard(self, at: Direction) -> Operand:
        """Return the stored shard of W as it is all-gathered."""
        return self.matmul.gemm.w(self.weight.detach(), at)

    def forward(self, x_MK: Tensor) -> Tensor:
        return self.matmul(x_MK, self.weight, self.bias)


class Norm(nn.Module):
    """LayerNorm, with weight and bias, one or none, or RMSNorm, of [M, H] over features that `axes` shard."""

    def __init__(self, name: str, axes: Axes, build: Build) -> None:
        super().__init__()
        self.axes, self.comm = build.live(axes), build.comm
        self.eps, self.is_centred_at_0 = build.arch.norm_epsilon, build.arch.apply_layernorm_1p
        self.kernels = build.norm_kernels
        self.weight = build.optional(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.lacks_bias = self.bias is None and not build.arch.is_rms_norm

    def forward(self, x_MH: Tensor) -> Tensor:
        bias = x_MH.new_zeros(x_MH.shape[-1]) if self.lacks_bias else self.bias
        if self.weight is None:
            weight = x_MH.new_ones(x_MH.shape[-1])
        else:
            weight = self.weight + 1 if self.is_centred_at_0 else self.weight
        return norm(x_MH, weight, bias, self.eps, self.axes, self.comm, kernels=self.kernels)


class HiddenDropout(nn.Module):
    """Dropout on the residual stream [M, H], with the same mask in every layout."""

    def __init__(self, site: str, build: Build) -> None:
        super().__init__()
        self.site, self.rate = site, build.arch.hidden_dropout
        self.hidden_size = build.arch.hidden_size
        self.layout, self.mesh = build.mode.residual, build.comm.mesh

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        if self.rate == 0 or at.key is None:
            return x_MH
        rows = at.token_rows(self.layout[0], x_MH.device)
        columns = torch.arange(*span(self.hidden_size, self.layout[1], self.mesh), device=x_MH.device)
        return dropout(x_MH, keep_mask(derive_seed(*at.key, self.site), rows, columns, self.rate), self.rate)


Activation = Callable[[Tensor], Tensor]


class _XIELU(torch.autograd.Function):
    """xIELU with parameters p and n: backward keeps x alone.

    x > 0    softplus(p) x^2 + x / 2
    x <= 0   (softplus(n) + 1/2) (e^x - 1 - x) + x / 2
    """

    @staticmethod
    def forward(ctx: Any, x_MF: Tensor, p: Tensor, n: Tensor) -> Tensor:
        ctx.save_for_backward(x_MF, p, n)
        low_MF = torch.expm1(x_MF.clamp(max=0)).sub_(x_MF).mul_(F.softplus(n) + 0.5)
        return torch.where(x_MF > 0, F.softplus(p) * x_MF * x_MF, low_MF).add_(x_MF, alpha=0.5)

    @staticmethod
    def backward(ctx: Any, dy_MF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_MF, p, n = ctx.saved_tensors
        wide = torch.promote_types(x_MF.dtype, torch.float32)
        above_MF, below_MF = x_MF.clamp(min=0), torch.expm1(x_MF.clamp(max=0))
        dp = (dy_MF * above_MF * above_MF).sum(dtype=wide) * p.sigmoid()
        dn = (dy_MF * (below_MF - x_MF.clamp(max=0))).sum(dtype=wide) * n.sigmoid()
        slope_MF = above_MF.mul_(2 * F.softplus(p)).add_(below_MF.mul_(F.softplus(n) + 0.5)).add_(0.5)
        return slope_MF.mul_(dy_MF), dp.to(p.dtype), dn.to(n.dtype)


def _xielu(x_MF: Tensor, p: Tensor, n: Tensor) -> Tensor:
    y_MF: Tensor = _XIELU.apply(x_MF, p.to(x_MF.dtype), n.to(x_MF.dtype))
    return y_MF


def _gated(activation: Activation, fused_MF: Tensor) -> Tensor:
    gate, up = fused_MF.chunk(2, dim=-1)
    return activation(gate) * up


def _clamped_swiglu(fused_MF: Tensor) -> Tensor:
    gate, up = fused_MF.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(gate * 1.702) * (up + 1)


# Functions of the features and, for some, of parameters.
ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x_MF: F.relu(x_MF).square(),
    "xielu": _xielu,
    "swiglu": partial(_gated, F.silu),
    "geglu": partial(_gated, F.gelu),
    "geglu_tanh": partial(_gated, partial(F.gelu, approximate="tanh")),
    "clamped_swiglu": _clamped_swiglu,
}


class MLP(nn.Module):
    """MLP [M, H] -> [M, H]: up (and gate) projection, activation, down projection.

    Args:
        within: modules of activation recomputation that it is a part of; the first one is the whole MLP.
    """

    def __init__(self, layer: str, build: Build, fc1: str = FC1, fc2: str = FC2, within: Sequence[str] = ()) -> None:
        super().__init__()
        self.function, self.param_names = ACTIVATIONS[build.arch.activation], tuple(build.arch.activation_params)
        self.fc1 = Linear(layer, fc1, build)
        for name in self.param_names:
            self.register_parameter(name, build.param(f"{layer}.mlp.{name}"))
        self.fc2 = Linear(layer, fc2, build)
        self.recomputes_all = any(build.recompute.recomputes(each, within[1:]) for each in within[:1])
        self.recomputes_activation = build.recompute.recomputes(MLP_ACT, within)

    def activation(self, y_MF: Tensor) -> Tensor:
        """Return the activation of the features, with its parameters."""
        return self.function(y_MF, *map(self.get_parameter, self.param_names))

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        if not self.recomputes_all:
            return self.compute(x_MH, at)
        with at.reads_input():
            return recomputed(self.compute, x_MH, at.saving(None))

    def compute(self, x_MH: Tensor, at: Pass) -> Tensor:
        """Return the output [M, H] of the down projection."""
        with at.reads_input():
            y_MF = self.fc1(x_MH)
        if self.recomputes_activation and torch.compiler.is_compiling():  # no hook is part of a graph
            y_MH: Tensor = self.fc2(recomputed(self.activation, y_MF))
        else:
            a_MF = self.activation(y_MF)
            with recompute_from_input(self.activation, y_MF, a_MF) if self.recomputes_activation else nullcontext():
                y_MH = self.fc2(a_MF)
        return y_MH
