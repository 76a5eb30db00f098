"""The kind of each layer, by its index in the whole model, so that it does not depend on the division into stages.

A kind repeats along a short pattern over depth; this is the one place that reads the keys which choose it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron3d.model.architecture import Architecture
from megatron3d.ops.rotary_spec import Rotary
from megatron3d.ops.router_spec import GLOBAL, Balance

# State of each router between steps by its name in checkpoints: the bias of its choice, the load of the step before.
EXPERT_BIAS, LOAD = "expert_bias", "load"
# Columns of a router's counts besides those of the experts: entropy, dropped choices, least and largest bias.
COUNTS_BESIDES = 4


@dataclass(frozen=True)
class AttentionKind:
    """Attention of one layer.

    Attributes:
        rotary: None: its queries and keys are not rotated.
        window: keys that a query sees, itself included; None: all before it.
    """

    rotary: Rotary | None
    window: int | None = None


def attention_kind(arch: Architecture, layer: int) -> AttentionKind:
    """Return the attention of a layer, counted from 0 in the whole model."""
    pattern = arch.no_rope_freq
    skips = bool(pattern) and bool(pattern[layer % len(pattern)])
    has_rotary = arch.position_embedding_type == "rope" and not skips
    size = arch.qk_pos_emb_head_dim if arch.is_latent else int(arch.kv_channels * arch.rotary_percent)
    windows = arch.window_pattern or (1,)
    window = arch.window if windows[layer % len(windows)] else None
    rotary = Rotary(arch.rotary_base, size, arch.rotary_scaling, arch.rotary_interleaved)
    if window is not None and arch.rope_local_base_freq is not None:
        rotary = Rotary(arch.rope_local_base_freq, size, interleaved=arch.rotary_interleaved)
    return AttentionKind(rotary if has_rotary else None, window)


def has_experts(arch: Architecture, layer: int) -> bool:
    """Return whether a layer, counted from 0 in the whole model, has a mixture of experts in place of its MLP."""
    if arch.experts is None:
        return False
    pattern = arch.experts.layers
    return not pattern or bool(pattern[layer % len(pattern)])


def expert_layers(arch: Architecture) -> tuple[int, ...]:
    """Return the layers that have a mixture of experts."""
    return tuple(layer for layer in range(arch.num_layers) if has_experts(arch, layer))


def router_names(arch: Architecture) -> list[str]:
    """Return the path of every router of the model, in the order of the forward pass."""
    layers = [f"layers.{layer}" for layer in expert_layers(arch)]
    if arch.num_layers and has_experts(arch, arch.num_layers - 1):
        layers += [f"mtp.{depth}.layer" for depth in range(arch.mtp_num_layers)]
    return [f"{layer}.mlp.router" for layer in layers]


def counts_shape(arch: Architecture) -> tuple[int, int]:
    """Return the shape of what all routers of a model count in a step, in fp64."""
    return len(router_names(arch)), (arch.experts.num_experts + COUNTS_BESIDES if arch.experts else 0)


def counts_each_step(arch: Architecture) -> bool:
    """Return whether routers count in every step, since the next one needs it, and not only where they are watched."""
    has_bias = arch.experts is not None and arch.experts.has_expert_bias
    return has_bias or (arch.balance or Balance()).loss == GLOBAL


def pattern_length(arch: Architecture) -> int:
    """Return the number of layers after which the kinds repeat."""
    experts = len(arch.experts.layers) if arch.experts else 0
    return math.lcm(len(arch.no_rope_freq) or 1, len(arch.window_pattern) or 1, experts or 1)


def layer_counts(arch: Architecture, layers: Iterable[int]) -> Mapping[int, int]:
    """Return how many of these layers are of each place in the pattern; a place is also the first layer there."""
    length = pattern_length(arch)
    return Counter(layer % length for layer in layers)


def attention_kinds(arch: Architecture) -> tuple[AttentionKind, ...]:
    """Return the distinct attention kinds of all layers, in the order in which they first occur."""
    return tuple(dict.fromkeys(attention_kind(arch, place) for place in layer_counts(arch, range(arch.num_layers))))


def rotaries(arch: Architecture) -> tuple[Rotary, ...]:
    """Return the distinct rotary embeddings of all layers, in the order in which they first occur."""
    return tuple(dict.fromkeys(kind.rotary for kind in attention_kinds(arch) if kind.rotary is not None))


def mean_keys(arch: Architecture) -> float:
    """Return the mean over all layers of the most keys that a query sees: the window, or the whole sequence."""
    return sum(count * keys for keys, count in _keys(arch)) / arch.num_layers


def keys_seen(arch: Architecture, layer: int) -> int:
    """Return the most keys that a query of a layer sees: the window, or the whole sequence."""
    return min(attention_kind(arch, layer).window or arch.seq_length, arch.seq_length)


def widest_window(arch: Architecture) -> int:
    """Return the most keys that a query of any layer sees."""
    return max(keys for keys, _ in _keys(arch))


def has_window(arch: Architecture) -> bool:
    """Return whether a layer has a window that is shorter than the sequence."""
    return any(keys < arch.seq_length for keys, _ in _keys(arch))


def _keys(arch: Architecture) -> Iterator[tuple[int, int]]:
    """Yield the most keys that a query sees, and how many layers have as many."""
    for place, count in layer_counts(arch, range(arch.num_layers)).items():
        yield keys_seen(arch, place), count
