"""A checkpoint as a folder that torch.distributed.checkpoint reads, written with one tensor in memory.

    folder/__0_0.distcp    each tensor as torch.save writes it, one after another
    folder/.metadata       a pickle: shape and dtype of each tensor, and where its bytes are

The pickle is written opcode by opcode: each object calls its class, so that any version of torch rebuilds its own
(opcodes: Python's `pickletools`; classes: `torch.distributed.checkpoint.metadata` and `.filesystem`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron3d.checkpoint import store
from megatron3d.checkpoint.index import read_index
from megatron3d.checkpoint.store import Piece
from megatron3d.convert.conversion import ConversionReport, ConversionRequest
from megatron3d.convert.output_files import output_folder
from megatron3d.runtime.files import fsync

DATA_FILE, METADATA = "__0_0.distcp", ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class _Call:
    """A call of a class by its module and name; with no arguments at all (None), the object of that name itself."""

    module: str
    name: str
    args: tuple[object, ...] | None = None


def to_torch(request: ConversionRequest) -> ConversionReport:
    """Write all tensors of a checkpoint, weights and optimizer state, under their names and in their dtypes there.

    Raises UserError where the checkpoint is missing or damaged, or the folder exists or cannot be written.
    """
    checkpoint = store.resolve(request.source)
    tensors = read_index(checkpoint).tensors
    described: dict[object, object] = {}
    places: dict[object, object] = {}
    with output_folder(request.target) as folder:
        with (folder / DATA_FILE).open("wb") as file:
            for name, stored in tensors.items():
                tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
                box = tuple((0, size) for size in stored.shape)
                store.load(checkpoint, [Piece(name, stored.shape, box, tensor)])
                start = file.tell()
                torch.save(tensor, file)
                described[name] = _tensor_metadata(stored.shape, stored.dtype)
                index = _Call(_METADATA, "MetadataIndex", (name, _size((0,) * len(stored.shape))))
                place = (DATA_FILE, start, file.tell() - start)
                places[index] = _Call("torch.distributed.checkpoint.filesystem", "_StorageInfo", place)
            num_bytes = file.tell()
        fsync(folder / DATA_FILE)
        metadata = _Call(_METADATA, "Metadata", (described, None, places))
        (folder / METADATA).write_bytes(b"\x80\x02" + _pickled(metadata) + b".")
        fsync(folder / METADATA)
    return ConversionReport((f"{len(tensors)} tensors, {num_bytes:,} bytes",))


def _tensor_metadata(shape: tuple[int, ...], dtype: str) -> _Call:
    """Return the metadata of a tensor that one chunk holds whole."""
    properties = _Call(_METADATA, "TensorProperties", (_Call("torch", dtype),))
    chunk = _Call(_METADATA, "ChunkStorageMetadata", (_size((0,) * len(shape)), _size(shape)))
    return _Call(_METADATA, "TensorStorageMetadata", (properties, _size(shape), [chunk]))


def _size(shape: tuple[int, ...]) -> _Call:
    return _Call("torch", "Size", (shape,))


def _pickled(value: object) -> bytes:
    """Return the opcodes that push a value, of protocol 2."""
    match value:
        case None:
            return b"N"
        case int():
            content = value.to_bytes(8, "little", signed=True)
            return b"\x8a\x08" + content
        case str():
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        case tuple():
            return b"(" + b"".join(map(_pickled, value)) + b"t"
        case list():
            return b"](" + b"".join(map(_pickled, value)) + b"e"
        case Mapping():
            return b"}(" + b"".join(_pickled(part) for item in value.items() for part in item) + b"u"
        case _Call():
            name = f"c{value.module}\n{value.name}\n".encode()
            return name if value.args is None else name + _pickled(value.args) + b"R"
    raise AssertionError(f"{type(value)} is not among the types of the metadata")
