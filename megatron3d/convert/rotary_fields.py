"""What the model types with rotary positions have in common: fields, rules, and what none of them can represent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import JsonValue

from megatron3d.convert.hub_fields import AllowedValues, FieldMapping, HubConfig, Windows
from megatron3d.model.architecture import Architecture


def rotary_obstacles(arch: Architecture) -> Iterator[str]:
    if arch.num_attention_heads % arch.num_query_groups:
        yield f"num_query_groups={arch.num_query_groups}: in llama it divides num_attention_heads"
    if arch.kv_channels % 2:
        yield f"kv_channels={arch.kv_channels}: llama's rotary positions turn pairs of channels"


def llama_obstacles(arch: Architecture) -> Iterator[str]:
    yield from rotary_obstacles(arch)
    if arch.hidden_size % arch.num_attention_heads:
        yield f"num_attention_heads={arch.num_attention_heads}: in llama it divides hidden_size={arch.hidden_size}"


NO_WINDOW = "every position attends to all earlier ones"
COMMON = {
    "is_encoder_decoder": AllowedValues((False, None), "the model has no encoder"),
    "add_cross_attention": AllowedValues((False, None), "the model has no cross-attention"),
    "pruned_heads": AllowedValues(({}, None), "no head can be left out"),
    "quantization_config": AllowedValues(
        (None,), "weights are floating-point numbers; convert the model before quantization"
    ),
    "tie_encoder_decoder": AllowedValues((False, None), "the model has no encoder"),
    "rope_interleaved": AllowedValues((False, None), "channels i and i + size / 2 of a head are rotated together"),
}
NO_WINDOWS = {
    "sliding_window": AllowedValues((None,), NO_WINDOW),
    "use_sliding_window": AllowedValues((False, None), NO_WINDOW),
    "layer_types": AllowedValues(("full_attention", None), NO_WINDOW),
}
ROPE_NORM = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
LAYER_NORM = {"position_embedding_type": "rope", "normalization": "LayerNorm"}
NO_BIAS = {"add_bias_linear": False, "add_qkv_bias": False, "add_mlp_bias": False}
SILU = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
GATED = ("hidden_act", "silu", SILU)
TANH = dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh")
PLAIN = {**TANH, "gelu": "gelu", "relu": "relu"}


def rotary_fields(inner: int, positions: int, **others: FieldMapping) -> dict[str, FieldMapping]:
    """Return the fields of a model with rotary positions, with the defaults that differ between model types."""
    return {
        "num_layers": FieldMapping(("num_hidden_layers",), 32),
        "hidden_size": FieldMapping(("hidden_size",), 4096),
        "ffn_hidden_size": FieldMapping(("intermediate_size",), inner),
        "num_attention_heads": FieldMapping(("num_attention_heads",), 32),
        "num_query_groups": FieldMapping(("num_key_value_heads",), None),
        "kv_channels": FieldMapping(("head_dim",), None),
        "max_position_embeddings": FieldMapping(("max_position_embeddings",), positions),
        "vocab_size": FieldMapping(("vocab_size",), 32000),
        "norm_epsilon": FieldMapping(("rms_norm_eps",), 1e-6),
        "rotary_base": FieldMapping(("rope_theta",), 10000.0),
        "tie_embeddings": FieldMapping(("tie_word_embeddings",), False),
        "attention_dropout": FieldMapping(("attention_dropout",), 0.0),
        "init_method_std": FieldMapping(("initializer_range",), 0.02),
        **others,
    }


# Biases of attention's projections and of the MLP, where a model type chooses them.
ATTENTION_BIAS = FieldMapping(("attention_bias",), False)
MLP_BIAS = FieldMapping(("mlp_bias",), False, write=lambda arch: arch.has_mlp_bias)


def inverse(value: JsonValue) -> JsonValue:
    return 1 / value if isinstance(value, int | float) and value else value


def after_max_window_layers(settings: HubConfig, layer: int) -> bool:
    first = settings.get("max_window_layers", 28)
    return not isinstance(first, int) or layer < first


def has_rotary_positions(settings: HubConfig, layer: int) -> bool:
    """Return whether a SmolLM3's layer has rotary positions; only the others can have a window."""
    listed, interval = settings.get("no_rope_layers"), settings.get("no_rope_layer_interval", 4)
    if isinstance(listed, list) and layer < len(listed):
        return bool(listed[layer])
    return not isinstance(interval, int) or interval < 1 or (layer + 1) % interval != 0


def every(interval: int, name: str | None = None) -> Callable[[HubConfig, int], bool]:
    """Return the function of whether a layer is the last of `interval`, which a field may change."""

    def is_last(settings: HubConfig, layer: int) -> bool:
        said = settings.get(name, interval) if name else interval
        return isinstance(said, int) and said > 0 and (layer + 1) % said == 0

    return is_last


SWITCHED = Windows(None, after_max_window_layers, has_switch=True)
