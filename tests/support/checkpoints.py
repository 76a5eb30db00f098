"""Save a training state synchronously, and verify the checkpoints of a run from the newest on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from megatron3d.checkpoint import store
from megatron3d.checkpoint.publish import candidates
from megatron3d.checkpoint.store import first_intact, verify
from megatron3d.train.checkpointing import describe, source_of
from megatron3d.train.state import TrainState


def newest_intact(root: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest intact checkpoint of a run (None: there is none), and the newer ones, with reasons."""
    return first_intact(candidates(root), verify)


def save_state(root: Path, state: TrainState, identity: Mapping[str, JsonValue]) -> Path:
    """Write a checkpoint, synchronously, on all ranks."""
    pieces = source_of(state)(lambda tensor: tensor)
    return store.save(root, state.iteration, pieces, describe(state, identity), state.model.comm)
