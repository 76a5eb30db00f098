"""Store of logical tensors on disk, written and read as boxes by any number of ranks in any layout.

run/latest_checkpointed_iteration.txt        "100"
run/iter_0000100/index.json                  which box of which tensor is in which file, and its checksum
run/iter_0000100/rank_00000.safetensors      the boxes that rank 0 wrote

Writing of one rank's safetensors file box by box, without building it in memory.

8 bytes: length of the header | header: {"w[0:2,0:4]": {"dtype", "shape", "data_offsets"}, ...} | bytes of the boxes
(https://github.com/huggingface/safetensors, "Format"; little-endian, boxes without holes between them)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import xxhash
from pydantic import JsonValue

from megatron3d.checkpoint.index import (
    FILE_NAME,
    Index,
    StoredBox,
    StoredTensor,
    merge_tensors,
    pack,
    read_index,
    unpack,
)
from megatron3d.checkpoint.pieces import CHUNK_BYTES, DTYPES, Piece, dtype_name, raw_bytes, safetensors_header
from megatron3d.checkpoint.publish import (
    explain_write_errors,
    iteration_folder,
    latest,
    make_temporary_folder,
    publish,
    resolve,
)
from megatron3d.checkpoint.read import find_damage, load, load_with_index
from megatron3d.comm.interface import ObjectCollectives
from megatron3d.comm.objects import run_on_all_ranks
from megatron3d.errors import UserError
from megatron3d.runtime.files import fsync, hidden, write_text

# Bytes after which a file is flushed to the disk: until then a slow disk looks like a hang.
FLUSH_BYTES = 2**28
ORDER = {dtype: place for place, dtype in enumerate(DTYPES)}


def write_boxes(
    path: Path, pieces: Iterable[Piece], count: Callable[[int], None] = lambda num_bytes: None
) -> dict[str, StoredTensor]:
    """Write the pieces that are not empty to a new file and fsync it; return the stored boxes by tensor.

    Needs memory for one box where pieces are not contiguous on the host, else none.  Creates no file without pieces.
    Raises OSError where the file cannot be written.

    Args:
        count: told the bytes of each part that was written.
    """
    nonempty = sorted((piece for piece in pieces if piece.tensor.numel()), key=lambda piece: ORDER[piece.tensor.dtype])
    keys = [piece.key for piece in nonempty]
    assert len(set(keys)) == len(keys), f"{path.name} was given twice: {[key for key in keys if keys.count(key) > 1]}"
    if not nonempty:
        return {}
    with path.open("xb") as file:
        file.write(safetensors_header((piece.key, piece.tensor.dtype, piece.tensor.shape) for piece in nonempty))
        checksums = [_write_all(file, piece, count) for piece in nonempty]
    fsync(path)
    stored: dict[str, StoredTensor] = {}
    for piece, checksum in zip(nonempty, checksums, strict=True):
        box = StoredBox(box=piece.box, file=path.name, key=piece.key, checksum=checksum)
        before = stored[piece.name].boxes if piece.name in stored else ()
        dtype = dtype_name(piece.tensor.dtype)
        stored[piece.name] = StoredTensor(shape=piece.shape, dtype=dtype, boxes=(*before, box))
    return stored


def _write_all(file: BinaryIO, piece: Piece, count: Callable[[int], None]) -> str:
    """Write a box and return its checksum, computed chunk by chunk while the chunk is in the CPU's cache."""
    content, digest = raw_bytes(piece.compute() if piece.compute else piece.tensor), xxhash.xxh3_64()
    assert len(content) == piece.tensor.nbytes, f"{piece.key} has {len(content)} bytes, not {piece.tensor.nbytes}"
    for start in range(0, len(content), CHUNK_BYTES):
        chunk = content[start : start + CHUNK_BYTES]
        digest.update(chunk)
        end = file.tell() + file.write(chunk)
        if end // FLUSH_BYTES > (end - len(chunk)) // FLUSH_BYTES:
            file.flush()
            os.fsync(file.fileno())
        count(len(chunk))
    return digest.hexdigest()


__all__ = ["Index", "Piece", "latest", "load", "load_with_index", "read_index", "resolve", "save"]


def save(
    root: Path,
    iteration: int,
    pieces: Iterable[Piece],
    meta: Mapping[str, JsonValue],
    comm: ObjectCollectives,
    count: Callable[[int], None] = lambda num_bytes: None,
) -> Path:
    """Write one checkpoint with all ranks and return its folder; the pieces of all ranks must cover whole tensors.

    When this returns on any rank, the checkpoint is complete on disk and the newest of the run.  Where a rank fails,
    all ranks raise the same UserError, and earlier checkpoints remain as they were.

    Args:
        count: told the bytes of each part that this rank has written.
    """
    folder = iteration_folder(root, iteration)
    is_first = comm.mesh.rank == 0
    try:
        run_on_all_ranks(comm, lambda: _begin(folder) if is_first else None)
        written = run_on_all_ranks(comm, lambda: _write(folder, comm.mesh.rank, pieces, count))
        run_on_all_ranks(comm, lambda: _finish(folder, iteration, meta, written) if written else None)
    except Exception:
        if is_first:
            shutil.rmtree(hidden(folder), ignore_errors=True)
        raise
    return folder


def _begin(folder: Path) -> None:
    with explain_write_errors(folder):
        make_temporary_folder(folder)


def _write(folder: Path, rank: int, pieces: Iterable[Piece], count: Callable[[int], None]) -> str:
    """Write this rank's file; return its boxes by tensor, packed, of which rank 0 receives those of all ranks."""
    if not hidden(folder).is_dir():
        unseen = f"checkpoint.save={folder.parent}: some ranks do not see the folder that rank 0 made there"
        raise UserError(f"{unseen}; save to a file system that all nodes share")
    with explain_write_errors(folder):
        return pack(write_boxes(hidden(folder) / f"rank_{rank:05d}.safetensors", pieces, count))


def _finish(folder: Path, iteration: int, meta: Mapping[str, JsonValue], written: list[str]) -> None:
    index = Index(iteration=iteration, meta=dict(meta), tensors=merge_tensors(map(unpack, written)))
    with explain_write_errors(folder):
        write_text(hidden(folder) / FILE_NAME, index.to_json())
        publish(folder, iteration)


def verify(folder: Path, share: tuple[int, int] = (0, 1)) -> tuple[str, ...]:
    """Read all bytes of a checkpoint and return a sentence for each damage.

    Args:
        share: (i, n) reads only the i-th of n shares of the files.
    """
    try:
        return tuple(find_damage(folder, read_index(folder), share))
    except UserError as error:
        return error.problems


def first_intact(
    found: Iterable[tuple[Path, str | None]], damage_of: Callable[[Path], Sequence[str]]
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the first checkpoint without a refusal and without damage, and those skipped before it, with reasons."""
    skipped: list[tuple[Path, str]] = []
    for folder, refusal in found:
        problems = [refusal] if refusal else damage_of(folder)
        if not problems:
            return folder, skipped
        skipped.append((folder, "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if problems[3:] else "")))
    return None, skipped
