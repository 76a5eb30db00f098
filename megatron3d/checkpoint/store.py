"""Store of logical tensors on disk, written and read as boxes by any number of ranks in any layout.

run/latest_checkpointed_iteration.txt        "100"
run/iter_0000100/index.json                  which box of which tensor is in which file, and its checksum
run/iter_0000100/rank_00000.safetensors      the boxes that rank 0 wrote
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import JsonValue

from megatron3d.checkpoint.index import FILE_NAME, Index, StoredTensor, merge_tensors, read_index
from megatron3d.checkpoint.piece import Piece
from megatron3d.checkpoint.publish import (
    explain_write_errors,
    iteration_folder,
    latest,
    make_temporary_folder,
    publish,
    remove_temporary_folder,
    resolve,
    temporary_folder,
)
from megatron3d.checkpoint.read import load, load_with_index, read_meta
from megatron3d.checkpoint.write import write_boxes
from megatron3d.comm.interface import ObjectCollectives
from megatron3d.comm.run_on_all_ranks import run_on_all_ranks
from megatron3d.errors import UserError
from megatron3d.runtime.files import write_text

__all__ = ["Index", "Piece", "latest", "load", "load_with_index", "read_index", "read_meta", "resolve", "save"]


def save(
    root: Path, iteration: int, pieces: Iterable[Piece], meta: Mapping[str, JsonValue], comm: ObjectCollectives
) -> Path:
    """Write one checkpoint with all ranks and return its folder; the pieces of all ranks must cover whole tensors.

    When this returns on any rank, the checkpoint is complete on disk and the newest of the run.  Where a rank fails,
    all ranks raise the same UserError, and earlier checkpoints remain as they were.
    """
    folder = iteration_folder(root, iteration)
    is_first = comm.mesh.rank == 0
    try:
        run_on_all_ranks(comm, lambda: _begin(folder) if is_first else None)
        written = run_on_all_ranks(comm, lambda: _write(folder, comm.mesh.rank, pieces))
        run_on_all_ranks(comm, lambda: _finish(folder, iteration, meta, written) if written else None)
    except Exception:
        if is_first:
            remove_temporary_folder(folder)
        raise
    return folder


def _begin(folder: Path) -> None:
    with explain_write_errors(folder):
        make_temporary_folder(folder)


def _write(folder: Path, rank: int, pieces: Iterable[Piece]) -> dict[str, StoredTensor]:
    """Write this rank's file; return its boxes by tensor."""
    if not temporary_folder(folder).is_dir():
        unseen = f"checkpoint.save={folder.parent}: some ranks do not see the folder that rank 0 made there"
        raise UserError(f"{unseen}; save to a file system that all nodes share")
    with explain_write_errors(folder):
        return write_boxes(temporary_folder(folder) / f"rank_{rank:05d}.safetensors", pieces)


def _finish(
    folder: Path, iteration: int, meta: Mapping[str, JsonValue], written: list[dict[str, StoredTensor]]
) -> None:
    index = Index(iteration=iteration, meta=dict(meta), tensors=merge_tensors(written)).with_checksum()
    with explain_write_errors(folder):
        write_text(temporary_folder(folder) / FILE_NAME, index.model_dump_json())
        publish(folder, iteration)
