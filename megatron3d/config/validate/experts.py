"""Rules of a mixture of experts: sizes that fit one another, keys that belong together, and what has no experts yet."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts, near_divisors
from megatron3d.parallel.expert_ranks import expert_sizes

NUM, TOPK, GROUPS, GROUP_TOPK = (
    f"model.{key}" for key in ("num_moe_experts", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk")
)
SHARED, GATE = "model.moe_shared_expert_intermediate_size", "model.moe_shared_expert_gate"
LOSS, COEFF = "model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff"
SIZE, DISPATCHER = "parallel.expert_model_parallel_size", "parallel.moe_token_dispatcher_type"
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
    if size == 1 or sizes.mismatch:
        return
    if experts is None:
        yield f"{facts.named(SIZE)}: the model has no experts; set {NUM}, or use 1"
        return
    possible = expert_sizes(facts.spec.mode, sizes.shards)
    if size not in possible:
        yield (
            f"{facts.named(SIZE)}: experts are distributed over the last axes of the mesh (tensor, context, data), and "
            f"none of their products is {size}; use {one_of(sorted(possible))}"
        )
    if experts.num_experts % size:
        fitting = [each for each in sorted(possible) if experts.num_experts % each == 0]
        yield f"{facts.named(SIZE)}: {size} does not divide {NUM}={experts.num_experts}; use {one_of(fitting)}"
