"""Pieces of logical tensors that a rank writes or reads for a parameter and its optimizer state.

Their names are `model.<part>` and, for each kind of state of the update rule, `optimizer.<state>.<part>`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from megatron3d.checkpoint.index import box_text
from megatron3d.model.params import part_views
from megatron3d.parallel.layout import Box, ParamSpec, Shape, box_shape
from megatron3d.parallel.mesh import PIPELINE, Axes, Mesh
from megatron3d.zero import Buffers

# safetensors' names.  Files store the largest elements first, so that every box is aligned.
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
# Bytes hashed and written together: they fit in a core's cache.
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor of global `shape`; `tensor` has the shape of the box and may be any view.

    With `compute`, `tensor` only has the dtype and shape, and the values are computed when they are written.
    """

    name: str
    shape: Shape
    box: Box
    tensor: Tensor
    compute: Callable[[], Tensor] | None = None

    def __post_init__(self) -> None:
        held, wanted = tuple(self.tensor.shape), box_shape(self.box)
        assert held == wanted, f"{self.name}: the tensor is {held}, its box {box_text(self.box)} is {wanted}"

    @property
    def key(self) -> str:
        """Key in a safetensors file: the tensor's name and the box."""
        return self.name + box_text(self.box)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the index, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return what stands before tensors that are written end to end, padded so that they begin at a multiple of 8."""
    assert sys.byteorder == "little", "safetensors files are little-endian"
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy where it is contiguous on the host."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def checksum(tensor: Tensor) -> str:
    """Return the XXH3 checksum (64 bits) of a tensor's bytes, in hexadecimal.

    On one core about as fast as a copy, and twice as fast as zlib's CRC-32 (benchmarks/results/checksums.json).
    """
    return xxhash.xxh3_64_hexdigest(raw_bytes(tensor))


class ParamRange(NamedTuple):
    """Elements [start, stop) of the local tensor of a parameter."""

    name: str
    spec: ParamSpec
    start: int
    stop: int


def param_pieces(prefix: str, spec: ParamSpec, local: Tensor, mesh: Mesh, start: int = 0) -> list[Piece]:
    """Return the pieces of `<prefix>.<part name>` in `local`, without padding; their tensors are views of `local`.

    Args:
        local: the local tensor of a parameter, or a range of its elements that starts at element `start`.
    """
    views = part_views(spec, local, mesh, start)
    return [Piece(f"{prefix}.{part.name}", part.shape, box, view) for part, box, view in views]


def ranges_to_write(buffers: Buffers) -> dict[str, ParamRange]:
    """Return the range of each parameter, and of its optimizer state, that this rank writes: `split_among_replicas`."""
    held = [
        ParamRange(name, buffers.specs[name], start, start + len(values))
        for name, start, values in buffers.shards("main")
    ]
    return {each.name: each for each in split_among_replicas(held, buffers.comm.mesh, buffers.sharding.axes)}


def split_among_replicas(held: Iterable[ParamRange], mesh: Mesh, zero_axes: Axes = ()) -> Iterator[ParamRange]:
    """Apply the save rule: ranks that replicate elements each write an equal number of them.

        rank 0 of 3   | a a a a a b |
        rank 1 of 3               | b b b c c |           three ranks hold a, b and c
        rank 2 of 3                         | c c c c c |

    Such ranks differ along axes that are neither in the layout nor used by ZeRO (`zero_axes`).  Their parameters, one
    after another, are split into as many parts as there are such ranks, at starts of rows.  Where two pipeline ranks
    hold a parameter, each does this for one half.  Every rank computes its part without communication.
    """
    groups: dict[Axes, list[ParamRange]] = {}
    for each in held:
        split = each.spec.axes | {PIPELINE, *zero_axes}
        copies = mesh.without(mesh.names, split)
        groups.setdefault(copies, []).append(_half_of_pipeline_rank(_without_padding(each, mesh), mesh))
    for copies, group in groups.items():
        yield from _part(group, mesh.index(copies), mesh.size(copies), mesh)


def _without_padding(held: ParamRange, mesh: Mesh) -> ParamRange:
    """Exclude padding rows at the end of a parameter with a single part, such as those of the vocabulary."""
    spec = held.spec
    if len(spec.parts) > 1 or spec.blocks > 1:
        return held
    ((low, _), *_), (rows, *others) = spec.part_boxes(mesh)[0], spec.local_shape(mesh)
    real = min(max(spec.parts[0].shape[0] - low, 0), rows) * math.prod(others)
    return held._replace(start=min(held.start, real), stop=min(held.stop, real))


def _half_of_pipeline_rank(held: ParamRange, mesh: Mesh) -> ParamRange:
    """Return the part of the range that belongs to this one of the pipeline ranks that hold the parameter."""
    holders = held.spec.holders
    if len(holders) == 1:
        return held
    place, numel = holders.index(mesh.coord(PIPELINE)), math.prod(held.spec.local_shape(mesh))
    low, high = (_row_start(held.spec, numel * edge // len(holders), mesh) for edge in (place, place + 1))
    start, stop = (min(max(edge, low), high) for edge in (held.start, held.stop))
    return held._replace(start=start, stop=stop)


def _part(group: list[ParamRange], index: int, ranks: int, mesh: Mesh) -> Iterator[ParamRange]:
    """Yield the ranges of part `index` out of `ranks` parts with equally many elements."""
    total = sum(each.stop - each.start for each in group)
    low, high = (total * edge // ranks for edge in (index, index + 1))
    passed = 0
    for each in group:
        start, stop = (_cut(each, each.start + edge - passed, mesh) for edge in (low, high))
        yield each._replace(start=start, stop=stop)
        passed += each.stop - each.start


def _cut(held: ParamRange, element: int, mesh: Mesh) -> int:
    """Round an element down to the start of its row, or to an end of the range."""
    if element >= held.stop:
        return held.stop
    return max(_row_start(held.spec, element, mesh), held.start)


def _row_start(spec: ParamSpec, element: int, mesh: Mesh) -> int:
    """Return the first element of the row of an element."""
    shape = spec.local_shape(mesh)
    width = math.prod(shape[1:])
    return element if element >= math.prod(shape) or not width else element // width * width
