"""Architecture of a model with every default resolved, and the defaults of each model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GATED = frozenset({"swiglu", "geglu"})


@dataclass(frozen=True)
class Family:
    """Defaults of a model family for keys that the configuration leaves open."""

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
    """Hyperparameters of the model with every None of the configuration resolved."""

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


def default_ffn_hidden_size(hidden_size: int, activation: str) -> int:
    """Return 4 hidden; for gated activations, which have three weights, 8/3 hidden rounded up to a multiple of 256."""
    return -(-8 * hidden_size // 3 // 256) * 256 if activation in GATED else 4 * hidden_size
