"""Fact: a malicious checkpoint is refused with a reason.

Nothing in it is executed, no file outside its folder is opened, and no memory is allocated for sizes it only claims.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import tracemalloc

import pytest
import torch
import xxhash

from megatron3d.checkpoint.compare import describe_differences, mean_pieces
from megatron3d.checkpoint.index import MAX_BYTES, read_index
from megatron3d.checkpoint.read import load
from megatron3d.checkpoint.store import Piece, save, verify
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import Mesh
from tests.support.checkpoints import newest_intact

ONE = Mesh((("x", 1),))
FILE = "rank_00000.safetensors"
LARGEST = 2**24


@pytest.fixture
def checkpoint(tmp_path, run_ranks):
    """Save `model.w` [3, 2] in one file."""
    w = torch.arange(6.0).reshape(3, 2)
    piece = Piece("model.w", (3, 2), ((0, 3), (0, 2)), w)
    return run_ranks(ONE, lambda comm: save(tmp_path / "run", 3, [piece], {}, comm))[0]


class Harm:
    """Object whose unpickling would execute code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def header(entry):
    text = json.dumps({"model.w[0:3,0:2]": entry}).encode()
    return struct.pack("<Q", len(text)) + text


F32 = {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}
FILES = {
    "a pickle": lambda here: pickle.dumps(Harm(here / "harm")),
    "a pickle behind a header": lambda here: header(F32) + pickle.dumps(Harm(here / "harm")),
    "a header without end": lambda here: struct.pack("<Q", 2**63) + b"{",
    "a header of 90 MB": lambda here: struct.pack("<Q", 90_000_000) + b"{" + b" " * 89_999_998 + b"}",
    "a header of 200 MB": lambda here: struct.pack("<Q", 200_000_000) + b" " * 1000,
    "deep JSON": lambda here: struct.pack("<Q", 100_000) + b"[" * 100_000,
    "numbers beyond the file": lambda here: header(F32 | {"shape": [2**40], "data_offsets": [0, 2**42]}),
    "numbers that overflow": lambda here: header(F32 | {"shape": [2**62, 2**62], "data_offsets": [0, 24]}),
    "numbers backwards": lambda here: header(F32 | {"data_offsets": [24, 0]}) + bytes(24),
    "another type": lambda here: header(F32 | {"dtype": "I32"}) + bytes(24),
    "another shape": lambda here: header(F32 | {"shape": [2, 3]}) + bytes(24),
    "an unknown type": lambda here: header(F32 | {"dtype": "PICKLE"}) + bytes(24),
    "more behind the numbers": lambda here: header(F32) + bytes(48),
    "nothing": lambda here: b"",
}


def refusals(checkpoint):
    """Return the refusal of each way to read a checkpoint."""
    w = torch.full((3, 2), torch.nan)
    said = list(verify(checkpoint))
    for action in (
        lambda: load(checkpoint, [Piece("model.w", (3, 2), ((0, 3), (0, 2)), w)]),
        lambda: list(describe_differences(checkpoint, checkpoint)),
        lambda: [piece.compute() for piece in mean_pieces([checkpoint]) if piece.compute],
    ):
        with pytest.raises(UserError) as caught:
            action()
        said += caught.value.problems
    assert bool(w.isnan().all()), "something was loaded"
    good, passed = newest_intact(checkpoint.parent)
    assert good is None and len(passed) == 1
    return said


@pytest.mark.parametrize("name", FILES)
def test_hostile_files(checkpoint, tmp_path, name):
    (checkpoint / FILE).write_bytes(FILES[name](tmp_path))
    tracemalloc.start()
    try:
        said = refusals(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < LARGEST
    finally:
        tracemalloc.stop()
    assert all(FILE in problem for problem in said) and len(said) >= 4
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", [FILE, "index.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(checkpoint, name, make):
    (checkpoint / name).unlink()
    make(checkpoint / name)
    assert all(name in problem for problem in refusals(checkpoint))


def box_of(index):
    return index["tensors"]["model.w"]["boxes"][0]


def _huge(index):
    index["tensors"]["model.w"]["shape"] = [2**40, 2**20]
    box_of(index)["box"] = [[0, 2**40], [0, 2**20]]


INDEXES = {
    "up": lambda index: box_of(index).update(file="../../etc/rank_00000.safetensors"),
    "absolute": lambda index: box_of(index).update(file="/etc/rank_00000.safetensors"),
    "hidden newline": lambda index: box_of(index).update(file="rank_00000.safetensors\n"),
    "a pickle": lambda index: box_of(index).update(file="rank_00000.pt"),
    "more memory than there is": _huge,
    "negative": lambda index: box_of(index).update(box=[[-3, 3], [0, 2]]),
    "no numbers": lambda index: box_of(index).update(box=[["0", 3], [0, 2]]),
    "beyond any integer": lambda index: index["tensors"]["model.w"].update(shape=[10**400, 2]),
    "another key": lambda index: box_of(index).update(key="__metadata__"),
    "a thousand dims": lambda index: (
        index["tensors"]["model.w"].update(shape=[3, 2] + [1] * 998),
        box_of(index).update(box=[[0, 3], [0, 2]] + [[0, 1]] * 998),
    ),
    "nothing": lambda index: (
        index["tensors"]["model.w"].update(shape=[0, 2]),
        box_of(index).update(box=[[0, 0], [0, 2]]),
    ),
    "a negative iteration": lambda index: index.update(iteration=-1),
    "a key of a megabyte": lambda index: box_of(index).update(key="k" * 10**6),
    "no type of numbers": lambda index: index["tensors"]["model.w"].update(dtype="os.system"),
    "a name that moves the cursor": lambda index: index["tensors"].update({"\x1b[2J": index["tensors"]["model.w"]}),
}


def dumped(index):
    """Return what the checksum of an index is taken of."""
    return json.dumps(index, separators=(",", ":")).encode()


@pytest.mark.parametrize("name", INDEXES)
def test_hostile_indexes(checkpoint, name):
    """Write the changed index with a matching checksum, where the change leaves an index at all."""
    path = checkpoint / "index.json"
    index = json.loads(path.read_text())
    INDEXES[name](index)
    index.pop("checksum")
    path.write_text(json.dumps(index | {"checksum": xxhash.xxh3_64_hexdigest(dumped(index))}))
    tracemalloc.start()
    try:
        said = verify(checkpoint)
        assert said and all(len(text) < 1000 and "its checksum" not in text for text in said)
        w = torch.zeros(3, 2)
        with pytest.raises(UserError):
            load(checkpoint, [Piece("model.w", (3, 2), ((0, 3), (0, 2)), w)])
        assert newest_intact(checkpoint.parent)[0] is None and not w.any()
        for action in (describe_differences, lambda *paths: (p.compute() for p in mean_pieces(paths) if p.compute)):
            try:
                done = list(action(checkpoint, checkpoint))
            except UserError:
                continue
            assert not done, "an index that is no one's type has nothing to average"
        assert tracemalloc.get_traced_memory()[1] < LARGEST
    finally:
        tracemalloc.stop()


def test_one_place_for_two_boxes_is_read_once(checkpoint):
    """Otherwise a short index could ask for a large box to be hashed any number of times."""
    path = checkpoint / "index.json"
    index = json.loads(path.read_text())
    index["tensors"]["model.v"] = index["tensors"]["model.w"]
    index.pop("checksum")
    path.write_text(json.dumps(index | {"checksum": xxhash.xxh3_64_hexdigest(dumped(index))}))
    (said,) = verify(checkpoint)
    assert said == f"index.json is damaged: {FILE}: model.w[0:3,0:2] is the place of two boxes"


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5, "1" * 10**6, '"' + "a" * 10**6, "{}", "null", ""])
def test_json_that_is_not_an_index_is_refused(checkpoint, text):
    (checkpoint / "index.json").write_text(text)
    with pytest.raises(UserError, match=r"index\.json is damaged"):
        read_index(checkpoint)


def test_an_index_that_would_fill_memory_is_not_read(checkpoint):
    with (checkpoint / "index.json").open("r+b") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(UserError, match=f"index.json has {MAX_BYTES + 1} bytes, more than any index"):
        read_index(checkpoint)


@pytest.mark.parametrize("size", [None, 90_000_000, 2**30, 2**40, 2**62], ids=str)
def test_a_file_that_is_longer_than_its_header_says_is_not_mapped(checkpoint, size):
    """A terabyte of holes cannot be mapped under a limit of memory: a resume takes the older checkpoint instead.

    Bug that this finds: it is mapped nevertheless where its header, too, is longer than that of any file.
    """
    os.truncate(checkpoint / FILE, 2**40)
    if size is not None:
        with (checkpoint / FILE).open("r+b") as file:
            file.write(struct.pack("<Q", size))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**39, hard))
    try:
        assert any("and its header" in problem for problem in verify(checkpoint))
        assert newest_intact(checkpoint.parent)[0] is None
        with pytest.raises(UserError, match="and its header"):
            load(checkpoint, [Piece("model.w", (3, 2), ((0, 3), (0, 2)), torch.empty(3, 2))])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
