"""Fact: a rank's file is a safetensors file like the library's own, and is never in memory as a whole."""

from __future__ import annotations

import tracemalloc

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.checkpoint.piece import DTYPES, Piece, checksum
from megatron3d.checkpoint.write import write_boxes

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)


def whole(name, tensor):
    """A piece that is a whole tensor."""
    return Piece(name, tuple(tensor.shape), tuple((0, size) for size in tensor.shape), tensor)


@given(
    st.dictionaries(
        NAMES, st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=3)), max_size=6
    )
)
def test_the_library_reads_it(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("file") / "rank_00000.safetensors"
    made = {
        name: torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
        if dtype != torch.bool
        else torch.randint(0, 2, shape) == 1
        for name, (dtype, shape) in tensors.items()
    }
    stored = write_boxes(path, [whole(name, tensor) for name, tensor in made.items()])
    full = {name: tensor for name, tensor in made.items() if tensor.numel()}
    assert stored.keys() == full.keys()
    assert path.exists() == bool(full)
    read = safetensors.torch.load_file(path) if full else {}
    assert len(read) == len(full)
    for name, tensor in full.items():
        (box,) = stored[name].boxes
        got = read[box.key]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert got.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == content
        assert box.checksum == checksum(tensor) == xxhash.xxh3_64_hexdigest(content)


def test_memory_is_one_box(tmp_path):
    """Of boxes that are no contiguous memory; contiguous ones need none."""
    boxes = [Piece(f"w{i}", (256, 1024), ((0, 256), (0, 1024)), torch.ones(1024, 256).t()) for i in range(12)]
    held = []

    class Watched(Piece):
        @property
        def key(self):
            held.append(tracemalloc.get_traced_memory()[0])
            return super().key

    size = boxes[0].tensor.nbytes
    tracemalloc.start()
    try:
        write_boxes(tmp_path / "rank_00000.safetensors", boxes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * size, "Python's own memory"
    assert (tmp_path / "rank_00000.safetensors").stat().st_size > 12 * size


def test_a_box_twice_or_a_file_twice(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    w = whole("w", torch.ones(2))
    with pytest.raises(AssertionError, match="was given twice"):
        write_boxes(path, [w, w])
    write_boxes(path, [w])
    with pytest.raises(FileExistsError):
        write_boxes(path, [w])
