"""Rules of the model section: windows, RoPE, latent attention, multi-token prediction, experts and their ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron3d.attention.rotary_spec import LONGROPE, YARN
from megatron3d.config.model_defaults import LATENT_KEYS, ROTARY_KEYS, wrong_pair_factors
from megatron3d.config.read import one_of
from megatron3d.config.validate.facts import Facts, describe_mode, near_divisors, near_multiples, plain
from megatron3d.experts.plan import expert_sizes, stage_axes
from megatron3d.model.spec import (
    CORE_ATTN,
    DENSE_MLP,
    INPUT_NORMS,
    LAYERNORM,
    MLA_UP_PROJ,
    MOE,
    MOE_ACT,
    SHARED_EXPERTS,
    attention_kinds,
    expert_layers,
)
from megatron3d.parallel.mesh import Sizes
from megatron3d.parallel.modes.mode import Mode


def window_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key of windows that is unused or impossible."""
    model = facts.config.model
    where, pattern = facts.named("model.window_size"), facts.arch.window_pattern
    if model.window_size is not None:
        left, right = model.window_size
        if right != 0:
            yield f"{where}: attention is causal, so that no key after the query is seen; use [{max(left, 1)}, 0]"
        if left < 1:
            yield f"{where}: a query would see no key before itself; use [127, 0], or another first number above 0"
    if model.window_attn_skip_freq is None:
        return
    where = facts.named("model.window_attn_skip_freq")
    if model.window_size is None:
        yield f"{where}: no layer has a window; set model.window_size, or leave it out"
    elif len(pattern) > model.num_layers:
        yield f"{where}: longer than model.num_layers={model.num_layers}; use {model.num_layers} or less"
    elif not any(pattern):
        yield f"{where}: no layer has the window; use 2, or another number above 1"
    elif all(pattern):
        yield f"{where}: every layer has the window; leave it out"


SCALING_KEYS = ("rotary_scaling_factor", *dict.fromkeys(key for keys in ROTARY_KEYS.values() for key in keys))
ROPE_KEYS = (
    "rotary_percent",
    "rotary_interleaved",
    "no_rope_freq",
    "rotary_scaling",
    "rope_local_base_freq",
    "qk_layernorm_after_rope",
    "qk_l2_norm",
)


def rotary_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key of RoPE that is unused, missing or contradictory."""
    arch = facts.arch
    if arch.position_embedding_type != "rope":
        for key in ROPE_KEYS:
            if facts.is_set(f"model.{key}"):
                yield (
                    f"{facts.named(f'model.{key}')}: not used with position_embedding_type "
                    f"{arch.position_embedding_type}; use rope, or leave it out"
                )
    else:
        yield from _channel_problems(facts)
        yield from _order_of_norm_problems(facts)
        yield from _l2_norm_problems(facts)
        yield from _local_base_problems(facts)
    yield from _pattern_problems(facts)
    yield from _temperature_problems(facts)
    yield from _scaling_problems(facts)


def _temperature_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key of the factor of queries by position that is unused."""
    arch, beta = facts.arch, "model.attention_temperature_beta"
    for key in ("length", "offset", "layers"):
        name = f"model.attention_temperature_{key}"
        if arch.attention_temperature_beta is None and facts.is_set(name):
            yield f"{facts.named(name)}: not used without {beta}; set it, for example to 0.1, or leave {name} out"
    if arch.attention_temperature_beta is not None and all(kind.temperature is None for kind in attention_kinds(arch)):
        where = facts.named("model.attention_temperature_layers")
        yield f"{where}: every layer has RoPE; use all, or set model.no_rope_freq"


def _l2_norm_problems(facts: Facts) -> Iterator[str]:
    """Yield a message for norms without weights next to norms with them, or to norms of another kind."""
    arch, where = facts.arch, facts.named("model.qk_l2_norm")
    if arch.qk_l2_norm and arch.qk_layernorm:
        yield f"{where}: queries and keys have norms with weights; use false, or model.qk_layernorm=false"
    elif arch.qk_l2_norm and (arch.normalization != "RMSNorm" or arch.apply_layernorm_1p):
        yield f"{where}: only with norms by the root mean square; use model.normalization=RMSNorm, or leave it out"


def _order_of_norm_problems(facts: Facts) -> Iterator[str]:
    """Yield a message for norms behind RoPE of which there are none, or that are over more than a head."""
    arch, where = facts.arch, facts.named("model.qk_layernorm_after_rope")
    if not arch.qk_layernorm_after_rope or arch.is_latent:  # which is refused elsewhere
        return
    if not arch.qk_layernorm:
        yield f"{where}: queries and keys have no norm; use model.qk_layernorm=true, or leave it out"
    elif arch.qk_layernorm_scope != "head":
        yield f"{where}: RoPE works on heads; use model.qk_layernorm_scope=head, or leave it out"


def _channel_problems(facts: Facts) -> Iterator[str]:
    percent, size = facts.config.model.rotary_percent, facts.arch.kv_channels
    channels = int(size * percent)
    if percent < 1 and (channels % 2 or not channels):
        values = [f"{count / size:g}" for count in near_multiples(2, channels) if count <= size]
        where, use = facts.named("model.rotary_percent"), one_of(values or ["1"])
        yield f"{where}: RoPE rotates pairs of channels, but {percent:g} of a head's {size} are {channels}; use {use}"


def _pattern_problems(facts: Facts) -> Iterator[str]:
    pattern, num_layers = facts.arch.no_rope_freq, facts.config.model.num_layers
    where = facts.named("model.no_rope_freq")
    if len(pattern) > num_layers:
        yield f"{where}: longer than model.num_layers={num_layers}; use {num_layers} or less"
    elif pattern and all(pattern):
        yield f"{where}: no layer has RoPE; use model.position_embedding_type=none, or a number from 2"
    elif pattern and not any(pattern):
        yield f"{where}: every layer has RoPE; leave it out"


def _local_base_problems(facts: Facts) -> Iterator[str]:
    """Yield a message if the base of layers with a window has no effect, or if it leaves none to the other base."""
    arch, where = facts.arch, facts.named("model.rope_local_base_freq")
    if arch.rope_local_base_freq is None:
        return
    rotated = [kind for kind in attention_kinds(arch) if kind.rotary is not None]
    if all(kind.window is None for kind in rotated):
        yield f"{where}: no layer with RoPE has a window; set model.window_size, or leave it out"
    elif all(kind.window is not None for kind in rotated):
        yield (
            f"{where}: every layer with RoPE has the window, so that rotary_base and rotary_scaling have no effect; "
            "set model.rotary_base instead, or model.window_attn_skip_freq"
        )


def _scaling_problems(facts: Facts) -> Iterator[str]:
    model = facts.config.model
    kind, keys = model.rotary_scaling, ROTARY_KEYS.get(model.rotary_scaling or "", {})
    used = {"rotary_scaling_factor", *keys} if kind else set()
    for key in SCALING_KEYS:
        if getattr(model, key) is not None and key not in used:
            able = [name for name, others in ROTARY_KEYS.items() if key in (*others, "rotary_scaling_factor")]
            where, scaling = facts.named(f"model.{key}"), plain(facts.config, "model.rotary_scaling")
            yield f"{where}: not used with {scaling}; use {one_of(able)}, or leave it out"
    needed = [key for key in _EXAMPLES if key in used and (key, kind) != ("rotary_scaling_factor", LONGROPE)]
    for key in (key for key in needed if getattr(model, key) is None):
        yield f"{facts.named('model.rotary_scaling')}: needs model.{key}; set it, for example to {_EXAMPLES[key]}"
    yield from _order_problems(facts)
    yield from _pair_problems(facts)
    if kind == YARN and model.rotary_base <= 1:
        yield f"{facts.named('model.rotary_base')}: yarn needs a base above 1; use 10000.0"


# Keys that a scaling needs, each with a value.
_EXAMPLES = {
    "rotary_scaling_factor": "8.0",
    "original_max_position_embeddings": "8192",
    "rotary_short_factor": "a list of 1.0 for each pair of channels",
    "rotary_long_factor": "a list of 8.0 for each pair of channels",
}


def _pair_problems(facts: Facts) -> Iterator[str]:
    """Yield a message for each list of longrope of another length, and for an original length without logarithm."""
    model = facts.config.model
    if model.rotary_scaling != LONGROPE:
        return
    for key, problem in wrong_pair_factors(model).items():
        yield f"model.{key}: {problem}; give one for each"
    if model.original_max_position_embeddings == 1:
        yield f"{facts.named('model.original_max_position_embeddings')}: longrope divides by its logarithm; use 2"


def _order_problems(facts: Facts) -> Iterator[str]:
    """Yield a message if the rotations below which a rate is scaled are not fewer than those above which it is kept."""
    scaling = facts.arch.rotary_scaling
    bounds = (("rotary_low_freq_factor", "rotary_high_freq_factor"), ("rotary_beta_slow", "rotary_beta_fast"))
    for key, other in bounds if scaling else ():
        few, many = (getattr(scaling, name.removeprefix("rotary_")) for name in (key, other))
        # Bounds may be equal, as YaRN's in Kimi K2 and llama3's in Llama 4.
        if None not in (few, many) and few > many:
            yield f"{facts.named(f'model.{key}')}: {few:g} is above {other} {many:g}; use {many / 4:g}"


# Keys that latent attention replaces or does without, and why.
REPLACED = {
    "num_query_groups": "every head has keys of its own",
    "kv_channels": "heads have qk_head_dim + qk_pos_emb_head_dim and v_head_dim channels",
    "qk_layernorm": "the latents are always normalized",
    "qk_layernorm_after_rope": "the latents are always normalized",
    "attention_temperature_beta": "no model with latents multiplies its queries by position",
    "qk_l2_norm": "the latents are always normalized",
    "clip_qkv": "keys and values come from latents, which no model clips",
    "rotary_percent": "RoPE rotates the last qk_pos_emb_head_dim channels of a head",
}


def latent_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key of latent attention that is unused, and per key that it replaces."""
    model, arch = facts.config.model, facts.arch
    yield from _recompute_problems(facts)
    if not model.multi_latent_attention:
        for key in LATENT_KEYS:
            if getattr(model, key) is not None:
                where = facts.named(f"model.{key}")
                yield f"{where}: not used without model.multi_latent_attention=true; set that, or leave it out"
        return
    for key, why in REPLACED.items():
        if facts.is_set(f"model.{key}"):
            where = facts.named(f"model.{key}")
            yield f"{where}: not used with model.multi_latent_attention=true, {why}; leave it out"
    if arch.position_embedding_type != "rope":
        where = facts.named("model.position_embedding_type")
        yield f"{where}: multi_latent_attention has a rotary key; use rope"
    if arch.qk_pos_emb_head_dim % 2:
        where, values = facts.named("model.qk_pos_emb_head_dim"), near_multiples(2, arch.qk_pos_emb_head_dim)
        yield f"{where}: RoPE rotates pairs of channels; use {one_of(values)}"


def qk_clip_problems(facts: Facts) -> Iterator[str]:
    """Yield a message for QK-clip where scaled weights change no logit, or where none is recorded."""
    if not facts.config.optimizer.qk_clip:
        return
    where = facts.named("optimizer.qk_clip")
    for key in ("model.qk_layernorm", "model.qk_l2_norm"):
        if facts.is_set(key) and not facts.arch.is_latent:
            norms = plain(facts.config, key)
            yield f"{where}: {norms} undoes what it does to the weights; use false for one of the two"
    if facts.config.train.compile is True:
        yield f"{where}: no logit is recorded with train.compile=true; use train.compile=auto"


def _recompute_problems(facts: Facts) -> Iterator[str]:
    """Yield a message for modules that the model does not have, or that are recomputed without, or within, others."""
    modules, arch, experts = facts.config.train.recompute_modules or (), facts.arch, facts.arch.experts
    where, is_latent = facts.named("train.recompute_modules"), facts.config.model.multi_latent_attention
    owners = {
        MLA_UP_PROJ: ("latent attention", is_latent),
        LAYERNORM: ("models with norms of inputs", not set(INPUT_NORMS).isdisjoint(arch.norm_sites)),
        DENSE_MLP: ("dense layers", len(expert_layers(arch)) < arch.num_layers),
        MOE_ACT: ("a mixture of experts", experts is not None),
        MOE: ("a mixture of experts", experts is not None),
        SHARED_EXPERTS: ("a mixture with shared experts", experts is not None and experts.shared_ffn_hidden_size > 0),
    }
    for module, owner in ((each, owners[each][0]) for each in modules if each in owners and not owners[each][1]):
        rest = ",".join(each for each in modules if each != module)
        yield f"{where}: {module} is a part of {owner} only; use {f'[{rest}]' if rest else 'null'}"
    if MOE in modules and (inner := [each for each in (MOE_ACT, SHARED_EXPERTS) if each in modules]):
        use = ",".join(each for each in modules if each not in inner)
        yield f"{where}: {MOE} is recomputed with {' and '.join(inner)}, which are parts of it; use [{use}]"
    if LAYERNORM in modules and facts.config.train.compile is True:
        yield f"{where}: no norm is recomputed with train.compile=true, whose compiler chooses; use train.compile=auto"
    if MLA_UP_PROJ in modules and is_latent and CORE_ATTN not in modules:
        use = ",".join((CORE_ATTN, *modules))
        yield f"{where}: {MLA_UP_PROJ} is recomputed together with the attention after it; use [{use}]"


NUM, FACTOR = "model.mtp_num_layers", "model.mtp_loss_scaling_factor"


def mtp_problems(facts: Facts) -> Iterator[str]:
    """Yield the modules without labels in the shortest sequences, and a factor that nothing uses."""
    model, warmup = facts.config.model, facts.config.train.seq_length_warmup
    if not model.mtp_num_layers:
        if facts.is_set(FACTOR):
            yield f"{facts.named(FACTOR)}: not used with {NUM}=0; leave it out, or use {NUM} 1"
        return
    length = min(model.seq_length, warmup[0] if warmup else model.seq_length)
    name = "model.seq_length" if length == model.seq_length else "the first length of train.seq_length_warmup,"
    most = length - 1
    if model.mtp_num_layers > most:
        yield (
            f"{facts.named(NUM)}: the last module predicts {model.mtp_num_layers + 1} tokens ahead, but {name} "
            f"{length} has labels for {most} modules at most; use {one_of(sorted({0, min(1, most), most}))}"
        )


def mtp_layout_problems(facts: Facts, mode: Mode) -> Iterator[str]:
    """Yield the tensor axes that do not divide the output of the modules' linears."""
    sizes, hidden = dict(mode.axes), facts.arch.hidden_size
    ranks = math.prod(sizes[axis] for axis in mode.inner[1])
    if facts.arch.mtp_num_layers and hidden % ranks:
        yield (
            f"{facts.named(NUM)}: model.hidden_size={hidden} is not a multiple of the {ranks} ranks that split the "
            f"output of its linears ({describe_mode(facts.spec)}); use model.hidden_size "
            f"{one_of(near_multiples(ranks, hidden))}, or {NUM} 0"
        )


NUM_EXPERTS, TOPK, GROUPS, GROUP_TOPK = (
    f"model.{key}" for key in ("num_moe_experts", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk")
)
GROUP_SCORES = "model.moe_router_group_score_topk"
SHARED, GATE = "model.moe_shared_expert_intermediate_size", "model.moe_shared_expert_gate"
LOSS, COEFF = "model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff"
SIZE, ETP = (f"parallel.{key}" for key in ("expert_model_parallel_size", "expert_tensor_parallel_size"))
BIAS, RATE = "model.moe_router_enable_expert_bias", "model.moe_router_bias_update_rate"
PRE_SOFTMAX, SCORES = "model.moe_router_pre_softmax", "model.moe_router_score_function"


def expert_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of the keys of a mixture of experts."""
    model, experts = facts.config.model, facts.arch.experts
    if experts is None:
        return
    if experts.topk > experts.num_experts:
        yield f"{facts.named(TOPK)}: more than {NUM_EXPERTS}={experts.num_experts}; use 1 to {experts.num_experts}"
    if facts.arch.activation_params:
        yield f"{facts.named('model.activation')}: has parameters of an MLP, and experts have none; use swiglu"
    if experts.pre_softmax and experts.score_function != "softmax":
        yield f"{facts.named(PRE_SOFTMAX)}: not used with {SCORES}={experts.score_function}; leave it out"
    if experts.topk == 1 < experts.num_experts and experts.score_function == "softmax" and not experts.pre_softmax:
        yield (
            f"{facts.named(TOPK)}: the softmax over one chosen expert is exactly 1, so that the router would never "
            f"learn; use {PRE_SOFTMAX}=true, or {SCORES}=sigmoid"
        )
    if experts.has_shared_gate and not experts.shared_ffn_hidden_size:
        yield f"{facts.named(GATE)}: there are no shared experts to gate; set {SHARED}, or use false"
    yield from _balance_problems(facts)
    if model.moe_expert_capacity_factor is None:
        for key, is_used, what in (
            ("moe_token_drop_policy", model.moe_token_drop_policy != "probs", "drops nothing"),
            ("moe_pad_expert_input_to_capacity", model.moe_pad_expert_input_to_capacity, "has no capacity to pad to"),
        ):
            if is_used:
                where, use = facts.named(f"model.{key}"), f"set it, or leave model.{key} out"
                yield f"{where}: {what} without model.moe_expert_capacity_factor; {use}"
    if model.moe_router_bias_update_rate is not None and not experts.has_expert_bias:
        yield f"{facts.named(RATE)}: not used without {BIAS}=true; set it, or leave {RATE} out"
    if 1 not in (experts.layers or (1,))[: model.num_layers]:
        depth = plain(facts.config, "model.num_layers")
        yield f"{facts.named('model.moe_layer_freq')}: none of {depth} layers has experts; leave {NUM_EXPERTS} out"
    yield from _group_problems(facts)


def _balance_problems(facts: Facts) -> Iterator[str]:
    model = facts.config.model
    losses, coeffs = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if losses == "none":
        if coeffs:
            yield f"{facts.named(COEFF)}: not used with {LOSS}=none; use seq_aux_loss, or leave it out"
        return
    names, factors = (each if isinstance(each, tuple) else (each,) for each in (losses, coeffs))
    if len(set(names)) < len(names):
        yield f"{facts.named(LOSS)}: names a loss twice; add up their factors"
    elif len(names) != len(factors):
        yield f"{facts.named(COEFF)}: {len(factors)} for {len(names)} losses; give a list of {len(names)}"
    elif not all(factors):
        yield f"{facts.named(LOSS)}: has no effect with {COEFF}=0; use for example {COEFF}=0.01, or {LOSS}=none"


def _group_problems(facts: Facts) -> Iterator[str]:
    experts = facts.arch.experts
    assert experts is not None, "called with experts only"
    groups, kept = experts.num_groups, experts.group_topk
    if groups is None or kept is None:
        if experts.group_score_topk is not None:
            yield f"{facts.named(GROUP_SCORES)}: not used without {GROUPS}; set it, or leave {GROUP_SCORES} out"
        if groups != kept:
            given, missing = (GROUPS, GROUP_TOPK) if kept is None else (GROUP_TOPK, GROUPS)
            yield f"{facts.named(given)}: not used without {missing}; set both, or neither"
        return
    if experts.num_experts % groups:
        near = one_of(near_divisors(experts.num_experts, groups))
        yield f"{facts.named(GROUPS)}: {groups} does not divide {NUM_EXPERTS}={experts.num_experts}; use {near}"
        return
    if kept > groups:
        yield f"{facts.named(GROUP_TOPK)}: more than {GROUPS}={groups}; use 1 to {groups}"
    elif experts.topk > kept * experts.num_experts // groups:
        least = -(-experts.topk * groups // experts.num_experts)
        yield (
            f"{facts.named(GROUP_TOPK)}: {kept} groups have {kept * experts.num_experts // groups} experts, fewer than "
            f"{TOPK}={experts.topk}; use {least} or more"
        )
    elif experts.num_group_scores > experts.num_experts // groups:
        few = f"a group has {experts.num_experts // groups} experts, fewer than the {experts.num_group_scores} scores"
        yield f"{facts.named(GROUPS)}: {few} that its own sums up; use fewer groups, or set {GROUP_SCORES}=1"


def expert_rank_problems(facts: Facts) -> Iterator[str]:
    """Yield what is wrong with the ranks that the experts are distributed over."""
    size, experts, sizes = facts.config.parallel.expert_model_parallel_size, facts.arch.experts, facts.spec.sizes
    etensor = facts.config.parallel.expert_tensor_parallel_size
    if size == etensor == 1 or sizes.mismatch:
        return
    if experts is None:
        key = ETP if size == 1 else SIZE
        yield f"{facts.named(key)}: the model has no experts; set {NUM_EXPERTS}, or use 1"
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
        yield f"{facts.named(SIZE)}: {size} does not divide {NUM_EXPERTS}={experts.num_experts}; use {one_of(fitting)}"


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
