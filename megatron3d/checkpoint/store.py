"""The logical store: global tensors on disk, written and read as boxes by any number of ranks in any layout.

run/latest_checkpointed_iteration.txt        "100"
run/iter_0000100/index.json                  which box of which tensor is in which file
run/iter_0000100/rank_00000.safetensors      the boxes that rank 0 wrote
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron3d.checkpoint.boxes import overlap, text, within
from megatron3d.checkpoint.folder import (
    abandon,
    begin,
    iteration_folder,
    latest,
    publish,
    resolve,
    sync,
    temporary,
    writing,
)
from megatron3d.checkpoint.index import FILE_NAME, Index, StoredBox, StoredTensor, merge, read_index
from megatron3d.checkpoint.together import together
from megatron3d.comm import Comm
from megatron3d.errors import UserError
from megatron3d.layout import Box, Shape, box_shape

__all__ = ["Piece", "latest", "load", "read_meta", "resolve", "save"]


@dataclass(frozen=True)
class Piece:
    """A box of a logical global tensor of `shape`; `tensor` has the box's shape and may be any view."""

    name: str
    shape: Shape
    box: Box
    tensor: Tensor

    def __post_init__(self) -> None:
        held, wanted = tuple(self.tensor.shape), box_shape(self.box)
        assert held == wanted, f"{self.name}: the tensor is {held}, its box {text(self.box)} is {wanted}"


def save(root: Path, iteration: int, pieces: Iterable[Piece], meta: Mapping[str, JsonValue], comm: Comm) -> Path:
    """Write one checkpoint with all ranks and return its folder; the pieces of all ranks must make whole tensors.

    It is complete on disk, and the newest of the run, when this returns on any rank.  Where a rank fails all raise
    the same UserError, and earlier checkpoints remain as they were.
    """
    folder = iteration_folder(root, iteration)
    is_first = comm.mesh.rank == 0
    try:
        together(comm, lambda: _begin(folder) if is_first else None)
        written = together(comm, lambda: _write_boxes(folder, comm.mesh.rank, pieces))
        together(comm, lambda: _finish(folder, iteration, meta, written) if written else None)
    except Exception:
        if is_first:
            abandon(folder)
        raise
    return folder


def _begin(folder: Path) -> None:
    with writing(folder):
        begin(folder)


def _write_boxes(folder: Path, rank: int, pieces: Iterable[Piece]) -> dict[str, StoredTensor]:
    """Write this rank's file; what is in it, by tensor."""
    file = f"rank_{rank:05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    stored: dict[str, StoredTensor] = {}
    for piece in pieces:
        if piece.tensor.numel() == 0:
            continue
        key = piece.name + text(piece.box)
        assert key not in tensors, f"rank {rank} was given {key} twice"
        tensors[key] = piece.tensor.detach().cpu().contiguous()
        box = StoredBox(box=piece.box, file=file, key=key)
        dtype = str(piece.tensor.dtype).removeprefix("torch.")
        before = stored[piece.name].boxes if piece.name in stored else ()
        stored[piece.name] = StoredTensor(shape=piece.shape, dtype=dtype, boxes=(*before, box))
    if tensors:
        _write_file(folder, file, tensors)
    return stored


def _write_file(folder: Path, file: str, tensors: Mapping[str, Tensor]) -> None:
    if not temporary(folder).is_dir():
        unseen = f"checkpoint.save={folder.parent}: some ranks do not see the folder that rank 0 made there"
        raise UserError(f"{unseen}; save to a file system that all nodes share")
    with writing(folder):
        path = temporary(folder) / file
        save_file(dict(tensors), path)
        sync(path)


def _finish(
    folder: Path, iteration: int, meta: Mapping[str, JsonValue], written: list[dict[str, StoredTensor]]
) -> None:
    index = Index(iteration=iteration, meta=dict(meta), tensors=merge(written))
    with writing(folder):
        path = temporary(folder) / FILE_NAME
        path.write_text(index.model_dump_json())
        sync(path)
        publish(folder, iteration)


def read_meta(path: Path) -> dict[str, JsonValue]:
    """What was saved beside the tensors of the checkpoint `path`."""
    return read_index(path).meta


def load(path: Path, pieces: Iterable[Piece]) -> None:
    """Fill each piece's tensor in place from the checkpoint `path`, converting its dtype.

    Reads only what the pieces need, one overlap at a time.  Raises UserError with all differences between the pieces
    and the checkpoint, before anything is filled, or with all files that are damaged.
    """
    wanted = [piece for piece in pieces if piece.tensor.numel() > 0]
    index = read_index(path)
    UserError.collect(f"checkpoint {path}: {difference}" for difference in _differences(index, wanted))
    reads: dict[str, list[tuple[StoredBox, Box, Piece]]] = {}
    for piece in wanted:
        for stored in index.tensors[piece.name].boxes:
            common = overlap(stored.box, piece.box)
            if common is not None:
                reads.setdefault(stored.file, []).append((stored, common, piece))
    damages = (damage for file, parts in sorted(reads.items()) for damage in _read_boxes(path / file, parts))
    UserError.collect(f"checkpoint {path}: {damage}; load another checkpoint of the run" for damage in damages)


def _differences(index: Index, pieces: Iterable[Piece]) -> Iterator[str]:
    """What keeps the pieces from being filled, a sentence for each tensor."""
    for name, shape in dict.fromkeys((piece.name, piece.shape) for piece in pieces):
        stored = index.tensors.get(name)
        if stored is None:
            yield f"tensor {name} is not in it; this run needs it with shape {list(shape)}"
        elif stored.shape != shape:
            yield f"tensor {name} has shape {list(stored.shape)}, this run needs {list(shape)}"
        elif found := stored.flaw():
            yield f"{FILE_NAME} is damaged: tensor {name}: {found}"


def _read_boxes(path: Path, parts: Iterable[tuple[StoredBox, Box, Piece]]) -> Iterator[str]:
    """Fill the pieces from one file; a sentence for each damage."""
    try:
        with safe_open(path, framework="pt") as file:
            for stored, common, piece in parts:
                box = file.get_slice(stored.key)
                if tuple(box.get_shape()) != box_shape(stored.box):
                    yield f"{path.name}: {stored.key} is {box.get_shape()}, not {list(box_shape(stored.box))}"
                    continue
                part = box[within(common, stored.box)]
                piece.tensor.detach()[within(common, piece.box)].copy_(part)
    except (OSError, SafetensorError) as error:
        yield f"{path.name} is missing or damaged: {error}"
