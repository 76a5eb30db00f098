"""Rules of a mixture of experts: sizes that fit one another, keys that belong together, and what has no experts yet."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts, near_divisors
from megatron3d.parallel.expert_ranks import expert_sizes, stage_axes
from megatron3d.parallel.mesh import Sizes

NUM, TOPK, GROUPS, GROUP_TOPK = (
    f"model.{key}" for key in ("num_moe_experts", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk")
)
SHARED, GATE = "model.moe_shared_expert_intermediate_size", "model.moe_shared_expert_gate"
LOSS, COEFF = "model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff"
SIZE, ETP, DISPATCHER = (
    f"parallel.{key}"
    for key in ("expert_model_parallel_size", "expert_tensor_parallel_size", "moe_token_dispatcher_type")
)
LOAD = "parallel.expert_load_imbalance"
BIAS, RATE = "model.moe_router_enable_expert_bias", "model.moe_router_bias_update_rate"
PRE_SOFTMAX, SCORES = "model.moe_router_pre_softmax", "model.moe_router_score_function"


def expert_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of the keys of a mixture of experts."""
    model, experts = facts.config.model, facts.arch.experts
    if experts is None:
        for name in (name for name in type(model).model_fields if name.startswith("moe_")):
            if getattr(model, name) != type(model).model_fields[name].default:
                yield f"{facts.named(f'model.{name}')}: not used without {NUM}; set it, or leave {name} out"
        return
    if experts.topk > experts.num_experts:
        yield f"{facts.named(TOPK)}: more than {NUM}={experts.num_experts}; use 1 to {experts.num_experts}"
    if experts.pre_softmax and experts.score_function != "softmax":
        yield f"{facts.named(PRE_SOFTMAX)}: not used with {SCORES}={experts.score_function}; leave it out"
    if experts.has_shared_gate and not experts.shared_ffn_hidden_size:
        yield f"{facts.named(GATE)}: there are no shared experts to gate; set {SHARED}, or use false"
    if model.moe_router_load_balancing_type == "none" and model.moe_aux_loss_coeff:
        yield f"{facts.named(COEFF)}: not used with {LOSS}=none; use seq_aux_loss, or leave it out"
    if model.moe_router_bias_update_rate is not None and not experts.has_expert_bias:
        yield f"{facts.named(RATE)}: not used without {BIAS}=true; set it, or leave {RATE} out"
    if 1 not in (experts.layers or (1,)):
        yield f"{facts.named('model.moe_layer_freq')}: no layer has experts; leave {NUM} out"
    yield from _group_problems(facts)


def _group_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of groups of experts."""
    experts = facts.arch.experts
    assert experts is not None, "called with experts only"
    groups, kept = experts.num_groups, experts.group_topk
    if groups is None or kept is None:
        if groups != kept:
            given, missing = (GROUPS, GROUP_TOPK) if kept is None else (GROUP_TOPK, GROUPS)
            yield f"{facts.named(given)}: not used without {missing}; set both, or neither"
        return
    if experts.num_experts % groups:
        near = one_of(near_divisors(experts.num_experts, groups))
        yield f"{facts.named(GROUPS)}: {groups} does not divide {NUM}={experts.num_experts}; use {near}"
        return
    if kept > groups:
        yield f"{facts.named(GROUP_TOPK)}: more than {GROUPS}={groups}; use 1 to {groups}"
    elif experts.topk > kept * experts.num_experts // groups:
        least = -(-experts.topk * groups // experts.num_experts)
        yield (
            f"{facts.named(GROUP_TOPK)}: {kept} groups have {kept * experts.num_experts // groups} experts, fewer than "
            f"{TOPK}={experts.topk}; use {least} or more"
        )
    elif max(experts.topk // kept, 1) > experts.num_experts // groups:
        yield f"{facts.named(GROUPS)}: a group has {experts.num_experts // groups} experts, too few; use fewer groups"


def expert_rank_problems(facts: Facts) -> Iterator[str]:
    """Yield what is wrong with the ranks that the experts are distributed over."""
    size, experts, sizes = facts.config.parallel.expert_model_parallel_size, facts.arch.experts, facts.spec.sizes
    if size == 1 and facts.config.parallel.moe_token_dispatcher_type is not None:
        yield f"{facts.named(DISPATCHER)}: no token leaves its rank with {SIZE}=1; leave {DISPATCHER} out"
    etensor = facts.config.parallel.expert_tensor_parallel_size
    if experts is None and facts.config.parallel.expert_load_imbalance != 1:
        yield f"{facts.named(LOAD)}: the model has no experts; set {NUM}, or leave {LOAD} out"
    if size == etensor == 1 or sizes.mismatch:
        return
    if experts is None:
        key = ETP if size == 1 else SIZE
        yield f"{facts.named(key)}: the model has no experts; set {NUM}, or use 1"
        return
    ffn = experts.ffn_hidden_size
    if ffn % etensor:
        near = one_of(near_divisors(ffn, etensor))
        yield f"{facts.named(ETP)}: {etensor} does not divide the experts' inner size {ffn}; use {near}"
        return
    possible = _sizes_with(facts, etensor)
    if not possible:
        beside = {each: _sizes_with(facts, each) for each in range(1, _num_ranks(facts) + 1) if ffn % each == 0}
        fitting = [each for each in beside if size in beside[each]] or [each for each in beside if beside[each]]
        yield f"{facts.named(ETP)}: {_no_refinement(facts)}; use {one_of(fitting)}"
    elif size not in possible:
        yield f"{facts.named(SIZE)}: {_no_refinement(facts)}; use {one_of(possible)}"
    elif experts.num_experts % size:
        fitting = [each for each in possible if experts.num_experts % each == 0]
        yield f"{facts.named(SIZE)}: {size} does not divide {NUM}={experts.num_experts}; use {one_of(fitting)}"


def _no_refinement(facts: Facts) -> str:
    """Return why the experts' ranks and the dense axes have no common refinement."""
    parallel = facts.config.parallel
    ranks = f"{parallel.expert_tensor_parallel_size} x {parallel.expert_model_parallel_size}"
    axes = " x ".join(f"{name} {size}" for name, size in _axes(facts) if size > 1) or "1 rank"
    return f"ETP x EP = {ranks} neighbouring ranks divide no axis of a stage ({axes}) into whole pieces"


def _axes(facts: Facts) -> Sizes:
    sizes = facts.spec.sizes
    return stage_axes(facts.spec.mode, sizes.shards, sizes.replicas)


def _num_ranks(facts: Facts) -> int:
    return math.prod(size for _, size in _axes(facts))


def _sizes_with(facts: Facts, etensor: int) -> list[int]:
    """Return the expert-parallel sizes that are possible next to an expert tensor parallel size, in ascending order."""
    return sorted(expert_sizes(_axes(facts), etensor))
