"""A folder of torch.distributed.checkpoint, read without running what it holds.

    folder/.metadata                 a pickle: shape and dtype of each tensor, and the places of its boxes in files
    folder/__0_0.distcp, ...         each box as torch.save writes it, one after another
    folder/common.pt                 Megatron-LM's arguments and counters, as torch.save writes them

A pickle can call any function.  `.metadata` is read by an unpickler that knows the classes of the metadata only, the
other files by torch's own one (`weights_only`); both refuse everything else.  Values of further classes that
Megatron-LM is known to save become inert objects.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

from megatron3d.checkpoint.index import coverage_error, intersection, slices_within
from megatron3d.errors import UserError, is_machine_fault
from megatron3d.parallel.layout import Box, Shape, box_shape
from megatron3d.runtime.files import retried

METADATA, COMMON = ".metadata", "common.pt"
# Largest pickle that is read.
MAX_BYTES = 2**30
_FILE = re.compile(r"__\d{1,8}_\d{1,8}\.distcp")


class InertObject:
    """Stand-in for an object of a class that nothing here needs: it keeps no state and does nothing."""

    def __init__(self, *_: object) -> None:
        """Ignore the arguments."""

    def __setstate__(self, _: object) -> None:
        """Ignore the state."""


class _Record:
    """Stand-in for an object of a class of torch's metadata: its fields by name, from arguments or from a state."""

    fields: tuple[str, ...] = ()
    values: Mapping[str, Any]

    def __new__(cls, *values: object) -> _Record:
        record = super().__new__(cls)
        record.values = dict(zip(cls.fields, values, strict=False))
        return record

    def __setstate__(self, state: Any) -> None:
        self.values = dict(state if isinstance(state, Mapping) else zip(self.fields, state, strict=False))


class _Metadata(_Record):
    fields = ("state_dict_metadata", "planner_data", "storage_data")


class _MetadataIndex(_Record):
    fields = ("fqn", "offset")

    @property
    def key(self) -> tuple[object, ...]:
        """What torch compares: the name of a tensor, and where a box of it starts."""
        return self.values["fqn"], self.values.get("offset")

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MetadataIndex) and self.key == other.key


class _TensorStorageMetadata(_Record):
    fields = ("properties", "size", "chunks")


class _TensorProperties(_Record):
    fields = ("dtype",)


class _ChunkStorageMetadata(_Record):
    fields = ("offsets", "sizes")


class _StorageInfo(_Record):
    fields = ("relative_path", "offset", "length", "transform_descriptors")


# Stand-ins of the classes that reading needs, by the module and name in a pickle.
_TORCH = "torch.distributed.checkpoint"
_CLASSES: Mapping[str, object] = {
    f"{_TORCH}.metadata.Metadata": _Metadata,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": _Metadata,
    f"{_TORCH}.metadata.MetadataIndex": _MetadataIndex,
    f"{_TORCH}.metadata.TensorStorageMetadata": _TensorStorageMetadata,
    f"{_TORCH}.metadata.TensorProperties": _TensorProperties,
    f"{_TORCH}.metadata.ChunkStorageMetadata": _ChunkStorageMetadata,
    f"{_TORCH}.filesystem._StorageInfo": _StorageInfo,
    "torch.Size": tuple,
    "torch.serialization._get_layout": InertObject,
}
# Further classes that torch and Megatron-LM write, of which nothing is needed.
_INERT = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|planner|filesystem|storage)\.\w+"
    r"|megatron\.(core|training)\.[\w.]+"
    r"|(builtins\.)?set|pathlib\.(_local\.)?\w*Path|signal\.Signals|types\.SimpleNamespace|_io\.BytesIO"
    r"|numpy\.(_core|core)\.multiarray\.(_reconstruct|scalar)|numpy\.(ndarray|dtype)|numpy\.dtypes\.\w+"
)


class _Refused(Exception):
    """A class or function that is not read."""


class _MetadataReader(pickle.Unpickler):
    """Unpickler of the classes of the metadata; every other name is refused, and nothing is imported for it."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the class of a name; raises _Refused."""
        full = f"{module}.{name}"
        if full in _CLASSES:
            return _CLASSES[full]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if _INERT.fullmatch(full):
            return InertObject
        raise _Refused(full)


@dataclass(frozen=True)
class TorchBox:
    """A box of a tensor, and its bytes: `length` of them, in a file from `start` on."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class TorchTensor:
    """A tensor and the boxes that hold it."""

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[TorchBox, ...]


@dataclass(frozen=True)
class TorchFolder:
    """The tensors of a folder by name, and the names of other objects, which are not read.

    Raises UserError where the metadata is damaged, or a file that it names is missing or too short.
    """

    folder: Path
    tensors: Mapping[str, TorchTensor] = field(init=False)
    objects: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        tensors, objects = _read_metadata(self.folder)
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "objects", objects)
        UserError.collect(_problems(self.folder, tensors))

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor; memory also holds one stored box."""
        stored = self.tensors[name]
        values = torch.empty(box_shape(box), dtype=stored.dtype)
        for each in stored.boxes:
            if (common := intersection(each.box, box)) is not None:
                values[slices_within(common, box)] = self._values(name, each)[slices_within(common, each.box)]
        return values

    def _values(self, name: str, stored: TorchBox) -> Tensor:
        path = self.folder / stored.file

        def read() -> bytes:
            with path.open("rb") as file:
                file.seek(stored.start)
                return file.read(stored.length)

        try:
            found = torch.load(io.BytesIO(retried(path, read)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, BadZipFile) as error:
            if is_machine_fault(error):
                raise
            raise UserError(f"{path}: {name} is damaged; copy the checkpoint again") from error
        wanted = (box_shape(stored.box), self.tensors[name].dtype)
        if not isinstance(found, Tensor) or (tuple(found.shape), found.dtype) != wanted:
            raise UserError(f"{path}: {name} is not the tensor that {METADATA} describes; copy the checkpoint again")
        return found

    @cached_property
    def common(self) -> dict[str, Any]:
        """What `common.pt` holds; raises UserError where that is missing, damaged or of unknown classes."""
        path = self.folder / COMMON
        try:
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            UserError.collect(
                f"{path}: holds {name}, which is not read, since it could run code; describe the model with --config"
                for name in unsafe
                if name not in _NAMESPACE and not _INERT.fullmatch(name)
            )
            known: list[Any] = [(_NAMESPACE.get(name, InertObject), name) for name in unsafe]
            with torch.serialization.safe_globals(known):
                found = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
            if is_machine_fault(error):
                raise
            raise UserError(
                f"{path}: cannot be read ({str(error).splitlines()[0]}); copy the checkpoint again, or describe the "
                "model with --config"
            ) from error
        if not isinstance(found, dict):
            raise UserError(f"{path}: holds no state of Megatron-LM; describe the model with --config")
        return found


class SavedNamespace:
    """Attributes that a pickle gives to a namespace of Megatron-LM's arguments."""


_NAMESPACE: Mapping[str, type] = {"argparse.Namespace": SavedNamespace}


def _read_metadata(folder: Path) -> tuple[dict[str, TorchTensor], tuple[str, ...]]:
    path = folder / METADATA
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UserError(f"{path}: has {size} bytes, more than any metadata ({MAX_BYTES})")
        return _described(_MetadataReader(io.BytesIO(retried(path, path.read_bytes))).load())
    except _Refused as error:
        raise UserError(
            f"{path}: names {error}, which no metadata of tensors needs and which could run code; nothing was read"
        ) from error
    except (OSError, pickle.UnpicklingError, EOFError, ArithmeticError, LookupError) as error:
        if is_machine_fault(error):
            raise
        raise UserError(f"{path}: is damaged ({error}); copy the checkpoint again") from error
    except (AttributeError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}: describes no tensors ({error}); copy the checkpoint again") from error


def _described(found: Any) -> tuple[dict[str, TorchTensor], tuple[str, ...]]:
    """Return the tensors and the names of other objects; raises TypeError, ValueError, LookupError, AttributeError."""
    tensors: dict[str, TorchTensor] = {}
    objects, places = [], found.values["storage_data"]
    for name, stored in found.values["state_dict_metadata"].items():
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError("a name that is not printable")
        if not isinstance(stored, _TensorStorageMetadata):
            objects.append(name)
            continue
        boxes = []
        for chunk in stored.values["chunks"]:
            offsets, sizes = chunk.values["offsets"], chunk.values["sizes"]
            place = places[_MetadataIndex(name, offsets)].values
            if not _FILE.fullmatch(place["relative_path"]) or place.get("transform_descriptors"):
                raise ValueError(f"{name} is in no plain file of the folder")
            box = tuple((int(low), int(low) + int(size)) for low, size in zip(offsets, sizes, strict=True))
            boxes.append(TorchBox(box, place["relative_path"], int(place["offset"]), int(place["length"])))
        dtype = stored.values["properties"].values["dtype"]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name} has no dtype")
        tensors[name] = TorchTensor(tuple(map(int, stored.values["size"])), dtype, tuple(boxes))
    return tensors, tuple(objects)


def _problems(folder: Path, tensors: Mapping[str, TorchTensor]) -> list[str]:
    """Return a sentence for each tensor without all its elements, and for each file that is missing or too short."""
    problems, ends = [], dict[str, int]()
    for name, tensor in tensors.items():
        if found := coverage_error(tensor.shape, [each.box for each in tensor.boxes]):
            problems.append(f"{folder / METADATA}: {name}: {found}")
        for each in tensor.boxes:
            ends[each.file] = max(ends.get(each.file, 0), each.start + each.length)
    for file, end in sorted(ends.items()):
        path = folder / file
        if not path.is_file():
            problems.append(f"{path}: does not exist, and {METADATA} names it; copy the whole folder of all ranks")
        elif (size := path.stat().st_size) < end:
            problems.append(f"{path}: has {size} bytes of at least {end}; copy it again")
    return problems
