"""Reading of boxes: files are checked against the index before their content is used.

A box that is read completely is verified with its checksum.  For a box that is read in part, the file's header is
compared with the index and the file's length with its header.  Where the ranks of a run load together, one of those
that need a part of a box reads it whole and verifies it, so that every byte is verified in the read that loads it:

    box in the file       | . . . . . . o . |        o: one element of the box, chosen by its checksum
    needed by rank 0      | . . . .                  reads its half
    needed by rank 1              . . o . |          reads the whole box, verifies it, takes its half

Loading of a checkpoint by all ranks of a run: the index is parsed once, and every byte is read and verified once.

    rank 0                  index.json -> parsed, checked -> broadcast in lines, of which a rank parses what it needs
    replica 0 of 2          | a a a . . . |   reads half of the boxes that both need, and verifies them
    replica 1 of 2          | . . . b b b |   reads the other half
    both, after the sum     | a a a b b b |   the elements that a rank has not read are 0

The sum is one of integers, so that the bits of each element stay.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron3d.checkpoint.index import (
    FILE_NAME,
    Index,
    StoredBox,
    StoredTensor,
    intersection,
    read_index,
    slices_within,
)
from megatron3d.checkpoint.pieces import Piece, checksum, dtype_name
from megatron3d.comm.interface import Comm
from megatron3d.comm.objects import broadcast_bytes, run_on_all_ranks
from megatron3d.errors import UserError, is_machine_fault
from megatron3d.parallel.layout import Box, box_shape
from megatron3d.parallel.mesh import Axes
from megatron3d.runtime.files import retried

Wanted = tuple[Box, Piece]
BoxesByFile = Sequence[tuple[str, Mapping[StoredBox, list[Wanted]]]]


def load(path: Path, pieces: Iterable[Piece]) -> None:
    """Fill each piece's tensor in place from the checkpoint `path`, converting its dtype.

    Reads only what the pieces need, one box at a time.  Raises UserError with all differences between the pieces
    and the checkpoint, before anything is filled, or with all files that are damaged.
    """
    load_with_index(path, read_index(path), pieces)


def load_with_index(path: Path, index: Index, pieces: Iterable[Piece]) -> None:
    """Load like `load`, with an index that has been read already."""
    raise_if_damaged(
        path,
        (
            found
            for file, boxes in _boxes_to_read(str(path), index, pieces)
            for found in _load_file(CheckpointFolder(path, index), file, boxes, _is_whole)
        ),
    )


def raise_if_damaged(path: Path, damages: Iterable[str]) -> None:
    """Raise UserError with all damage, if there is any."""
    who = f"checkpoint {path}"
    UserError.collect(
        damage if damage.startswith(who) else f"{who}: {damage}; load another checkpoint of the run"
        for damage in damages
    )


def find_damage(path: Path, index: Index, share: tuple[int, int]) -> Iterator[str]:
    """Read all boxes of a checkpoint and yield a sentence for each damage.

    Args:
        share: (i, n) reads every n-th file starting with the i-th, so that n threads together read all.
    """
    yield from find_index_damage(index) if share[0] == 0 else ()
    files: dict[str, dict[StoredBox, StoredTensor]] = {}
    for tensor in index.tensors.values():
        for stored in tensor.boxes:
            files.setdefault(stored.file, {})[stored] = tensor
    for file in sorted(files)[share[0] :: share[1]]:
        with BoxFile(path / file) as boxes:
            for stored, tensor in files[file].items():
                box = boxes.read(stored, tensor)
                if box is not None and checksum(box) != stored.checksum:
                    boxes.problems.append(_checksum_mismatch(path / file, stored))
        yield from boxes.problems


def find_index_damage(index: Index) -> Iterator[str]:
    """Yield a sentence for each tensor that the boxes do not cover once, and each place that two boxes have."""
    for name, tensor in index.tensors.items():
        if found := tensor.coverage_error():
            yield f"{FILE_NAME} is damaged: tensor {name}: {found}"
    places: dict[tuple[str, str], StoredBox] = {}
    for stored in (stored for tensor in index.tensors.values() for stored in tensor.boxes):
        if places.setdefault((stored.file, stored.key), stored) is not stored:
            yield f"{FILE_NAME} is damaged: {stored.file}: {stored.key} is the place of two boxes"


# What safetensors reads, as parts of which the header is read here.
MAX_HEADER_BYTES, HEADER_PART = 100_000_000, 2**20
# No longer than its last part: the end of a box within the bytes of all boxes.
_END, _END_BYTES = re.compile(rb'"data_offsets"\s*:\s*\[\s*[0-9]{1,20}\s*,\s*([0-9]{1,20})\s*\]'), 256


def check_length(path: Path) -> None:
    """Raise SafetensorError where a file is not as long as its header says, before all of it is mapped into memory.

    A file that a failing disk has made longer, or that is mostly a hole, can be longer than a process may map.
    """
    found = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES or found < 8 + size:
            raise SafetensorError(f"{found} bytes, and its header would have {size}")
        end, before = 0, b""
        for start in range(0, size, HEADER_PART):
            part = before + file.read(min(HEADER_PART, size - start))
            end = max(end, *map(int, _END.findall(part)), 0)
            before = part[-_END_BYTES:]
    if found != 8 + size + end:
        raise SafetensorError(f"{found} bytes, and its header describes {8 + size + end}")


class BoxFile:
    """An open safetensors file of boxes; damage is collected in `problems` instead of raised."""

    def __init__(self, path: Path) -> None:
        self.path, self.problems = path, list[str]()
        self._file: Any = None

    def __enter__(self) -> BoxFile:
        try:
            self._file = retried(self.path, self._open)
        except (OSError, SafetensorError, RuntimeError) as error:  # the last where torch cannot map the file
            if is_machine_fault(error):
                raise
            self.problems.append(f"{self.path.name} is missing or damaged: {error}")
        return self

    def _open(self) -> Any:
        if not stat.S_ISREG(self.path.stat().st_mode):
            raise OSError("not a file")
        check_length(self.path)
        return safe_open(self.path, framework="pt").__enter__()

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)

    def box(self, file: Any, stored: StoredBox) -> Tensor | None:
        """Return a box, memory-mapped from an open file, or None and report where its shape is another one."""
        found, wanted = list(file.get_slice(stored.key).get_shape()), list(box_shape(stored.box))
        if found != wanted:
            self.problems.append(f"{self.path.name}: {stored.key} is {found}, not {wanted}")
            return None
        box: Tensor = file.get_tensor(stored.key)
        return box

    def read(self, stored: StoredBox, tensor: StoredTensor) -> Tensor | None:
        """Return a box, memory-mapped from the file; None where the file does not match the index."""
        if self._file is None:
            return None
        try:
            box = self.box(self._file, stored)
        except SafetensorError as error:
            self.problems.append(f"{self.path.name} is missing or damaged: {error}")
            return None
        if box is None:
            return None
        if dtype_name(box.dtype) != tensor.dtype:
            self.problems.append(f"{self.path.name}: {stored.key} is {dtype_name(box.dtype)}, not {tensor.dtype}")
            return None
        return box


OpenFile = Callable[[Path], BoxFile]


class BoxSource(Protocol):
    """Where the boxes of a training state are."""

    @property
    def index(self) -> Index:
        """Which box of which tensor it has."""

    @property
    def name(self) -> str:
        """Its name in messages, which follows `checkpoint`."""

    def fill(self, boxes: BoxesByFile, comm: Comm) -> list[str]:
        """Fill the pieces of this rank from these boxes; return each damage of all ranks, on all ranks.

        All ranks of the run call this together.
        """


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint on disk: its folder, where the boxes of its tensors are, and how its files are opened."""

    folder: Path
    index: Index
    open_file: OpenFile = BoxFile

    @property
    def name(self) -> str:
        return str(self.folder)

    def fill(self, boxes: BoxesByFile, comm: Comm) -> list[str]:
        def read() -> list[str]:
            return [found for file, parts in boxes for found in _load_file(self, file, parts, _has_chosen_element)]

        found = run_on_all_ranks(comm, read)
        damage: list[str] = comm.broadcast_object(found and list(dict.fromkeys(chain(*found))))
        return damage


def _checksum_mismatch(path: Path, stored: StoredBox) -> str:
    return f"{path.name}: {stored.key} is damaged: its bytes are not those that its checksum was taken of"


def _differences(index: Index, pieces: Iterable[Piece]) -> Iterator[str]:
    """Yield a sentence for each tensor that the checkpoint cannot provide."""
    for name, shape in dict.fromkeys((piece.name, piece.shape) for piece in pieces):
        stored = index.tensors.get(name)
        if stored is None:
            yield f"tensor {name} is not in it; this run needs it with shape {list(shape)}"
        elif stored.shape != shape:
            yield f"tensor {name} has shape {list(stored.shape)}, this run needs {list(shape)}"
        elif found := stored.coverage_error():
            yield f"{FILE_NAME} is damaged: tensor {name}: {found}"


def _boxes_to_read(name: str, index: Index, pieces: Iterable[Piece]) -> BoxesByFile:
    """Return, for each file, the stored boxes to read and which box of which piece each of them fills.

    Raises UserError with all differences between the pieces and the checkpoint.
    """
    wanted = [piece for piece in pieces if piece.tensor.numel() > 0]
    UserError.collect(f"checkpoint {name}: {difference}" for difference in _differences(index, wanted))
    files: dict[str, dict[StoredBox, list[Wanted]]] = {}
    for piece in wanted:
        for stored in index.tensors[piece.name].boxes:
            common = intersection(stored.box, piece.box)
            if common is not None:
                files.setdefault(stored.file, {}).setdefault(stored, []).append((common, piece))
    return sorted(files.items())


def _part_of(files: BoxesByFile, index: int, parts: int) -> BoxesByFile:
    """Return the boxes whose first element is in part `index` of the elements of all boxes, one box after another."""
    total = sum(math.prod(box_shape(stored.box)) for _, boxes in files for stored in boxes)
    passed, mine = 0, []
    for file, boxes in files:
        chosen: dict[StoredBox, list[Wanted]] = {}
        for stored, wanted in boxes.items():
            if passed * parts // total == index:
                chosen[stored] = wanted
            passed += math.prod(box_shape(stored.box))
        mine += [(file, chosen)] if chosen else []
    return mine


def _is_whole(stored: StoredBox, wanted: Sequence[Wanted]) -> bool:
    """Return whether all elements of a stored box are wanted."""
    return sum(math.prod(box_shape(common)) for common, _ in wanted) >= math.prod(box_shape(stored.box))


def _has_chosen_element(stored: StoredBox, wanted: Sequence[Wanted]) -> bool:
    """Return whether an element that the checksum chooses is wanted, which spreads the verification over the ranks."""
    number = int(stored.checksum, 16)
    chosen = [low + number % (high - low) for low, high in stored.box]
    return any(
        all(low <= place < high for place, (low, high) in zip(chosen, common, strict=True)) for common, _ in wanted
    )


def _load_file(
    source: CheckpointFolder,
    file: str,
    parts: Mapping[StoredBox, Sequence[Wanted]],
    is_verified: Callable[[StoredBox, Sequence[Wanted]], bool],
) -> list[str]:
    """Fill the pieces from one file; return a sentence for each damage."""
    path = source.folder / file
    with source.open_file(path) as boxes:
        for stored, wanted in parts.items():
            box = boxes.read(stored, source.index.tensors[wanted[0][1].name])
            if box is None:
                continue
            if stored.checksum and is_verified(stored, wanted) and checksum(box) != stored.checksum:
                boxes.problems.append(_checksum_mismatch(path, stored))
                continue
            for common, piece in wanted:
                piece.tensor.detach()[slices_within(common, piece.box)].copy_(box[slices_within(common, stored.box)])
    return boxes.problems


# Integers that NCCL and gloo add, by the bytes of an element; others are added byte by byte.
_WORDS = {4: torch.int32, 8: torch.int64}


def read_index_on_all_ranks(
    folder: Path,
    comm: Comm,
    names: Iterable[str],
    prefix: str = "",
    read: Callable[[Path], Index] | None = None,
    device: torch.device | None = None,
) -> Index:
    """Return the index of the tensors `names`, which rank 0 reads, perhaps with `read`, and sends to all.

    All ranks raise UserError if the index is missing or damaged, for tensors whose names start with `prefix`.  It has
    20 MB for a large model on thousands of ranks: the collectives of tensors on `device` (None: the CPU) send it.
    """
    packed: list[bytes] = []

    def parse() -> None:
        index = (read or read_index)(folder)
        raise_if_damaged(folder, find_index_damage(index.with_prefix(prefix)))
        packed.append(index.packed())

    run_on_all_ranks(comm, lambda: parse() if comm.mesh.rank == 0 else None)
    return Index.unpacked(broadcast_bytes(comm, packed[0] if packed else b"", device or torch.device("cpu")), names)


def load_on_all_ranks(
    source: BoxSource,
    pieces: Sequence[Piece],
    memory: Iterable[Tensor],
    comm: Comm,
    replicas: Axes,
    own: Sequence[Piece] = (),
) -> list[str]:
    """Fill the pieces of all ranks and return each damage, on all ranks; after damage the values are undefined.

    Together all ranks must need every element of the tensors that they load; then every byte is verified.  All ranks
    raise UserError with all differences between the pieces and the index.

    Args:
        memory: contiguous tensors of which the pieces are views; what no piece covers becomes 0.
        replicas: axes along which all ranks have the same pieces, of which each reads a part; each axis has a group.
        own: further pieces, which no other rank has, beyond `memory`.
    """
    tensors, mesh = list(memory), comm.mesh
    mine: list[tuple[str, Mapping[StoredBox, list[Wanted]]]] = []

    def choose() -> None:
        files, alone = (_boxes_to_read(source.name, source.index, each) for each in (pieces, own))
        for tensor in tensors:
            tensor.zero_()
        mine.extend([*_part_of(files, mesh.index(replicas), mesh.size(replicas)), *alone])

    run_on_all_ranks(comm, choose)
    damage = source.fill(mine, comm)
    for tensor in tensors if not damage else ():
        words = tensor.view(-1).view(_WORDS.get(tensor.element_size(), torch.int8))
        for axis in mesh.nontrivial(replicas):
            comm.all_reduce(words, (axis,)).wait()
    return damage
