"""Mixture of experts in place of a layer's MLP, for every layout (Shazeer et al. 2017, arXiv:1701.06538).

    residual -> relayout: whole rows -> router -> rows to experts -> fc1, activation, fc2 -> rows added -> residual
                                              shared experts, while the rows are in flight

The router and the combination run where a token is at home: on one rank, with all its features.
Letters: M tokens, H hidden, E experts, K experts of a token, R rows of experts, F inner features.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron3d.experts.dispatch import DISPATCH, ExpertRanks, gather_tokens, reduce_rows
from megatron3d.experts.grouped_matmul import GroupedMatmul, add_biases
from megatron3d.experts.plan import (
    GLOBAL,
    MICROBATCH,
    SEQUENCE,
    Balance,
    Experts,
    capacity_of,
    expert_plan,
    padded_rows,
    sharing_axes,
)
from megatron3d.experts.router import (
    Capacity,
    Routes,
    balance_terms,
    choices_kept,
    counts_of_sequences,
    route,
    router_logits,
    with_loss,
    z_terms,
)
from megatron3d.experts.rows import Groups, Rows, padded_to
from megatron3d.linear.fp8_rows import Fp8RowsGemm
from megatron3d.model.linear_spec import SHARED_FC1, SHARED_FC2
from megatron3d.model.microbatch import Pass
from megatron3d.model.modules import ACTIVATIONS, MLP, Build
from megatron3d.model.spec import MOE, MOE_ACT, SHARED_EXPERTS
from megatron3d.ops.recompute import KeptResults, recompute_from_input, recomputed
from megatron3d.ops.relayout import TokenRelayout


class ExpertLinear(nn.Module):
    """Linear of all experts of this rank: rows X [R, K], sorted by expert, to [R, N]."""

    def __init__(self, name: str, num_experts: int, build: Build, *, expands: bool) -> None:
        super().__init__()
        plan = expert_plan(expands, build.live(build.mode.etensor))
        self.weight = build.param(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        copies = [] if self.bias is None else set(build.mode.etensor) - build.specs[f"{name}.bias"].axes
        # Of the ranks whose partial outputs are summed the first one adds the bias.
        self.adds_bias = not any(build.comm.mesh.coord(axis) for axis in copies)
        self.matmul = GroupedMatmul(num_experts, build.main_grads, build.wgrads, build.gemm_of(name, plan, Fp8RowsGemm))

    def forward(self, x: Rows, rows: Groups, weights_R: Tensor | None = None) -> Tensor:
        """Return the outputs; `weights_R` are the weights that the rows have already, and the biases not yet."""
        y_RN = self.matmul(x, self.weight, rows)
        if self.bias is None:
            return y_RN
        return add_biases(y_RN, self.bias if self.adds_bias else 0 * self.bias, rows.counts, weights_R)


class _Weighted(torch.autograd.Function):
    """Activation of rows times their weights, which keeps the input alone and recomputes the activation in backward."""

    @staticmethod
    def forward(ctx: Any, x_RF: Tensor, weights_R: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(x_RF, weights_R)
        return activation(x_RF).mul_(weights_R.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RF, weights_R = ctx.saved_tensors
        x_RF = x_RF.detach().requires_grad_()
        with torch.enable_grad():
            y_RF = ctx.activation(x_RF)
        product_RF = dy_RF * y_RF.detach()
        dweights_R = product_RF.sum(1, dtype=weights_R.dtype)
        weighted_RF = torch.mul(dy_RF, weights_R.unsqueeze(1), out=product_RF)
        of_y = get_gradient_edge(y_RF)
        del y_RF  # its values are not needed any more
        return *torch.autograd.grad(of_y, x_RF, weighted_RF), dweights_R, None


class ExpertMLP(nn.Module):
    """MLPs of this rank's experts: rows [R, H], sorted by expert, to [R, H], times their weights [R].

    The rows are weighted between the linears, so that no output of an expert is kept for the weights' gradients, or,
    where the model says so, before them.
    """

    def __init__(self, name: str, num_experts: int, build: Build) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[build.arch.activation]
        self.fc1 = ExpertLinear(f"{name}.fc1", num_experts, build, expands=True)
        self.fc2 = ExpertLinear(f"{name}.fc2", num_experts, build, expands=False)
        self.recomputes_activation = build.recompute.recomputes(MOE_ACT, (MOE,))
        self.applies_probs_on_input = build.arch.experts is not None and build.arch.experts.applies_probs_on_input

    def tokens(self, x_MH: Tensor) -> Rows:
        """Return tokens as they are sent to experts: as `fc1` multiplies them, unless they are weighted before."""
        return Rows(x_MH, None if self.applies_probs_on_input else self.fc1.matmul.gemm.packed(x_MH.detach()))

    def forward(self, x: Rows, weights_R: Tensor, rows: Groups) -> Tensor:
        if self.applies_probs_on_input:
            x_RH = x.values
            x, weights_R = Rows((x_RH * weights_R.unsqueeze(1)).to(x_RH.dtype)), torch.ones_like(weights_R)

        def weighted(y_RF: Tensor) -> Tensor:
            a_RF: Tensor = _Weighted.apply(y_RF, weights_R, self.activation)
            return a_RF

        y_RF = self.fc1(x, rows)
        a_RF = weighted(y_RF)
        with recompute_from_input(weighted, y_RF, a_RF) if self.recomputes_activation else nullcontext():
            y_RH: Tensor = self.fc2(Rows(a_RF), rows, weights_R)
        return y_RH


class Router(nn.Module):
    """Router of a layer, in fp32 or wider, with the losses that balance its experts' load."""

    def __init__(self, name: str, experts: Experts, build: Build) -> None:
        super().__init__()
        self.name, self.experts, self.balance = name, experts, build.arch.balance or Balance()
        self.losses = tuple(self.balance.losses.items())
        self.comm, self.home = build.comm, build.mode.home
        batch = build.mode.batch_axes
        self.sequence_axes = build.live(tuple(axis for axis in self.home if axis not in batch))
        self.weight, self.bias = build.param(f"{name}.weight"), build.optional(f"{name}.bias")
        assert build.routers is not None, "a model with experts has the state of its routers"
        self.state = build.routers
        self.state.add(name)

    def forward(self, x_MH: Tensor, at: Pass) -> Routes:
        with at.reads_input():
            logits_ME = router_logits(x_MH, self.weight, self.bias)
        is_training = at.target is not None and torch.is_grad_enabled()
        counted = partial(self._count, at) if is_training else None
        expert_bias_E, once = self.state.row(self.name, "expert_bias"), partial(at.once, f"{self.name}.choice")
        in_turn = self.balance.forces_even_load and at.target is not None
        row_M = at.token_rows(self.home, logits_ME.device) if in_turn else None
        routes = route(logits_ME, self.experts, expert_bias_E, once, counted, row_M)
        if not is_training:
            return routes
        assert at.target is not None, "only a pass that ends in the loss has losses of routers"
        loss, taken = self._loss(logits_ME, routes, at), self._within_capacity(routes, at)
        return taken._replace(weights_MK=with_loss(taken.weights_MK, loss, at.target.scale))

    def capacity(self, num_tokens: int, at: Pass) -> int | None:
        """Return the rows that each expert is padded to, where its ranks have `num_tokens` tokens; None: it is not."""
        if not self.balance.pads_to_capacity or at.target is None or not torch.is_grad_enabled():
            return None
        return padded_rows(self.balance, self.experts, num_tokens, at.seq_length)

    def _within_capacity(self, routes: Routes, at: Pass) -> Routes:
        """Return the routes, where choices above an expert's capacity are the index after the last expert."""
        if self.balance.capacity_factor is None:
            return routes
        tokens = capacity_of(self.balance.capacity_factor, at.seq_length, self.experts)
        capacity = Capacity(tokens, self.balance.drop_policy)

        def choose() -> Tensor:
            rows_M = at.token_rows(self.home, routes.experts_MK.device)
            kept_MK = choices_kept(routes, rows_M, at.seq_length, capacity, self.sequence_axes, self.comm)
            self.state.count_dropped(self.name, kept_MK)
            return kept_MK

        kept_MK = at.once(f"{self.name}.kept", choose)
        return routes._replace(experts_MK=routes.experts_MK.where(kept_MK, self.experts.num_experts))

    def _count(self, at: Pass, chosen_MK: Tensor, scores_ME: Tensor) -> None:
        """Count a microbatch's choices, and keep them where they are wanted."""
        self.state.count(self.name, chosen_MK, scores_ME)
        if self.state.choices is not None:
            self.state.choices.append((self.name, at.token_rows(self.home, chosen_MK.device), chosen_MK))

    def _loss(self, logits_ME: Tensor, routes: Routes, at: Pass) -> Tensor:
        """Return this rank's part of all losses times their factors, means over the global batch."""
        assert at.target is not None, "only a pass that ends in the loss has losses of routers"
        loads, terms = self._loads(routes, at), partial(balance_terms, topk=self.experts.topk)
        total = logits_ME.new_zeros(())
        if loads:
            load_ME = torch.stack(torch.broadcast_tensors(*(coeff * loads[name] for name, coeff in self.losses)))
            total = total + terms(routes.scores_ME, load_ME.sum(0)).sum()
        if self.balance.z_coeff:
            total = total + self.balance.z_coeff * z_terms(logits_ME).sum()

        @torch.no_grad()
        def values() -> list[Tensor]:
            found = [terms(routes.scores_ME, loads[name]).sum() for name, _ in self.losses]
            return found + ([z_terms(logits_ME).sum()] if self.balance.z_coeff else [])

        at.once(f"{self.name}.losses", lambda: self.state.add_losses(self.name, values))
        return total / at.target.all_tokens

    def _loads(self, routes: Routes, at: Pass) -> dict[str, Tensor]:
        """Return for each balance loss the share of tokens that chose each expert, of every token [M, E] or all [E].

        A loss of sequences, or of a microbatch, counts tokens that other ranks hold as well; that of the global batch
        has the load of the step before.
        """
        found, dtype = dict[str, Tensor](), routes.scores_ME.dtype
        if not {name for name, _ in self.losses} <= {GLOBAL}:
            sequence_M = at.sequence_of_rows(self.home, routes.experts_MK.device)
            counts_BE = counts_of_sequences(routes.experts_MK, self.experts.num_experts, sequence_M, len(at.tokens_BL))
            if self.sequence_axes:
                counts_BE = self.comm.all_reduce(counts_BE, self.sequence_axes).wait()
            load_BE = counts_BE.to(dtype) / at.seq_length
            found |= {SEQUENCE: load_BE[sequence_M], MICROBATCH: load_BE.mean(0)}
        if (load_E := self.state.row(self.name, "load")) is not None:
            found[GLOBAL] = load_E.to(dtype)
        return {name: found[name] for name, _ in self.losses}


class SharedGate(nn.Module):
    """Gate of the shared experts: sigmoid of a projection [M, H] -> [M, 1]."""

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        self.weight = build.param(f"{name}.weight")

    def forward(self, x_MH: Tensor) -> Tensor:
        return F.linear(x_MH, self.weight).sigmoid()


class MoE(nn.Module):
    """Mixture of experts [M, H] -> [M, H] of one layer, shared experts included."""

    def __init__(self, index: int, layer: str, build: Build) -> None:
        super().__init__()
        experts, name = build.arch.experts, f"{layer}.mlp"
        assert experts is not None, f"layer {index} has no experts"
        self.dispatcher = build.mode.dispatcher
        self.etensor = build.live(build.mode.etensor)
        self.ranks = ExpertRanks(experts.num_experts, build.live(build.mode.experts), build.comm)
        self.relayout = TokenRelayout(build.mode.residual, build.mode.copies, build.comm)
        has_shared, within = bool(experts.shared_ffn_hidden_size), (SHARED_EXPERTS, MOE)
        self.shared_experts = MLP(layer, build, SHARED_FC1, SHARED_FC2, within) if has_shared else None
        self.recomputes_all = build.recompute.recomputes(MOE)
        self.shared_gate = SharedGate(f"{name}.shared_gate", build) if experts.has_shared_gate else None
        self.router = Router(f"{name}.router", experts, build)
        self.num_sharing = build.comm.mesh.size(build.live(sharing_axes(build.mode)))
        self.experts = ExpertMLP(f"{name}.experts", self.ranks.num_local, build)

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        if self.recomputes_all:
            with at.reads_input():
                return recomputed(self.mixture, x_MH, replace(at.saving(None), kept=KeptResults()))
        return self.mixture(x_MH, at)

    def mixture(self, x_MH: Tensor, at: Pass) -> Tensor:
        """Return the sum of each token's experts [M, H], and of the shared ones."""
        home_MH = self.relayout.to_rows(x_MH)
        routes, once = self.router(home_MH, at), partial(at.once, f"{self.router.name}.rows")
        shared_by = self.etensor, self.relayout.comm
        tokens, routes = gather_tokens(self.experts.tokens(home_MH), routes, *shared_by)
        sent = DISPATCH[self.dispatcher](tokens, routes, self.ranks, once)
        del tokens  # nothing but what is sent is needed
        shared_MH = None if self.shared_experts is None else self.shared_experts(x_MH, at)  # while rows are in flight
        pads_to = self.router.capacity(len(home_MH) * self.num_sharing, at)
        computed, restored = padded_to(pads_to, *sent.rows())
        y_MH = sent.combine(restored(self.experts(*computed)))
        del computed  # nothing but backward needs the rows any more
        y_MH = reduce_rows(y_MH, *shared_by)
        if self.shared_gate is not None and shared_MH is not None:
            with at.reads_input():
                gate_M1 = self.shared_gate(home_MH)
            return self.relayout.from_rows(y_MH + gate_M1 * self.relayout.to_rows(shared_MH))
        y_MH = self.relayout.from_rows(y_MH)
        return y_MH if shared_MH is None else y_MH + shared_MH
