"""Boxes of training states in the memory of ranks: a source of a state, like the folder of a checkpoint.

    step 30   rank 0: w[0:4]   rank 1: -        rank 2: -        w[4:8] was on a rank that died: no state
    step 20   rank 0: w[0:4]   rank 1: w[4:8]   rank 2: w[4:8]   complete: the state goes on from here

Ranks say which boxes of which steps they hold, in whatever layout these were made.  For the newest step of which every
element is somewhere, each element gets one holder, and the ranks of the new layout ask the holders for what they need.
Boxes of two steps are never mixed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from megatron3d.checkpoint.index import (
    Index,
    StoredBox,
    StoredTensor,
    coverage_error,
    intersection,
    slices_within,
)
from megatron3d.checkpoint.pieces import Piece, dtype_name
from megatron3d.checkpoint.read import BoxesByFile, Wanted
from megatron3d.comm.interface import Comm
from megatron3d.parallel.layout import Box, Shape, box_shape

# Bytes that a rank asks for at a time.  Twice as many are in use next to the state, and the same ones in every round.
ROUND_BYTES = 2**25
# Start of each box in what is sent, so that it can be used in place.
ALIGNMENT = 8


@dataclass(frozen=True)
class HeldStep:
    """Boxes of one step that a rank holds in host memory.

    Attributes:
        meta: the metadata of a checkpoint of that step; its cursors may be only those that this rank knows.
    """

    meta: Mapping[str, Any]
    pieces: Sequence[Piece]

    def listing(self) -> list[Any]:
        """Return what other ranks are told: the metadata, and by name shape, dtype and boxes of each tensor."""
        tensors: dict[str, tuple[Shape, str, list[Box]]] = {}
        for piece in self.pieces:
            if piece.tensor.numel():
                found = tensors.setdefault(piece.name, (piece.shape, dtype_name(piece.tensor.dtype), []))
                found[2].append(piece.box)
        return [self.meta, tensors]


# What a rank holds; a step may occur several times, as this rank's own boxes and as those of another rank.
Held = Sequence[HeldStep]


class StepKey(NamedTuple):
    """Identity of a step: after a rollback an iteration comes again, with other samples."""

    iteration: int
    consumed_samples: int

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> StepKey:
        """Return that of the metadata of a checkpoint."""
        return cls(meta["iteration"], meta["consumed_samples"])


def complete_steps(
    listings: Sequence[Sequence[Any]], needed: Mapping[str, Shape], num_preferred: int | None = None
) -> Iterator[Index]:
    """Yield the index of each step of which every element of the `needed` tensors is held, the newest step first.

    The `file` of a box is the number of the rank that holds it.

    Args:
        listings: for each rank, the listings of all that it holds.
        num_preferred: the first ranks, which are taken as holders where they can be; None: all.
    """
    preferred = len(listings) if num_preferred is None else num_preferred
    steps: dict[StepKey, list[tuple[int, Any, Any]]] = {}
    for rank, held in enumerate(listings):
        for meta, tensors in held:
            steps.setdefault(StepKey.of(meta), []).append((rank, meta, tensors))
    for key in sorted(steps, reverse=True):
        tensors = _assign([(rank, tensors) for rank, _, tensors in steps[key]], needed, (preferred, len(listings)))
        if tensors is not None:
            meta = _merged_meta([meta for _, meta, _ in steps[key]])
            yield Index.model_construct(None, iteration=key.iteration, meta=meta, tensors=tensors)


def _merged_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, JsonValue]:
    """Return the metadata of a step with the places in the data that any rank knows."""
    cursors = {lane: cursor for meta in metas for lane, cursor in meta["cursors"].items()}
    return {**metas[0], "cursors": cursors}


def _assign(
    held: Sequence[tuple[int, Mapping[str, Any]]], needed: Mapping[str, Shape], ranks: tuple[int, int]
) -> dict[str, StoredTensor] | None:
    """Return for each needed tensor boxes that cover it once, each with the rank it is taken from.

    None where an element is missing.  Of the ranks that hold a box, the one that has been assigned the fewest elements
    is taken.

    Args:
        ranks: number of ranks that are taken where they hold a box as well, and of all.
    """
    num_preferred, num_ranks = ranks
    assigned = [0] * num_ranks
    tensors: dict[str, StoredTensor] = {}
    for name, shape in needed.items():
        dtypes: set[str] = set()
        holders: dict[Box, list[int]] = {}
        for rank, each in held:
            if name in each:
                found_shape, dtype, boxes = each[name]
                dtypes.add(dtype)
                assert tuple(found_shape) == shape, f"{name} is {found_shape} in memory, and {shape} in this run"
                for box in boxes:
                    holders.setdefault(tuple((low, high) for low, high in box), []).append(rank)
        stored: list[StoredBox] = []
        for box, parts in _divide(shape, holders):
            rank = min(holders[box], key=lambda each: (each >= num_preferred, assigned[each]))
            assigned[rank] += sum(map(_numel, parts))
            stored += [StoredBox(part, str(rank), "", "") for part in parts]
        if sum(_numel(each.box) for each in stored) < math.prod(shape):
            return None
        assert len(dtypes) == 1, f"{name} is held as {sorted(dtypes)}"
        tensors[name] = StoredTensor(shape, dtypes.pop(), tuple(stored))
    return tensors


def _numel(box: Box) -> int:
    return math.prod(box_shape(box))


def _divide(shape: Shape, boxes: Iterable[Box]) -> Iterator[tuple[Box, list[Box]]]:
    """Yield boxes, the largest first, each with its parts that no box before it has."""
    ordered = sorted(boxes, key=_numel, reverse=True)
    if coverage_error(shape, ordered) is None:
        yield from ((box, [box]) for box in ordered)
        return
    taken: list[Box] = []
    left = math.prod(shape)
    for box in ordered:
        parts = [box]
        for other in taken if left else ():
            parts = [rest for part in parts for rest in _without(part, other)]
        if left and parts:
            yield box, parts
            taken.append(box)
            left -= sum(map(_numel, parts))


def _without(box: Box, other: Box) -> Iterator[Box]:
    """Yield boxes that together are `box` without what `other` has of it."""
    common = intersection(box, other)
    if common is None:
        yield box
        return
    for dim, ((low, high), (start, stop)) in enumerate(zip(box, common, strict=True)):
        for first, last in ((low, start), (stop, high)):
            if first < last:
                yield (*common[:dim], (first, last), *box[dim + 1 :])


class Request(NamedTuple):
    """A box that this rank wants, and the pieces to which its values go."""

    name: str
    box: Box
    pieces: tuple[Piece, ...]


class HeldBoxes:
    """A step in the memory of ranks, as a source of boxes.

    Args:
        index: of the step, as `complete_steps` yields it.
        held: what this rank holds.

    Attributes:
        local_bytes: bytes that this rank has taken from its own memory.
        received_bytes: bytes that it has received from other ranks.
    """

    def __init__(self, index: Index, held: Held, round_bytes: int = ROUND_BYTES) -> None:
        self.index, self._round_bytes = index, round_bytes
        self._pieces: dict[str, list[Piece]] = {}
        self.local_bytes = self.received_bytes = 0
        for step in held:
            for piece in step.pieces if StepKey.of(step.meta) == StepKey.of(index.meta) else ():
                self._pieces.setdefault(piece.name, []).append(piece)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"in memory, of iteration {self.index.iteration}"

    def fill(self, boxes: BoxesByFile, comm: Comm) -> list[str]:
        """Fill the pieces from this rank's memory and from that of others, over the network; nothing is damaged."""
        wanted: dict[int, list[Request]] = {}
        for holder, parts in boxes:
            for stored, places in parts.items():
                pieces: dict[tuple[str, Box], tuple[Piece, ...]] = {}
                for common, piece in places:
                    pieces[piece.name, common] = (*pieces.get((piece.name, common), ()), piece)
                assert all(intersection(box, stored.box) == box for _, box in pieces), "a box that is not held there"
                wanted.setdefault(int(holder), []).extend(Request(*each, to) for each, to in pieces.items())
        for request in wanted.pop(comm.mesh.rank, ()):
            self.local_bytes += _put(request, self._find(request.name, request.box))
        self._receive(wanted, comm)
        return []

    def _find(self, name: str, box: Box) -> Tensor:
        """Return the values of a box that this rank holds."""
        holding = next(each for each in self._pieces[name] if intersection(box, each.box) == box)
        return holding.tensor.detach()[slices_within(box, holding.box)]

    def _receive(self, wanted: Mapping[int, Sequence[Request]], comm: Comm) -> None:
        """Ask the holders, and answer the other ranks, in rounds, until no rank wants more."""
        rounds = list(self._rounds(wanted))
        received = torch.empty(2 * self._round_bytes if wanted else 0, dtype=torch.uint8)
        sent, is_last = torch.empty(0, dtype=torch.uint8), False
        while not is_last:
            requests = rounds.pop(0) if rounds else {}
            ranks = range(comm.mesh.world_size)
            asked = [[bool(rounds), [each[:2] for each in requests.get(rank, ())]] for rank in ranks]
            questions = [json.loads(bytes(each.numpy())) for each in comm.all_to_all_bytes([*map(_as_bytes, asked)])]
            found = [[self._find(name, _as_box(box)) for name, box in boxes] for _, boxes in questions]
            sizes = [sum(_room(each) for each in values) for values in found]
            sent = sent if len(sent) >= sum(sizes) else torch.empty(sum(sizes), dtype=torch.uint8)
            blocks = sent[: sum(sizes)].split(sizes)
            for values, block in zip(found, blocks, strict=True):
                _pack(values, block)
            answers = comm.all_to_all_bytes(blocks, received)
            for rank, mine in requests.items():
                self._put_all(mine, answers[rank])
            is_last = not any(goes_on for goes_on, _ in questions)

    def _rounds(self, wanted: Mapping[int, Sequence[Request]]) -> Iterator[dict[int, list[Request]]]:
        """Yield what is asked for in each round, by holder; larger boxes are asked for in parts."""
        found: dict[int, list[Request]] = {}
        num_bytes = 0
        for holder, requests in wanted.items():
            for request in requests:
                itemsize = self._dtype(request.name).itemsize
                for part in _parts(request.box, max(self._round_bytes // itemsize, 1)):
                    if found and num_bytes + _numel(part) * itemsize > self._round_bytes:
                        yield found
                        found, num_bytes = {}, 0
                    found.setdefault(holder, []).append(request._replace(box=part))
                    num_bytes += _numel(part) * itemsize
        if found:
            yield found

    def _dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.index.tensors[name].dtype)
        return found

    def _put_all(self, requests: Sequence[Request], answer: Tensor) -> None:
        start = 0
        for request in requests:
            shape, dtype = box_shape(request.box), self._dtype(request.name)
            values = answer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            start += _room(values)
            self.received_bytes += _put(request, values)
        assert start == len(answer), f"{len(answer)} bytes were received, and {start} are wanted"


def _room(values: Tensor) -> int:
    """Return the bytes that a box takes in what is sent."""
    return -(-values.nbytes // ALIGNMENT) * ALIGNMENT


def _pack(boxes: Sequence[Tensor], block: Tensor) -> None:
    """Copy boxes to bytes, each to its aligned place."""
    start = 0
    for values in boxes:
        block[start : start + values.nbytes].view(values.dtype).view(values.shape).copy_(values)
        start += _room(values)


def _as_box(ends: Sequence[Sequence[int]]) -> Box:
    return tuple((low, high) for low, high in ends)


def hand_over(held: Held, comm: Comm, num_kept: int) -> Held:
    """Return what this rank holds with boxes of ranks that the new layout leaves out, after the first `num_kept`.

    All ranks that hold something call this together, before those that stay restore.  What no rank that stays holds is
    divided among them, of every step of which all known tensors are complete.
    """
    listings = comm.gather_object([step.listing() for step in held])
    steps: list[Index] = []
    if listings is not None:
        shapes = {name: tuple(found[0]) for each in listings for _, names in each for name, found in names.items()}
        steps = list(complete_steps(listings, shapes, num_kept))
    packed: list[str] = comm.broadcast_object([step.packed().decode() for step in steps])
    received: list[HeldStep] = []
    for content in packed:
        index = Index.unpacked(content.encode())
        leaving = [(name, box) for name, tensor in index.tensors.items() for box in tensor.boxes]
        leaving = [(name, box) for name, box in leaving if int(box.file) >= num_kept]
        mine = leaving[comm.mesh.rank :: num_kept] if comm.mesh.rank < num_kept else []
        boxes: dict[str, dict[StoredBox, list[Wanted]]] = {}
        pieces: list[Piece] = []
        for name, stored in mine:
            tensor = index.tensors[name]
            memory = torch.empty(box_shape(stored.box), dtype=getattr(torch, tensor.dtype))
            pieces.append(Piece(name, tensor.shape, stored.box, memory))
            # Boxes of other tensors, with the same numbers, are equal to this one.
            boxes.setdefault(stored.file, {}).setdefault(stored, []).append((stored.box, pieces[-1]))
        HeldBoxes(index, held).fill(sorted(boxes.items()), comm)
        received += [HeldStep(index.meta, pieces)] if pieces else []
    return (*held, *received)


def _put(request: Request, values: Tensor) -> int:
    """Copy the values of a box to the pieces that want them; return their bytes."""
    for piece in request.pieces:
        piece.tensor.detach()[slices_within(request.box, piece.box)].copy_(values)
    return values.nbytes


def _parts(box: Box, max_numel: int) -> Iterator[Box]:
    """Yield parts of a box of at most `max_numel` elements, cut along its first dims."""
    if _numel(box) <= max_numel:
        yield box
        return
    (low, high), *rest = box
    rows = max_numel // _numel(tuple(rest))
    for start in range(low, high, max(rows, 1)):
        inner = [tuple(rest)] if rows else _parts(tuple(rest), max_numel)
        yield from (((start, min(start + max(rows, 1), high)), *each) for each in inner)


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
