"""`index.json`: which file of a checkpoint holds which box of which logical tensor, and the metadata of the run.

{"format": ..., "version": 2, "iteration": 100, "meta": {...},
 "tensors": {"model.wte": {"shape": [8, 4], "dtype": "float32",
                           "boxes": [{"box": [[0, 8], [0, 4]], "file": "rank_00000.safetensors", "key": ...,
                                      "checksum": "62f2ef4a9a2b4b9d"}]}},
 "checksum": XXH3 of everything before it, in this order and without spaces}

The content is untrusted: nothing in it is executed, no name can lead out of the checkpoint's folder, and no memory is
allocated before shapes and sizes agree with the files.
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
# Largest index that is read; that of a trillion parameters on ten thousand ranks has a few hundred megabytes.
MAX_BYTES = 2**30
CHECKSUM = "^[0-9a-f]{16}$"
# Name of a tensor: printable characters only.
Name = Annotated[str, Field(pattern="^[!-~]{1,500}$")]


class _IndexModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class StoredBox(_IndexModel):
    """One stored box: its file in the checkpoint's folder, its key there, and its checksum."""

    box: Box
    file: str = Field(pattern=r"^rank_[0-9]{5,}\.safetensors$")
    key: str
    checksum: str = Field(pattern=CHECKSUM)


class StoredTensor(_IndexModel):
    """A logical tensor and its stored boxes."""

    shape: Shape
    dtype: str
    boxes: tuple[StoredBox, ...]

    def coverage_error(self) -> str | None:
        """Return why the boxes do not cover the tensor exactly once; None where they do."""
        return coverage_error(self.shape, (stored.box for stored in self.boxes))


class _Header(BaseModel):
    """Fields that every version of the index has."""

    format: str
    version: int


class Index(_IndexModel):
    """Metadata of a checkpoint, and the location of every box of its tensors."""

    format: str = FORMAT
    version: int = VERSION
    iteration: int
    meta: dict[str, JsonValue]
    tensors: dict[Name, StoredTensor]
    checksum: str | None = Field(None, pattern=CHECKSUM)

    def with_prefix(self, prefix: str) -> Index:
        """Return the index of only the tensors whose names start with `prefix`."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}
        return self.model_copy(update={"tensors": tensors})

    def with_checksum(self) -> Index:
        """Return the index with its checksum filled in."""
        content = self.model_dump_json(exclude={"checksum"}).encode()
        return self.model_copy(update={"checksum": xxhash.xxh3_64_hexdigest(content)})


def merge_tensors(parts: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Merge the tensors of all ranks' files; every element must have been written exactly once."""
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
    """Read the index of a checkpoint; raise UserError where it is missing, foreign, of another version or damaged."""
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
    """Return one sentence per fault, at most five."""
    faults = error.errors(include_url=False, include_context=False)
    sentences = [" ".join((".".join(map(str, fault["loc"])), fault["msg"])).strip() for fault in faults[:5]]
    return sentences + ([f"and {len(faults) - 5} more faults"] if len(faults) > 5 else [])


def intersection(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None where it is empty."""
    common = tuple((max(low, start), min(high, stop)) for (low, high), (start, stop) in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices of box `inner` in a tensor that holds box `outer`."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(inner, outer, strict=True))


def box_text(box: Box) -> str:
    """Format a box as in keys and messages, `[0:2,4:8]`."""
    return "[" + ",".join(f"{low}:{high}" for low, high in box) + "]"


def coverage_error(shape: Shape, boxes: Iterable[Box]) -> str | None:
    """Describe the first region of a tensor that the boxes do not cover exactly once; None where there is none."""
    boxes = list(boxes)
    for box in boxes:
        inside = len(box) == len(shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
        if not inside:
            return f"box {box_text(box)} is not inside a tensor of {list(shape)}"
    found = _miscovered_region(shape, boxes)
    if found is None:
        return None
    region, times = found
    return f"elements {box_text(region)} are in {times} boxes instead of one"


def _miscovered_region(shape: Shape, boxes: list[Box]) -> tuple[Box, int] | None:
    """Return the first region not covered once, and its count: split dim 0 at every edge of a box, then recurse."""
    if not shape:
        return None if len(boxes) == 1 else ((), len(boxes))
    cuts = sorted({0, shape[0], *(edge for box in boxes for edge in box[0])})
    slabs: dict[int, list[Box]] = {cut: [] for cut in cuts}
    for (low, high), *others in boxes:
        for cut in cuts[bisect_left(cuts, low) : bisect_left(cuts, high)]:
            slabs[cut].append(tuple(others))
    for low, high in pairwise(cuts):
        found = _miscovered_region(shape[1:], slabs[low])
        if found:
            region, times = found
            return ((low, high), *region), times
    return None
