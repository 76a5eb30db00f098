"""Model types of Hugging Face like Llama: what each has otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pydantic import JsonValue

from megatron3d.convert.fields import AllowedValues, FieldMapping, HubConfig, ModelType, Windows
from megatron3d.model.spec import Architecture


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


def _neox_obstacles(arch: Architecture) -> Iterator[str]:
    yield from llama_obstacles(arch)
    if arch.num_query_groups != arch.num_attention_heads:
        yield f"num_query_groups={arch.num_query_groups}: gpt_neox has one per head, {arch.num_attention_heads}"
    if arch.kv_channels * arch.num_attention_heads != arch.hidden_size:
        yield f"kv_channels={arch.kv_channels}: gpt_neox's heads have hidden_size / num_attention_heads channels"


OLMO2 = {
    **ROPE_NORM,
    "norm_placement": "post",
    "qk_layernorm": True,
    "qk_layernorm_scope": "projection",
    "add_mlp_bias": False,
}
OLMO_FIELDS = {
    "num_query_groups": FieldMapping(("num_key_value_heads",), None),
    "vocab_size": FieldMapping(("vocab_size",), 50304),
    "norm_epsilon": FieldMapping(("rms_norm_eps",), 1e-5),
    "add_bias_linear": ATTENTION_BIAS,
}
_OLMO1 = {*rotary_fields(0, 0, **OLMO_FIELDS)} - {"norm_epsilon"}
ROTARY_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType(
        class_name="LlamaForCausalLM",
        family="llama",
        fields=rotary_fields(11008, 2048, add_bias_linear=ATTENTION_BIAS, add_mlp_bias=MLP_BIAS),
        activation=GATED,
        fixed={**ROPE_NORM, "qk_layernorm": False},
        obstacles=llama_obstacles,
        rules={
            **COMMON,
            **NO_WINDOWS,
            "pretraining_tp": AllowedValues((1, None), "its products are not computed in slices"),
        },
    ),
    "mistral": ModelType(
        class_name="MistralForCausalLM",
        family="llama",
        fields=rotary_fields(14336, 131072, num_query_groups=FieldMapping(("num_key_value_heads",), 8)),
        activation=GATED,
        fixed={**ROPE_NORM, **NO_BIAS, "qk_layernorm": False},
        obstacles=rotary_obstacles,
        rules=COMMON,
        windows=Windows(4096),
    ),
    "qwen2": ModelType(
        class_name="Qwen2ForCausalLM",
        family="llama",
        fields=rotary_fields(
            22016,
            32768,
            num_query_groups=FieldMapping(("num_key_value_heads",), 32),
            vocab_size=FieldMapping(("vocab_size",), 151936),
        ),
        activation=GATED,
        fixed={**ROPE_NORM, **NO_BIAS, "add_qkv_bias": True, "qk_layernorm": False},
        obstacles=rotary_obstacles,
        rules={**COMMON, "use_mrope": AllowedValues((False, None), "a position is one number")},
        windows=SWITCHED,
    ),
    "qwen3": ModelType(
        class_name="Qwen3ForCausalLM",
        family="llama",
        fields=rotary_fields(
            22016,
            32768,
            num_query_groups=FieldMapping(("num_key_value_heads",), 32),
            kv_channels=FieldMapping(("head_dim",), 128),
            vocab_size=FieldMapping(("vocab_size",), 151936),
            add_bias_linear=ATTENTION_BIAS,
        ),
        activation=GATED,
        fixed={**ROPE_NORM, "add_mlp_bias": False, "qk_layernorm": True},
        obstacles=rotary_obstacles,
        rules=COMMON,
        windows=SWITCHED,
    ),
    "smollm3": ModelType(
        class_name="SmolLM3ForCausalLM",
        family="llama",
        fields=rotary_fields(
            11008,
            32768,
            num_layers=FieldMapping(("num_hidden_layers",), 36),
            hidden_size=FieldMapping(("hidden_size",), 2048),
            num_attention_heads=FieldMapping(("num_attention_heads",), 16),
            num_query_groups=FieldMapping(("num_key_value_heads",), 4),
            vocab_size=FieldMapping(("vocab_size",), 128256),
            rotary_base=FieldMapping(("rope_theta",), 2000000.0),
            tie_embeddings=FieldMapping(("tie_word_embeddings",), True),
            add_bias_linear=ATTENTION_BIAS,
            add_mlp_bias=MLP_BIAS,
        ),
        activation=GATED,
        fixed={**ROPE_NORM, "qk_layernorm": False},
        obstacles=rotary_obstacles,
        rules={**COMMON, "pretraining_tp": AllowedValues((1, 2, None), "its products are not computed in slices")},
        windows=Windows(None, has_rotary_positions, has_switch=True),
        has_no_rope_layers=True,
    ),
    "olmo": ModelType(
        class_name="OlmoForCausalLM",
        family="llama",
        fields={name: field for name, field in rotary_fields(11008, 2048, **OLMO_FIELDS).items() if name in _OLMO1},
        activation=GATED,
        fixed={
            "position_embedding_type": "rope",
            "normalization": "PlainLayerNorm",
            "norm_epsilon": 1e-5,
            "add_mlp_bias": False,
            "qk_layernorm": False,
        },
        obstacles=rotary_obstacles,
        rules={
            **COMMON,
            **NO_WINDOWS,
            "clip_qkv": AllowedValues((None,), "queries, keys and values are not clipped"),
            "pretraining_tp": AllowedValues((1, None), "its products are not computed in slices"),
        },
    ),
    "olmo2": ModelType(
        class_name="Olmo2ForCausalLM",
        family="llama",
        fields=rotary_fields(11008, 2048, **OLMO_FIELDS),
        activation=GATED,
        fixed=OLMO2,
        obstacles=rotary_obstacles,
        rules={**COMMON, **NO_WINDOWS},
    ),
    "olmo3": ModelType(
        class_name="Olmo3ForCausalLM",
        family="llama",
        fields=rotary_fields(11008, 2048, **OLMO_FIELDS, rotary_base=FieldMapping(("rope_theta",), 500000.0)),
        activation=GATED,
        fixed=OLMO2,
        obstacles=rotary_obstacles,
        rules=COMMON,
        windows=Windows(4096, every(4)),
        has_local_rope=True,
    ),
    "phi3": ModelType(
        class_name="Phi3ForCausalLM",
        family="llama",
        fields=rotary_fields(
            8192,
            4096,
            hidden_size=FieldMapping(("hidden_size",), 3072),
            vocab_size=FieldMapping(("vocab_size",), 32064),
            norm_epsilon=FieldMapping(("rms_norm_eps",), 1e-5),
            rotary_percent=FieldMapping(("partial_rotary_factor",), 1.0),
            hidden_dropout=FieldMapping(("resid_pdrop", "embd_pdrop"), 0.0),
        ),
        activation=GATED,
        fixed={**ROPE_NORM, **NO_BIAS, "qk_layernorm": False},
        obstacles=llama_obstacles,
        rules={**COMMON, "attention_bias": AllowedValues((False, None), "attention has no biases")},
        windows=Windows(None),
    ),
    "granite": ModelType(
        class_name="GraniteForCausalLM",
        family="llama",
        fields=rotary_fields(
            11008,
            2048,
            add_bias_linear=ATTENTION_BIAS,
            add_mlp_bias=MLP_BIAS,
            embedding_scale=FieldMapping(("embedding_multiplier",), 1.0),
            softmax_scale=FieldMapping(
                ("attention_multiplier",), 1.0, write=lambda arch: arch.softmax_scale or arch.kv_channels**-0.5
            ),
            logit_scale=FieldMapping(("logits_scaling",), 1.0, inverse, lambda arch: inverse(arch.logit_scale)),
            residual_scale=FieldMapping(("residual_multiplier",), 1.0),
        ),
        activation=GATED,
        fixed={**ROPE_NORM, "qk_layernorm": False},
        obstacles=rotary_obstacles,
        rules={**COMMON, **NO_WINDOWS},
    ),
    "starcoder2": ModelType(
        class_name="Starcoder2ForCausalLM",
        family="llama",
        fields=rotary_fields(
            12288,
            4096,
            num_layers=FieldMapping(("num_hidden_layers",), 30),
            hidden_size=FieldMapping(("hidden_size",), 3072),
            num_attention_heads=FieldMapping(("num_attention_heads",), 24),
            num_query_groups=FieldMapping(("num_key_value_heads",), 2),
            vocab_size=FieldMapping(("vocab_size",), 49152),
            norm_epsilon=FieldMapping(("norm_epsilon",), 1e-5),
            init_method_std=FieldMapping(("initializer_range",), 0.018042),
            tie_embeddings=FieldMapping(("tie_word_embeddings",), True),
            add_bias_linear=FieldMapping(("use_bias",), True),
            hidden_dropout=FieldMapping(("residual_dropout", "embedding_dropout"), 0.0),
        ),
        activation=("hidden_act", "gelu_pytorch_tanh", PLAIN),
        fixed={**LAYER_NORM, "qk_layernorm": False},
        obstacles=rotary_obstacles,
        rules={
            **COMMON,
            "mlp_type": AllowedValues(("default", None), "the MLP has no gate"),
            "norm_type": AllowedValues(("layer_norm", None), "norms subtract the mean"),
            "layer_norm_epsilon": AllowedValues((1e-5, None), "the field that counts is norm_epsilon"),
            "scale_attn_weights": AllowedValues((True, None), "scores are divided by the root of a head's size"),
            "attention_softmax_in_fp32": AllowedValues((True, None), "softmax is computed in fp32"),
            "scale_attention_softmax_in_fp32": AllowedValues((True, None), "softmax is computed in fp32"),
        },
        windows=Windows(None),
    ),
    "nemotron": ModelType(
        class_name="NemotronForCausalLM",
        family="llama",
        fields=rotary_fields(
            24576,
            4096,
            hidden_size=FieldMapping(("hidden_size",), 6144),
            num_attention_heads=FieldMapping(("num_attention_heads",), 48),
            vocab_size=FieldMapping(("vocab_size",), 256000),
            norm_epsilon=FieldMapping(("norm_eps",), 1e-5),
            init_method_std=FieldMapping(("initializer_range",), 0.0134),
            rotary_percent=FieldMapping(("partial_rotary_factor",), 0.5),
            add_bias_linear=ATTENTION_BIAS,
            add_mlp_bias=MLP_BIAS,
        ),
        activation=("hidden_act", "relu2", {"relu2": "squared_relu", **PLAIN}),
        fixed={**LAYER_NORM, "apply_layernorm_1p": True, "qk_layernorm": False},
        obstacles=rotary_obstacles,
        rules={**COMMON, **NO_WINDOWS},
    ),
    "gpt_neox": ModelType(
        class_name="GPTNeoXForCausalLM",
        family="llama",
        fields={
            "num_layers": FieldMapping(("num_hidden_layers",), 44),
            "hidden_size": FieldMapping(("hidden_size",), 6144),
            "ffn_hidden_size": FieldMapping(("intermediate_size",), 24576),
            "num_attention_heads": FieldMapping(("num_attention_heads",), 64),
            "max_position_embeddings": FieldMapping(("max_position_embeddings",), 2048),
            "vocab_size": FieldMapping(("vocab_size",), 50432),
            "norm_epsilon": FieldMapping(("layer_norm_eps",), 1e-5),
            "rotary_base": FieldMapping(("rope_theta",), 10000.0),
            "rotary_percent": FieldMapping(("partial_rotary_factor",), 0.25),
            "tie_embeddings": FieldMapping(("tie_word_embeddings",), False),
            "hidden_dropout": FieldMapping(("hidden_dropout",), 0.0),
            "attention_dropout": FieldMapping(("attention_dropout",), 0.0),
            "init_method_std": FieldMapping(("initializer_range",), 0.02),
            "use_parallel_residual": FieldMapping(("use_parallel_residual",), True),
            "add_bias_linear": FieldMapping(("attention_bias",), True),
        },
        activation=("hidden_act", "gelu", {"gelu": "gelu", **PLAIN}),
        fixed={**LAYER_NORM, "add_mlp_bias": True, "qk_layernorm": False},
        obstacles=_neox_obstacles,
        rules={
            **COMMON,
            **NO_WINDOWS,
            "classifier_dropout": AllowedValues((None, 0.0, 0.1), "the model has no classifier"),
            "attention_probs_dropout_prob": AllowedValues((0.0, None), "the field that counts is attention_dropout"),
            "hidden_dropout_prob": AllowedValues((0.0, None), "the field that counts is hidden_dropout"),
        },
        body="gpt_neox.",
        aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    ),
}
