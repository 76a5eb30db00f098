"""Fact: a run parses the index once and reads every byte of its checkpoint once, and every rank gets the saved bits.

Each byte is verified by a rank that loads it; what one rank finds, all ranks raise alike.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron3d.checkpoint import read
from megatron3d.checkpoint import read as loading
from megatron3d.checkpoint.index import read_index
from megatron3d.checkpoint.pieces import checksum
from megatron3d.checkpoint.read import BoxFile
from megatron3d.checkpoint.store import Piece, save
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import DATA, Mesh
from tests.support.turn_ranks import make_comm, run_turns

REPLICATED = Mesh((("replica", 1), ("data", 2), ("t", 2)))
IN_GROUPS = Mesh((("replica", 2), ("data", 2), ("t", 1)))
TENSOR_4 = Mesh((("replica", 1), ("data", 1), ("t", 4)))
ALONE = Mesh((("t", 1),))
AXES = (("replica",), ("data",), ("t",))
VALUES = torch.arange(48.0).reshape(12, 4)
VALUES[0, 0], VALUES[5, 1], VALUES[11, 3] = -0.0, torch.nan, -torch.inf


def pieces_of(mesh, memory):
    """Return the pieces of one rank: rows of `w` [12, 4] split over t, and all of `b` [12] in `memory`."""
    ranks, index = mesh.size(("t",)), mesh.index(("t",))
    low, high = (12 * edge // ranks for edge in (index, index + 1))
    w, b = memory[: (high - low) * 4].view(-1, 4), memory[(high - low) * 4 :][:12]
    return [Piece("w", (12, 4), ((low, high), (0, 4)), w), Piece("b", (12,), ((0, 12),), b)]


def empty(mesh):
    """Return the memory of one rank, with two elements of padding."""
    return torch.full((48 // mesh.size(("t",)) + 12 + 2,), torch.nan)


def write(rank, world_size, root, mesh):
    """Save rows of `w` from every rank, and from the first rank `b`, the last column of `w`."""
    rows = VALUES.chunk(world_size)[rank]
    low = rank * len(rows)
    pieces = [Piece("w", (12, 4), ((low, low + len(rows)), (0, 4)), rows)]
    pieces += [Piece("b", (12,), ((0, 12),), VALUES[:, 3].contiguous())] if rank == 0 else []
    return save(root, 3, pieces, {"a": 1}, make_comm(mesh.at(rank), AXES))


def fill(rank, world_size, folder, mesh):
    """Load on one rank; return the loaded pieces and the damage, or the problems of the UserError."""
    comm = make_comm(mesh.at(rank), AXES)
    memory = empty(mesh)
    pieces = pieces_of(comm.mesh, memory)
    try:
        index = loading.read_index_on_all_ranks(folder, comm, [piece.name for piece in pieces])
        damage = loading.load_on_all_ranks(read.CheckpointFolder(folder, index), pieces, [memory], comm, DATA)
    except UserError as error:
        return error.problems
    return memory, damage


def expected(mesh, rank):
    memory = torch.zeros_like(empty(mesh))
    for piece in pieces_of(mesh.at(rank), memory):
        whole = VALUES if piece.name == "w" else VALUES[:, 3]
        piece.tensor.copy_(whole[tuple(slice(*ends) for ends in piece.box)])
    return memory


class Reads:
    """Counts parsed indexes, boxes read, and boxes of which the checksum was computed."""

    def __init__(self, monkeypatch):
        self.indexes, self.verified = 0, 0
        self.boxes: Counter[str] = Counter()
        read_box = BoxFile.read

        def parse(folder):
            self.indexes += 1
            return read_index(folder)

        def load(file, stored, tensor):
            self.boxes[stored.key] += 1
            return read_box(file, stored, tensor)

        def verify(box):
            self.verified += 1
            return checksum(box)

        monkeypatch.setattr(loading, "read_index", parse)
        monkeypatch.setattr(BoxFile, "read", load)
        monkeypatch.setattr(read, "checksum", verify)


@pytest.mark.parametrize("mesh", [REPLICATED, IN_GROUPS, TENSOR_4], ids=["data 2", "data 2 x 2", "tensor 4"])
@pytest.mark.parametrize("num_writers", [1, 2, 4])
def test_every_rank_gets_the_saved_bits(tmp_path, monkeypatch, mesh, num_writers):
    """Catches a sum of floats (-0.0 becomes 0.0), a part that no replica reads, and padding that is not cleared."""
    (folder, *_) = run_turns(write, num_writers, tmp_path, Mesh((("t", num_writers),)))
    reads = Reads(monkeypatch)
    for rank, (memory, damage) in enumerate(run_turns(fill, 4, folder, mesh)):
        assert damage == [] and torch.equal(memory.view(torch.int32), expected(mesh, rank).view(torch.int32))
    assert reads.indexes == 1, "only rank 0 parses the index"
    tensor_ranks = mesh.size(("t",))
    assert reads.boxes.pop("b[0:12]") == tensor_ranks, "one replica of each tensor rank reads what all of them hold"
    if num_writers >= tensor_ranks:
        assert set(reads.boxes.values()) == {1}, "each box of w is read by one rank"
    assert len(reads.boxes) == num_writers
    assert reads.verified == num_writers + tensor_ranks, "each box is verified once by those that hold all of it"


@pytest.mark.parametrize("mesh", [REPLICATED, TENSOR_4], ids=["data 2", "tensor 4"])
def test_a_damaged_byte_is_found_in_whichever_rank_loads_it(tmp_path, mesh):
    """One box is loaded by several ranks in parts: catches one that only readers of whole boxes verify."""
    (folder,) = run_turns(write, 1, tmp_path, ALONE)
    path = folder / "rank_00000.safetensors"
    content = path.read_bytes()
    for place in range(len(content) - 4 * 60, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found = {tuple(damage) for _, damage in run_turns(fill, 4, folder, mesh)}
        ((damage,),) = found
        assert damage.startswith("rank_00000.safetensors: ") and "is damaged" in damage


def test_what_one_rank_cannot_read_all_ranks_report(tmp_path):
    (folder, *_) = run_turns(write, 2, tmp_path, Mesh((("t", 2),)))
    (folder / "rank_00001.safetensors").unlink()
    outcomes = [damage for _, damage in run_turns(fill, 4, folder, REPLICATED)]
    assert outcomes == [outcomes[0]] * 4 and "rank_00001.safetensors is missing or damaged" in outcomes[0][0]
    (folder / "index.json").write_text("{")
    refused = run_turns(fill, 4, folder, REPLICATED)
    assert refused == [refused[0]] * 4 and "index.json is damaged" in refused[0][0]


def test_a_tensor_that_the_checkpoint_lacks_is_named_on_all_ranks(tmp_path):
    (folder, *_) = run_turns(write, 1, tmp_path, ALONE)

    def ask(rank, world_size):
        comm = make_comm(REPLICATED.at(rank), AXES)
        index = loading.read_index_on_all_ranks(folder, comm, ["v"])
        v = torch.zeros(2)
        with pytest.raises(UserError) as caught:
            pieces = [Piece("v", (2,), ((0, 2),), v)]
            loading.load_on_all_ranks(read.CheckpointFolder(folder, index), pieces, [v], comm, DATA)
        return caught.value.problems

    problems = run_turns(ask, 4)
    assert problems == [problems[0]] * 4 and "tensor v is not in it" in problems[0][0]


def test_ranks_that_need_a_part_divide_the_verification(tmp_path):
    """Catches a rule that lets the first rank verify everything."""
    boxes = 64
    w = torch.rand(boxes, 8)
    pieces = [Piece(f"w{i}", (8,), ((0, 8),), w[i]) for i in range(boxes)]
    folder = save(tmp_path, 1, pieces, {}, make_comm(ALONE, AXES))
    tensors = read_index(folder).tensors.values()
    halves = [[(((low, low + 4),), pieces[0])] for low in (0, 4)]
    counts = [sum(read._has_chosen_element(each.boxes[0], half) for each in tensors) for half in halves]
    assert sum(counts) == boxes and min(counts) > boxes // 4


def test_the_store_carries_no_index(tmp_path, monkeypatch):
    """Rank 0's store serves all ranks: catches an index that is sent as a Python object."""
    pieces = [Piece(f"w{i}", (8,), ((0, 8),), torch.rand(8)) for i in range(500)]
    folder = save(tmp_path, 1, pieces, {}, make_comm(ALONE, AXES))
    assert (folder / "index.json").stat().st_size > 50_000

    def ask(rank, world_size):
        comm, sent = make_comm(TENSOR_4.at(rank), AXES), []
        broadcast = comm.broadcast_object

        def count(value):
            sent.append(len(repr(value)))
            return broadcast(value)

        monkeypatch.setattr(comm, "broadcast_object", count)
        index = loading.read_index_on_all_ranks(folder, comm, [f"w{rank}", "w7", "absent"])
        return set(index.tensors), index.tensors["w7"] == read_index(folder).tensors["w7"], sum(sent)

    assert all(
        (names, equal) == ({f"w{rank}", "w7"}, True) and size < 200
        for rank, (names, equal, size) in enumerate(run_turns(ask, 4))
    )
