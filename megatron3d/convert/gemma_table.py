"""Gemma's model types: norms that multiply by 1 + weight, scaled embeddings, windows with their own rotary base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

from megatron3d.convert.fields import AllowedValues, FieldMapping, ModelType, Windows
from megatron3d.convert.llama_table import (
    ATTENTION_BIAS,
    COMMON,
    NO_WINDOWS,
    ROPE_NORM,
    every,
    rotary_fields,
    rotary_obstacles,
)
from megatron3d.model.spec import Architecture


def inverse_square(value: JsonValue) -> JsonValue:
    return value**-0.5 if isinstance(value, int | float) and value > 0 else value


def pre_attention_scalar(arch: Architecture) -> JsonValue:
    """Return the number whose inverse root is the factor of the scores."""
    if arch.softmax_scale is None:
        return arch.kv_channels
    number = arch.softmax_scale**-2
    return round(number) if abs(number - round(number)) < 1e-9 * number else number


def root_of_hidden_size(value_of: Callable[[str], Any]) -> object:
    return value_of("hidden_size") ** 0.5


NO_OTHER_ATTENTION = AllowedValues((False, None), "every position sees only earlier ones")
GEMMA = {**ROPE_NORM, "apply_layernorm_1p": True, "add_mlp_bias": False}
GEMMA_GELU = {"gelu_pytorch_tanh": "geglu_tanh"}


def _later_fields(positions: int, **others: FieldMapping) -> dict[str, FieldMapping]:
    """Return the fields of Gemma 2 and 3."""
    return rotary_fields(
        9216,
        positions,
        num_layers=FieldMapping(("num_hidden_layers",), 26),
        hidden_size=FieldMapping(("hidden_size",), 2304),
        num_attention_heads=FieldMapping(("num_attention_heads",), 8),
        num_query_groups=FieldMapping(("num_key_value_heads",), 4),
        kv_channels=FieldMapping(("head_dim",), 256),
        tie_embeddings=FieldMapping(("tie_word_embeddings",), True),
        add_bias_linear=ATTENTION_BIAS,
        softmax_scale=FieldMapping(("query_pre_attn_scalar",), 256, inverse_square, pre_attention_scalar),
        **others,
    )


GEMMA_TYPES: Mapping[str, ModelType] = {
    "gemma": ModelType(
        class_name="GemmaForCausalLM",
        family="llama",
        fields=rotary_fields(
            24576,
            8192,
            num_layers=FieldMapping(("num_hidden_layers",), 28),
            hidden_size=FieldMapping(("hidden_size",), 3072),
            num_attention_heads=FieldMapping(("num_attention_heads",), 16),
            num_query_groups=FieldMapping(("num_key_value_heads",), 16),
            kv_channels=FieldMapping(("head_dim",), 256),
            vocab_size=FieldMapping(("vocab_size",), 256000),
            tie_embeddings=FieldMapping(("tie_word_embeddings",), True),
            add_bias_linear=ATTENTION_BIAS,
        ),
        # The first releases say gelu and mean its approximation by tanh.
        activation=("hidden_act", "gelu_pytorch_tanh", {**GEMMA_GELU, "gelu": "geglu_tanh"}),
        fixed={**GEMMA, "qk_layernorm": False},
        computed={"embedding_scale": root_of_hidden_size},
        obstacles=rotary_obstacles,
        rules={
            **COMMON,
            **NO_WINDOWS,
            "use_bidirectional_attention": NO_OTHER_ATTENTION,
            "hidden_activation": AllowedValues(("gelu_pytorch_tanh", None), "the activation is hidden_act's"),
        },
    ),
    "gemma2": ModelType(
        class_name="Gemma2ForCausalLM",
        family="llama",
        fields=_later_fields(
            8192,
            vocab_size=FieldMapping(("vocab_size",), 256000),
            attention_softcap=FieldMapping(("attn_logit_softcapping",), 50.0),
            logit_softcap=FieldMapping(("final_logit_softcapping",), 30.0),
        ),
        activation=("hidden_activation", "gelu_pytorch_tanh", GEMMA_GELU),
        fixed={**GEMMA, "norm_placement": "sandwich", "qk_layernorm": False},
        computed={"embedding_scale": root_of_hidden_size},
        obstacles=rotary_obstacles,
        rules={
            **COMMON,
            "use_bidirectional_attention": NO_OTHER_ATTENTION,
            "hidden_act": AllowedValues(("gelu_pytorch_tanh", None), "the activation is hidden_activation's"),
        },
        windows=Windows(4096, every(2)),
    ),
    "gemma3_text": ModelType(
        class_name="Gemma3ForCausalLM",
        family="llama",
        fields=_later_fields(
            131072,
            vocab_size=FieldMapping(("vocab_size",), 262208),
            rotary_base=FieldMapping(("rope_theta",), 1000000.0),
            logit_softcap=FieldMapping(("final_logit_softcapping",), None),
        ),
        activation=("hidden_activation", "gelu_pytorch_tanh", GEMMA_GELU),
        fixed={**GEMMA, "norm_placement": "sandwich", "qk_layernorm": True, "qk_layernorm_scope": "head"},
        computed={"embedding_scale": root_of_hidden_size},
        obstacles=rotary_obstacles,
        rules={
            **COMMON,
            "use_bidirectional_attention": NO_OTHER_ATTENTION,
            "attn_logit_softcapping": AllowedValues((None,), "this model type does not cap scores"),
        },
        windows=Windows(4096, every(6, "sliding_window_pattern"), interval_name="sliding_window_pattern"),
        has_local_rope=True,
        local_base=10000.0,
    ),
}
