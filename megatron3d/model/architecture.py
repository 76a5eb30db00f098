"""The network's numbers with everything that a configuration leaves open; computed where they are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from megatron3d.config.schema import ModelConfig

GATED = frozenset({"swiglu", "geglu"})

T = TypeVar("T")


@dataclass(frozen=True)
class Family:
    """What a model family chooses where the configuration leaves it open."""

    position_embedding_type: str
    normalization: str
    activation: str
    add_bias_linear: bool
    tie_embeddings: bool


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family("learned_absolute", "LayerNorm", "gelu_tanh", add_bias_linear=True, tie_embeddings=True),
    "llama": Family("rope", "RMSNorm", "swiglu", add_bias_linear=False, tie_embeddings=False),
}


@dataclass(frozen=True)
class Architecture:
    """The model with every None resolved."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    max_position_embeddings: int
    vocab_size: int
    padded_vocab_size: int
    position_embedding_type: str
    rotary_base: float
    normalization: str
    norm_epsilon: float
    activation: str
    add_bias_linear: bool
    tie_embeddings: bool
    qk_layernorm: bool
    hidden_dropout: float
    attention_dropout: float
    init_method_std: float


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def default_ffn_hidden_size(hidden_size: int, activation: str) -> int:
    """4 hidden, or 8/3 hidden rounded up to a multiple of 256 where a gate takes a third of the parameters."""
    return -(-8 * hidden_size // 3 // 256) * 256 if activation in GATED else 4 * hidden_size


def architecture(model: ModelConfig, vocab_size: int, vocab_multiple: int = 1) -> Architecture:
    """The model's numbers for a tokenizer of `vocab_size`; padding is also a multiple of `vocab_multiple` ranks."""
    family = FAMILIES[model.family]
    activation = _given(model.activation, family.activation)
    multiple = math.lcm(model.make_vocab_size_divisible_by, vocab_multiple)
    return Architecture(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=_given(model.ffn_hidden_size, default_ffn_hidden_size(model.hidden_size, activation)),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=_given(model.num_query_groups, model.num_attention_heads),
        kv_channels=_given(model.kv_channels, model.hidden_size // model.num_attention_heads),
        seq_length=model.seq_length,
        max_position_embeddings=_given(model.max_position_embeddings, model.seq_length),
        vocab_size=vocab_size,
        padded_vocab_size=-(-vocab_size // multiple) * multiple,
        position_embedding_type=_given(model.position_embedding_type, family.position_embedding_type),
        rotary_base=model.rotary_base,
        normalization=_given(model.normalization, family.normalization),
        norm_epsilon=model.norm_epsilon,
        activation=activation,
        add_bias_linear=_given(model.add_bias_linear, family.add_bias_linear),
        tie_embeddings=_given(model.tie_embeddings, family.tie_embeddings),
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
    )
