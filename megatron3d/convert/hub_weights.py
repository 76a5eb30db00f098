"""Find the tensors of a Hugging Face folder, check them before any is read, and map them into memory one by one.

A file is mapped once per tensor: the pages of earlier tensors, which would count as the process's memory, go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron3d.config.model_schema import ModelConfig
from megatron3d.convert.hub_fields import HubConfig
from megatron3d.convert.model_types import MODEL_TYPES
from megatron3d.convert.module_names import LAYER, MTP_COPIES
from megatron3d.convert.output_files import source_file
from megatron3d.convert.tensor_names import (
    TIED_HEAD,
    FileTensor,
    Place,
    RowRange,
    file_tensors,
    strip_body_prefix,
)
from megatron3d.errors import UserError
from megatron3d.model.architecture import Architecture
from megatron3d.parallel.layout import Shape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
_NAMES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
# Tensors that old versions saved with the weights: causal masks and rotary frequencies.
_CONSTANTS = re.compile(r"(h\.\d+\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
# Weights of all experts of a layer.
STACKED = re.compile(r"\.mlp\.experts\.gate_up_proj$")
MAX_PROBLEMS = 8


@dataclass(frozen=True)
class HubTensor:
    """A tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class HubWeights:
    """The tensors of a folder of a model, and their `table`.

    `vocabulary` names those with a row for each token.  Raises UserError with every problem where files are missing,
    damaged or foreign, or tensors other than the table's.
    """

    def __init__(self, folder: Path, arch: Architecture, model_type: str) -> None:
        self.files = find_files(folder)
        found = {tensor.name: tensor for path in self.files for tensor in _tensors(path)}
        found = {name: tensor for name, tensor in found.items() if not _CONSTANTS.search(name)}
        is_stacked = arch.experts is not None and any(STACKED.search(name) for name in found)
        tensors = self.table = file_tensors(arch, model_type, is_stacked)
        is_tied = arch.tie_embeddings
        self.vocabulary = frozenset(tensor.name for tensor in tensors if tensor.has_vocabulary)
        bare = {strip_body_prefix(tensor.name, model_type): tensor.name for tensor in tensors}
        self._stored = {bare.get(name, name): tensor for name, tensor in found.items()}
        head = self._stored.pop(TIED_HEAD, None) if is_tied else None
        copies = self._copies(tensors)
        _raise(folder, _differences(self._stored, tensors))
        for copy, name in copies:
            if not torch.equal(_read(copy), self.tensor(name)):
                raise UserError(f"{folder}: {copy.name} differs from {name}; multi-token prediction shares it here")
        if head is not None and not torch.equal(_read(head), self.tensor(tensors[0].name)):
            raise UserError(
                f"{folder}: config.json ties the embedding and the head, but {TIED_HEAD} differs from "
                f"{tensors[0].name}; set tie_word_embeddings to false there if the model was trained so"
            )

    def _copies(self, tensors: Sequence[FileTensor]) -> list[tuple[HubTensor, str]]:
        """Return, and forget, the copies of embedding and head in modules of multi-token prediction, with the name of
        what they are copies of."""
        matrices = [tensor.name for tensor in tensors if tensor.has_vocabulary]
        found = []
        for name in list(self._stored):
            for copy, matrix in zip(MTP_COPIES, (matrices[0], matrices[-1]), strict=True):
                if name.startswith(LAYER.partition("{n}")[0]) and name.endswith(f".{copy}"):
                    found.append((self._stored.pop(name), matrix))
        return found

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of the weights."""
        return frozenset(self.stored(tensor.name).dtype for tensor in self.table if not tensor.is_state)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as stored, mapped from the file."""
        return _read(self._stored[name])

    def stored(self, name: str) -> HubTensor:
        """Return where a tensor of the table is, and its dtype."""
        return self._stored[name]


def rows_of(values: Tensor, rows: RowRange) -> Tensor:
    """Return rows of a logical tensor as a view of the values of a file's tensor."""
    return view_of(values, rows.place, rows.high - rows.low, rows.shape)


def view_of(values: Tensor, place: Place, num_rows: int, shape: Shape) -> Tensor:
    """Return rows of a logical tensor of a shape, at their place in a file's tensor, as a view of its values."""
    values = values if place.expert < 0 else values[place.expert]
    rows = joined(values, place.is_transposed)[place.start : place.start + num_rows * place.step : place.step]
    return rows if len(shape) == 1 else rows[:, place.column : place.column + shape[1]]


def joined(values: Tensor, is_transposed: bool) -> Tensor:
    """Return the joined logical tensors as a view of a file's tensor; a transposed row or column is contiguous."""
    if not is_transposed:
        return values
    return values.T if min(values.shape) > 1 else values.reshape(values.shape[::-1])


def _read(stored: HubTensor) -> Tensor:
    try:
        with safe_open(stored.file, framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(stored.name)
    except (OSError, SafetensorError, RuntimeError) as error:  # the last where torch cannot map the file
        raise _damaged(stored.file, error) from error
    return tensor


def _tensors(path: Path) -> Iterator[HubTensor]:
    """Yield the tensors that the header of a file describes."""
    try:
        with safe_open(path, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
                part = handle.get_slice(name)
                dtype = _NAMES.get(part.get_dtype())
                if dtype is None:
                    raise UserError(
                        f"{path}: {name} is of type {part.get_dtype()}, not one of {', '.join(_NAMES)}; convert the "
                        "model before quantization"
                    )
                yield HubTensor(path, name, tuple(part.get_shape()), dtype)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is no whole safetensors file ({error}); copy or download it again")


def without_absent_modules(folder: Path, model: ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return a model without the modules of multi-token prediction that config.json has and the files have not."""
    if not model.mtp_num_layers:
        return model, ()
    start = f"model.layers.{model.num_layers}."
    if any(tensor.name.startswith(start) for path in find_files(folder) for tensor in _tensors(path)):
        return model, ()
    note = "config.json has modules of multi-token prediction, the files have none: the model has none"
    return model.model_copy(update={"mtp_num_layers": 0}), (note,)


def refuse_code(folder: Path, settings: HubConfig) -> tuple[str, ...]:
    """Return a note where a folder has Python code next to a model that transformers has without it.

    Code is never run.  Raises UserError where it defines a model that transformers does not have.
    """
    code = sorted(path.name for path in folder.glob("modeling*.py"))
    if not code and settings.get("auto_map") is None:
        return ()
    what = code[0] if code else "auto_map in config.json"
    hub_type = MODEL_TYPES.get(str(settings.get("model_type")))
    if hub_type is not None and settings.get("architectures") == [hub_type.class_name]:
        return (f"{what}: code is never run; the model is {hub_type.class_name} as transformers has it",)
    raise UserError(
        f"{folder}: {what} defines the model by code, which is never run here; if transformers has the same model "
        "without that code (trust_remote_code=False computes the same), remove auto_map and the .py files"
    )


def find_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files of a folder; raises UserError where there are none, only pickles, or some are missing."""
    if source_file(folder, INDEX).is_file():
        names = sorted(set(_weight_map(folder / INDEX).values()))
        missing = [name for name in names if not source_file(folder, name).is_file()]
        if missing:
            raise UserError(
                f"{folder}: {len(missing)} of {len(names)} files that {INDEX} names are not there: "
                f"{', '.join(missing[:MAX_PROBLEMS])}; copy or download them"
            )
        return tuple(folder / name for name in names)
    if source_file(folder, SINGLE).is_file():
        return (folder / SINGLE,)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{folder}: {pickles[0]} is a pickle, which can run any program when it is read, and is never opened here; "
            "give a folder with safetensors, such as transformers' save_pretrained writes"
        )
    raise UserError(f"{folder}: there is neither {SINGLE} nor {INDEX}; give a folder that save_pretrained wrote")


def _weight_map(path: Path) -> Mapping[str, str]:
    try:
        named = json.loads(path.read_bytes())["weight_map"]
        is_map = isinstance(named, dict) and all(isinstance(file, str) for file in named.values())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: no weight_map can be read ({error!r}); copy or download it again") from error
    if not is_map or not named or any(Path(file).name != file for file in named.values()):
        raise UserError(f"{path}: its weight_map is not from tensors to files next to it; copy or download it again")
    return dict(named)


def _differences(stored: Mapping[str, HubTensor], tensors: Iterable[FileTensor]) -> Iterator[str]:
    """Yield the differences between the files and the model that config.json describes."""
    wanted = {tensor.name: tensor.shape for tensor in tensors}
    for name, shape in wanted.items():
        if name not in stored:
            yield f"tensor {name} {list(shape)} of the model that config.json describes is in no file"
        elif stored[name].shape != shape:
            found = list(stored[name].shape)
            yield f"tensor {name} is {found}, and {list(shape)} in the model that config.json describes"
    for name in stored:
        if name not in wanted:
            yield f"tensor {name} {list(stored[name].shape)} is not in the model that config.json describes"


def _raise(folder: Path, problems: Iterator[str]) -> None:
    found = [f"{folder}: {problem}" for problem in problems]
    more = [f"{folder}: and {len(found) - MAX_PROBLEMS} more tensors"] if len(found) > MAX_PROBLEMS else []
    UserError.collect(found[:MAX_PROBLEMS] + more)
