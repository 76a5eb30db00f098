"""Architecture of a model section: every key that is null gets the default of the model family."""

from __future__ import annotations

import math
from typing import TypeVar

from megatron3d.config.schema import ModelConfig
from megatron3d.model.architecture import FAMILIES, Architecture, default_ffn_hidden_size

T = TypeVar("T")


def resolve_architecture(model: ModelConfig, vocab_size: int, vocab_multiple: int = 1) -> Architecture:
    """Return the architecture of a model with `vocab_size` tokens, every default resolved.

    The padded vocabulary is a multiple of both `vocab_multiple` and `make_vocab_size_divisible_by`.
    """
    family = FAMILIES[model.family]
    activation = _or_default(model.activation, family.activation)
    multiple = math.lcm(model.make_vocab_size_divisible_by, vocab_multiple)
    return Architecture(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=_or_default(model.ffn_hidden_size, default_ffn_hidden_size(model.hidden_size, activation)),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=_or_default(model.num_query_groups, model.num_attention_heads),
        kv_channels=_or_default(model.kv_channels, model.hidden_size // model.num_attention_heads),
        seq_length=model.seq_length,
        max_position_embeddings=_or_default(model.max_position_embeddings, model.seq_length),
        vocab_size=vocab_size,
        padded_vocab_size=-(-vocab_size // multiple) * multiple,
        position_embedding_type=_or_default(model.position_embedding_type, family.position_embedding_type),
        rotary_base=model.rotary_base,
        normalization=_or_default(model.normalization, family.normalization),
        norm_epsilon=model.norm_epsilon,
        activation=activation,
        add_bias_linear=_or_default(model.add_bias_linear, family.add_bias_linear),
        tie_embeddings=_or_default(model.tie_embeddings, family.tie_embeddings),
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
    )


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value
