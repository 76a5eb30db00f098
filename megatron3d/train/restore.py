"""Start of a state from boxes, wherever they are: in the memory of ranks, or in a checkpoint on disk.

ranks that go on     what they hold of each step --+
ranks that are new   nothing                       |--> the newest step that is complete, in memory or on disk
rank 0               checkpoints of the run -------+    -> the state of the new layout, all of it of that step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from megatron3d.checkpoint.held import Held, HeldBoxes, HeldStep, complete_steps
from megatron3d.checkpoint.index import Index
from megatron3d.checkpoint.publish import candidates, iteration_of
from megatron3d.comm.objects import broadcast_bytes, on_rank_0
from megatron3d.train.checkpointing import EVERYTHING, LoadOptions, describe_alone, fill_state, held_pieces, try_load
from megatron3d.train.state import TrainState


@dataclass(frozen=True)
class Restored:
    """What a state was restored from, the same on all ranks.

    Attributes:
        iteration: of the state; None: there was nothing to restore, and the state is as it was.
        folder: the checkpoint on disk; None: the memory of ranks.
        local_bytes: bytes that ranks took from their own memory.
        received_bytes: bytes that they received from other ranks' memory.
        disk_bytes: bytes that ranks filled from disk, those of replicas as well.
        skipped: newer checkpoints that could not be used, with reasons.
    """

    iteration: int | None
    folder: Path | None = None
    local_bytes: int = 0
    received_bytes: int = 0
    disk_bytes: int = 0
    skipped: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if self.iteration is None:
            return "nothing is held in memory or on disk"
        if self.folder is not None:
            return f"iteration {self.iteration} from {self.folder} ({self.disk_bytes / 1e9:.3g} GB from disk)"
        sent, local = self.received_bytes / 1e9, self.local_bytes / 1e9
        return f"iteration {self.iteration} from memory ({sent:.3g} GB of other ranks, {local:.3g} GB of the same)"


def held_state(state: TrainState, identity: Mapping[str, JsonValue], is_complete: bool | None = None) -> Held:
    """Return the boxes of a live state in host memory, without communication; nothing while an update is half done.

    On a CPU they are views, which keep the state's memory alive.

    Args:
        is_complete: what `state.update.is_complete()` said before the groups were aborted; None: it is asked now.
    """
    if not (state.update.is_complete() if is_complete is None else is_complete):
        return ()
    meta = describe_alone(state, identity, state.spec.config)
    return (HeldStep(meta, [replace(piece, tensor=piece.tensor.cpu()) for piece in held_pieces(state)]),)


def restore(
    state: TrainState,
    held: Held,
    folder: Path | None,
    identity: Mapping[str, JsonValue],
    options: LoadOptions = EVERYTHING,
) -> Restored:
    """Fill a state of any layout with the newest complete step, from memory or disk; return what it was.

    All ranks of the state's layout call this together, those that hold nothing with an empty `held`.  All boxes are of
    one step.  A step in memory is taken before a checkpoint of the same iteration.  With nothing held anywhere this
    loads the newest intact checkpoint of the folder.  Raises UserError, on all ranks, as `load_state`.

    Args:
        held: steps of which this rank has boxes in memory, in any layout; must not be views of `state`.
        folder: that of the run, with its checkpoints; None: there is none.
    """
    comm = state.model.comm
    listings = comm.gather_object([[step.listing() for step in held], _needed(state, options)])
    steps = _complete(listings) if listings else []
    found: list[list[Any]] = on_rank_0(
        comm,
        lambda: [
            *([step.iteration, 1, place, None] for place, step in enumerate(steps)),
            *([iteration_of(path), 0, path, refusal] for path, refusal in (candidates(folder) if folder else ())),
        ],
    )
    skipped: list[tuple[str, str]] = []
    for iteration, is_held, place, refusal in sorted(found, key=lambda each: each[:2], reverse=True):
        if refusal is None and is_held:
            return _from_memory(steps[place] if steps else None, state, held, identity, options, skipped)
        problems = [refusal] if refusal else try_load(place, state, identity, options)
        if not problems:
            num_bytes = _sum(state, sum(piece.tensor.nbytes for piece in held_pieces(state, options)))
            return Restored(iteration, place, disk_bytes=num_bytes, skipped=tuple(skipped))
        skipped.append((str(place), "; ".join(problems[:3])))
    return Restored(None, skipped=tuple(skipped))


def _needed(state: TrainState, options: LoadOptions) -> dict[str, tuple[int, ...]]:
    """Return the tensors of which this rank needs boxes, with their shapes."""
    return {piece.name: piece.shape for piece in held_pieces(state, options) if piece.tensor.numel()}


def _complete(listings: Sequence[Any]) -> list[Index]:
    needed = {name: tuple(shape) for _, names in listings for name, shape in names.items()}
    return list(complete_steps([held for held, _ in listings], needed))


def _from_memory(
    index: Index | None,
    state: TrainState,
    held: Held,
    identity: Mapping[str, JsonValue],
    options: LoadOptions,
    skipped: Sequence[tuple[str, str]],
) -> Restored:
    """Fill the state from the memory of ranks; `index` is that of the step, on rank 0."""
    device = state.buffers.flat_buffers[0].main.device
    packed = broadcast_bytes(state.model.comm, b"" if index is None else index.packed(), device)
    source = HeldBoxes(Index.unpacked(packed, _needed(state, options)), held)
    damage = fill_state(source, state, identity, options)
    assert not damage, f"memory is not verified: {damage}"
    local_bytes, received_bytes = (_sum(state, each) for each in (source.local_bytes, source.received_bytes))
    return Restored(source.index.iteration, None, local_bytes, received_bytes, skipped=tuple(skipped))


def _sum(state: TrainState, number: int) -> int:
    """Return the sum of a number of each rank."""
    numbers = state.model.comm.gather_object(number)
    total: int = state.model.comm.broadcast_object(sum(numbers) if numbers else None)
    return total
