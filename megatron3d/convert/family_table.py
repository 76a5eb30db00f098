"""The table of convertible model types in docs/models.md, from the tables that convert them.

`python -m megatron3d.convert.family_table` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.convert.hub_fields import ModelType, show
from megatron3d.convert.model_types import MODEL_TYPES

# Keys that every model type with rotary positions, or every model, has a field for.
_EVERYWHERE = frozenset(
    [
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "max_position_embeddings",
        "vocab_size",
        "norm_epsilon",
        "rotary_base",
        "tie_embeddings",
        "attention_dropout",
        "init_method_std",
    ]
)


def family_table() -> list[str]:
    """Return the rows of the table: model type, class, keys with one value, and keys that config.json chooses."""
    rows = ["| model type | class of transformers | `family`, and keys with one value | chosen in config.json |"]
    rows.append("|---|---|---|---|")
    for name, hub_type in MODEL_TYPES.items():
        cells = (
            name,
            hub_type.class_name,
            ", ".join(_fixed(hub_type)),
            ", ".join(f"`{key}`" for key in _free(hub_type)),
        )
        rows.append(f"| {' | '.join(cells)} |")
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
    for derived in hub_type.derived:
        yield from derived.model_keys


if __name__ == "__main__":
    print("\n".join(family_table()))
