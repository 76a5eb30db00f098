"""Layers with a sliding window, and without rotary positions, as config.json lists them.

sliding_window = 4096, layer_types = ["sliding_attention", "full_attention", ...]    model.window_size = [4095, 0], ...
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from megatron3d.convert.hub_fields import HubConfig, ModelType, Windows, show
from megatron3d.model.architecture import Architecture

SLIDING, FULL = "sliding_attention", "full_attention"


def read_layers(
    settings: HubConfig, hub_type: ModelType, num_layers: JsonValue
) -> tuple[dict[str, JsonValue], list[str]]:
    """Return our keys of windows and of layers without rotary positions, and problems."""
    if not isinstance(num_layers, int):  # which the schema refuses
        return {}, []
    values, problems = _windows(settings, hub_type.windows, num_layers) if hub_type.windows else ({}, [])
    if hub_type.has_no_rope_layers:
        skipped, wrong = _layers_without_rope(settings, num_layers)
        return values | skipped, problems + wrong
    return values, problems


def write_layers(arch: Architecture, hub_type: ModelType) -> dict[str, JsonValue]:
    """Return the fields of an architecture's windows and of its layers without rotary positions."""
    found: dict[str, JsonValue] = {}
    windows = hub_type.windows
    if windows:
        found["sliding_window"] = arch.window
        if windows.has_switch:
            found["use_sliding_window"] = arch.window is not None
        if windows.default_full:
            has = (arch.window_pattern or (1,)) if arch.window is not None else (0,)
            found["layer_types"] = [SLIDING if has[n % len(has)] else FULL for n in range(arch.num_layers)]
    if hub_type.has_no_rope_layers:
        skips = arch.no_rope_freq or (0,)
        found["no_rope_layers"] = [1 - skips[n % len(skips)] for n in range(arch.num_layers)]
    return found


def _windows(settings: HubConfig, windows: Windows, num_layers: int) -> tuple[dict[str, JsonValue], list[str]]:
    window = settings.get("sliding_window", windows.default)
    if windows.has_switch and not settings.get("use_sliding_window"):
        window = None
    types = settings.get("layer_types")
    if windows.default_full is None or (window is None and types is None):
        return _keys(window, ()), []
    if types is None:
        return _keys(window, [0 if windows.default_full(settings, n) else 1 for n in range(num_layers)]), []
    if not isinstance(types, list) or len(types) != num_layers or not all(each in (SLIDING, FULL) for each in types):
        return {}, [
            f"layer_types={show(types)}: a list of {num_layers} entries {SLIDING} or {FULL} works; other kinds of "
            "attention cannot be converted"
        ]
    has = [int(each == SLIDING) for each in types]
    if window is None and any(has):
        return {}, [f"layer_types={show(types)}: there is no window; sliding_window must be a number"]
    return _keys(window, has), []


def _keys(window: JsonValue, has: Sequence[int]) -> dict[str, JsonValue]:
    """Return the keys of a window in layers with a 1; of no layers: in all."""
    if not isinstance(window, int) or (has and not any(has)):
        return {}
    size: dict[str, JsonValue] = {"window_size": [window - 1, 0]}
    return size if all(has) else {**size, "window_attn_skip_freq": shortest_pattern(has)}


def _layers_without_rope(settings: HubConfig, num_layers: int) -> tuple[dict[str, JsonValue], list[str]]:
    listed, interval = settings.get("no_rope_layers"), settings.get("no_rope_layer_interval", 4)
    if listed is None and isinstance(interval, int) and interval > 0:
        listed = [int((n + 1) % interval != 0) for n in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or not all(each in (0, 1) for each in listed):
        return {}, [f"no_rope_layers={show(listed)}: a list of {num_layers} entries works, 0 for no rotary positions"]
    skipped = [1 - int(bool(each)) for each in listed]
    return ({"no_rope_freq": shortest_pattern(skipped)} if any(skipped) else {}), []


def shortest_pattern(flags: Sequence[int]) -> list[JsonValue]:
    """Return the shortest list whose repetition begins with these flags."""
    fits = (
        length for length in range(1, len(flags) + 1) if all(flags[n] == flags[n % length] for n in range(len(flags)))
    )
    return list(flags[: next(fits, 0)])
