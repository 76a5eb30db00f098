"""Piece: the box of a logical tensor that a rank holds; names of dtypes in the index and in safetensors; checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from megatron3d.checkpoint.index import box_text
from megatron3d.parallel.layout import Box, Shape, box_shape

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


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy where it is contiguous on the host."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def checksum(tensor: Tensor) -> str:
    """Return the XXH3 checksum (64 bits) of a tensor's bytes, in hexadecimal.

    On one core about as fast as a copy, and twice as fast as zlib's CRC-32 (benchmarks/results/checksums.json).
    """
    return xxhash.xxh3_64_hexdigest(raw_bytes(tensor))
