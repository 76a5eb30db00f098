"""Numbers that follow from a configuration; computed where they are needed, never stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron3d.config.schema import Config, ModelConfig, ParallelConfig
from megatron3d.mesh import Mesh
from megatron3d.modes import MODES, Mode, build_mode


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


_FAMILY = {
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": "gelu_tanh",
        "add_bias_linear": True,
        "tie_embeddings": True,
    },
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "tie_embeddings": False,
    },
}
GATED = frozenset({"swiglu", "geglu"})


def default_ffn_hidden_size(hidden_size: int, activation: str) -> int:
    """4 hidden, or 8/3 hidden rounded up to a multiple of 256 where a gate takes a third of the parameters."""
    return -(-8 * hidden_size // 3 // 256) * 256 if activation in GATED else 4 * hidden_size


def architecture(model: ModelConfig, vocab_size: int, vocab_multiple: int = 1) -> Architecture:
    """The model's numbers for a tokenizer of `vocab_size`; padding is also a multiple of `vocab_multiple` ranks."""
    chosen = {name: getattr(model, name) for name in _FAMILY[model.family]}
    family = {name: _FAMILY[model.family][name] if value is None else value for name, value in chosen.items()}
    values = {
        name: getattr(model, name) for name in Architecture.__annotations__ if name in type(model).model_fields
    } | family
    multiple = math.lcm(model.make_vocab_size_divisible_by, vocab_multiple)
    values |= {
        "ffn_hidden_size": model.ffn_hidden_size or default_ffn_hidden_size(model.hidden_size, family["activation"]),
        "num_query_groups": model.num_query_groups or model.num_attention_heads,
        "kv_channels": model.kv_channels or model.hidden_size // model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "vocab_size": vocab_size,
        "padded_vocab_size": -(-vocab_size // multiple) * multiple,
    }
    return Architecture(**values)


def tensor_mode(parallel: ParallelConfig) -> Mode:
    """The tensor-parallel mode with its axes' sizes."""
    form = "sequence_parallel" if parallel.sequence_parallel else parallel.tensor_parallel_form
    return build_mode(parallel.tensor_parallel_mode, form, tensor_shape(parallel))


def tensor_shape(parallel: ParallelConfig) -> tuple[int, ...]:
    """Sizes of the tensor axes."""
    if parallel.tensor_parallel_shape is not None:
        return parallel.tensor_parallel_shape
    return MODES[parallel.tensor_parallel_mode].default_shape(parallel.tensor_model_parallel_size or 1)


def tensor_size(parallel: ParallelConfig) -> int:
    """TP: the product of the tensor axes."""
    return math.prod(tensor_shape(parallel))


def make_mesh(parallel: ParallelConfig, world_size: int, rank: int = 0) -> Mesh:
    """The grid `pipeline x data x tensor axes`, data parallelism taking what is left."""
    pipeline = parallel.pipeline_model_parallel_size
    data = world_size // (pipeline * tensor_size(parallel))
    return Mesh((("pipeline", pipeline), ("data", data), *tensor_mode(parallel).axes), rank)


def num_microbatches(config: Config, mesh: Mesh) -> int:
    """global_batch_size = micro_batch_size x data-parallel size x number of microbatches."""
    return config.train.global_batch_size // (config.train.micro_batch_size * mesh.sizes["data"])
