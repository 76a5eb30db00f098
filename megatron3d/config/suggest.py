"""Suggestions for unknown keys: similar names, and the names of the same option in other frameworks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from megatron3d.config.schema import Config, declared

SECTIONS: Mapping[str, tuple[str, ...]] = {
    section: tuple(type(getattr(Config(), section)).model_fields) for section in Config.model_fields
}

# Key of each name in another framework.
_BY_ALIAS: Mapping[str, str] = {
    alias: f"{section}.{name}"
    for section, field in Config.model_fields.items()
    for name, key in type(field.default).model_fields.items()
    for alias in declared(key).get("also", ())
}
# Values that names of other frameworks stand for.
_VALUES: Mapping[str, str] = {
    "swiglu": "swiglu",
    "openai_gelu": "gelu_tanh",
    "use_rotary_position_embeddings": "rope",
    "bf16": "bf16",
    "fp16": "fp16",
    "disable_bias_linear": "false",
    "untie_embeddings_and_output_weights": "false",
    "use_distributed_optimizer": "1",
    "fsdp": "3",
    "data_parallel_shard_degree": "3",
    "gradient_checkpointing": "full",
    "recompute_activations": "selective",
}
# Words that do not tell one key from another, and letters of a name that are compared.
_COMMON_WORDS = frozenset(
    ("num", "size", "type", "name", "model", "init", "max", "min", "use", "of", "in", "to", "per")
)
_LONGEST = 100


def nearest_key(section: str, name: str) -> str | None:
    """Return the `section.key` closest to a misspelt, misplaced or foreign name, or None if no key is similar.

    A similar key has a word in common with the name, up to its spelling.
    """
    name = name.lower().replace("-", "_")
    if found := _BY_ALIAS.get(f"{section}.{name}"):
        return found
    section = section if section in SECTIONS else (nearest(section, SECTIONS) or "")
    places = [section] if section in SECTIONS else []
    places += [other for other in SECTIONS if other != section]
    exact = next((f"{place}.{name}" for place in places if name in SECTIONS[place]), None)
    if found := exact or _BY_ALIAS.get(name):
        return found
    for place, cutoff in zip(places, [0.6] + [0.75] * len(places), strict=False):
        if near := nearest(name, (key for key in SECTIONS[place] if _share_a_word(name, key)), cutoff):
            return f"{place}.{near}"
    return None


def value_of(name: str) -> str | None:
    """Return the value that a name of another framework stands for: `bf16` for train.precision; None for others."""
    return _VALUES.get(name.lower().replace("-", "_"))


def _share_a_word(name: str, key: str) -> bool:
    words = (word for word in name[:_LONGEST].split("_") if word not in _COMMON_WORDS)
    return any(nearest(word, (other for other in key.split("_") if other not in _COMMON_WORDS), 0.7) for word in words)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, or None."""
    return next(iter(get_close_matches(name[:_LONGEST], list(known), 1, cutoff)), None)


def one_of(values: Iterable[object]) -> str:
    """Join values as `1, 2, 4 or 8`."""
    *most, last = (str(value) for value in values)
    return f"{', '.join(most)} or {last}" if most else last
