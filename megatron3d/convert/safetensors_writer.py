"""Write safetensors files tensor by tensor, with one in memory: their sizes are known before their values.

    8 bytes: length of the header | header: JSON {name: {dtype, shape, data_offsets}} | the tensors' bytes, end to end

Format: https://github.com/huggingface/safetensors.  Several files are named and indexed as transformers does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron3d.convert.hub_weights import INDEX, SINGLE
from megatron3d.convert.output_files import write_json
from megatron3d.convert.tensor_names import FileTensor
from megatron3d.runtime.files import fsync

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


@dataclass(frozen=True)
class SafetensorsFile:
    """A file and its tensors."""

    name: str
    tensors: tuple[FileTensor, ...]


def dtype_of(tensor: FileTensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a file whose weights have a dtype: state stays in fp32, as training has it."""
    return torch.float32 if tensor.is_state else dtype


def num_bytes(tensor: FileTensor, dtype: torch.dtype) -> int:
    """Return the size in bytes of a tensor's values, in a file whose weights have a dtype."""
    return torch.Size(tensor.shape).numel() * dtype_of(tensor, dtype).itemsize


def divide(tensors: Sequence[FileTensor], dtype: torch.dtype, max_bytes: int) -> tuple[SafetensorsFile, ...]:
    """Divide tensors, in order, into files of at most `max_bytes`; a larger tensor has a file of its own."""
    groups: list[list[FileTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = num_bytes(tensor, dtype)
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    if len(groups) == 1:
        return (SafetensorsFile(SINGLE, tuple(groups[0])),)
    names = (f"model-{place:05d}-of-{len(groups):05d}.safetensors" for place in range(1, len(groups) + 1))
    return tuple(SafetensorsFile(name, tuple(group)) for name, group in zip(names, groups, strict=True))


def write_shards(folder: Path, shards: Sequence[SafetensorsFile], dtype: torch.dtype, values: Iterator[Tensor]) -> None:
    """Write the files, and an index if there are several; `values` come in the order of the files' tensors."""
    for shard in shards:
        _write(folder / shard.name, shard.tensors, dtype, values)
    if len(shards) > 1:
        total = sum(num_bytes(tensor, dtype) for shard in shards for tensor in shard.tensors)
        named = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(named.items()))}
        write_json(folder / INDEX, index)


def _write(path: Path, tensors: Sequence[FileTensor], dtype: torch.dtype, values: Iterator[Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + num_bytes(tensor, dtype)
        code = _CODES[dtype_of(tensor, dtype)]
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            value = next(values).contiguous()
            described = tensor.shape, dtype_of(tensor, dtype)
            assert (tuple(value.shape), value.dtype) == described, f"{tensor.name} is {value.shape}"
            file.write(value.view(-1).view(torch.uint8).numpy().data)
    fsync(path)
