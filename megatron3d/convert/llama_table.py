"""Model types of Hugging Face like Llama, Gemma's included: what each has otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from pydantic import JsonValue

from megatron3d.attention.rotary_spec import LONGROPE
from megatron3d.convert.fields import (
    FULL,
    AllowedValues,
    DerivedKeys,
    FieldMapping,
    HubConfig,
    ModelType,
    Windows,
    shortest_pattern,
    show,
)
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


def equal_heads_obstacles(name: str, arch: Architecture) -> Iterator[str]:
    """Yield what a model type cannot represent whose heads have keys of their own and divide the hidden size."""
    if arch.num_query_groups != arch.num_attention_heads:
        yield f"num_query_groups={arch.num_query_groups}: {name} has one per head, {arch.num_attention_heads}"
    yield from _undivided_heads(name, arch)


def _undivided_heads(name: str, arch: Architecture) -> Iterator[str]:
    if arch.kv_channels * arch.num_attention_heads != arch.hidden_size:
        yield f"kv_channels={arch.kv_channels}: {name}'s heads have hidden_size / num_attention_heads channels"


def divided_heads_obstacles(name: str, arch: Architecture) -> Iterator[str]:
    """Yield what a model type cannot represent whose heads divide the hidden size."""
    yield from rotary_obstacles(arch)
    yield from _undivided_heads(name, arch)


_NO_WINDOW = "every position attends to all earlier ones"
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
    "sliding_window": AllowedValues((None,), _NO_WINDOW),
    "use_sliding_window": AllowedValues((False, None), _NO_WINDOW),
    "layer_types": AllowedValues(("full_attention", None), _NO_WINDOW),
}
WHOLE_PRODUCTS = {"pretraining_tp": AllowedValues((1, None), "its products are not computed in slices")}
NO_BIAS = {"add_bias_linear": False, "add_qkv_bias": False, "add_mlp_bias": False}
LAYER_NORM = {"normalization": "LayerNorm", "qk_layernorm": False}
_NEIGHBOURS = {"rotary_interleaved": True, "qk_layernorm": False}
_GATES = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_PLAIN = {**dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"), "gelu": "gelu", "relu": "relu"}

# Field of config.json of each of our keys: those of `Sizes`, others that every model has, and further ones.
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
_NAMES = {
    **_SIZES,
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "tie_embeddings": "tie_word_embeddings",
    "init_method_std": "initializer_range",
    "add_bias_linear": "attention_bias",
    "rotary_percent": "partial_rotary_factor",
    "mtp_num_layers": "num_mtp_layers",
}
_BASE: Mapping[str, JsonValue] = {
    "norm_epsilon": 1e-6,
    "rotary_base": 10000.0,
    "tie_embeddings": False,
    "attention_dropout": 0.0,
    "init_method_std": 0.02,
}
# Layers, hidden size, inner size of the MLP, heads, heads of keys, size of a head, positions, vocabulary.
Sizes = tuple[int, int, int, int, int | None, int | None, int, int]


def rotary_fields(
    sizes: Sizes, without: Collection[str] = (), **others: FieldMapping | JsonValue
) -> dict[str, FieldMapping]:
    """Return the fields of a model with rotary positions.

    Args:
        sizes: values of absent fields.
        without: keys that have no field.
        others: further fields, or values of absent ones.
    """
    values: dict[str, FieldMapping | JsonValue] = {**dict(zip(_SIZES, sizes, strict=True)), **_BASE, **others}
    return {
        key: value if isinstance(value, FieldMapping) else FieldMapping((_NAMES.get(key, key),), value)
        for key, value in values.items()
        if key not in without
    }


def rotary_type(
    class_name: str,
    fields: Mapping[str, FieldMapping],
    fixed: Mapping[str, object],
    rules: Mapping[str, AllowedValues] | None = None,
    windows: Windows | None = None,
    **others: Any,
) -> ModelType:
    """Return a model type with rotary positions, and with RMSNorm and SwiGLU unless said otherwise."""
    return ModelType(
        **{
            "class_name": f"{class_name}ForCausalLM",
            "family": "llama",
            "fields": fields,
            "activation": ("hidden_act", "silu", _GATES),
            "fixed": {"position_embedding_type": "rope", "normalization": "RMSNorm", **fixed},
            "obstacles": rotary_obstacles,
            "rules": {**COMMON, **({} if windows else NO_WINDOWS), **(rules or {})},
            "windows": windows,
            **others,
        }
    )


# Biases of the MLP, where a model type chooses them.
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


_SWITCHED = Windows(None, after_max_window_layers, has_switch=True)
_OLMO: Mapping[str, Any] = {"norm_epsilon": 1e-5, "add_bias_linear": False}
_OLMO2 = {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_scope": "projection", "add_mlp_bias": False}


def inverse_root(value: JsonValue) -> JsonValue:
    return value**-0.5 if isinstance(value, int | float) and value > 0 else value


def pre_attention_scalar(arch: Architecture) -> JsonValue:
    """Return the number whose inverse root is the factor of the scores."""
    if arch.softmax_scale is None:
        return arch.kv_channels
    number = arch.softmax_scale**-2
    return round(number) if abs(number - round(number)) < 1e-9 * number else number


def _unrotated_layers(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    """Return the layers without rotary positions: those without the window."""
    depth, types = settings["num_hidden_layers"], settings.get("layer_types")
    if settings.get("sliding_window", 4096) is None:
        return {}, ["sliding_window=null: only layers with a window have rotary positions; give a number"]
    if not isinstance(depth, int) or not isinstance(types, list | None):  # which are refused elsewhere
        return {}, []
    is_last = every(4, "sliding_window_pattern")
    full = [int(is_last(settings, n)) for n in range(depth)] if types is None else [int(t == FULL) for t in types]
    return ({"no_rope_freq": shortest_pattern(full)} if any(full) else {}), []


def _unrotated_obstacles(arch: Architecture) -> Iterator[str]:
    skipped, has = arch.no_rope_freq or (0,), (arch.window_pattern or (1,)) if arch.window is not None else (0,)
    if any(skipped[n % len(skipped)] == has[n % len(has)] for n in range(arch.num_layers)):
        yield (
            f"no_rope_freq={show(arch.no_rope_freq)}: in cohere2 layers with a window have rotary positions, and the "
            "others have none"
        )


_UNROTATED = DerivedKeys(
    (), ("no_rope_freq",), _unrotated_layers, lambda arch: {}, _unrotated_obstacles, ("no_rope_freq",)
)


def _read_divided(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    hidden, heads, size = (settings.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    if size is None or not isinstance(hidden, int) or not isinstance(heads, int) or size == hidden / heads:
        return {}, []
    return {}, [f"head_dim={show(size)}: heads have hidden_size / num_attention_heads channels; remove it"]


DIVIDED = DerivedKeys(("head_dim",), (), _read_divided, lambda arch: {"head_dim": arch.kv_channels})


def _described_positions(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    """Return a problem where positions are not described: the default of such a type is a scaling of its own."""
    is_described = any(settings.get(name) is not None for name in ("rope_parameters", "rope_scaling"))
    problem = "rope_parameters=null: rotary positions of this type are scaled unless described; add rope_parameters"
    return {}, [] if is_described else [problem]


DESCRIBED = DerivedKeys((), (), _described_positions, lambda arch: {})


def _read_head_size(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    size, counts = settings.get("attention_head_dim"), settings.get("head_dim")
    if size is None or size == counts:
        return {}, []
    return {}, [f"attention_head_dim={show(size)} and head_dim={show(counts)}: the latter counts; give it this value"]


def _nothing(settings: HubConfig) -> tuple[dict[str, JsonValue], list[str]]:
    return {}, []


# Hunyuan: queries and keys are normalized behind RoPE.
HUNYUAN = {"add_mlp_bias": False, "qk_layernorm": True, "qk_layernorm_after_rope": True}
HUNYUAN_HEADS = DerivedKeys(
    ("attention_head_dim",), (), _read_head_size, lambda arch: {"attention_head_dim": arch.kv_channels}
)
# Ids of tokens, and sizes of parts that no file of a language model holds.
_HUNYUAN_IDS = """
eod_token_id pad_id im_start_id im_end_id im_newline_id image_token_id text_start_id text_end_id mask_init_id
video_start_id video_end_id num_media_embeds org_vocab_size class_num pool_type dense_list
"""
HUNYUAN_IDS = DerivedKeys(tuple(_HUNYUAN_IDS.split()), (), _nothing, lambda arch: {})
HUNYUAN_RULES = {
    "use_qk_norm": AllowedValues((True, None), "queries and keys are normalized"),
    "use_cla": AllowedValues((False, None), "every layer has keys of its own"),
    "cla_share_factor": AllowedValues((2, 1, None), "every layer has keys of its own"),
    "use_rotary_pos_emb": AllowedValues((True, None), "positions are rotary"),
    "position_embedding_xdrope": AllowedValues((False, None), "a position is one number"),
    "xdrope_section": AllowedValues((None,), "a position is one number"),
    "norm_type": AllowedValues(("rms", "hf_rms", None), "norms divide by the root mean square"),
    "mlp_bias": AllowedValues((False, None), "the MLP has no biases"),
    "add_classification_head": AllowedValues((False, None), "the model has no classifier"),
}


def _cohere_type(
    class_name: str, name: str, base: float, rules: Mapping[str, AllowedValues], **others: Any
) -> ModelType:
    """Return a type whose attention and MLP read one norm, which has no bias."""
    return rotary_type(
        class_name,
        rotary_fields(
            (40, 8192, 22528, 64, None, None, 8192, 256000),
            without=("kv_channels",),
            norm_epsilon=FieldMapping(("layer_norm_eps",), 1e-5),
            rotary_base=base,
            tie_embeddings=True,
            add_bias_linear=False,
            logit_scale=FieldMapping(("logit_scale",), 0.0625),
        ),
        {
            **_NEIGHBOURS,
            "normalization": "BiaslessLayerNorm",
            "norm_placement": "shared",
            "use_parallel_residual": True,
            "add_mlp_bias": False,
        },
        {"use_qk_norm": AllowedValues((False, None), "a norm has one weight for all heads"), **rules},
        obstacles=partial(divided_heads_obstacles, name),
        **others,
    )


_TANH = "gelu_pytorch_tanh"


def _gemma_type(
    class_name: str,
    fields: Mapping[str, FieldMapping],
    fixed: Mapping[str, object],
    rules: Mapping[str, AllowedValues],
    activation: tuple[str, str, Mapping[str, str]] = ("hidden_activation", _TANH, {_TANH: "geglu_tanh"}),
    **others: Any,
) -> ModelType:
    """Return a type whose norms multiply by 1 + weight, whose embeddings are scaled, with GeGLU."""
    one_way = {"use_bidirectional_attention": AllowedValues((False, None), "every position sees only earlier ones")}
    return rotary_type(
        class_name,
        fields,
        {"apply_layernorm_1p": True, "add_mlp_bias": False, **fixed},
        {**one_way, **rules},
        activation=activation,
        computed={"embedding_scale": lambda value_of: value_of("hidden_size") ** 0.5},
        **others,
    )


_LATER_GEMMA: Mapping[str, Any] = {
    "tie_embeddings": True,
    "add_bias_linear": False,
    "softmax_scale": FieldMapping(("query_pre_attn_scalar",), 256, inverse_root, pre_attention_scalar),
}
ROTARY_TYPES: Mapping[str, ModelType] = {
    "llama": rotary_type(
        "Llama",
        rotary_fields((32, 4096, 11008, 32, None, None, 2048, 32000), add_bias_linear=False, add_mlp_bias=MLP_BIAS),
        {"qk_layernorm": False},
        WHOLE_PRODUCTS,
        obstacles=llama_obstacles,
    ),
    "mistral": rotary_type(
        "Mistral",
        rotary_fields((32, 4096, 14336, 32, 8, None, 131072, 32000)),
        {**NO_BIAS, "qk_layernorm": False},
        windows=Windows(4096),
    ),
    "ministral3": rotary_type(
        "Ministral3",
        rotary_fields((34, 4096, 14336, 32, 8, 128, 262144, 131072), norm_epsilon=1e-5),
        {**NO_BIAS, "qk_layernorm": False},
        windows=Windows(None),
        derived=(DESCRIBED,),
        has_beta=True,
    ),
    "qwen2": rotary_type(
        "Qwen2",
        rotary_fields((32, 4096, 22016, 32, 32, None, 32768, 151936)),
        {**NO_BIAS, "add_qkv_bias": True, "qk_layernorm": False},
        {"use_mrope": AllowedValues((False, None), "a position is one number")},
        _SWITCHED,
    ),
    "qwen3": rotary_type(
        "Qwen3",
        rotary_fields((32, 4096, 22016, 32, 32, 128, 32768, 151936), add_bias_linear=False),
        {"add_mlp_bias": False, "qk_layernorm": True},
        windows=_SWITCHED,
    ),
    "smollm3": rotary_type(
        "SmolLM3",
        rotary_fields(
            (36, 2048, 11008, 16, 4, None, 32768, 128256),
            rotary_base=2000000.0,
            tie_embeddings=True,
            add_bias_linear=False,
            add_mlp_bias=MLP_BIAS,
        ),
        {"qk_layernorm": False},
        {"pretraining_tp": AllowedValues((1, 2, None), "its products are not computed in slices")},
        Windows(None, has_rotary_positions, has_switch=True),
        has_no_rope_layers=True,
    ),
    "olmo": rotary_type(
        "Olmo",
        rotary_fields((32, 4096, 11008, 32, None, None, 2048, 50304), ("norm_epsilon",), clip_qkv=None, **_OLMO),
        {"normalization": "PlainLayerNorm", "norm_epsilon": 1e-5, "add_mlp_bias": False, "qk_layernorm": False},
        WHOLE_PRODUCTS,
        has_only_type=True,
    ),
    "olmo2": rotary_type(
        "Olmo2",
        rotary_fields((32, 4096, 11008, 32, None, None, 2048, 50304), **_OLMO),
        _OLMO2,
        has_only_type=True,
    ),
    "olmo3": rotary_type(
        "Olmo3",
        rotary_fields((32, 4096, 11008, 32, None, None, 2048, 50304), **_OLMO, rotary_base=500000.0),
        _OLMO2,
        windows=Windows(4096, every(4)),
        has_local_rope=True,
    ),
    "phi3": rotary_type(
        "Phi3",
        rotary_fields(
            (32, 3072, 8192, 32, None, None, 4096, 32064),
            norm_epsilon=1e-5,
            rotary_percent=1.0,
            hidden_dropout=FieldMapping(("resid_pdrop", "embd_pdrop"), 0.0),
        ),
        {**NO_BIAS, "qk_layernorm": False},
        {"attention_bias": AllowedValues((False, None), "attention has no biases")},
        Windows(None),
        obstacles=llama_obstacles,
        scalings=(LONGROPE,),
        original_length=4096,
    ),
    "granite": rotary_type(
        "Granite",
        rotary_fields(
            (32, 4096, 11008, 32, None, None, 2048, 32000),
            add_bias_linear=False,
            add_mlp_bias=MLP_BIAS,
            embedding_scale=FieldMapping(("embedding_multiplier",), 1.0),
            softmax_scale=FieldMapping(
                ("attention_multiplier",), 1.0, write=lambda arch: arch.softmax_scale or arch.kv_channels**-0.5
            ),
            logit_scale=FieldMapping(("logits_scaling",), 1.0, inverse, lambda arch: inverse(arch.logit_scale)),
            residual_scale=FieldMapping(("residual_multiplier",), 1.0),
        ),
        {"qk_layernorm": False},
    ),
    "starcoder2": rotary_type(
        "Starcoder2",
        rotary_fields(
            (30, 3072, 12288, 24, 2, None, 4096, 49152),
            init_method_std=0.018042,
            tie_embeddings=True,
            norm_epsilon=FieldMapping(("norm_epsilon",), 1e-5),
            add_bias_linear=FieldMapping(("use_bias",), True),
            hidden_dropout=FieldMapping(("residual_dropout", "embedding_dropout"), 0.0),
        ),
        LAYER_NORM,
        {
            "mlp_type": AllowedValues(("default", None), "the MLP has no gate"),
            "norm_type": AllowedValues(("layer_norm", None), "norms subtract the mean"),
            "layer_norm_epsilon": AllowedValues((1e-5, None), "the field that counts is norm_epsilon"),
            "scale_attn_weights": AllowedValues((True, None), "scores are divided by the root of a head's size"),
            "attention_softmax_in_fp32": AllowedValues((True, None), "softmax is computed in fp32"),
            "scale_attention_softmax_in_fp32": AllowedValues((True, None), "softmax is computed in fp32"),
        },
        Windows(None),
        activation=("hidden_act", "gelu_pytorch_tanh", _PLAIN),
        aliases={"activation_function": "hidden_act"},
    ),
    "nemotron": rotary_type(
        "Nemotron",
        rotary_fields(
            (32, 6144, 24576, 48, None, None, 4096, 256000),
            init_method_std=0.0134,
            norm_epsilon=FieldMapping(("norm_eps",), 1e-5),
            rotary_percent=0.5,
            add_bias_linear=False,
            add_mlp_bias=MLP_BIAS,
        ),
        {"normalization": "LayerNorm", "apply_layernorm_1p": True, "qk_layernorm": False},
        activation=("hidden_act", "relu2", {"relu2": "squared_relu", **_PLAIN}),
    ),
    "gpt_neox": rotary_type(
        "GPTNeoX",
        rotary_fields(
            (44, 6144, 24576, 64, None, None, 2048, 50432),
            without=("num_query_groups", "kv_channels"),
            norm_epsilon=FieldMapping(("layer_norm_eps",), 1e-5),
            rotary_percent=0.25,
            hidden_dropout=0.0,
            use_parallel_residual=True,
            add_bias_linear=True,
        ),
        {"normalization": "LayerNorm", "add_mlp_bias": True, "qk_layernorm": False},
        {
            "classifier_dropout": AllowedValues((None, 0.0, 0.1), "the model has no classifier"),
            "attention_probs_dropout_prob": AllowedValues((0.0, None), "the field that counts is attention_dropout"),
            "hidden_dropout_prob": AllowedValues((0.0, None), "the field that counts is hidden_dropout"),
        },
        obstacles=lambda arch: chain(llama_obstacles(arch), equal_heads_obstacles("gpt_neox", arch)),
        activation=("hidden_act", "gelu", {"gelu": "gelu", **_PLAIN}),
        body="gpt_neox.",
        aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    ),
    "glm4": rotary_type(
        "Glm4",
        rotary_fields(
            (40, 4096, 13696, 32, 2, 128, 131072, 151552),
            norm_epsilon=1.5625e-07,
            rotary_percent=0.5,
            add_qkv_bias=FieldMapping(("attention_bias",), True, write=lambda arch: arch.has_qkv_bias),
        ),
        {**_NEIGHBOURS, "add_bias_linear": False, "add_mlp_bias": False, "norm_placement": "sandwich"},
    ),
    "ernie4_5": rotary_type(
        "Ernie4_5",
        rotary_fields(
            (18, 1024, 3072, 16, 2, 128, 131072, 103424),
            norm_epsilon=1e-5,
            rotary_base=500000.0,
            tie_embeddings=True,
            add_bias_linear=FieldMapping(("use_bias",), False),
        ),
        _NEIGHBOURS,
    ),
    "hunyuan_v1_dense": rotary_type(
        "HunYuanDenseV1",
        rotary_fields((32, 4096, 11008, 32, None, None, 2048, 290943), norm_epsilon=1e-5, add_bias_linear=False),
        HUNYUAN,
        {**HUNYUAN_RULES, **WHOLE_PRODUCTS},
        derived=(HUNYUAN_HEADS, HUNYUAN_IDS),
        has_alpha=True,
    ),
    "apertus": rotary_type(
        "Apertus",
        rotary_fields(
            (32, 4096, 14336, 32, None, None, 65536, 131072),
            without=("kv_channels",),
            norm_epsilon=1e-5,
            rotary_base=12000000.0,
            add_bias_linear=False,
        ),
        {"add_mlp_bias": False, "qk_layernorm": True},
        {
            "hidden_dropout": AllowedValues((0.0, 0, None), "no outputs are dropped"),
            "mlp_bias": AllowedValues((False, None), "the MLP has no biases"),
            "post_norm": AllowedValues((False, None), "norms are on inputs"),
            "qk_norm": AllowedValues((True, None), "queries and keys are normalized"),
        },
        activation=("hidden_act", "xielu", {"xielu": "xielu"}),
        obstacles=partial(divided_heads_obstacles, "apertus"),
        derived=(DIVIDED, DESCRIBED),
    ),
    "cohere": _cohere_type("Cohere", "cohere", 500000.0, WHOLE_PRODUCTS, derived=(DIVIDED,)),
    "cohere2": _cohere_type(
        "Cohere2",
        "cohere2",
        10000.0,
        {
            "layer_switch": AllowedValues((4, None), "layer_types, or sliding_window_pattern, tell windows"),
            "order_of_interleaved_layers": AllowedValues(("local_attn_first", None), "layers with windows come first"),
            "position_embedding_type": AllowedValues(("rope_gptj", None), "rotary positions turn neighbours"),
            "rotary_pct": AllowedValues((1.0, 1, None), "whole heads are rotated"),
            "use_embedding_sharing": AllowedValues((True, None), "the field that counts is tie_word_embeddings"),
            "use_gated_activation": AllowedValues((True, None), "the MLP has a gate"),
            "use_parallel_block": AllowedValues((True, None), "attention and MLP read the same input"),
            "use_parallel_embedding": AllowedValues((False, None), "the embedding is one matrix"),
        },
        windows=Windows(4096, every(4, "sliding_window_pattern"), interval_name="sliding_window_pattern"),
        derived=(DIVIDED, _UNROTATED),
    ),
    "gemma": _gemma_type(
        "Gemma",
        rotary_fields((28, 3072, 24576, 16, 16, 256, 8192, 256000), tie_embeddings=True, add_bias_linear=False),
        {"qk_layernorm": False},
        {"hidden_activation": AllowedValues((_TANH, None), "the activation is hidden_act's")},
        # The first releases say gelu and mean its approximation by tanh.
        ("hidden_act", _TANH, {_TANH: "geglu_tanh", "gelu": "geglu_tanh"}),
    ),
    "gemma2": _gemma_type(
        "Gemma2",
        rotary_fields(
            **_LATER_GEMMA,
            sizes=(26, 2304, 9216, 8, 4, 256, 8192, 256000),
            attention_softcap=FieldMapping(("attn_logit_softcapping",), 50.0),
            logit_softcap=FieldMapping(("final_logit_softcapping",), 30.0),
        ),
        {"norm_placement": "sandwich", "qk_layernorm": False},
        {"hidden_act": AllowedValues((_TANH, None), "the activation is hidden_activation's")},
        windows=Windows(4096, every(2)),
        aliases={"sliding_window_size": "sliding_window"},
    ),
    "gemma3_text": _gemma_type(
        "Gemma3",
        rotary_fields(
            **_LATER_GEMMA,
            sizes=(26, 2304, 9216, 8, 4, 256, 131072, 262208),
            rotary_base=1000000.0,
            logit_softcap=FieldMapping(("final_logit_softcapping",), None),
        ),
        {"norm_placement": "sandwich", "qk_layernorm": True, "qk_layernorm_scope": "head"},
        {"attn_logit_softcapping": AllowedValues((None,), "this model type does not cap scores")},
        windows=Windows(4096, every(6, "sliding_window_pattern"), interval_name="sliding_window_pattern"),
        has_local_rope=True,
        local_base=10000.0,
    ),
}
