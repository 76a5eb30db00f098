"""Memory of a mixture of experts on one rank, where the experts' load is balanced.

    kept        router's input and choice | rows of fc1 | activation | input of fc2 | rows that slots are added of
    transient   rows and their gradients of one step between the router and the combination

Small tensors (a number or a weight per token and expert) count roughly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.analysis.memory_model.mlp_activations import KeptTensor, activation_tensors
from megatron3d.model.linears import SHARED_FC1, SHARED_FC2
from megatron3d.ops.router_spec import SEQUENCE, Experts

_INDEX = 8
ROUTER, FC1, ACTIVATION, FC2, COMBINE = (
    f"mlp.{name}" for name in ("router", "experts.fc1", "experts.activation", "experts.fc2", "experts.combine")
)
SHARED_ACTIVATION = SHARED_FC1.removesuffix("fc1") + "activation"
# Sites in the order of backward.
BACKWARD = (SHARED_FC2, SHARED_ACTIVATION, SHARED_FC1, COMBINE, FC2, ACTIVATION, FC1, ROUTER)


def expert_tensors(local: LocalSizes, experts: Experts) -> Iterator[KeptTensor]:
    """Yield what a mixture of experts keeps for backward, the norm's output included."""
    rows, hidden = local.expert_rows, local.arch.hidden_size
    moves = bool(local.mesh.nontrivial((*local.mode.residual[1], *local.mode.copies)))
    is_narrow, home = local.itemsize < local.wide, local.home_tokens * hidden
    if experts.shared_ffn_hidden_size or not (moves or is_narrow) or (experts.has_shared_gate and not moves):
        yield KeptTensor(ROUTER, "input of the layer", local.residual)
    if is_narrow:
        yield KeptTensor(ROUTER, "input and weight, widened", (home + experts.num_experts * hidden) * local.wide)
    if moves and (experts.has_shared_gate or not is_narrow):
        yield KeptTensor(ROUTER, "whole rows", home * local.itemsize)
    yield from _choice(local, experts)
    yield KeptTensor(FC1, "rows", rows * hidden * local.itemsize)
    yield from activation_tensors(local, rows * experts.ffn_hidden_size * local.itemsize, (FC1, FC2))
    yield KeptTensor(COMBINE, "rows of each slot", rows * hidden * local.itemsize)
    if experts.shared_ffn_hidden_size:
        yield from activation_tensors(local, local.inner(local.ffn), (SHARED_FC1, SHARED_FC2))
    if experts.has_shared_gate:
        yield KeptTensor(COMBINE, "output of shared experts", home * local.itemsize)


def _choice(local: LocalSizes, experts: Experts) -> Iterator[KeptTensor]:
    """Yield the choice of experts, the order of rows, and what the losses of the router keep."""
    balance, scores = local.arch.balance, local.home_tokens * experts.num_experts * local.wide
    yield KeptTensor(ROUTER, "choice, order of rows", local.expert_rows * (3 * _INDEX + 2 * local.wide))
    if experts.score_function != "softmax" or experts.pre_softmax:
        yield KeptTensor(ROUTER, "scores", scores)
    if balance is not None and balance.loss == SEQUENCE:
        yield KeptTensor(ROUTER, "scores of the balance loss", 3 * scores)
    if balance is not None and balance.z_coeff:
        yield KeptTensor(ROUTER, "logits", scores)


def expert_peaks(local: LocalSizes, experts: Experts) -> Mapping[str, int]:
    """Return the transient bytes of each site of the backward: gradients of rows, and copies in another order."""
    row, inner = local.expert_rows * local.arch.hidden_size, local.expert_rows * experts.ffn_hidden_size
    ranks, parts = local.mesh.size(local.mode.experts), 2 if local.is_gated else 1
    home = (1 if ranks == 1 else 2 * ranks) * local.home_tokens * local.arch.hidden_size
    one = local.arch.hidden_size * parts * experts.ffn_hidden_size * (local.itemsize < local.wide)
    return {
        site: size * local.itemsize
        for site, size in {
            COMBINE: home + 3 * row,
            FC2: home + row + inner + one,
            ACTIVATION: (1 + parts) * inner,
            FC1: home + row + parts * inner + one,
            ROUTER: home + 2 * row,
        }.items()
    }
