"""The fields of config.json by model type of Hugging Face: tables from which both directions of conversion follow.

    model.num_layers = 12        gpt2: n_layer = 12        llama: num_hidden_layers = 12

Field names and defaults are those of the `GPT2Config`, `LlamaConfig`, `MistralConfig` and `Qwen3Config` of Hugging Face
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from megatron3d.model.architecture import Architecture

HubConfig = Mapping[str, JsonValue]


def show(value: object) -> str:
    """Return a value as JSON."""
    return json.dumps(value)


@dataclass(frozen=True)
class FieldMapping:
    """Fields of config.json that must all have the value of one key of ours; `default` is that of an absent field."""

    names: tuple[str, ...]
    default: JsonValue


@dataclass(frozen=True)
class AllowedValues:
    """Values of a field, or of each entry of a list, that describe our model, and why no other one is possible.

    Attributes:
        absent: value of an absent field, where that is not an allowed one.
    """

    allowed: tuple[JsonValue, ...]
    why: str
    absent: JsonValue = None

    def allows(self, value: JsonValue) -> bool:
        """Return whether the value describes our model."""
        return value in self.allowed or (isinstance(value, list) and all(entry in self.allowed for entry in value))


@dataclass(frozen=True)
class ModelType:
    """A model type of Hugging Face transformers that can be converted.

    Attributes:
        class_name: entry of `architectures`.
        family: family of our model.
        fields: fields of config.json for each key of our model section.
        activation: the field, its default, and our activation for each of its values.
        fixed: values that our architecture has in every model of this type.
        obstacles: yields further properties of an architecture that this type cannot represent.
        rules: fields for which our model allows only certain values.
        has_rope: whether config.json describes rotary positions.
        constants: further fields that are written.
        as_zeros: values that a model of this type represents exactly with tensors of zeros.
        body: prefix of tensor names, which files of a model without head omit.
    """

    class_name: str
    family: str
    fields: Mapping[str, FieldMapping]
    activation: tuple[str, str, Mapping[str, str]]
    fixed: Mapping[str, object]
    obstacles: Callable[[Architecture], Iterator[str]]
    rules: Mapping[str, AllowedValues]
    has_rope: bool
    body: str
    constants: Mapping[str, JsonValue] = field(default_factory=dict)
    as_zeros: Mapping[str, object] = field(default_factory=dict)


def _common_obstacles(arch: Architecture) -> Iterator[str]:
    if arch.experts is not None:
        yield f"num_moe_experts={arch.experts.num_experts}: models with experts are not converted"
    if arch.window is not None:
        yield f"window_size={show((arch.window - 1, 0))}: {_NO_WINDOW}"


def _gpt2_obstacles(arch: Architecture) -> Iterator[str]:
    yield from _common_obstacles(arch)
    if arch.num_query_groups != arch.num_attention_heads:
        yield f"num_query_groups={arch.num_query_groups}: gpt2 has one per head, {arch.num_attention_heads}"
    if arch.kv_channels * arch.num_attention_heads != arch.hidden_size:
        yield f"kv_channels={arch.kv_channels}: gpt2's heads have hidden_size / num_attention_heads channels"


def _rotary_obstacles(arch: Architecture) -> Iterator[str]:
    yield from _common_obstacles(arch)
    if arch.num_attention_heads % arch.num_query_groups:
        yield f"num_query_groups={arch.num_query_groups}: in llama it divides num_attention_heads"
    if arch.kv_channels % 2:
        yield f"kv_channels={arch.kv_channels}: llama's rotary positions turn pairs of channels"
    if arch.rotary_percent != 1:
        yield f"rotary_percent={arch.rotary_percent}: llama's rotary positions turn all channels of a head"
    if arch.no_rope_freq:
        yield f"no_rope_freq={show(arch.no_rope_freq)}: every layer of llama has rotary positions"


def _llama_obstacles(arch: Architecture) -> Iterator[str]:
    yield from _rotary_obstacles(arch)
    if arch.hidden_size % arch.num_attention_heads:
        yield f"num_attention_heads={arch.num_attention_heads}: in llama it divides hidden_size={arch.hidden_size}"


_NO_WINDOW = "every position attends to all earlier ones"
_COMMON = {
    "is_encoder_decoder": AllowedValues((False, None), "the model has no encoder"),
    "add_cross_attention": AllowedValues((False, None), "the model has no cross-attention"),
    "pruned_heads": AllowedValues(({}, None), "no head can be left out"),
    "quantization_config": AllowedValues(
        (None,), "weights are floating-point numbers; convert the model before quantization"
    ),
    "tie_encoder_decoder": AllowedValues((False, None), "the model has no encoder"),
    "sliding_window": AllowedValues((None,), _NO_WINDOW),
    "rope_interleaved": AllowedValues((False, None), "channels i and i + size / 2 of a head are rotated together"),
    "use_sliding_window": AllowedValues((False, None), _NO_WINDOW),
}
_ROTARY = {
    "partial_rotary_factor": AllowedValues((1, 1.0, None), "all channels of a head are rotated"),
    "layer_types": AllowedValues(("full_attention", None), _NO_WINDOW),
}
_ROPE_NORM = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
_NO_BIAS = AllowedValues((False, None), "this model type has no biases in its MLP, and ours all or none")
_GATED = ("hidden_act", "silu", {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"})


def _rotary_fields(inner: int, positions: int, **others: FieldMapping) -> dict[str, FieldMapping]:
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


MODEL_TYPES: Mapping[str, ModelType] = {
    "gpt2": ModelType(
        class_name="GPT2LMHeadModel",
        family="gpt2",
        fields={
            "num_layers": FieldMapping(("n_layer",), 12),
            "hidden_size": FieldMapping(("n_embd",), 768),
            "ffn_hidden_size": FieldMapping(("n_inner",), None),
            "num_attention_heads": FieldMapping(("n_head",), 12),
            "max_position_embeddings": FieldMapping(("n_positions",), 1024),
            "vocab_size": FieldMapping(("vocab_size",), 50257),
            "norm_epsilon": FieldMapping(("layer_norm_epsilon",), 1e-5),
            "tie_embeddings": FieldMapping(("tie_word_embeddings",), True),
            "hidden_dropout": FieldMapping(("resid_pdrop", "embd_pdrop"), 0.1),
            "attention_dropout": FieldMapping(("attn_pdrop",), 0.1),
            "init_method_std": FieldMapping(("initializer_range",), 0.02),
        },
        activation=(
            "activation_function",
            "gelu_new",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"},
        ),
        fixed={
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "qk_layernorm": False,
        },
        obstacles=_gpt2_obstacles,
        rules={
            **_COMMON,
            "scale_attn_weights": AllowedValues((True,), "scores are divided by the root of a head's size"),
            "scale_attn_by_inverse_layer_idx": AllowedValues((False,), "all layers scale their scores alike"),
            "reorder_and_upcast_attn": AllowedValues((False,), "attention is computed in one way"),
        },
        has_rope=False,
        body="transformer.",
        as_zeros={"add_bias_linear": False},
    ),
    "llama": ModelType(
        class_name="LlamaForCausalLM",
        family="llama",
        fields=_rotary_fields(11008, 2048, add_bias_linear=FieldMapping(("attention_bias", "mlp_bias"), False)),
        activation=_GATED,
        fixed={**_ROPE_NORM, "qk_layernorm": False},
        obstacles=_llama_obstacles,
        rules={
            **_COMMON,
            **_ROTARY,
            "pretraining_tp": AllowedValues((1, None), "its products are not computed in slices"),
        },
        has_rope=True,
        body="model.",
    ),
    "mistral": ModelType(
        class_name="MistralForCausalLM",
        family="llama",
        fields=_rotary_fields(14336, 131072, num_query_groups=FieldMapping(("num_key_value_heads",), 8)),
        activation=_GATED,
        fixed={**_ROPE_NORM, "add_bias_linear": False, "qk_layernorm": False},
        obstacles=_rotary_obstacles,
        rules={**_COMMON, **_ROTARY, "sliding_window": AllowedValues((None,), _NO_WINDOW, absent=4096)},
        has_rope=True,
        body="model.",
        constants={"sliding_window": None},
    ),
    "qwen3": ModelType(
        class_name="Qwen3ForCausalLM",
        family="llama",
        fields=_rotary_fields(
            22016,
            32768,
            num_query_groups=FieldMapping(("num_key_value_heads",), 32),
            kv_channels=FieldMapping(("head_dim",), 128),
            vocab_size=FieldMapping(("vocab_size",), 151936),
        ),
        activation=_GATED,
        fixed={**_ROPE_NORM, "add_bias_linear": False, "qk_layernorm": True},
        obstacles=_rotary_obstacles,
        rules={name: rule for name, rule in _COMMON.items() if name != "sliding_window"}
        | {**_ROTARY, "attention_bias": _NO_BIAS},
        has_rope=True,
        body="model.",
        constants={"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
    ),
}

# Switches that no model type has, and the value of each without effect.
SWITCHES: Mapping[str, JsonValue] = {
    "rope_local_base_freq": None,
    "add_qkv_bias": None,
    "add_mlp_bias": None,
    "apply_layernorm_1p": False,
    "norm_placement": "pre",
    "qk_layernorm_scope": "head",
    "attention_output_gate": False,
    "embedding_scale": 1.0,
    "softmax_scale": None,
    "use_parallel_residual": False,
    "attention_softcap": None,
    "softmax_type": "vanilla",
    "logit_scale": 1.0,
    "logit_softcap": None,
}

# Fields that do not affect what the network computes.
_METADATA = """
_name_or_path _commit_hash _attn_implementation_autoset architectures model_type transformers_version
torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id
task_specific_params n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels
summary_first_dropout gradient_checkpointing output_past output_attentions output_hidden_states return_dict
id2label label2id num_labels problem_type finetuning_task chunk_size_feed_forward rope_theta rope_scaling
rope_parameters _num_labels is_decoder is_llama_config n_special predict_special_tokens max_sequence_length
max_window_layers tokenizer_class prefix torchscript use_bfloat16 tf_legacy_loss attn_implementation
_attn_implementation _flash_attn_2_enabled unsloth_fixed unsloth_version transformers.js_config
"""
# Defaults of text generation, which transformers 4 also stores in config.json.
_GENERATION = """
max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores output_logits return_dict_in_generate
forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
begin_suppress_tokens decoder_start_token_id max_time renormalize_logits
"""
METADATA = frozenset((_METADATA + _GENERATION).split())
