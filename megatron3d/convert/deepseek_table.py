"""DeepSeek's model types, whose attention is multi-head latent attention (DeepSeek-AI 2024, arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from megatron3d.convert.expert_table import ExpertFields
from megatron3d.convert.fields import AllowedValues, DerivedKeys, FieldMapping, HubConfig, ModelType, show
from megatron3d.convert.llama_table import (
    ATTENTION_BIAS,
    COMMON,
    GATED,
    MLP_BIAS,
    NO_WINDOWS,
    ROPE_NORM,
    rotary_fields,
)
from megatron3d.model.spec import Architecture

_LATENT_EPSILON = 1e-6
_WITHOUT = ("num_query_groups", "kv_channels", "norm_epsilon")


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
    heads: dict[str, JsonValue] = {
        "num_key_value_heads": arch.num_attention_heads,
        "head_dim": arch.qk_pos_emb_head_dim,
    }
    return {**heads, "qk_head_dim": arch.key_size}


def _obstacles(arch: Architecture) -> Iterator[str]:
    if arch.num_query_groups != arch.num_attention_heads:
        yield f"num_query_groups={arch.num_query_groups}: latent attention has one per head, {arch.num_attention_heads}"
    if arch.is_latent and arch.kv_channels != max(arch.key_size, arch.value_size):
        yield f"kv_channels={arch.kv_channels}: heads have qk_head_dim + qk_pos_emb_head_dim and v_head_dim channels"


SIZES = DerivedKeys(("num_key_value_heads", "head_dim", "qk_head_dim"), (), _read_sizes, _write_sizes, _obstacles)


def _latent_fields(inner: int, positions: int, **others: FieldMapping) -> dict[str, FieldMapping]:
    """Return the fields of a model with latent attention."""
    found = rotary_fields(
        inner,
        positions,
        q_lora_rank=FieldMapping(("q_lora_rank",), 1536),
        kv_lora_rank=FieldMapping(("kv_lora_rank",), 512),
        qk_head_dim=FieldMapping(("qk_nope_head_dim",), 128),
        qk_pos_emb_head_dim=FieldMapping(("qk_rope_head_dim",), 64),
        v_head_dim=FieldMapping(("v_head_dim",), 128),
        add_bias_linear=ATTENTION_BIAS,
        **others,
    )
    return {name: field for name, field in found.items() if name not in _WITHOUT}


_FIXED = {**ROPE_NORM, "multi_latent_attention": True, "qk_layernorm": False, "norm_epsilon": _LATENT_EPSILON}
_RULES = {
    **COMMON,
    **NO_WINDOWS,
    "rms_norm_eps": AllowedValues(
        (_LATENT_EPSILON,), "norms of latents have this epsilon, and all norms the same here"
    ),
    "pretraining_tp": AllowedValues((1, None), "its products are not computed in slices"),
}
V2_EXPERTS = ExpertFields(
    ("n_routed_experts", 64),
    ("num_experts_per_tok", None),
    ("moe_intermediate_size", 1407),
    shared=("n_shared_experts", 2),
    is_normalized=False,
    scale=("routed_scaling_factor", 1.0),
    first_dense=("first_k_dense_replace", 0),
)
V3_EXPERTS = ExpertFields(
    ("n_routed_experts", 256),
    ("num_experts_per_tok", 8),
    ("moe_intermediate_size", 2048),
    score="sigmoid",
    has_bias=True,
    shared=("n_shared_experts", 1),
    normalizes=("norm_topk_prob", True),
    groups=("n_group", 8),
    kept_groups=("topk_group", 4),
    scale=("routed_scaling_factor", 2.5),
    first_dense=("first_k_dense_replace", 3),
)
_EVERY_LAYER = AllowedValues((1, None), "every layer behind the first ones has experts")
LATENT_TYPES: Mapping[str, ModelType] = {
    "deepseek_v2": ModelType(
        class_name="DeepseekV2ForCausalLM",
        family="llama",
        fields=_latent_fields(11008, 2048, vocab_size=FieldMapping(("vocab_size",), 102400), add_mlp_bias=MLP_BIAS),
        activation=GATED,
        fixed={**_FIXED, "rotary_interleaved": True},
        obstacles=lambda arch: iter(()),
        rules={
            **_RULES,
            "topk_method": AllowedValues(("greedy", None), "scores of groups are sums, not the largest in each"),
            "scoring_func": AllowedValues(("softmax", None), "its scores are softmax"),
            "norm_topk_prob": AllowedValues((False, None), "its weights are not divided by their sum"),
            "n_group": AllowedValues((1, None), "a greedy choice knows no groups"),
            "topk_group": AllowedValues((1, None), "a greedy choice knows no groups"),
            "moe_layer_freq": _EVERY_LAYER,
        },
        derived=(SIZES, V2_EXPERTS.keys()),
        has_mscale=True,
        constants={"rms_norm_eps": _LATENT_EPSILON},
    ),
    "deepseek_v3": ModelType(
        class_name="DeepseekV3ForCausalLM",
        family="llama",
        fields=_latent_fields(
            18432,
            4096,
            num_layers=FieldMapping(("num_hidden_layers",), 61),
            hidden_size=FieldMapping(("hidden_size",), 7168),
            num_attention_heads=FieldMapping(("num_attention_heads",), 128),
            vocab_size=FieldMapping(("vocab_size",), 129280),
            rotary_interleaved=FieldMapping(("rope_interleave",), True),
            mtp_num_layers=FieldMapping(("num_mtp_layers",), 1),
        ),
        activation=GATED,
        fixed={**_FIXED, "add_mlp_bias": False},
        obstacles=lambda arch: iter(()),
        rules={
            **_RULES,
            "topk_method": AllowedValues(("noaux_tc", None), "experts are chosen by scores and biases"),
            "scoring_func": AllowedValues(("sigmoid", None), "its scores are sigmoids"),
            "moe_layer_freq": _EVERY_LAYER,
        },
        aliases={"num_nextn_predict_layers": "num_mtp_layers"},
        derived=(SIZES, V3_EXPERTS.keys()),
        has_mscale=True,
        constants={"rms_norm_eps": _LATENT_EPSILON},
    ),
}
