"""How each model type of Hugging Face spells what a model section says: tables, from which both directions follow.

    model.num_layers = 12        gpt2: n_layer = 12        llama: num_hidden_layers = 12

Field names and defaults are those of the `GPT2Config` and `LlamaConfig` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from megatron3d.model.architecture import Architecture


@dataclass(frozen=True)
class FieldMapping:
    """Fields of config.json that must have one value, which is one of ours; `default` holds where a field is absent."""

    names: tuple[str, ...]
    default: JsonValue


@dataclass(frozen=True)
class AllowedValues:
    """Values of a field that change nothing in our model, and what holds for all others."""

    allowed: tuple[JsonValue, ...]
    why: str


@dataclass(frozen=True)
class ModelType:
    """One model type.

    Attributes:
        class_name: what `architectures` names.
        keys: for each key of our model section, its fields.
        activation: the field, its default, and ours for each of its values.
        traits: what our architecture must be, beside what the keys say.
        demands: what else it must fulfil to be written.
        rules: fields that our model has no choice about.
        has_rope: whether rotary positions are described.
        body: prefix of the tensors' names, which files of the bare body leave out.
    """

    class_name: str
    keys: Mapping[str, FieldMapping]
    activation: tuple[str, str, Mapping[str, str]]
    traits: Mapping[str, object]
    demands: Callable[[Architecture], Iterator[str]]
    rules: Mapping[str, AllowedValues]
    has_rope: bool
    body: str


def _gpt2_demands(arch: Architecture) -> Iterator[str]:
    if arch.num_query_groups != arch.num_attention_heads:
        yield f"num_query_groups={arch.num_query_groups}: gpt2 has one per head, {arch.num_attention_heads}"
    if arch.kv_channels * arch.num_attention_heads != arch.hidden_size:
        yield f"kv_channels={arch.kv_channels}: gpt2's heads have hidden_size / num_attention_heads channels"


def _llama_demands(arch: Architecture) -> Iterator[str]:
    if arch.num_attention_heads % arch.num_query_groups:
        yield f"num_query_groups={arch.num_query_groups}: in llama it divides num_attention_heads"
    if arch.hidden_size % arch.num_attention_heads:
        yield f"num_attention_heads={arch.num_attention_heads}: in llama it divides hidden_size={arch.hidden_size}"
    if arch.kv_channels % 2:
        yield f"kv_channels={arch.kv_channels}: llama's rotary positions turn pairs of channels"


_COMMON = {
    "is_encoder_decoder": AllowedValues((False, None), "the model has no encoder"),
    "add_cross_attention": AllowedValues((False, None), "the model has no cross-attention"),
    "pruned_heads": AllowedValues(({}, None), "no head can be left out"),
    "quantization_config": AllowedValues(
        (None,), "weights are floating-point numbers; convert the model before quantization"
    ),
    "sliding_window": AllowedValues((None,), "every position attends to all earlier ones"),
    "use_sliding_window": AllowedValues((False, None), "every position attends to all earlier ones"),
}

MODEL_TYPES: Mapping[str, ModelType] = {
    "gpt2": ModelType(
        class_name="GPT2LMHeadModel",
        keys={
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
        traits={
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "qk_layernorm": False,
        },
        demands=_gpt2_demands,
        rules={
            **_COMMON,
            "scale_attn_weights": AllowedValues((True,), "scores are divided by the root of a head's size"),
            "scale_attn_by_inverse_layer_idx": AllowedValues((False,), "all layers scale their scores alike"),
            "reorder_and_upcast_attn": AllowedValues((False,), "attention is computed in one way"),
        },
        has_rope=False,
        body="transformer.",
    ),
    "llama": ModelType(
        class_name="LlamaForCausalLM",
        keys={
            "num_layers": FieldMapping(("num_hidden_layers",), 32),
            "hidden_size": FieldMapping(("hidden_size",), 4096),
            "ffn_hidden_size": FieldMapping(("intermediate_size",), 11008),
            "num_attention_heads": FieldMapping(("num_attention_heads",), 32),
            "num_query_groups": FieldMapping(("num_key_value_heads",), None),
            "kv_channels": FieldMapping(("head_dim",), None),
            "max_position_embeddings": FieldMapping(("max_position_embeddings",), 2048),
            "vocab_size": FieldMapping(("vocab_size",), 32000),
            "norm_epsilon": FieldMapping(("rms_norm_eps",), 1e-6),
            "rotary_base": FieldMapping(("rope_theta",), 10000.0),
            "tie_embeddings": FieldMapping(("tie_word_embeddings",), False),
            "add_bias_linear": FieldMapping(("attention_bias", "mlp_bias"), False),
            "attention_dropout": FieldMapping(("attention_dropout",), 0.0),
            "init_method_std": FieldMapping(("initializer_range",), 0.02),
        },
        activation=("hidden_act", "silu", {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}),
        traits={"position_embedding_type": "rope", "normalization": "RMSNorm", "qk_layernorm": False},
        demands=_llama_demands,
        rules={
            **_COMMON,
            "pretraining_tp": AllowedValues((1, None), "its products are not computed in slices"),
            "partial_rotary_factor": AllowedValues((1, 1.0, None), "all channels of a head are rotated"),
        },
        has_rope=True,
        body="model.",
    ),
}

# Fields that say nothing about what the network computes.
_METADATA = """
_name_or_path _commit_hash _attn_implementation_autoset architectures model_type transformers_version
torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id
task_specific_params n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels
summary_first_dropout gradient_checkpointing output_past output_attentions output_hidden_states return_dict
id2label label2id num_labels problem_type finetuning_task chunk_size_feed_forward rope_theta rope_scaling
rope_parameters
"""
METADATA = frozenset(_METADATA.split())
