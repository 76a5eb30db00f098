"""What a rank holds of a logical tensor, and the two names of each data type: in the index and in safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from megatron3d.checkpoint.index import box_text
from megatron3d.parallel.layout import Box, Shape, box_shape

# safetensors' names, largest elements first, which is how a file orders them: then every box begins aligned.
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
# Hashed and written at one time: what a core's cache holds.
PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Piece:
    """A box of a logical global tensor of `shape`; `tensor` has the box's shape and may be any view.

    With `make`, `tensor` only says type and shape, and the numbers are made when they are written.
    """

    name: str
    shape: Shape
    box: Box
    tensor: Tensor
    make: Callable[[], Tensor] | None = None

    def __post_init__(self) -> None:
        held, wanted = tuple(self.tensor.shape), box_shape(self.box)
        assert held == wanted, f"{self.name}: the tensor is {held}, its box {box_text(self.box)} is {wanted}"

    @property
    def key(self) -> str:
        """Its name in a file: the tensor's, and the box."""
        return self.name + box_text(self.box)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, as the index says it."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in row-major order; its own memory where that is how it lies on the host."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def checksum(tensor: Tensor) -> str:
    """XXH3 (64 bits) of the bytes, in hexadecimal.

    On one core about as fast as a copy, and twice as fast as zlib's CRC-32 (benchmarks/results/checksums.json).
    """
    return xxhash.xxh3_64_hexdigest(raw_bytes(tensor))
