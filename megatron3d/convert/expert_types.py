"""Model types of Hugging Face whose layers have experts, with ordinary attention; DeepSeek's are in `latent_types`."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from megatron3d.convert.expert_fields import ExpertFields
from megatron3d.convert.hub_fields import AllowedValues, DerivedKeys, FieldMapping, HubConfig, ModelType, Windows
from megatron3d.convert.rotary_fields import (
    ATTENTION_BIAS,
    COMMON,
    GATED,
    NO_BIAS,
    NO_WINDOWS,
    ROPE_NORM,
    every,
    rotary_fields,
    rotary_obstacles,
)

_MIXTRAL = ExpertFields(("num_local_experts", 8), ("num_experts_per_tok", 2), ("intermediate_size", 14336))
_QWEN2 = ExpertFields(
    ("num_experts", 60),
    ("num_experts_per_tok", 4),
    ("moe_intermediate_size", 1408),
    normalizes=("norm_topk_prob", False),
    gated_shared=("shared_expert_intermediate_size", 5632),
    lists_dense=True,
)
_QWEN3 = ExpertFields(
    ("num_experts", 128),
    ("num_experts_per_tok", 8),
    ("moe_intermediate_size", 768),
    normalizes=("norm_topk_prob", False),
    lists_dense=True,
)
_OLMOE = ExpertFields(
    ("num_experts", 64),
    ("num_experts_per_tok", 8),
    ("intermediate_size", 2048),
    normalizes=("norm_topk_prob", False),
)
_GLM = ExpertFields(
    ("n_routed_experts", 128),
    ("num_experts_per_tok", 8),
    ("moe_intermediate_size", 1408),
    score="sigmoid",
    has_bias=True,
    shared=("n_shared_experts", 1),
    normalizes=("norm_topk_prob", True),
    groups=("n_group", 1),
    kept_groups=("topk_group", 1),
    scale=("routed_scaling_factor", 1.0),
    first_dense=("first_k_dense_replace", 1),
)
_GPT_OSS = ExpertFields(
    ("num_local_experts", 128), ("num_experts_per_tok", 4), ("intermediate_size", 2880), has_router_bias=True
)


def _described_positions(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    """Return a problem where positions are not described: the default of gpt-oss is a scaling of its own."""
    if settings.get("rope_parameters") is None and settings.get("rope_scaling") is None:
        return {}, [
            "rope_parameters=null: rotary positions of gpt_oss are scaled unless described; add rope_parameters"
        ]
    return {}, []


EXPERT_TYPES: Mapping[str, ModelType] = {
    "mixtral": ModelType(
        class_name="MixtralForCausalLM",
        family="llama",
        fields=rotary_fields(
            14336,
            131072,
            num_query_groups=FieldMapping(("num_key_value_heads",), 8),
            norm_epsilon=FieldMapping(("rms_norm_eps",), 1e-5),
            rotary_base=FieldMapping(("rope_theta",), 1000000.0),
        ),
        activation=GATED,
        fixed={**ROPE_NORM, **NO_BIAS, "qk_layernorm": False},
        obstacles=rotary_obstacles,
        rules={**COMMON, "router_jitter_noise": AllowedValues((0, 0.0, None), "tokens reach the router as they are")},
        windows=Windows(None),
        derived=(_MIXTRAL.keys(),),
    ),
    "gpt_oss": ModelType(
        class_name="GptOssForCausalLM",
        family="llama",
        fields=rotary_fields(
            2880,
            131072,
            num_layers=FieldMapping(("num_hidden_layers",), 36),
            hidden_size=FieldMapping(("hidden_size",), 2880),
            num_attention_heads=FieldMapping(("num_attention_heads",), 64),
            num_query_groups=FieldMapping(("num_key_value_heads",), 8),
            kv_channels=FieldMapping(("head_dim",), 64),
            vocab_size=FieldMapping(("vocab_size",), 201088),
            norm_epsilon=FieldMapping(("rms_norm_eps",), 1e-5),
            rotary_base=FieldMapping(("rope_theta",), 150000.0),
            add_bias_linear=FieldMapping(("attention_bias",), True),
        ),
        activation=("hidden_act", "silu", {"silu": "clamped_swiglu"}),
        fixed={**ROPE_NORM, "add_mlp_bias": True, "qk_layernorm": False, "softmax_type": "learnable"},
        obstacles=rotary_obstacles,
        rules={
            **COMMON,
            "swiglu_alpha": AllowedValues((1.702, None), "the gain of the gate is 1.702"),
            "swiglu_limit": AllowedValues((7.0, 7, None), "gate and up projection are clamped at 7"),
            "experts_per_token": AllowedValues((4, None), "the field that counts is num_experts_per_tok"),
            "initial_context_length": AllowedValues((4096, None), "rope_parameters describe positions"),
        },
        windows=Windows(128, every(2)),
        derived=(_GPT_OSS.keys(), DerivedKeys((), (), _described_positions, lambda arch: {})),
    ),
    "qwen2_moe": ModelType(
        class_name="Qwen2MoeForCausalLM",
        family="llama",
        fields=rotary_fields(
            5632,
            32768,
            num_layers=FieldMapping(("num_hidden_layers",), 24),
            hidden_size=FieldMapping(("hidden_size",), 2048),
            num_attention_heads=FieldMapping(("num_attention_heads",), 16),
            num_query_groups=FieldMapping(("num_key_value_heads",), 16),
            vocab_size=FieldMapping(("vocab_size",), 151936),
            add_qkv_bias=FieldMapping(("qkv_bias",), True, write=lambda arch: arch.has_qkv_bias),
        ),
        activation=GATED,
        fixed={**ROPE_NORM, "add_bias_linear": False, "add_mlp_bias": False, "qk_layernorm": False},
        obstacles=rotary_obstacles,
        rules={
            **COMMON,
            "use_sliding_window": AllowedValues((False, None), "which layers have windows depends on the reader"),
            "layer_types": AllowedValues(("full_attention", None), "which layers have windows depends on the reader"),
        },
        windows=Windows(None, has_switch=True),
        derived=(_QWEN2.keys(),),
    ),
    "qwen3_moe": ModelType(
        class_name="Qwen3MoeForCausalLM",
        family="llama",
        fields=rotary_fields(
            6144,
            32768,
            num_layers=FieldMapping(("num_hidden_layers",), 24),
            hidden_size=FieldMapping(("hidden_size",), 2048),
            num_query_groups=FieldMapping(("num_key_value_heads",), 4),
            vocab_size=FieldMapping(("vocab_size",), 151936),
            add_bias_linear=ATTENTION_BIAS,
        ),
        activation=GATED,
        fixed={**ROPE_NORM, "add_mlp_bias": False, "qk_layernorm": True},
        obstacles=rotary_obstacles,
        rules=COMMON,
        windows=Windows(4096, has_switch=True),
        aliases={"num_local_experts": "num_experts"},
        derived=(_QWEN3.keys(),),
    ),
    "glm4_moe": ModelType(
        class_name="Glm4MoeForCausalLM",
        family="llama",
        fields=rotary_fields(
            10944,
            131072,
            num_layers=FieldMapping(("num_hidden_layers",), 46),
            num_attention_heads=FieldMapping(("num_attention_heads",), 96),
            num_query_groups=FieldMapping(("num_key_value_heads",), 8),
            vocab_size=FieldMapping(("vocab_size",), 151552),
            norm_epsilon=FieldMapping(("rms_norm_eps",), 1e-5),
            rotary_percent=FieldMapping(("partial_rotary_factor",), 0.5),
            qk_layernorm=FieldMapping(("use_qk_norm",), False),
            add_qkv_bias=FieldMapping(("attention_bias",), False, write=lambda arch: arch.has_qkv_bias),
            mtp_num_layers=FieldMapping(("num_mtp_layers",), 1),
        ),
        activation=GATED,
        fixed={**ROPE_NORM, "add_bias_linear": False, "add_mlp_bias": False},
        obstacles=rotary_obstacles,
        rules={**COMMON, **NO_WINDOWS},
        aliases={"num_nextn_predict_layers": "num_mtp_layers", "num_local_experts": "n_routed_experts"},
        derived=(_GLM.keys(),),
    ),
    "olmoe": ModelType(
        class_name="OlmoeForCausalLM",
        family="llama",
        fields=rotary_fields(
            2048,
            4096,
            num_layers=FieldMapping(("num_hidden_layers",), 16),
            hidden_size=FieldMapping(("hidden_size",), 2048),
            num_attention_heads=FieldMapping(("num_attention_heads",), 16),
            vocab_size=FieldMapping(("vocab_size",), 50304),
            norm_epsilon=FieldMapping(("rms_norm_eps",), 1e-5),
            add_bias_linear=ATTENTION_BIAS,
        ),
        activation=GATED,
        fixed={**ROPE_NORM, "add_mlp_bias": False, "qk_layernorm": True, "qk_layernorm_scope": "projection"},
        obstacles=rotary_obstacles,
        rules={
            **COMMON,
            **NO_WINDOWS,
            "clip_qkv": AllowedValues((None,), "queries, keys and values are not clipped"),
        },
        derived=(_OLMOE.keys(),),
    ),
}
