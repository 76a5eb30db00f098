"""Rules of the keys of RoPE: which are used together, and what their values allow."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.config.model_defaults import ROTARY_KEYS
from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts, near_multiples, plain
from megatron3d.model.layer_kinds import attention_kinds
from megatron3d.ops.rotary_spec import YARN

SCALING_KEYS = ("rotary_scaling_factor", *dict.fromkeys(key for keys in ROTARY_KEYS.values() for key in keys))
# Values of the keys of RoPE that have no effect.
WITHOUT_EFFECT = {
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "rotary_scaling": None,
    "rope_local_base_freq": None,
}


def rotary_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key of RoPE that is unused, missing or contradictory."""
    model, arch = facts.config.model, facts.arch
    if arch.position_embedding_type != "rope":
        for key, value in WITHOUT_EFFECT.items():
            if getattr(model, key) != value:
                yield (
                    f"{facts.named(f'model.{key}')}: not used with position_embedding_type "
                    f"{arch.position_embedding_type}; use rope, or leave it out"
                )
    else:
        yield from _channel_problems(facts)
        yield from _local_base_problems(facts)
    yield from _pattern_problems(facts)
    yield from _scaling_problems(facts)


def _channel_problems(facts: Facts) -> Iterator[str]:
    percent, size = facts.config.model.rotary_percent, facts.arch.kv_channels
    channels = int(size * percent)
    if percent < 1 and (channels % 2 or not channels):
        values = [f"{count / size:g}" for count in near_multiples(2, channels) if count <= size]
        yield (
            f"{facts.named('model.rotary_percent')}: RoPE rotates pairs of channels, but {percent:g} of a head's "
            f"{size} are {channels}; use {one_of(values or ['1'])}"
        )


def _pattern_problems(facts: Facts) -> Iterator[str]:
    pattern, num_layers = facts.arch.no_rope_freq, facts.config.model.num_layers
    where = facts.named("model.no_rope_freq")
    if len(pattern) > num_layers:
        yield f"{where}: longer than model.num_layers={num_layers}; use {num_layers} or less"
    elif pattern and all(pattern):
        yield f"{where}: no layer has RoPE; use model.position_embedding_type=none, or a number from 2"
    elif pattern and not any(pattern):
        yield f"{where}: every layer has RoPE; leave it out"


def _local_base_problems(facts: Facts) -> Iterator[str]:
    """Yield a message if the base of layers with a window has no effect, or if it leaves none to the other base."""
    arch, where = facts.arch, facts.named("model.rope_local_base_freq")
    if arch.rope_local_base_freq is None:
        return
    rotated = [kind for kind in attention_kinds(arch) if kind.rotary is not None]
    if all(kind.window is None for kind in rotated):
        yield f"{where}: no layer with RoPE has a window; set model.window_size, or leave it out"
    elif all(kind.window is not None for kind in rotated):
        yield (
            f"{where}: every layer with RoPE has the window, so that rotary_base and rotary_scaling have no effect; "
            "set model.rotary_base instead, or model.window_attn_skip_freq"
        )


def _scaling_problems(facts: Facts) -> Iterator[str]:
    model = facts.config.model
    kind, keys = model.rotary_scaling, ROTARY_KEYS.get(model.rotary_scaling or "", {})
    used = {"rotary_scaling_factor", *keys} if kind else set()
    for key in SCALING_KEYS:
        if getattr(model, key) is not None and key not in used:
            able = [name for name, others in ROTARY_KEYS.items() if key in (*others, "rotary_scaling_factor")]
            where, scaling = facts.named(f"model.{key}"), plain(facts.config, "model.rotary_scaling")
            yield f"{where}: not used with {scaling}; use {one_of(able)}, or leave it out"
    needed = [key for key in ("rotary_scaling_factor", "original_max_position_embeddings") if key in used]
    for key in (key for key in needed if getattr(model, key) is None):
        example = {"rotary_scaling_factor": "8.0", "original_max_position_embeddings": "8192"}[key]
        yield f"{facts.named('model.rotary_scaling')}: needs model.{key}; set it, for example to {example}"
    yield from _order_problems(facts)
    if kind == YARN and model.rotary_base <= 1:
        yield f"{facts.named('model.rotary_base')}: yarn needs a base above 1; use 10000.0"


def _order_problems(facts: Facts) -> Iterator[str]:
    """Yield a message if the rotations below which a rate is scaled are not fewer than those above which it is kept."""
    scaling = facts.arch.rotary_scaling
    for key, few, many in (
        (
            ("rotary_low_freq_factor", scaling.low_freq_factor, scaling.high_freq_factor),
            ("rotary_beta_slow", scaling.beta_slow, scaling.beta_fast),
        )
        if scaling
        else ()
    ):
        # YaRN's range of pairs is never empty: where both bounds are equal, as in Kimi K2, it is one pair or two.
        if few is not None and many is not None and (few > many or (few == many and key != "rotary_beta_slow")):
            other = {"rotary_low_freq_factor": "rotary_high_freq_factor", "rotary_beta_slow": "rotary_beta_fast"}[key]
            yield f"{facts.named(f'model.{key}')}: {few:g} is not below {other} {many:g}; use {many / 4:g}"
