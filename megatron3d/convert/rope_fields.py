"""The description of rotary positions in config.json: `rope_parameters`, or `rope_theta` and `rope_scaling` before it.

rope_parameters = {"rope_type": "llama3", "factor": 8.0, ...}        model.rotary_scaling = llama3, ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from pydantic import JsonValue

from megatron3d.convert.hub_fields import HubConfig, ModelType, show
from megatron3d.convert.window_fields import FULL, SLIDING
from megatron3d.model.architecture import Architecture
from megatron3d.ops.rotary_spec import LINEAR, LLAMA3, YARN

LOCAL_BASE = "rope_local_base_freq"
_DESCRIPTIONS = ("rope_parameters", "rope_scaling")
_ANYWHERE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# Our key of each field of a scaling.
_LENGTH = {"factor": "rotary_scaling_factor", "original_max_position_embeddings": "original_max_position_embeddings"}
_KEYS: Mapping[str, Mapping[str, str]] = {
    LINEAR: {"factor": "rotary_scaling_factor"},
    LLAMA3: {
        **_LENGTH,
        "low_freq_factor": "rotary_low_freq_factor",
        "high_freq_factor": "rotary_high_freq_factor",
    },
    YARN: {
        **_LENGTH,
        "beta_slow": "rotary_beta_slow",
        "beta_fast": "rotary_beta_fast",
        "attention_factor": "rotary_attention_factor",
        "truncate": "rotary_truncate",
    },
}
# DeepSeek's description of the attention factor.
_MSCALES = frozenset({"mscale", "mscale_all_dim"})


def read_rope(settings: HubConfig, hub_type: ModelType) -> tuple[HubConfig, dict[str, JsonValue], list[str]]:
    """Return the settings with the rotary base in `rope_theta`, our keys of a scaling, and problems."""
    if not hub_type.has_rope:
        found = [name for name in ("rope_theta", *_DESCRIPTIONS) if settings.get(name) is not None]
        problems = [f"{name}={show(settings[name])}: gpt2 has no rotary positions; remove it" for name in found]
        return settings, {}, problems
    values, problems, local = list[dict[str, JsonValue]](), list[str](), None
    for name in _DESCRIPTIONS:
        rope = settings.get(name)
        if hub_type.has_local_rope and isinstance(rope, dict) and (SLIDING in rope or FULL in rope):
            local, rope = rope.get(SLIDING), rope.get(FULL)
        if rope is None:
            continue
        if problem := _problem(rope):
            problems.append(f"{name}={show(rope)}: {problem}")
        elif isinstance(rope, dict):
            settings = {
                **settings,
                **{key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope},
            }
            values.append(_scaling(rope, settings.get("max_position_embeddings")))
    if len(values) == 2 and values[0] != values[1]:
        both = " and ".join(f"{name}={show(settings[name])}" for name in _DESCRIPTIONS)
        problems.append(f"{both}: they describe different rotary positions; remove the wrong one")
    ours = values[0] if values else {}
    if hub_type.has_mscale and ours.get("rotary_scaling") == YARN and not problems:
        ours = ours | _score_scale(settings)
    if hub_type.has_local_rope:
        base, wrong = _local_base(settings, local, hub_type)
        ours, problems = ours | base, problems + wrong
    return settings, ours, problems


def _score_scale(settings: HubConfig) -> dict[str, JsonValue]:
    """Return the factor of attention's scores, which DeepSeek multiplies by the square of a scaling's factor."""
    ropes = [rope for name in _DESCRIPTIONS if isinstance(rope := settings.get(name), dict)]
    mscale, factor = ropes[0].get("mscale_all_dim"), ropes[0].get("factor")
    sizes = settings.get("qk_nope_head_dim", 128), settings.get("qk_rope_head_dim", 64)
    if not mscale or not all(isinstance(number, int | float) for number in (mscale, factor, *sizes)):
        return {}
    return {"softmax_scale": _scaled_scores(float(mscale), float(factor), sum(sizes))}  # type: ignore[arg-type]


def _scaled_scores(mscale: float, factor: float, key_size: int) -> float:
    return float(key_size**-0.5 * (0.1 * mscale * math.log(max(factor, 1.0)) + 1) ** 2)


def _mscale_of(arch: Architecture) -> dict[str, JsonValue]:
    """Return the field whose value gives an architecture's factor of scores, none where that is the default."""
    if arch.softmax_scale is None or arch.rotary_scaling is None:
        return {}
    factor, size = arch.rotary_scaling.factor, arch.key_size
    exact = (math.sqrt(arch.softmax_scale * size**0.5) - 1) / (0.1 * math.log(factor))
    short = round(exact, 9)
    return {"mscale_all_dim": short if _scaled_scores(short, factor, size) == arch.softmax_scale else exact}


def _local_base(settings: HubConfig, local: JsonValue, hub_type: ModelType) -> tuple[dict[str, JsonValue], list[str]]:
    """Return the rotary base of layers with a window, which is not scaled, and problems."""
    default = hub_type.fields["rotary_base"].default
    base = settings.get(LOCAL_BASE, hub_type.local_base or settings.get("rope_theta", default))
    if local is None:
        return {LOCAL_BASE: base}, []
    known = {"rope_type", "type", "rope_theta"}
    if not isinstance(local, dict) or _kind(local) != "default" or not known.issuperset(local):
        return {}, [f"rope_parameters of {SLIDING}={show(local)}: only rope_type default with a rope_theta works"]
    return {LOCAL_BASE: local.get("rope_theta", base)}, []


def write_rope(arch: Architecture, hub_type: ModelType) -> dict[str, JsonValue]:
    """Return the fields of an architecture's rotary positions: transformers 5 reads the first, before it the others."""
    scaling = _write_scaling(arch)
    if scaling is not None and hub_type.has_mscale:
        scaling |= _mscale_of(arch)
    plain: dict[str, JsonValue] = {"rope_type": "default", "rope_theta": arch.rotary_base}
    if "rotary_percent" in hub_type.fields:
        plain["partial_rotary_factor"] = arch.rotary_percent
    described: dict[str, JsonValue] = {**plain, **(scaling or {})}
    if not hub_type.has_local_rope:
        return {"rope_parameters": described, "rope_scaling": scaling}
    local = arch.rotary_base if arch.rope_local_base_freq is None else arch.rope_local_base_freq
    both: dict[str, JsonValue] = {SLIDING: {"rope_type": "default", "rope_theta": local}, FULL: described}
    return {"rope_parameters": both, LOCAL_BASE: local} if hub_type.local_base else {"rope_parameters": both}


def _write_scaling(arch: Architecture) -> dict[str, JsonValue] | None:
    """Return the fields of an architecture's scaling; None if it has none."""
    if arch.rotary_scaling is None:
        return None
    known = {name: value for name, value in asdict(arch.rotary_scaling).items() if value is not None}
    return {"rope_type": known.pop("kind"), **known}


def _kind(rope: Mapping[str, JsonValue]) -> JsonValue:
    return rope.get("rope_type", rope.get("type", "default"))


def _problem(rope: JsonValue) -> str | None:
    """Return why a description of rotary positions cannot be represented, None if it can."""
    kinds = f"only null or rope_type default, {LINEAR}, {LLAMA3} or {YARN} works"
    if not isinstance(rope, dict):
        return f"not a table; {kinds}"
    kind = _kind(rope)
    if kind != "default" and kind not in _KEYS:
        return f"this scaling of rotary positions is unknown here; {kinds}"
    keys = _KEYS.get(str(kind), {})
    known = {*_ANYWHERE, *keys} | (_MSCALES if kind == YARN else set())
    if others := [name for name, value in rope.items() if name not in known and value is not None]:
        return f"{', '.join(others)} of rope_type {kind} is unknown here; remove it if it has no effect"
    if "factor" in keys and not isinstance(rope.get("factor"), int | float):
        return f"rope_type {kind} has a number as factor; add it"
    return None


def _scaling(rope: Mapping[str, JsonValue], positions: JsonValue) -> dict[str, JsonValue]:
    """Return the keys of a description; a missing original length is, as in transformers, the model's `positions`."""
    kind = str(_kind(rope))
    if kind not in _KEYS:
        return {}
    keys = _KEYS[kind]
    values: dict[str, JsonValue] = {"rotary_scaling": kind}
    values |= {ours: rope[theirs] for theirs, ours in keys.items() if rope.get(theirs) is not None}
    if "original_max_position_embeddings" in keys:
        values.setdefault("original_max_position_embeddings", positions)
    if kind == YARN and rope.get("attention_factor") is None:
        factor, scales = rope["factor"], [rope.get(name) for name in ("mscale", "mscale_all_dim")]
        if all(scales) and isinstance(factor, int | float) and factor > 1:
            above, below = (0.1 * scale * math.log(factor) + 1 for scale in scales if isinstance(scale, int | float))
            values["rotary_attention_factor"] = above / below
    return values
