"""The logical store: global tensors on disk, written and read as boxes by any number of ranks in any layout.

run/latest_checkpointed_iteration.txt        "100"
run/iter_0000100/index.json                  which box of which tensor is in which file, and its checksum
run/iter_0000100/rank_00000.safetensors      the boxes that rank 0 wrote
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import JsonValue

from megatron3d.checkpoint.index import FILE_NAME, Index, StoredTensor, merge, read_index
from megatron3d.checkpoint.piece import Piece
from megatron3d.checkpoint.publish import (
    abandon,
    begin,
    iteration_folder,
    latest,
    publish,
    resolve,
    temporary,
    writing,
)
from megatron3d.checkpoint.read import fill, load, read_meta
from megatron3d.checkpoint.write import write_boxes
from megatron3d.comm.interface import ObjectCollectives
from megatron3d.comm.run_on_all_ranks import together
from megatron3d.errors import UserError
from megatron3d.runtime.files import write_text

__all__ = ["Index", "Piece", "fill", "latest", "load", "read_index", "read_meta", "resolve", "save"]


def save(
    root: Path, iteration: int, pieces: Iterable[Piece], meta: Mapping[str, JsonValue], comm: ObjectCollectives
) -> Path:
    """Write one checkpoint with all ranks and return its folder; the pieces of all ranks must make whole tensors.

    It is complete on disk, and the newest of the run, when this returns on any rank.  Where a rank fails all raise
    the same UserError, and earlier checkpoints remain as they were.
    """
    folder = iteration_folder(root, iteration)
    is_first = comm.mesh.rank == 0
    try:
        together(comm, lambda: _begin(folder) if is_first else None)
        written = together(comm, lambda: _write(folder, comm.mesh.rank, pieces))
        together(comm, lambda: _finish(folder, iteration, meta, written) if written else None)
    except Exception:
        if is_first:
            abandon(folder)
        raise
    return folder


def _begin(folder: Path) -> None:
    with writing(folder):
        begin(folder)


def _write(folder: Path, rank: int, pieces: Iterable[Piece]) -> dict[str, StoredTensor]:
    """Write this rank's file; what is in it, by tensor."""
    if not temporary(folder).is_dir():
        unseen = f"checkpoint.save={folder.parent}: some ranks do not see the folder that rank 0 made there"
        raise UserError(f"{unseen}; save to a file system that all nodes share")
    with writing(folder):
        return write_boxes(temporary(folder) / f"rank_{rank:05d}.safetensors", pieces)


def _finish(
    folder: Path, iteration: int, meta: Mapping[str, JsonValue], written: list[dict[str, StoredTensor]]
) -> None:
    index = Index(iteration=iteration, meta=dict(meta), tensors=merge(written)).sealed()
    with writing(folder):
        write_text(temporary(folder) / FILE_NAME, index.model_dump_json())
        publish(folder, iteration)
