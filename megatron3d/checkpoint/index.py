"""`index.json`: which file of a checkpoint holds which box of which logical tensor, and what describes the run.

{"format": ..., "version": 2, "iteration": 100, "meta": {...},
 "tensors": {"model.wte": {"shape": [8, 4], "dtype": "float32",
                           "boxes": [{"box": [[0, 8], [0, 4]], "file": "rank_00000.safetensors", "key": ...,
                                      "checksum": "62f2ef4a9a2b4b9d"}]}},
 "checksum": of all that stands before, written in this order without spaces}

Whatever is read here was perhaps written by somebody who means harm: nothing in it is executed, names no file outside
of the folder, or has memory taken for it before it agrees with what is there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from megatron3d.errors import UserError
from megatron3d.parallel.layout import Box, Shape

FILE_NAME = "index.json"
FORMAT = "megatron3d checkpoint"
VERSION = 2
# Largest index that is read: that of a trillion parameters on ten thousand ranks has some hundred megabytes.
MAX_BYTES = 2**30
CHECKSUM = "^[0-9a-f]{16}$"
# Of a tensor: what a terminal shows as it is.
Name = Annotated[str, Field(pattern="^[!-~]{1,500}$")]


class _IndexModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class StoredBox(_IndexModel):
    """One box in a file beside the index; `file` cannot lead out of the checkpoint's folder."""

    box: Box
    file: str = Field(pattern=r"^rank_[0-9]{5,}\.safetensors$")
    key: str
    checksum: str = Field(pattern=CHECKSUM)


class StoredTensor(_IndexModel):
    """A logical tensor and where its boxes are."""

    shape: Shape
    dtype: str
    boxes: tuple[StoredBox, ...]

    def coverage_error(self) -> str | None:
        """What keeps the boxes from covering the tensor exactly once."""
        return coverage_error(self.shape, (stored.box for stored in self.boxes))


class _Header(BaseModel):
    """What every version of the index has."""

    format: str
    version: int


class Index(_IndexModel):
    """A whole checkpoint without its numbers."""

    format: str = FORMAT
    version: int = VERSION
    iteration: int
    meta: dict[str, JsonValue]
    tensors: dict[Name, StoredTensor]
    checksum: str | None = Field(None, pattern=CHECKSUM)

    def with_prefix(self, prefix: str) -> Index:
        """The same with only the tensors whose names begin so."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}
        return self.model_copy(update={"tensors": tensors})

    def with_checksum(self) -> Index:
        """The same with its checksum."""
        content = self.model_dump_json(exclude={"checksum"}).encode()
        return self.model_copy(update={"checksum": xxhash.xxh3_64_hexdigest(content)})


def merge_tensors(parts: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """The tensors of all ranks' files; every element of each must have been written exactly once."""
    merged: dict[str, StoredTensor] = {}
    boxes: dict[str, list[StoredBox]] = {}
    for part in parts:
        for name, tensor in part.items():
            known = merged.setdefault(name, tensor)
            same = (known.shape, known.dtype) == (tensor.shape, tensor.dtype)
            assert same, f"ranks disagree on {name}: {known.shape} {known.dtype}, {tensor.shape} {tensor.dtype}"
            boxes.setdefault(name, []).extend(tensor.boxes)
    merged = {
        name: StoredTensor(shape=tensor.shape, dtype=tensor.dtype, boxes=tuple(boxes[name]))
        for name, tensor in sorted(merged.items())
    }
    flaws = [f"{name}: {found}" for name, tensor in merged.items() if (found := tensor.coverage_error())]
    assert not flaws, f"the ranks' pieces do not make whole tensors: {'; '.join(flaws)}"
    return merged


def read_index(folder: Path) -> Index:
    """The index of a checkpoint; raises UserError where it is absent, foreign, of another version or damaged."""
    content = _content(folder)
    try:
        header = _Header.model_validate_json(content)
        if header.format != FORMAT:
            raise UserError(f"checkpoint {folder} is a {header.format!r}, not a {FORMAT!r}")
        if header.version != VERSION:
            written = f"checkpoint {folder} is of version {header.version}, this megatron3d reads {VERSION}"
            raise UserError(f"{written}; use the megatron3d that wrote it")
        index = Index.model_validate_json(content)
    except ValidationError as error:
        raise UserError(*(f"checkpoint {folder}: {FILE_NAME} is damaged: {text}" for text in _causes(error))) from error
    if index.with_checksum().checksum != index.checksum:
        raise UserError(f"checkpoint {folder}: {FILE_NAME} is damaged: it is not what its checksum was taken of")
    return index


def _content(folder: Path) -> bytes:
    path = folder / FILE_NAME
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"checkpoint {folder}: {FILE_NAME} is not a file; give the folder of another checkpoint")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UserError(f"checkpoint {folder}: {FILE_NAME} has {size} bytes, more than any index ({MAX_BYTES})")
        return path.read_bytes()
    except FileNotFoundError:
        what = f"is not a {FORMAT}: it has no {FILE_NAME}" if folder.is_dir() else "does not exist"
        raise UserError(f"checkpoint {folder} {what}; give the folder of a run or one of its iter_ folders") from None
    except OSError as error:
        raise UserError(f"checkpoint {folder}: {FILE_NAME} cannot be read: {error.strerror}") from error


def _causes(error: ValidationError) -> list[str]:
    """One sentence per fault, at most five."""
    faults = error.errors(include_url=False, include_context=False)
    sentences = [" ".join((".".join(map(str, fault["loc"])), fault["msg"])).strip() for fault in faults[:5]]
    return sentences + ([f"and {len(faults) - 5} more faults"] if len(faults) > 5 else [])


def intersection(a: Box, b: Box) -> Box | None:
    """The box that both hold; None where there is no element in both."""
    common = tuple((max(low, start), min(high, stop)) for (low, high), (start, stop) in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where `inner` lies in a tensor that holds `outer`."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(inner, outer, strict=True))


def box_text(box: Box) -> str:
    """A box as it is written after a tensor's name, `[0:2,4:8]`."""
    return "[" + ",".join(f"{low}:{high}" for low, high in box) + "]"


def coverage_error(shape: Shape, boxes: Iterable[Box]) -> str | None:
    """The first region of a tensor that the boxes do not cover exactly once, in words; None where there is none."""
    boxes = list(boxes)
    for box in boxes:
        inside = len(box) == len(shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
        if not inside:
            return f"box {box_text(box)} is not inside a tensor of {list(shape)}"
    uneven = _uneven(shape, boxes)
    if uneven is None:
        return None
    region, times = uneven
    return f"elements {box_text(region)} are in {times} boxes instead of one"


def _uneven(shape: Shape, boxes: list[Box]) -> tuple[Box, int] | None:
    """Cut the first dim at every edge; each slab must be covered once by what the boxes that cross it hold there."""
    if not shape:
        return None if len(boxes) == 1 else ((), len(boxes))
    cuts = sorted({0, shape[0], *(edge for box in boxes for edge in box[0])})
    slabs: dict[int, list[Box]] = {cut: [] for cut in cuts}
    for (low, high), *others in boxes:
        for cut in cuts[bisect_left(cuts, low) : bisect_left(cuts, high)]:
            slabs[cut].append(tuple(others))
    for low, high in pairwise(cuts):
        uneven = _uneven(shape[1:], slabs[low])
        if uneven:
            region, times = uneven
            return ((low, high), *region), times
    return None
