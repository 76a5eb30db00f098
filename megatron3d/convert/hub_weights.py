"""Files of a Hugging Face folder: JSON, the tokenizer's, and safetensors, which are read as a checkpoint's index.

    layers.0.attention.k.weight [H, H]  =  rows H to 2H of the transpose of h.0.attn.c_attn.weight in model.safetensors
    a file                              =  8 bytes: length of the header | JSON {name: {dtype, shape, data_offsets}} |
                                           the tensors' bytes, end to end

Nothing is converted or copied to read: ranks read the boxes that they need from the mapped files.  A file is mapped
once per tensor, so that pages of earlier tensors do not count as the process's memory, and is written with one tensor
in memory, where safetensors' `save_file` would hold all.  Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron3d.checkpoint.index import Index, Meta, StoredBox, StoredTensor, refuse_torch_folder
from megatron3d.checkpoint.pieces import dtype_name, raw_bytes, safetensors_header
from megatron3d.checkpoint.read import BoxFile, check_length
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.convert.config_json import class_name_of, language_model, model_type_of, read_settings
from megatron3d.convert.family_table import MODEL_TYPES, WHOLE_MODELS
from megatron3d.convert.fields import DTYPE_NAMES, HubConfig, WholeModel
from megatron3d.convert.tensor_names import LAYER, MTP_COPIES, TIED_HEAD, FileTensor, Place, RowRange, file_tensors
from megatron3d.data.token_files.files import is_path
from megatron3d.data.tokenizers.special_tokens import MAX_BYTES
from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.errors import UserError, is_machine_fault
from megatron3d.model.spec import Architecture, architecture_record
from megatron3d.parallel.layout import box_shape
from megatron3d.runtime.arguments import read_limited
from megatron3d.runtime.files import fsync, retried, write_text

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, full) for name, full in DTYPE_NAMES.items()}
_NAMES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
# Tensors that old versions saved with the weights: causal masks and rotary frequencies.
_CONSTANTS = re.compile(r"((h\.\d+\.attn|layers\.\d+\.attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
# Weights of all experts of a layer.
STACKED = re.compile(r"\.mlp\.experts\.gate_up_proj$")
MAX_PROBLEMS = 8
JSON, PIECES = "tokenizer.json", "tokenizer.model"
# A SentencePiece model that no tokenizer.json equals; transformers would read PIECES as Llama's kind of model.
BARE_PIECES = "sentencepiece.model"
_KINDS = {JSON: "HuggingFaceTokenizer", PIECES: "SentencePieceTokenizer", BARE_PIECES: "SentencePieceTokenizer"}


def source_file(folder: Path, name: str) -> Path:
    """Return a file of a Hugging Face folder, whether or not it is there.

    Raises UserError where it is no regular file, or a link that leads out of the folder; links of the hub's cache,
    which lead from `snapshots/REVISION` to `blobs`, are followed.
    """
    path, root = folder / name, Path(os.path.realpath(folder))
    real = Path(os.path.realpath(path))
    homes = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(home) for home in homes):
        raise UserError(f"{path}: is a link to {real}, outside of the folder; copy that file here if it belongs here")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no regular file; give a folder that save_pretrained wrote")
    return path


def read_json(path: Path) -> dict[str, JsonValue]:
    """Return the JSON object of a file; raises UserError where there is none."""
    try:
        value = json.loads(read_limited(path, MAX_BYTES))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give a folder that save_pretrained wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is not a JSON object; copy or download it again")
    return value


def write_json(path: Path, value: object) -> None:
    """Write a JSON file with indentation."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def folder_tokenizer(folder: Path) -> tuple[str, str] | None:
    """Return type and file of a folder's tokenizer, None where there is none; raises UserError for links out of it."""
    for name, kind in _KINDS.items():
        if (path := source_file(folder, name)).is_file():
            return kind, str(path)
    return None


@dataclass(frozen=True)
class HubTensor:
    """A tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class HubWeights:
    """The tensors of a folder of a model, and their `table`; `stored` says where each is.

    `vocabulary` names those with a row for each token.  Raises UserError with every problem where files are missing,
    damaged or foreign, or tensors other than the table's.  Of a `whole` model it is the language model's.
    """

    def __init__(self, folder: Path, arch: Architecture, model_type: str, whole: WholeModel | None = None) -> None:
        self.folder, self.files = folder, find_files(folder)
        found = {tensor.name: tensor for path in self.files for tensor in _tensors(path)}
        if whole is not None:
            named = ((whole.text_name(name), tensor) for name, tensor in found.items())
            found = {name: tensor for name, tensor in named if name is not None}
        is_stacked = arch.experts is not None and any(STACKED.search(name) for name in found)
        tensors = self.table = file_tensors(arch, model_type, is_stacked)
        self.vocabulary = frozenset(tensor.name for tensor in tensors if tensor.has_vocabulary)
        # Files of a model without head, such as those of the first GPT-2 models, leave the prefix out.
        bare = {tensor.name.removeprefix(MODEL_TYPES[model_type].body): tensor.name for tensor in tensors}
        self.stored = {bare.get(name, name): tensor for name, tensor in found.items()}
        head = self.stored.pop(TIED_HEAD, None) if arch.tie_embeddings else None
        copies = self._copies(tensors)
        problems = [f"{folder}: {problem}" for problem in _differences(self.stored, tensors)]
        more = len(problems) - MAX_PROBLEMS
        UserError.collect(problems[:MAX_PROBLEMS] + ([f"{folder}: and {more} more tensors"] if more > 0 else []))
        for tensor in tensors:
            if tensor.number is not None and not isclose(
                value := self.tensor(tensor.name).item(), tensor.number, rel_tol=0.01
            ):
                raise UserError(
                    f"{folder}: {tensor.name} is {value}; only {tensor.number} is what the model computes here"
                )
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
        for name in list(self.stored):
            for copy, matrix in zip(MTP_COPIES, (matrices[0], matrices[-1]), strict=True):
                if name.startswith(LAYER.partition("{n}")[0]) and name.endswith(f".{copy}"):
                    found.append((self.stored.pop(name), matrix))
        return found

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of the weights."""
        return frozenset(self.stored[tensor.name].dtype for tensor in self.table if not tensor.is_state)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as stored, mapped from the file."""
        return _read(self.stored[name])


def rows_of(values: Tensor, rows: RowRange) -> Tensor:
    """Return rows of a logical tensor as a view of the values of a file's tensor."""
    place, num_rows = rows.place, rows.high - rows.low
    values = values if place.expert < 0 else values[place.expert]
    if place.is_transposed:  # a row or column stays contiguous
        values = values.T if min(values.shape) > 1 else values.reshape(values.shape[::-1])
    found = values[place.start : place.start + num_rows * place.step : place.step]
    return found if len(rows.shape) == 1 else found[:, place.column : place.column + rows.shape[1]]


@contextmanager
def _opened(path: Path, checks_length: bool = False) -> Iterator[Any]:
    """Open a safetensors file; raises UserError where it, or what is read from it, is damaged."""
    try:
        if checks_length:
            retried(path, lambda: check_length(path))
        with safe_open(path, framework="pt") as handle:
            yield handle
    except (OSError, SafetensorError, RuntimeError) as error:  # the last where torch cannot map the file
        if is_machine_fault(error):
            raise
        raise UserError(f"{path} is no whole safetensors file ({error}); copy or download it again") from error


def _read(stored: HubTensor) -> Tensor:
    with _opened(stored.file) as handle:
        tensor: Tensor = handle.get_tensor(stored.name)
    return tensor


def _tensors(path: Path) -> Iterator[HubTensor]:
    """Yield the tensors that the header of a file describes, but for constants, which may be of any type."""
    with _opened(path, checks_length=True) as handle:
        for name in (name for name in handle.keys() if not _CONSTANTS.search(name)):  # noqa: SIM118 (no mapping)
            part = handle.get_slice(name)
            dtype = _NAMES.get(part.get_dtype())
            if dtype is None:
                raise UserError(
                    f"{path}: {name} is of type {part.get_dtype()}, not one of {', '.join(_NAMES)}; convert the "
                    "model before quantization"
                )
            yield HubTensor(path, name, tuple(part.get_shape()), dtype)


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
    class_name = class_name_of(settings)
    if class_name and settings.get("architectures") == [class_name]:
        return (f"{what}: code is never run; the model is {class_name} as transformers has it",)
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
    if not is_map or not named or any(Path(file).name != file or not is_path(file) for file in named.values()):
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


def weights_meta(arch: Architecture, tokenizer: str | None, model_type: str) -> Meta:
    """Return the metadata of a folder's weights; `tokenizer` is a fingerprint, None where it is not known."""
    return Meta(
        model=architecture_record(arch),
        identity={} if tokenizer is None else {"tokenizer": tokenizer},
        iteration=0,
        consumed_samples=0,
        optimizer_steps=0.0,
        model_type=model_type,
    )


@dataclass(frozen=True)
class HubFolder:
    """A folder that was opened: its config.json, the model that this describes, its weights, and notes on it.

    `settings` are those of the language model; `class_name` is transformers' class of the folder.
    """

    settings: HubConfig
    model: ModelConfig
    model_type: str
    arch: Architecture
    weights: HubWeights
    notes: tuple[str, ...]
    class_name: str


def open_folder(folder: Path, seq_length: int | None = None) -> HubFolder:
    """Open a folder, whose weights are not read.

    Raises UserError with every field of config.json that our model cannot represent, or every problem of the files.
    """
    refuse_torch_folder(folder)
    published = read_json(source_file(folder, "config.json"))
    code = refuse_code(folder, published)
    settings, part = language_model(published)
    model, absent = without_absent_modules(folder, read_settings(settings, seq_length))
    arch, model_type = resolve_architecture(model, model.vocab_size or 0), model_type_of(settings)
    whole = WHOLE_MODELS.get(str(published.get("model_type")))
    weights, notes = HubWeights(folder, arch, model_type, whole), (*code, *part, *absent)
    return HubFolder(settings, model, model_type, arch, weights, notes, class_name_of(published))


def read_hub_index(folder: Path) -> Index:
    """Return the index of a Hugging Face folder, whose files are opened with `HubFile`; raises as `open_folder`."""
    hub = open_folder(folder)
    tensors: dict[str, StoredTensor] = {}
    for tensor in hub.weights.table:
        stored = hub.weights.stored[tensor.name]
        for rows in tensor.row_ranges():
            key = ":".join([*(str(int(number)) for number in rows.place), stored.name])
            box = StoredBox(rows.box, stored.file.name, key, checksum="")
            name = f"model.{rows.name}"
            others = tensors[name].boxes if name in tensors else ()
            dtype = dtype_name(stored.dtype)
            tensors[name] = StoredTensor(rows.shape, dtype, (*others, box))
    found = folder_tokenizer(folder)
    meta = weights_meta(hub.arch, found and build_tokenizer(*found).fingerprint, hub.model_type)
    return Index.model_construct(None, iteration=0, meta=meta.model_dump(), tensors=tensors)


class HubFile(BoxFile):
    """An open safetensors file of a Hugging Face folder; `read_hub_index` says which rows of its tensors a box is."""

    def box(self, file: Any, stored: StoredBox) -> Tensor:
        """Return rows of a tensor, memory-mapped from an open file."""
        *numbers, name = stored.key.split(":", len(Place._fields))
        start, step, column, expert, is_transposed = map(int, numbers)
        place = Place(start, step, column, expert, bool(is_transposed))
        rows = RowRange(name, box_shape(stored.box), *stored.box[0], place)
        return rows_of(file.get_tensor(name), rows)


def dtype_of(tensor: FileTensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a file whose weights have a dtype: state stays in fp32, as training has it."""
    return torch.float32 if tensor.is_state else dtype


def num_bytes(tensor: FileTensor, dtype: torch.dtype) -> int:
    """Return the size in bytes of a tensor's values, in a file whose weights have a dtype."""
    return torch.Size(tensor.shape).numel() * dtype_of(tensor, dtype).itemsize


def divide(tensors: Sequence[FileTensor], dtype: torch.dtype, max_bytes: int) -> dict[str, list[FileTensor]]:
    """Return the tensors, in order, by the name of their file of at most `max_bytes`; a larger one has its own."""
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
        return {SINGLE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


def write_shards(
    folder: Path, shards: Mapping[str, Sequence[FileTensor]], dtype: torch.dtype, values: Iterator[Tensor]
) -> None:
    """Write the files, and an index if there are several; `values` come in the order of the files' tensors."""
    for file, tensors in shards.items():
        _write(folder / file, tensors, dtype, values)
    if len(shards) > 1:
        total = sum(num_bytes(tensor, dtype) for tensors in shards.values() for tensor in tensors)
        named = {tensor.name: file for file, tensors in shards.items() for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(named.items()))}
        write_json(folder / INDEX, index)


def _write(path: Path, tensors: Sequence[FileTensor], dtype: torch.dtype, values: Iterator[Tensor]) -> None:
    described = [(tensor.name, dtype_of(tensor, dtype), tensor.shape) for tensor in tensors]
    with path.open("wb") as file:
        file.write(safetensors_header(described, {"format": "pt"}))
        for name, stored, shape in described:
            value = next(values)
            assert (tuple(value.shape), value.dtype) == (shape, stored), f"{name} is {value.shape}"
            file.write(raw_bytes(value))
    fsync(path)
