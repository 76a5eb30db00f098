"""Model types of Hugging Face whose layers have experts, DeepSeek's with latent attention included.

    num_experts = 128, num_experts_per_tok = 8, norm_topk_prob = true        model.num_moe_experts = 128, ...

Multi-head latent attention: DeepSeek-AI 2024 (arXiv:2412.19437).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import JsonValue

from megatron3d.convert.fields import (
    CHUNK,
    AllowedValues,
    DerivedKeys,
    FieldMapping,
    HubConfig,
    ModelType,
    Windows,
    read_no_rope,
    shortest_pattern,
    show,
)
from megatron3d.convert.llama_table import (
    DESCRIBED,
    HUNYUAN,
    HUNYUAN_HEADS,
    HUNYUAN_IDS,
    HUNYUAN_RULES,
    MLP_BIAS,
    NO_BIAS,
    WHOLE_PRODUCTS,
    Sizes,
    every,
    rotary_fields,
    rotary_obstacles,
    rotary_type,
)
from megatron3d.experts.plan import Experts
from megatron3d.model.spec import Architecture, has_experts

Field = tuple[str, JsonValue]
SHARED = "shared_expert_intermediate_size"
_DENSE, _STEP = "mlp_only_layers", "decoder_sparse_step"
_SPARSE, _INTERVAL = "moe_layers", "interleave_moe_layer_step"


@dataclass(frozen=True)
class ExpertFields:
    """Fields of a model type with experts, each with the value of an absent one.

    Attributes:
        topk, ffn: experts of a token, and inner features of an expert.
        score: score function of the router.
        normalizes: whether the weights of chosen experts are divided by their sum; None: they always are, or never.
        is_normalized: whether they can be.
        applies_probs_on_input: whether weights multiply the inputs of experts, of which a token has one.
        has_router_bias: whether the router's logits have a bias, a parameter.
        has_bias: whether experts are chosen by scores and a bias of each.
        shared: number of shared experts of the size of the others; None: the type has none of these.
        gated_shared: inner features of the shared experts, whose output has a gate; None: the type has none of these.
        groups, kept_groups: groups of experts, and how many a token chooses from.
        group_scores: best scores of a group whose sum is its score.
        method: field of the choice with its values without groups and with them; None: the number of groups tells.
        scale: factor of the weights.
        first_dense: number of layers before those with experts.
        lists_experts: whether `moe_layers`, or every `interleave_moe_layer_step`, choose the layers.
        lists_dense: whether `mlp_only_layers` and `decoder_sparse_step` choose the layers.
    """

    num_experts: Field
    topk: Field
    ffn: Field
    score: str = "softmax"
    normalizes: Field | None = None
    shared: Field | None = None
    gated_shared: Field | None = None
    groups: Field | None = None
    kept_groups: Field | None = None
    group_scores: int = 2
    method: tuple[str, str, str] | None = None
    scale: Field | None = None
    first_dense: Field | None = None
    lists_dense: bool = False
    lists_experts: bool = False
    applies_probs_on_input: bool = False
    is_normalized: bool = True
    has_bias: bool = False
    has_router_bias: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields."""
        given = (getattr(self, each.name) for each in fields(self))
        named = (value[0] for value in given if isinstance(value, tuple))
        return (*named, *((_DENSE, _STEP) * self.lists_dense), *((_SPARSE, _INTERVAL) * self.lists_experts))

    def keys(self) -> DerivedKeys:
        """Return what converts the fields in both directions."""
        given = {
            "num_moe_experts": True,
            "moe_router_topk": True,
            "moe_ffn_hidden_size": True,
            "moe_layer_freq": self.first_dense is not None or self.lists_dense or self.lists_experts,
            "moe_router_bias": self.has_router_bias,
            "moe_router_enable_expert_bias": self.has_bias,
            "moe_router_pre_softmax": self.score == "softmax" and self.normalizes is not None,
            "moe_shared_expert_intermediate_size": self.shared is not None or self.gated_shared is not None,
            "moe_shared_expert_gate": self.gated_shared is not None,
            "moe_router_num_groups": self.groups is not None,
            "moe_router_group_topk": self.groups is not None,
            "moe_router_group_score_topk": self.groups is not None,
            "moe_router_topk_scaling_factor": self.scale is not None,
        }
        shown = tuple(key for key, has in given.items() if has)
        return DerivedKeys(self.names, ("experts",), self.read, self.write, self.obstacles, shown)

    def read(self, settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
        """Return our keys, and problems."""

        def value(field: Field | None) -> JsonValue:
            found = None if field is None else settings.get(*field)
            found = found[0] if isinstance(found, list) and found and found.count(found[0]) == len(found) else found
            return field[1] if field is not None and found is None else found

        layers, problems = self._layers(settings, value(self.first_dense))
        if problems or not any(layers):
            return {}, problems
        ours: dict[str, JsonValue] = {
            "num_moe_experts": value(self.num_experts),
            "moe_router_topk": value(self.topk),
            "moe_ffn_hidden_size": value(self.ffn),
            "moe_layer_freq": None if all(layers) else shortest_pattern(layers),
            "moe_router_score_function": self.score,
            "moe_router_pre_softmax": False,
            "moe_router_bias": self.has_router_bias,
            "moe_router_enable_expert_bias": self.has_bias,
            "moe_router_topk_scaling_factor": value(self.scale),
        }
        is_normalized = self.is_normalized and (self.normalizes is None or bool(value(self.normalizes)))
        if self.score == "softmax":
            ours["moe_router_pre_softmax"] = not is_normalized
        elif self.normalizes is not None and not is_normalized:
            problems.append(f"{self.normalizes[0]}=false: weights of chosen experts are divided by their sum; use true")
        number, ffn = value(self.shared), value(self.ffn)
        if isinstance(number, int) and isinstance(ffn, int) and number:
            ours["moe_shared_expert_intermediate_size"] = number * ffn
        if self.gated_shared is not None:
            ours |= {"moe_shared_expert_intermediate_size": value(self.gated_shared), "moe_shared_expert_gate": True}
        ours |= self._groups(settings, value(self.groups), value(self.kept_groups), value(self.topk))
        topk, chosen = ours["moe_router_topk"], settings.get(self.method[0]) if self.method else None
        if self.method and chosen not in (None, *self.method[1:]):
            problems.append(f"{self.method[0]}={show(chosen)}: only {' or '.join(map(show, self.method[1:]))} works")
        if topk is None or isinstance(topk, list):
            problems.append(f"{self.topk[0]}={show(topk)}: experts of a token; one number works")
        if self.applies_probs_on_input and topk != 1:
            problems.append(f"{self.topk[0]}={show(topk)}: weights are divided by their sum here, and not there; use 1")
        if self.applies_probs_on_input:
            ours["moe_apply_probs_on_input"] = True
        elif self.score == "sigmoid" and topk == 1:
            problems.append(f"{self.topk[0]}=1: the weight of a single expert is its score here, and 1 there; use 2")
        return ours, problems

    def _groups(self, settings: HubConfig, groups: JsonValue, kept: JsonValue, topk: JsonValue) -> dict[str, JsonValue]:
        """Return our keys of groups; none where the choice knows none."""
        if groups in (None, 1) or (self.method and settings.get(self.method[0]) != self.method[2]):
            return {}
        ours: dict[str, JsonValue] = {"moe_router_num_groups": groups, "moe_router_group_topk": kept}
        if isinstance(kept, int) and isinstance(topk, int) and max(topk // max(kept, 1), 1) != self.group_scores:
            ours["moe_router_group_score_topk"] = self.group_scores
        return ours

    def _layers(self, settings: HubConfig, first_dense: JsonValue) -> tuple[list[int], list[str]]:
        """Return 1 for each layer with experts and 0 for the others, and problems."""
        num_layers = settings["num_hidden_layers"]
        if not isinstance(num_layers, int):  # which the schema refuses
            return [], []
        has = [int(first_dense is None or n >= int(str(first_dense))) for n in range(num_layers)]
        if self.lists_dense:
            dense, step = settings.get(_DENSE) or [], settings.get(_STEP, 1)
            if not isinstance(dense, list) or not isinstance(step, int) or step < 1:
                return [], [f"{_DENSE}={show(dense)} and {_STEP}={show(step)}: a list of layers and a number work"]
            has = [int(n not in dense and (n + 1) % step == 0) for n in range(num_layers)]
        if self.lists_experts:
            sparse, interval = settings.get(_SPARSE), settings.get(_INTERVAL, 1)
            if not isinstance(sparse, list | None) or not isinstance(interval, int) or interval < 1:
                return [], [
                    f"{_SPARSE}={show(sparse)} and {_INTERVAL}={show(interval)}: a list of layers and a number work"
                ]
            has = [int((n + 1) % interval == 0 if sparse is None else n in sparse) for n in range(num_layers)]
        return has, []

    def write(self, arch: Architecture) -> dict[str, JsonValue]:
        """Return the fields of an architecture."""
        experts = arch.experts
        has = [int(has_experts(arch, n)) for n in range(arch.num_layers)]
        found: dict[str, JsonValue] = {}
        if self.first_dense is not None:
            found[self.first_dense[0]] = has.index(1) if any(has) else arch.num_layers
        if self.lists_dense:
            found |= {_DENSE: [n for n, each in enumerate(has) if not each], _STEP: 1}
        if self.lists_experts:
            found |= {_SPARSE: [n for n, each in enumerate(has) if each], _INTERVAL: 1}
        if experts is None:
            return found
        values: dict[Field | None, JsonValue] = {
            self.num_experts: experts.num_experts,
            self.topk: experts.topk,
            self.ffn: experts.ffn_hidden_size,
            self.normalizes: self.score != "softmax" or not experts.pre_softmax,
            self.shared: experts.shared_ffn_hidden_size // experts.ffn_hidden_size,
            self.gated_shared: experts.shared_ffn_hidden_size,
            self.groups: experts.num_groups or 1,
            self.kept_groups: experts.group_topk or 1,
            self.scale: experts.scaling_factor,
        }
        if self.method is not None:
            found[self.method[0]] = self.method[2 if experts.num_groups else 1]
        return found | {field[0]: value for field, value in values.items() if field is not None}

    def obstacles(self, arch: Architecture) -> Iterator[str]:
        """Yield values of an architecture that the fields cannot represent."""
        experts = arch.experts
        has, lists = [has_experts(arch, n) for n in range(arch.num_layers)], self.lists_dense or self.lists_experts
        if experts is None:
            if self.first_dense is None and not lists:
                yield "num_moe_experts=null: every layer of this model type has experts"
            return
        if not lists and has != sorted(has):
            yield f"moe_layer_freq={show(experts.layers)}: only the first layers of this model type can have an MLP"
        if self.first_dense is None and not lists and not all(has):
            yield f"moe_layer_freq={show(experts.layers)}: every layer of this model type has experts"
        yield from self._router_obstacles(experts)

    def _router_obstacles(self, experts: Experts) -> Iterator[str]:
        shared, ffn, gated = experts.shared_ffn_hidden_size, experts.ffn_hidden_size, self.gated_shared is not None
        # Whether the weights of chosen experts can be their shares of all scores.
        can_be_raw = self.score == "softmax" and (self.normalizes is not None or not self.is_normalized)
        router_bias, bias, scores = experts.has_router_bias, experts.has_expert_bias, experts.num_group_scores
        on_input = self.applies_probs_on_input
        takes_others = experts.num_groups is not None and scores != self.group_scores
        wrong: Sequence[tuple[bool, str, Any, str]] = (
            (experts.score_function != self.score, "router_score_function", experts.score_function, self.score),
            (experts.pre_softmax and not can_be_raw, "router_pre_softmax", True, "false"),
            (not (experts.pre_softmax or self.is_normalized), "router_pre_softmax", False, "true"),
            (router_bias != self.has_router_bias, "router_bias", router_bias, show(self.has_router_bias)),
            (bias != self.has_bias, "router_enable_expert_bias", bias, show(self.has_bias)),
            (experts.has_shared_gate != gated, "shared_expert_gate", experts.has_shared_gate, show(gated)),
            (experts.num_groups is not None and self.groups is None, "router_num_groups", experts.num_groups, "none"),
            (experts.scaling_factor != 1 and not self.scale, "router_topk_scaling_factor", experts.scaling_factor, "1"),
            (self.shared is None and shared > 0 and not gated, SHARED, shared, "none"),
            (shared % ffn > 0 and not gated, SHARED, shared, f"multiples of moe_ffn_hidden_size={ffn}"),
            (shared == 0 and gated, SHARED, shared, "some"),
            (self.score == "sigmoid" and experts.topk == 1 and not on_input, "router_topk", 1, "at least 2"),
            (on_input and experts.topk > 1, "router_topk", experts.topk, "1"),
            (
                experts.applies_probs_on_input != on_input,
                "apply_probs_on_input",
                experts.applies_probs_on_input,
                show(on_input),
            ),
            (takes_others, "router_group_score_topk", scores, str(self.group_scores)),
        )
        for is_wrong, key, value, theirs in wrong:
            if is_wrong:
                yield f"moe_{key}={show(value)}: this model type has {theirs}"


_LATENT_EPSILON = 1e-6


def _read_sizes(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    """Return a problem for each field of heads that contradicts the sizes of latent attention."""
    heads, rotated = settings.get("num_attention_heads"), settings.get("qk_rope_head_dim", 64)
    plain = settings.get("qk_nope_head_dim", 128)
    wanted: dict[str, JsonValue] = {"num_key_value_heads": heads, "head_dim": rotated}
    if isinstance(plain, int) and isinstance(rotated, int):
        wanted["qk_head_dim"] = plain + rotated
    return {}, [
        f"{name}={show(settings[name])}: latent attention has {show(value)} by its other sizes; use that"
        for name, value in wanted.items()
        if value is not None and settings.get(name) not in (None, value)
    ]


def _write_sizes(arch: Architecture) -> dict[str, JsonValue]:
    heads, rotated = arch.num_attention_heads, arch.qk_pos_emb_head_dim
    return {"num_key_value_heads": heads, "head_dim": rotated, "qk_head_dim": arch.key_size}


def _size_obstacles(arch: Architecture) -> Iterator[str]:
    if arch.num_query_groups != arch.num_attention_heads:
        yield f"num_query_groups={arch.num_query_groups}: latent attention has one per head, {arch.num_attention_heads}"
    if arch.is_latent and arch.kv_channels != max(arch.key_size, arch.value_size):
        yield f"kv_channels={arch.kv_channels}: heads have qk_head_dim + qk_pos_emb_head_dim and v_head_dim channels"


_SIZES = DerivedKeys(("num_key_value_heads", "head_dim", "qk_head_dim"), (), _read_sizes, _write_sizes, _size_obstacles)


_TOPK, _FFN, _RAW = "num_experts_per_tok", "moe_intermediate_size", ("norm_topk_prob", False)
_MIXTRAL = ExpertFields(("num_local_experts", 8), (_TOPK, 2), ("intermediate_size", 14336))
_QWEN3 = ExpertFields(("num_experts", 128), (_TOPK, 8), (_FFN, 768), normalizes=_RAW, lists_dense=True)
_QWEN2 = replace(
    _QWEN3, num_experts=("num_experts", 60), topk=(_TOPK, 4), ffn=(_FFN, 1408), gated_shared=(SHARED, 5632)
)
_OLMOE = ExpertFields(("num_experts", 64), (_TOPK, 8), ("intermediate_size", 2048), normalizes=_RAW)
_GPT_OSS = ExpertFields(("num_local_experts", 128), (_TOPK, 4), ("intermediate_size", 2880), has_router_bias=True)
_DEEPSEEK2 = ExpertFields(
    ("n_routed_experts", 64),
    (_TOPK, None),
    (_FFN, 1407),
    shared=("n_shared_experts", 2),
    is_normalized=False,
    groups=("n_group", 1),
    kept_groups=("topk_group", 1),
    group_scores=1,
    method=("topk_method", "greedy", "group_limited_greedy"),
    scale=("routed_scaling_factor", 1.0),
    first_dense=("first_k_dense_replace", 0),
)
_DEEPSEEK3 = ExpertFields(
    ("n_routed_experts", 256),
    (_TOPK, 8),
    (_FFN, 2048),
    score="sigmoid",
    has_bias=True,
    shared=("n_shared_experts", 1),
    normalizes=("norm_topk_prob", True),
    groups=("n_group", 8),
    kept_groups=("topk_group", 4),
    scale=("routed_scaling_factor", 2.5),
    first_dense=("first_k_dense_replace", 3),
)
_GLM = replace(
    _DEEPSEEK3,
    num_experts=("n_routed_experts", 128),
    ffn=(_FFN, 1408),
    groups=("n_group", 1),
    kept_groups=("topk_group", 1),
    scale=("routed_scaling_factor", 1.0),
    first_dense=("first_k_dense_replace", 1),
)
_MINIMAX = replace(
    _DEEPSEEK3,
    num_experts=("num_local_experts", 256),
    ffn=("intermediate_size", 1536),
    shared=None,
    normalizes=None,
    groups=None,
    kept_groups=None,
    scale=None,
    first_dense=None,
)

_HUNYUAN_EXPERTS = ExpertFields(
    ("num_experts", 1), ("moe_topk", 1), ("intermediate_size", 11008), shared=("num_shared_expert", 1)
)
_HUNYUAN_MOE = {
    "num_shared_expert": AllowedValues((1, None), "every layer has one shared expert"),
    "use_mixed_mlp_moe": AllowedValues((True, None), "every layer has one shared expert"),
    "moe_layer_num_skipped": AllowedValues((0, None), "every layer has experts"),
    "norm_topk_prob": AllowedValues((True, None), "weights of chosen experts are divided by their sum"),
    "group_limited_greedy": AllowedValues((False, None), "experts have no groups"),
    "n_group": AllowedValues((False, None), "experts have no groups"),
    "topk_group": AllowedValues((False, None), "experts have no groups"),
    "routed_scaling_factor": AllowedValues((False, 1.0, None), "weights of experts have no factor"),
    "moe_drop_tokens": AllowedValues((False, None), "no token is dropped"),
    "moe_random_routing_dropped_token": AllowedValues((False, None), "no token is dropped"),
    "use_mla": AllowedValues((False, None), "keys and values have no latent"),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        AllowedValues((None,), "keys and values have no latent"),
    ),
}

_LLAMA4 = ExpertFields(
    ("num_local_experts", 16),
    (_TOPK, 1),
    ("intermediate_size", 8192),
    score="sigmoid",
    shared=("num_shared_experts", 1),
    lists_experts=True,
    applies_probs_on_input=True,
)


def _read_chunks(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    """Return the positions of a model whose sequences are one chunk at most, in which attention is as in any model."""
    chunk, positions = settings.get(CHUNK, 8192), settings.get("max_position_embeddings", 131072)
    if not isinstance(chunk, int) or not isinstance(positions, int):
        return {}, []
    return {"max_position_embeddings": min(chunk, positions)}, []


_CHUNKS = DerivedKeys((CHUNK,), (), _read_chunks, lambda arch: {CHUNK: arch.max_position_embeddings})
_TUNED = {"attn_scale": 0.1, "floor_scale": 8192}


def _read_tuning(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    """Return the factor of queries by position, which layers without rotary positions have."""
    scale, floor = (settings.get(name, default) for name, default in _TUNED.items())
    if not settings.get("attn_temperature_tuning", True) or not scale:
        return {}, []
    layers, _ = read_no_rope(settings)
    if "no_rope_freq" not in layers:
        return {}, []
    keys = {"beta": scale, "length": floor, "offset": 1, "layers": "no_rope"}
    return {f"attention_temperature_{name}": value for name, value in keys.items()}, []


def _write_tuning(arch: Architecture) -> dict[str, JsonValue]:
    beta, length = arch.attention_temperature_beta, arch.attention_temperature_length
    return {"attn_temperature_tuning": beta is not None, "attn_scale": beta or 0.1, "floor_scale": length}


def _tuning_obstacles(arch: Architecture) -> Iterator[str]:
    if arch.attention_temperature_beta is None:
        return
    wanted = {"offset": 1, "layers": "no_rope"}
    for name, value in wanted.items():
        if (ours := getattr(arch, f"attention_temperature_{name}")) != value:
            yield f"attention_temperature_{name}={show(ours)}: in llama4_text it is {show(value)}"


_TUNING_KEYS = tuple(f"attention_temperature_{name}" for name in ("beta", "length", "offset", "layers"))
_TUNING = DerivedKeys(
    ("attn_temperature_tuning", *_TUNED), _TUNING_KEYS, _read_tuning, _write_tuning, _tuning_obstacles, _TUNING_KEYS[:2]
)


def _one_shared_obstacles(arch: Architecture) -> Iterator[str]:
    """Yield what a model type cannot represent that has one shared expert of the size of the others."""
    yield from rotary_obstacles(arch)
    experts = arch.experts
    if experts is not None and experts.shared_ffn_hidden_size != experts.ffn_hidden_size:
        shared = experts.shared_ffn_hidden_size
        yield f"moe_{SHARED}={shared}: this model type has one shared expert of {experts.ffn_hidden_size}"


def _rotated_channels(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    """Return the share of a head that is rotated, where the number of its channels is given."""
    channels, size = settings.get("rotary_dim"), settings.get("head_dim", 128)
    if not isinstance(channels, int) or not isinstance(size, int) or size < 1:
        return {}, []
    said, share = settings.get("partial_rotary_factor"), channels / size
    if said in (None, share):
        return {"rotary_percent": share}, []
    return {}, [f"rotary_dim={channels} and partial_rotary_factor={show(said)}: they differ; remove the wrong one"]


_ROTARY_DIM = DerivedKeys(
    ("rotary_dim",),
    (),
    _rotated_channels,
    lambda arch: {"rotary_dim": round(arch.rotary_percent * arch.kv_channels)},
)


def _latent_type(
    class_name: str,
    sizes: Sizes,
    others: Mapping[str, FieldMapping | JsonValue],
    fixed: Mapping[str, object],
    rules: Mapping[str, AllowedValues],
    experts: ExpertFields,
    **more: Any,
) -> ModelType:
    """Return a model type with latent attention, written with what its authors' own code reads."""
    epsilon = AllowedValues((_LATENT_EPSILON,), "norms of latents have this epsilon, and all norms the same here")
    found = rotary_fields(
        sizes,
        ("num_query_groups", "kv_channels", "norm_epsilon"),
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=FieldMapping(("qk_nope_head_dim",), 128),
        qk_pos_emb_head_dim=FieldMapping(("qk_rope_head_dim",), 64),
        v_head_dim=128,
        add_bias_linear=False,
        **others,
    )
    return rotary_type(
        class_name,
        found,
        {"multi_latent_attention": True, "qk_layernorm": False, "norm_epsilon": _LATENT_EPSILON, **fixed},
        {"rms_norm_eps": epsilon, **WHOLE_PRODUCTS, **rules},
        obstacles=lambda arch: iter(()),
        derived=(_SIZES, experts.keys()),
        has_mscale=True,
        constants={
            "rms_norm_eps": _LATENT_EPSILON,
            **{name: rule.allowed[0] for name, rule in rules.items()},
            **dict.fromkeys(("pretraining_tp", "ep_size"), 1),
        },
        **more,
    )


_EVERY_LAYER = AllowedValues((1, None), "every layer behind the first ones has experts")
_READER = "which layers have windows depends on the reader"
# Fields of the published files that describe modules which these files do not hold.
_MINIMAX_UNUSED = {
    "mlp_intermediate_size": AllowedValues((8192, None), "every layer has experts"),
    "num_mtp_modules": AllowedValues((3, 0, None), "its files hold no modules of multi-token prediction"),
    "mtp_transformer_layers": AllowedValues((1, None), "its files hold no modules of multi-token prediction"),
    "use_mtp": AllowedValues((True, False, None), "its files hold no modules of multi-token prediction"),
    "shared_moe_mode": AllowedValues(("sigmoid", None), "there are no shared experts"),
    **dict.fromkeys(
        ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
        AllowedValues((1.0, 1, None), "residual streams are added as they are"),
    ),
}
_MINIMAX_RULES = {
    **_MINIMAX_UNUSED,
    "router_jitter_noise": AllowedValues((0.0, 0, None), "tokens reach the router as they are"),
    "scoring_func": AllowedValues(("sigmoid", None), "its scores are sigmoids"),
    "use_routing_bias": AllowedValues((True, None), "experts are chosen by scores and biases"),
    "shared_intermediate_size": AllowedValues((0, None), "there are no shared experts"),
    "use_qk_norm": AllowedValues((True, None), "queries and keys are normalized"),
    "qk_norm_type": AllowedValues(("per_layer", None), "all heads are normalized together"),
    "attn_type_list": AllowedValues((None, 1), "every layer has attention"),
}
EXPERT_TYPES: Mapping[str, ModelType] = {
    "deepseek_v2": _latent_type(
        "DeepseekV2",
        (32, 4096, 11008, 32, None, None, 2048, 102400),
        {"add_mlp_bias": MLP_BIAS},
        {"rotary_interleaved": True},
        {
            "scoring_func": AllowedValues(("softmax", None), "its scores are softmax"),
            "norm_topk_prob": AllowedValues((False, None), "its weights are not divided by their sum"),
            "moe_layer_freq": _EVERY_LAYER,
        },
        _DEEPSEEK2,
    ),
    "deepseek_v3": _latent_type(
        "DeepseekV3",
        (61, 7168, 18432, 128, None, None, 4096, 129280),
        {"rotary_interleaved": FieldMapping(("rope_interleave",), True), "mtp_num_layers": 1},
        {"add_mlp_bias": False},
        {
            "topk_method": AllowedValues(("noaux_tc", None), "experts are chosen by scores and biases"),
            "scoring_func": AllowedValues(("sigmoid", None), "its scores are sigmoids"),
            "moe_layer_freq": _EVERY_LAYER,
        },
        _DEEPSEEK3,
        aliases={"num_nextn_predict_layers": "num_mtp_layers"},
    ),
    "llama4_text": rotary_type(
        "Llama4",
        rotary_fields(
            (48, 5120, 8192, 40, 8, 128, 131072, 202048),
            norm_epsilon=1e-5,
            rotary_base=500000.0,
            add_bias_linear=False,
            ffn_hidden_size=FieldMapping(("intermediate_size_mlp",), 16384),
            qk_l2_norm=FieldMapping(("use_qk_norm",), True),
        ),
        {"add_mlp_bias": False, "qk_layernorm": False, "rotary_interleaved": True},
        {
            "layer_types": AllowedValues(("full_attention", "chunked_attention", None), "other attention is unknown"),
            "router_jitter_noise": AllowedValues((0.0, 0, None), "tokens reach the router as they are"),
            "num_shared_experts": AllowedValues((1, None), "every layer with experts has one shared expert"),
            "for_llm_compressor": AllowedValues((False, None), "experts of a layer are in one tensor"),
        },
        obstacles=_one_shared_obstacles,
        has_no_rope_layers=True,
        derived=(_LLAMA4.keys(), _CHUNKS, _TUNING),
    ),
    "mixtral": rotary_type(
        "Mixtral",
        rotary_fields((32, 4096, 14336, 32, 8, None, 131072, 32000), norm_epsilon=1e-5, rotary_base=1000000.0),
        {**NO_BIAS, "qk_layernorm": False},
        {"router_jitter_noise": AllowedValues((0, 0.0, None), "tokens reach the router as they are")},
        Windows(None),
        derived=(_MIXTRAL.keys(),),
    ),
    "gpt_oss": rotary_type(
        "GptOss",
        rotary_fields(
            (36, 2880, 2880, 64, 8, 64, 131072, 201088), norm_epsilon=1e-5, rotary_base=150000.0, add_bias_linear=True
        ),
        {"add_mlp_bias": True, "qk_layernorm": False, "softmax_type": "learnable"},
        {
            "swiglu_alpha": AllowedValues((1.702, None), "the gain of the gate is 1.702"),
            "swiglu_limit": AllowedValues((7.0, 7, None), "gate and up projection are clamped at 7"),
            "experts_per_token": AllowedValues((4, None), "the field that counts is num_experts_per_tok"),
            "initial_context_length": AllowedValues((4096, None), "rope_parameters describe positions"),
        },
        Windows(128, every(2)),
        activation=("hidden_act", "silu", {"silu": "clamped_swiglu"}),
        derived=(_GPT_OSS.keys(), DESCRIBED),
    ),
    "qwen2_moe": rotary_type(
        "Qwen2Moe",
        rotary_fields(
            (24, 2048, 5632, 16, 16, None, 32768, 151936),
            add_qkv_bias=FieldMapping(("qkv_bias",), True, write=lambda arch: arch.has_qkv_bias),
        ),
        {"add_bias_linear": False, "add_mlp_bias": False, "qk_layernorm": False},
        {
            "use_sliding_window": AllowedValues((False, None), _READER),
            "layer_types": AllowedValues(("full_attention", None), _READER),
        },
        Windows(None, has_switch=True),
        derived=(_QWEN2.keys(),),
    ),
    "qwen3_moe": rotary_type(
        "Qwen3Moe",
        rotary_fields((24, 2048, 6144, 32, 4, None, 32768, 151936), add_bias_linear=False),
        {"add_mlp_bias": False, "qk_layernorm": True},
        windows=Windows(4096, has_switch=True),
        aliases={"num_local_experts": "num_experts"},
        derived=(_QWEN3.keys(),),
    ),
    "glm4_moe": rotary_type(
        "Glm4Moe",
        rotary_fields(
            (46, 4096, 10944, 96, 8, None, 131072, 151552),
            norm_epsilon=1e-5,
            rotary_percent=0.5,
            qk_layernorm=FieldMapping(("use_qk_norm",), False),
            add_qkv_bias=FieldMapping(("attention_bias",), False, write=lambda arch: arch.has_qkv_bias),
            mtp_num_layers=1,
        ),
        {"add_bias_linear": False, "add_mlp_bias": False},
        aliases={"num_nextn_predict_layers": "num_mtp_layers", "num_local_experts": "n_routed_experts"},
        derived=(_GLM.keys(),),
    ),
    "hunyuan_v1_moe": rotary_type(
        "HunYuanMoEV1",
        rotary_fields((32, 4096, 11008, 32, None, None, 2048, 290943), norm_epsilon=1e-5, add_bias_linear=False),
        HUNYUAN,
        {**HUNYUAN_RULES, **_HUNYUAN_MOE, **WHOLE_PRODUCTS},
        derived=(_HUNYUAN_EXPERTS.keys(), HUNYUAN_HEADS, HUNYUAN_IDS),
        obstacles=_one_shared_obstacles,
        has_alpha=True,
    ),
    "minimax_m2": rotary_type(
        "MiniMaxM2",
        rotary_fields((62, 3072, 1536, 48, 8, 128, 196608, 200064), rotary_base=5000000.0, rotary_percent=1.0),
        {**NO_BIAS, "qk_layernorm": True, "qk_layernorm_scope": "projection"},
        _MINIMAX_RULES,
        derived=(_MINIMAX.keys(), _ROTARY_DIM),
        constants={name: rule.allowed[0] for name, rule in _MINIMAX_RULES.items() if name not in _MINIMAX_UNUSED},
    ),
    "olmoe": rotary_type(
        "Olmoe",
        rotary_fields(
            (16, 2048, 2048, 16, None, None, 4096, 50304), norm_epsilon=1e-5, add_bias_linear=False, clip_qkv=None
        ),
        {"add_mlp_bias": False, "qk_layernorm": True, "qk_layernorm_scope": "projection"},
        derived=(_OLMOE.keys(),),
    ),
}
