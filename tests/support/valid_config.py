"""A small valid configuration, for tests that break one rule of it."""

from __future__ import annotations

from typing import Any

from megatron3d.config.schema import Config

VALID: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 16, "seq_length": 8, "kv_channels": 4},
    "train": {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 10},
}


def sections(changes: Any) -> dict[str, dict[str, Any]]:
    """Return the sections of a small valid configuration with some changes."""
    return {section: VALID.get(section, {}) | changes.get(section, {}) for section in (*VALID, *changes)}


def with_changes(changes: Any) -> Config:
    """Return the valid configuration with some changes, parsed."""
    return Config.model_validate(sections(changes))
