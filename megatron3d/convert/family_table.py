"""The fields of config.json by model type of Hugging Face: tables from which both directions of conversion follow.

    model.num_layers = 12        gpt2: n_layer = 12        llama: num_hidden_layers = 12

Field names and defaults are those of the configuration classes of Hugging Face transformers.
`python -m megatron3d.convert.family_table` prints the table of docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from megatron3d.convert.expert_table import EXPERT_TYPES
from megatron3d.convert.fields import AllowedValues, FieldMapping, ModelType, WholeModel, show
from megatron3d.convert.llama_table import COMMON, NO_WINDOWS, ROTARY_TYPES, equal_heads_obstacles, rotary_fields

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
        obstacles=partial(equal_heads_obstacles, "gpt2"),
        rules={
            **COMMON,
            **NO_WINDOWS,
            "scale_attn_weights": AllowedValues((True,), "scores are divided by the root of a head's size"),
            "scale_attn_by_inverse_layer_idx": AllowedValues((False,), "all layers scale their scores alike"),
            "reorder_and_upcast_attn": AllowedValues((False,), "attention is computed in one way"),
        },
        has_rope=False,
        body="transformer.",
        as_zeros={"add_bias_linear": False},
    ),
    **ROTARY_TYPES,
    **EXPERT_TYPES,
}


# Model types whose layers and fields are those of another one.
SAME_TYPES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
_IMAGES = (
    *("vision_tower.", "vision_model.", "multi_modal_projector."),
    *("model.vision_tower.", "model.multi_modal_projector."),
)
_TEXT = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
WHOLE_MODELS: Mapping[str, WholeModel] = {
    "gemma3": WholeModel("Gemma3ForConditionalGeneration", ("gemma3_text",), _TEXT, _IMAGES),
    "llama4": WholeModel("Llama4ForConditionalGeneration", ("llama4_text",), _TEXT, _IMAGES),
    "mistral3": WholeModel("Mistral3ForConditionalGeneration", ("mistral", "ministral3"), _TEXT, _IMAGES),
}


# Keys that every model type with rotary positions, or every model, has a field for.
_EVERYWHERE = frozenset(rotary_fields((0, 0, 0, 0, 0, 0, 0, 0)))


def family_table() -> list[str]:
    """Return the rows of the table: model type, class, keys with one value, and keys that config.json chooses."""
    rows = ["| model type | class of transformers | `family`, and keys with one value | chosen in config.json |"]
    rows.append("|---|---|---|---|")
    for name, hub_type in MODEL_TYPES.items():
        free = ", ".join(f"`{key}`" for key in _free(hub_type))
        rows.append(f"| {name} | {hub_type.class_name} | {', '.join(_fixed(hub_type))} | {free} |")
    return rows


def _fixed(hub_type: ModelType) -> Iterator[str]:
    yield f"`{hub_type.family}`"
    plain = {"position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False}
    plain |= {"add_qkv_bias": False, "add_mlp_bias": False, "qk_layernorm": False}
    if hub_type.has_rope:
        for key, value in hub_type.fixed.items():
            if plain.get(key) != value:
                yield f"`{key}: {value if isinstance(value, str) else show(value)}`"
    for key in hub_type.computed:
        yield f"`{key}`: root of `hidden_size`"


def _free(hub_type: ModelType) -> Iterator[str]:
    yield from sorted({"activation", *hub_type.fields} - _EVERYWHERE)
    if hub_type.windows:
        yield "window_size"
        yield from ("window_attn_skip_freq",) if hub_type.windows.default_full else ()
    if hub_type.has_no_rope_layers:
        yield "no_rope_freq"
    if hub_type.has_local_rope:
        yield "rope_local_base_freq"
    if hub_type.has_rope:
        yield "rotary_scaling"
    if hub_type.has_beta:
        yield from ("attention_temperature_beta", "attention_temperature_length")
    for derived in hub_type.derived:
        yield from derived.model_keys


if __name__ == "__main__":
    print("\n".join(family_table()))
