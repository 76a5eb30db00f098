"""Fact: of steps that ranks hold in any boxes, the newest complete one is found; every box moves once, in rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from megatron3d.checkpoint.held import Held, HeldBoxes, HeldStep, complete_steps
from megatron3d.checkpoint.index import coverage_error
from megatron3d.checkpoint.pieces import Piece
from megatron3d.parallel.layout import Box, Shape, box_shape
from megatron3d.parallel.mesh import Mesh
from tests.support.turn_ranks import make_comm, run_turns

SHAPE = (6, 5, 4)
WHOLE: Box = ((0, 6), (0, 5), (0, 4))


def step(iteration: int, boxes: Sequence[Box], dtype: torch.dtype = torch.float64) -> HeldStep:
    """Return boxes of `w` of a step, whose elements are functions of step and place."""
    pieces = [Piece("w", SHAPE, box, values(iteration, box, dtype)) for box in boxes]
    return HeldStep({"iteration": iteration, "consumed_samples": 8 * iteration, "cursors": {}}, pieces)


def values(iteration: int, box: Box, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    whole = torch.arange(math.prod(SHAPE), dtype=dtype).view(SHAPE) + 1000 * iteration
    return whole[tuple(slice(*ends) for ends in box)].clone()


def random_box(source: random.Random, shape: Shape = SHAPE) -> Box:
    return tuple((low, source.randint(low + 1, size)) for size in shape for low in [source.randrange(size)])


def complete(held: Sequence[Held]) -> list[int]:
    return [index.iteration for index in complete_steps([[s.listing() for s in each] for each in held], {"w": SHAPE})]


@pytest.mark.parametrize("seed", range(40))
def test_each_element_gets_one_holder_that_has_it(seed: int) -> None:
    """Boxes of ranks overlap in any way: those of the index cover the tensor once, each inside one of its holder."""
    source = random.Random(seed)
    held = [[step(1, [random_box(source) for _ in range(3)])] for _ in range(8)]
    filled = torch.zeros(SHAPE, dtype=torch.bool)
    for (each,) in held:
        for piece in each.pieces:
            filled[tuple(slice(*ends) for ends in piece.box)] = True
    assert complete(held) == ([1] if filled.all() else [])
    held[0] = [step(1, [((0, 6), (0, 5), (0, 2)), ((0, 6), (0, 3), (2, 4))])]
    held[1] = [step(1, [((0, 6), (1, 5), (1, 4))])]
    (index,) = complete_steps([[s.listing() for s in each] for each in held], {"w": SHAPE})
    stored = index.tensors["w"].boxes
    assert coverage_error(SHAPE, [each.box for each in stored]) is None
    for part in stored:
        assert any(_common(part.box, piece.box) == part.box for piece in held[int(part.file)][0].pieces)


def test_steps_are_complete_by_themselves() -> None:
    """Halves of two steps are no step; of several complete ones the newest is the first."""
    top, bottom = ((0, 3), (0, 5), (0, 4)), ((3, 6), (0, 5), (0, 4))
    assert complete([[step(2, [top]), step(1, [bottom])], []]) == []
    assert complete([[step(2, [top]), step(1, [bottom])], [step(1, [top])]]) == [1]
    assert complete([[step(2, [top]), step(1, [WHOLE])], [step(2, [bottom])]]) == [2, 1]
    later = step(2, [bottom])
    other = HeldStep({**later.meta, "consumed_samples": 99}, later.pieces)
    assert complete([[step(2, [top]), other], []]) == []


def test_replicas_divide_what_is_sent() -> None:
    """Four ranks hold the same eight tensors: each sends two."""
    names = {f"w{i}": (4,) for i in range(8)}
    pieces = [Piece(name, (4,), ((0, 4),), torch.zeros(4)) for name in names]
    listing = HeldStep(step(1, []).meta, pieces).listing()
    (index,) = complete_steps([[listing]] * 4, names)
    assert sorted(each.file for tensor in index.tensors.values() for each in tensor.boxes) == sorted("00112233")


@pytest.mark.parametrize("round_bytes", [1, 8, 50, 10**6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_byte_arrives_in_rounds_of_any_size(round_bytes: int, dtype: torch.dtype) -> None:
    """Every rank wants another box, some none; an element is received once or taken from the rank's own memory."""
    mine: list[list[Box]] = [[((0, 6), (0, 5), (0, 1))], [((0, 4), (0, 5), (1, 4))], [((4, 6), (0, 5), (1, 4))], []]
    wanted: list[list[Box]] = [
        [],
        [WHOLE],
        [((1, 6), (2, 3), (0, 4)), ((0, 1), (0, 5), (0, 1))],
        [((0, 6), (4, 5), (0, 4))],
    ]

    def fill(rank: int, world_size: int) -> tuple[int, int]:
        comm = make_comm(Mesh((("t", world_size),), rank), ())
        held = [step(3, mine[rank], dtype)]
        listings = comm.broadcast_object(comm.gather_object([each.listing() for each in held]))
        (index,) = complete_steps(listings, {"w": SHAPE})
        source = HeldBoxes(index, held, round_bytes)
        pieces = [Piece("w", SHAPE, box, torch.zeros(box_shape(box), dtype=dtype)) for box in wanted[rank]]
        needed = [
            (each.file, {each: [(common, piece)]})
            for piece in pieces
            for each in index.tensors["w"].boxes
            if (common := _common(each.box, piece.box))
        ]
        assert source.fill(needed, comm) == []
        assert all(piece.tensor.equal(values(3, piece.box, dtype)) for piece in pieces)
        return source.local_bytes, source.received_bytes

    size = dtype.itemsize
    assert run_turns(fill, 4) == [(0, 0), (60 * size, 60 * size), (6 * size, 19 * size), (0, 24 * size)]


def _common(a: Box, b: Box) -> Box | None:
    common = tuple((max(low, start), min(high, stop)) for (low, high), (start, stop) in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None
