"""How fields of a Hugging Face config.json correspond to keys of our model section, and fields without effect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from megatron3d.model.architecture import Architecture

HubConfig = Mapping[str, JsonValue]


def show(value: object) -> str:
    """Return a value as JSON."""
    return json.dumps(value)


@dataclass(frozen=True)
class FieldMapping:
    """Fields of config.json that must all have the value of one key of ours; `default` is that of an absent field.

    Attributes:
        read, write: our value of theirs, and the reverse, which sees the whole architecture; None: they are equal.
    """

    names: tuple[str, ...]
    default: JsonValue
    read: Callable[[JsonValue], JsonValue] | None = None
    write: Callable[[Architecture], JsonValue] | None = None


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


NO_ROPE_NAMES = ("no_rope_layers", "no_rope_layer_interval")


@dataclass(frozen=True)
class Windows:
    """Sliding windows of a model type.

    Attributes:
        default: window of a config.json without `sliding_window`.
        default_full: whether a layer, of a config.json without `layer_types`, sees the whole sequence; None: all
            layers have the window, and there is no such field.
        has_switch: whether `use_sliding_window` turns windows on; its default is off.
        interval_name: field that `default_full` reads; None: it reads none of its own.
    """

    default: int | None
    default_full: Callable[[HubConfig, int], bool] | None = None
    has_switch: bool = False
    interval_name: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields that describe windows."""
        types = ("layer_types",) if self.default_full else ()
        interval = (self.interval_name,) if self.interval_name else ()
        return ("sliding_window", *types, *interval, *(("use_sliding_window",) if self.has_switch else ()))


@dataclass(frozen=True)
class DerivedKeys:
    """Keys of ours that follow from several fields of config.json.

    Attributes:
        names: the fields.
        keys: names of the architecture's values that they choose.
        read: returns our keys, and problems.
        write: returns the fields of an architecture.
        obstacles: yields values of an architecture that the fields cannot represent.
        model_keys: the keys that the documentation names.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    read: Callable[[HubConfig], tuple[dict[str, JsonValue], list[str]]]
    write: Callable[[Architecture], dict[str, JsonValue]]
    obstacles: Callable[[Architecture], Iterator[str]] = lambda arch: iter(())
    model_keys: tuple[str, ...] = ()


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
        computed: values of our keys that follow from others, each a function of the value of a key.
        windows: sliding windows of this type; None: it has none.
        has_no_rope_layers: whether config.json lists the layers with rotary positions.
        has_local_rope: whether layers with a window have rotary positions of their own, which are not scaled.
        local_base: their base in a config.json without `rope_local_base_freq`; None: the base of the other layers, and
            there is no such field.
        has_mscale: whether `mscale_all_dim` of scaled rotary positions also chooses the factor of attention's scores.
        constants: further fields that are written.
        derived: keys that follow from several fields.
        as_zeros: values that a model of this type represents exactly with tensors of zeros.
        aliases: names of fields in older files.
        body: prefix of tensor names, which files of a model without head omit.
    """

    class_name: str
    family: str
    fields: Mapping[str, FieldMapping]
    activation: tuple[str, str, Mapping[str, str]]
    fixed: Mapping[str, object]
    obstacles: Callable[[Architecture], Iterator[str]]
    rules: Mapping[str, AllowedValues]
    has_rope: bool = True
    body: str = "model."
    aliases: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, Callable[[Callable[[str], Any]], object]] = field(default_factory=dict)
    windows: Windows | None = None
    has_no_rope_layers: bool = False
    has_local_rope: bool = False
    local_base: float | None = None
    has_mscale: bool = False
    constants: Mapping[str, JsonValue] = field(default_factory=dict)
    as_zeros: Mapping[str, object] = field(default_factory=dict)
    derived: tuple[DerivedKeys, ...] = ()

    @property
    def has_experts(self) -> bool:
        """Whether layers can have experts."""
        return any("experts" in derived.keys for derived in self.derived)

    @property
    def read_names(self) -> frozenset[str]:
        """Names of all fields that are read or checked."""
        names = {name for key in self.fields.values() for name in key.names} | {self.activation[0], *self.rules}
        names |= {"partial_rotary_factor"} if "rotary_percent" in self.fields else set()
        names |= set(self.windows.names) if self.windows else set()
        names |= {"rope_local_base_freq"} if self.local_base else set()
        names |= set(NO_ROPE_NAMES) if self.has_no_rope_layers else set()
        names |= {*self.aliases} | {name for each in self.derived for name in each.names}
        return frozenset(names)


def arch_value(arch: Architecture, name: str) -> Any:
    """Return the value of one of our keys; biases that are left out are those of all linears."""
    effective = {
        "add_qkv_bias": arch.has_qkv_bias,
        "add_mlp_bias": arch.has_mlp_bias,
        "multi_latent_attention": arch.is_latent,
    }
    return effective[name] if name in effective else getattr(arch, name)


# Switches that no model type has, and the value of each without effect.
SWITCHES: Mapping[str, JsonValue] = {
    "mtp_num_layers": 0,
    "rope_local_base_freq": None,
    "rotary_percent": 1.0,
    "add_qkv_bias": None,
    "add_mlp_bias": None,
    "apply_layernorm_1p": False,
    "norm_placement": "pre",
    "qk_layernorm_scope": "head",
    "attention_output_gate": False,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "softmax_scale": None,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "use_parallel_residual": False,
    "attention_softcap": None,
    "rotary_interleaved": False,
    "q_lora_rank": None,
    "kv_lora_rank": None,
    **dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 0),
    "softmax_type": "vanilla",
}

# Fields that do not affect what the network computes.
_METADATA = """
_name_or_path _commit_hash _attn_implementation_autoset architectures model_type transformers_version torch_dtype
dtype use_cache bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id task_specific_params n_ctx
summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout gradient_checkpointing
output_past output_attentions output_hidden_states return_dict id2label label2id num_labels problem_type
finetuning_task chunk_size_feed_forward rope_theta rope_scaling rope_parameters _num_labels is_decoder
is_llama_config n_special predict_special_tokens max_sequence_length max_window_layers cache_implementation
_sliding_window_pattern original_max_position_embeddings tokenizer_class prefix torchscript use_bfloat16
tf_legacy_loss attn_implementation _attn_implementation _flash_attn_2_enabled unsloth_fixed unsloth_version
transformers.js_config auto_map output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux ep_size
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
