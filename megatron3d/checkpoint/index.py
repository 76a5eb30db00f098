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

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Annotated, ClassVar

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, TypeAdapter, ValidationError

from megatron3d.data.corpus.stream import Cursor
from megatron3d.errors import UserError, is_machine_fault
from megatron3d.parallel.layout import Box, Shape
from megatron3d.runtime.files import retried

FILE_NAME = "index.json"
FORMAT = "megatron3d checkpoint"
VERSION = 2
# Largest index that is read; that of a trillion parameters on ten thousand ranks has a few hundred megabytes.
MAX_BYTES = 2**30
CHECKSUM = "^[0-9a-f]{16}$"
STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")
# Name of a tensor: printable characters only.
Name = Annotated[str, Field(pattern="^[!-~]{1,500}$")]
# Most dims of a tensor, and numbers that fit into 63 bits: checking coverage takes 2^dims steps per box.
MAX_DIMS = 4
Count = Annotated[int, Field(ge=0, lt=2**63)]


def _require_elements(box: Box) -> Box:
    if any(low >= high for low, high in box):
        raise ValueError("the box is empty")
    return box


@dataclass(frozen=True)
class StoredBox:
    """One stored box: its file in the checkpoint's folder, its key there, and its checksum; validated when read."""

    __pydantic_config__: ClassVar = STRICT

    box: Annotated[tuple[tuple[Count, Count], ...], Field(max_length=MAX_DIMS), AfterValidator(_require_elements)]
    file: Annotated[str, Field(pattern=r"^rank_[0-9]{5,10}\.safetensors$")]
    key: Annotated[str, Field(max_length=1000)]
    checksum: Annotated[str, Field(pattern=CHECKSUM)]


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor and its stored boxes; validated when read."""

    __pydantic_config__: ClassVar = STRICT

    shape: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMS)]
    dtype: Annotated[str, Field(pattern="^[a-z0-9_]{1,20}$")]
    boxes: tuple[StoredBox, ...]

    def coverage_error(self) -> str | None:
        """Return why the boxes do not cover the tensor exactly once; None where they do."""
        return coverage_error(self.shape, (stored.box for stored in self.boxes))


class _Header(BaseModel):
    """Fields that every version of the index has."""

    format: str
    version: int


class Index(BaseModel):
    """Metadata of a checkpoint, and the location of every box of its tensors."""

    model_config = STRICT

    format: str = FORMAT
    version: int = VERSION
    iteration: Count
    meta: dict[str, JsonValue]
    tensors: dict[Name, StoredTensor]
    checksum: str | None = Field(default=None, pattern=CHECKSUM)

    def with_prefix(self, prefix: str) -> Index:
        """Return the index of only the tensors whose names start with `prefix`."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}
        return self.model_copy(update={"tensors": tensors})

    def content(self) -> str:
        """Return what the checksum is taken of, written tensor by tensor so that other threads can go on in between."""
        start = self.model_copy(update={"tensors": {}}).model_dump_json(exclude={"checksum"}).removesuffix("{}}")
        tensors = ",".join(
            f"{json.dumps(name)}:{_TENSOR.dump_json(tensor).decode()}" for name, tensor in self.tensors.items()
        )
        return f"{start}{{{tensors}}}}}"

    def to_json(self) -> str:
        """Return the content of `index.json`."""
        content = self.content()
        return f'{content[:-1]},"checksum":"{_checksum(content)}"}}'

    def is_intact(self) -> bool:
        """Return whether the content is what the checksum was taken of."""
        return self.checksum == _checksum(self.content())

    def packed(self) -> bytes:
        """Return the content in lines: iteration and metadata, then a tensor each."""
        return json.dumps([self.iteration, self.meta]).encode() + b"\n" + pack(self.tensors).encode()

    @classmethod
    def unpacked(cls, content: bytes, names: Iterable[str] | None = None) -> Index:
        """Return the index of only some tensors, or of all, from the `packed` content of one that has been checked."""
        start, _, tensors = content.partition(b"\n")
        iteration, meta = json.loads(start)
        stored = unpack(tensors.decode(), None if names is None else set(names))
        return cls.model_construct(None, iteration=iteration, meta=meta, tensors=stored)


_TENSOR = TypeAdapter(StoredTensor)


def _checksum(content: str) -> str:
    return xxhash.xxh3_64_hexdigest(content.encode())


def pack(tensors: Mapping[str, StoredTensor]) -> str:
    """Return a line for each tensor: its name, a tab, and what is stored of it."""
    boxes = {name: [(box.box, box.file, box.key, box.checksum) for box in each.boxes] for name, each in tensors.items()}
    lines = (f"{name}\t{json.dumps([each.shape, each.dtype, boxes[name]])}" for name, each in tensors.items())
    return "\n".join(lines)


def unpack(lines: str, names: Container[str] | None = None) -> dict[str, StoredTensor]:
    """Return the tensors of `pack`, those of `names` only, without the time that it takes to validate them again."""
    tensors: dict[str, StoredTensor] = {}
    for line in lines.splitlines():
        name, _, content = line.partition("\t")
        if names is None or name in names:
            shape, dtype, boxes = json.loads(content)
            stored = tuple(StoredBox(tuple((low, high) for low, high in box), *place) for box, *place in boxes)
            tensors[name] = StoredTensor(tuple(shape), dtype, stored)
    return tensors


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
        name: StoredTensor(tensor.shape, tensor.dtype, tuple(boxes[name])) for name, tensor in sorted(merged.items())
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
            raise UserError(f"checkpoint {folder} is a {header.format[:40]!r}, not a {FORMAT!r}")
        if header.version != VERSION:
            written = f"checkpoint {folder} is of version {header.version}, this megatron3d reads {VERSION}"
            raise UserError(f"{written}; use the megatron3d that wrote it")
        index = Index.model_validate_json(content)
    except ValidationError as error:
        raise UserError(*(f"checkpoint {folder}: {FILE_NAME} is damaged: {text}" for text in _causes(error))) from error
    if not index.is_intact():
        raise UserError(f"checkpoint {folder}: {FILE_NAME} is damaged: it is not what its checksum was taken of")
    return index


# Prefixes of the names of tensors: weights, and their moving averages.
WEIGHTS, AVERAGES = "model.", "optimizer.ema."


def read_averages(folder: Path) -> Index:
    """Read the index of a checkpoint whose weights are their moving averages; raise also where it has none."""
    index = read_index(folder)
    averages = {name: tensor for name, tensor in index.tensors.items() if name.startswith(AVERAGES)}
    if not averages:
        raise UserError(
            f"checkpoint {folder} has no moving average of the weights, as a run with optimizer.ema_decay has; "
            "use --weights model"
        )
    rest = {name: tensor for name, tensor in index.tensors.items() if name not in averages}
    named = {WEIGHTS + name.removeprefix(AVERAGES): tensor for name, tensor in averages.items()}
    return index.model_copy(update={"tensors": rest | named})


# Readers of the index by what is taken as the weights, as the option --weights of tools names it.
READERS: Mapping[str, Callable[[Path], Index]] = {"model": read_index, "ema": read_averages}


def refuse_torch_folder(folder: Path) -> None:
    """Raise UserError where a folder, or the iteration in it, is of torch.distributed.checkpoint, as Megatron-LM's."""
    for path in (folder / ".metadata", *folder.glob("iter_*/.metadata")):
        if path.is_file():
            raise UserError(
                f"checkpoint {path.parent} is of torch.distributed.checkpoint (torch_dist of Megatron-LM) and is not "
                f"read as it is; if Megatron-LM wrote it: python tools/convert_checkpoint.py from-megatron --load "
                f"{folder} --output RUN; else export it to Hugging Face with the tools of what wrote it, then from-hf"
            )


def _content(folder: Path) -> bytes:
    path = folder / FILE_NAME

    def read() -> bytes:
        if path.exists() and not path.is_file():
            raise UserError(f"checkpoint {folder}: {FILE_NAME} is not a file; give the folder of another checkpoint")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UserError(f"checkpoint {folder}: {FILE_NAME} has {size} bytes, more than any index ({MAX_BYTES})")
        return path.read_bytes()

    try:
        return retried(path, read)
    except FileNotFoundError:
        refuse_torch_folder(folder)
        what = f"is not a {FORMAT}: it has no {FILE_NAME}" if folder.is_dir() else "does not exist"
        raise UserError(f"checkpoint {folder} {what}; give the folder of a run or one of its iter_ folders") from None
    except OSError as error:
        if is_machine_fault(error):
            raise
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
    if _is_grid(shape, boxes):
        return None
    point, times = _first_miscovered(shape, boxes) or (None, 1)
    if point is None:
        return None
    return f"elements {box_text(_uniform_region(shape, boxes, point))} are in {times} boxes instead of one"


def _is_grid(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Return whether the boxes are all the products of intervals that divide each dim, as ranks write them."""
    dims = [sorted({box[dim] for box in boxes}) for dim in range(len(shape))]
    divided = (
        [0, *(high for _, high in dim)] == [*(low for low, _ in dim), n] for dim, n in zip(dims, shape, strict=True)
    )
    return len(set(boxes)) == len(boxes) == prod(map(len, dims)) and all(divided)


def _first_miscovered(shape: Shape, boxes: Iterable[Box]) -> tuple[tuple[int, ...], int] | None:
    """Return the first element that is not in one box, in row-major order, and the number of boxes that hold it.

    The number of boxes at an element is the sum, over all corners that are nowhere beyond it, of +1 for a corner with
    an even number of ends and -1 for another one.  It is 1 everywhere if and only if these signs add up at every
    point to those of the whole tensor, which needs 2^dims steps per box instead of comparing boxes with each other.
    """
    signs = [prod(each) for each in product((1, -1), repeat=len(shape))]
    excess: dict[tuple[int, ...], int] = {}
    for box, weight in chain([(tuple((0, size) for size in shape), -1)], ((box, 1) for box in boxes)):
        for corner, sign in zip(product(*box), signs, strict=True):
            excess[corner] = excess.get(corner, 0) + weight * sign
    first = min((corner for corner, number in excess.items() if number), default=None)
    return None if first is None else (first, 1 + excess[first])


def _uniform_region(shape: Shape, boxes: Iterable[Box], point: tuple[int, ...]) -> Box:
    """Return the largest region from `point` on in which, dim after dim, no box begins or ends."""
    region: list[tuple[int, int]] = []
    for dim, low in enumerate(point):
        edges = chain((shape[dim],), *(box[dim] for box in boxes))
        region.append((low, min(edge for edge in edges if edge > low)))
        boxes = [box for box in boxes if box[dim][0] <= low < box[dim][1]]
    return tuple(region)


class Meta(BaseModel):
    """Metadata of a checkpoint; `config` and `mesh` are those of the run that wrote it.

    `model_type` is that of the Hugging Face folder that the run's weights come from, empty where there is none.
    `changes` are the options of the model that a continuation has changed: iteration, name, value before and after.
    """

    model_config = ConfigDict(strict=True)

    model: dict[str, JsonValue]
    identity: dict[str, JsonValue]
    iteration: Count
    consumed_samples: Count
    optimizer_steps: Annotated[FiniteFloat, Field(ge=0)]
    loss_scale: dict[str, FiniteFloat] = {}
    cursors: dict[str, Annotated[list[Count], Field(max_length=len(Cursor._fields))]] = {}
    config: dict[str, JsonValue] = {}
    mesh: dict[str, int] = {}
    versions: dict[str, str] = {}
    model_type: str = ""
    changes: list[dict[str, JsonValue]] = []


def read_meta(folder: Path) -> Meta:
    """Return the metadata of a checkpoint; raises UserError if it is not one of a training run."""
    return meta_of(folder, read_index(folder))


def meta_of(folder: Path | str, index: Index) -> Meta:
    """Return the metadata in an index; raises UserError if it is not one of a training run."""
    try:
        return Meta.model_validate(index.meta)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, detail["loc"])) for detail in error.errors())
        raise UserError(f"{folder}: its index is of no training run ({places}); load another checkpoint") from error
