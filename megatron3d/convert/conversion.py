"""Convert a Hugging Face folder to a run's folder and back, tensor by tensor; the output appears once verified.

from: config.json, *.safetensors, tokenizer     to: config.yaml, iter_0000000/, tokenizer, conversion.json

A checkpoint is also written as a folder that torch.distributed.checkpoint reads:

    folder/__0_0.distcp    each tensor as torch.save writes it, one after another
    folder/.metadata       a pickle: shape and dtype of each tensor, and where its bytes are

The pickle is written opcode by opcode: each object calls its class, so that any version of torch rebuilds its own
(opcodes: Python's `pickletools`; classes: `torch.distributed.checkpoint.metadata` and `.filesystem`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from megatron3d.checkpoint import store
from megatron3d.checkpoint.index import READERS, Index, read_index, read_meta
from megatron3d.checkpoint.pieces import dtype_name
from megatron3d.checkpoint.publish import run_folder
from megatron3d.checkpoint.store import Piece
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.read import SECTIONS, Resolved, read_config
from megatron3d.config.report import write_resolved
from megatron3d.config.schema import CheckpointConfig, Config, DataConfig, TrainConfig
from megatron3d.convert import compare
from megatron3d.convert.compare import LogitComparison
from megatron3d.convert.config_json import class_name_of, represents, write_settings
from megatron3d.convert.fields import HubConfig
from megatron3d.convert.hub_weights import (
    DTYPES,
    HubWeights,
    divide,
    dtype_of,
    folder_tokenizer,
    num_bytes,
    open_folder,
    read_json,
    rows_of,
    weights_meta,
    write_json,
    write_shards,
)
from megatron3d.convert.tensor_names import FileTensor, RowRange, file_tensors
from megatron3d.convert.tokenizer import (
    GENERATION,
    ID_KEYS,
    export_tokenizer,
    id_value,
    import_tokenizer,
    keep_token_ids,
)
from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.errors import UserError
from megatron3d.model.linear_spec import num_parameters
from megatron3d.model.spec import Architecture, architecture_of_record
from megatron3d.parallel.layout import Shape, box_shape
from megatron3d.parallel.mesh import DATA, PIPELINE, Mesh
from megatron3d.runtime.files import fsync, new_folder, write_text

RECORD = "conversion.json"
MAX_SHARD_BYTES = 5 * 10**9
_PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ConversionRequest:
    """Source, target and options of a conversion.

    Attributes:
        dtype: dtype of the written weights; None keeps that of the source.
        max_shard_bytes: largest safetensors file, for a conversion to Hugging Face.
        seq_length: sequence length of later training, for a conversion from Hugging Face.
        with_logits: run both models on stored inputs, and publish the output only if they agree.
        model_type: model type that is written; None: that of the model's origin, or the first that computes the same.
        config: file of ours that describes the model of a Megatron-LM checkpoint; None: its arguments do.
        weights: what is taken as the weights of a checkpoint, a name in `READERS`.
    """

    source: Path
    target: Path
    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    seq_length: int | None = None
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    with_transformers: bool = True
    with_logits: bool = True
    model_type: str | None = None
    config: Path | None = None
    weights: str = "model"


@dataclass(frozen=True)
class ConversionReport:
    """Sentences on what was converted, and the comparisons of logits."""

    notes: tuple[str, ...]
    agreements: tuple[LogitComparison, ...] = ()


class LogitsDiffer(RuntimeError):
    """Raised if the two models compute different logits; nothing was written."""


@contextmanager
def output_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `target` when the block succeeds; raises UserError where `target` exists."""
    if target.exists():
        raise UserError(f"--output {target}: exists already; name a new folder, or remove it")
    try:
        with new_folder(target) as folder:
            yield folder
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"--output {target}: cannot be written: {reason}; use a folder that you own, on a disk with room"
        ) from error


def from_hub(request: ConversionRequest) -> ConversionReport:
    """Write a run's folder with the weights of a Hugging Face folder; raises UserError or LogitsDiffer."""
    hub = open_folder(request.source, request.seq_length)
    model, arch, weights = hub.model, hub.arch, hub.weights
    assert model.vocab_size is not None, "config.json has a vocabulary"
    with output_folder(request.target) as folder:
        tokenizer, kind, name = import_tokenizer(
            request.source, folder, request.tokenizer_type, request.tokenizer_model
        )
        if tokenizer.vocab_size > model.vocab_size:
            raise UserError(
                f"{request.source}: the tokenizer has {tokenizer.vocab_size} tokens, the model vocab_size="
                f"{model.vocab_size}; name the model's own tokenizer with --tokenizer-type and --tokenizer-model"
            )
        notes = keep_token_ids(hub.settings, request.source, folder, tokenizer.vocab_size) if name else []
        meta = weights_meta(arch, tokenizer.fingerprint, hub.model_type)
        pieces = _pieces(weights, request.dtype)
        alone = ProcessComm(Mesh(tuple((axis, 1) for axis in (PIPELINE, *DATA)), 0), ())
        checkpoint = store.save(folder, 0, pieces, meta.model_dump(), alone)
        data = DataConfig.model_validate({"tokenizer_type": kind, "tokenizer_model": name})
        config = Config(model=model, train=_train_section(weights, request.dtype), data=data)
        sources = {"model": f"{request.source / 'config.json'}", "data": f"{request.source}"}
        origins = {f"{part}.{key}": sources.get(part, "default") for part, keys in SECTIONS.items() for key in keys}
        write_resolved(Resolved(config, origins), folder / "config.yaml", model.vocab_size)
        agreements = _compare_logits(checkpoint, arch, hub.settings, weights, request, hub.class_name)
        _write_record(folder, request, agreements, arch, hub.model_type)
    counts = f"{len(weights.table)} tensors of {len(weights.files)} files"
    return ConversionReport((counts, *hub.notes, *notes), agreements)


def _train_section(weights: HubWeights, dtype: torch.dtype | None) -> TrainConfig:
    """Return the section for training in the dtype `dtype`, by default that of the weights, fp32 where they differ."""
    stored = [dtype] if dtype else list(weights.dtypes)
    precision = _PRECISIONS[stored[0]] if len(stored) == 1 else "fp32"
    return TrainConfig().model_copy(update={"precision": precision})


def to_hub(request: ConversionRequest) -> ConversionReport:
    """Write a Hugging Face folder with the weights of a checkpoint; raises UserError or LogitsDiffer."""
    checkpoint = store.resolve(request.source)
    arch, index = read_architecture(checkpoint), READERS[request.weights](checkpoint)
    origin = _origin(checkpoint)
    wanted = request.model_type or (origin if represents(origin, arch) else None)
    model_type, settings, lost_notes = write_settings(arch, wanted)
    table = file_tensors(arch, model_type)
    dtype = request.dtype or stored_dtype(checkpoint, index, table)
    data = _data_section(request, checkpoint)
    with output_folder(request.target) as folder:
        no_ids = dict.fromkeys(ID_KEYS)
        write_json(folder / "config.json", settings | no_ids)  # transformers wants it for the tokenizer too
        tokenizer, notes = export_tokenizer(data, folder, arch.max_position_embeddings, request.with_transformers)
        ids = _token_ids(tokenizer, folder)
        settings |= {**ids, "torch_dtype": dtype_name(dtype), "use_cache": True}
        write_json(folder / "config.json", settings)
        if not (folder / GENERATION).exists():
            write_json(folder / GENERATION, ids)
        shards = divide(table, dtype, request.max_shard_bytes)
        write_shards(folder, shards, dtype, _values(checkpoint, index, table, dtype))
        weights = HubWeights(folder, arch, model_type)
        agreements = _compare_logits(checkpoint, arch, settings, weights, request, class_name_of(settings))
        _write_record(folder, request, agreements, arch, model_type)
    return ConversionReport((f"{len(table)} tensors into {len(shards)} files", *lost_notes, *notes), agreements)


def _token_ids(tokenizer: Tokenizer, folder: Path) -> dict[str, JsonValue]:
    """Return the ids of special tokens for config.json: null where there is none, since classes have defaults."""
    special, path = tokenizer.special, folder / GENERATION
    pad = read_json(path).get("pad_token_id") if path.exists() else None
    return {"bos_token_id": special.bos, "eos_token_id": id_value(special.ends), "pad_token_id": pad}


def _origin(checkpoint: Path) -> str:
    """Return the model type of the folder that a checkpoint's weights come from; empty where there is none.

    Checkpoints of earlier versions do not tell; of those, the folder of a run that was converted does.
    """
    path = run_folder(checkpoint) / RECORD
    found = read_meta(checkpoint).model_type
    return found or (str(read_json(path).get("model_type", "")) if path.is_file() else "")


def _compare_logits(
    checkpoint: Path,
    arch: Architecture,
    settings: HubConfig,
    weights: HubWeights,
    request: ConversionRequest,
    class_name: str,
) -> tuple[LogitComparison, ...]:
    """Run both models on the stored inputs; raises LogitsDiffer."""
    if not request.with_logits:
        return ()
    tokens = compare.stored_inputs(arch.vocab_size, arch.max_position_embeddings)
    rounded, rows = request.dtype or torch.float64, compare.compared_rows(arch.vocab_size, tokens)
    places = torch.searchsorted(rows, tokens)
    ours = compare.our_logits(checkpoint, READERS[request.weights](checkpoint), arch, rounded, places, rows)

    def values(name: str) -> Tensor:
        return weights.tensor(name)[rows] if name in weights.vocabulary else weights.tensor(name)

    found = [compare.compare(ours, settings, values, rounded, places)]
    if request.with_transformers and compare.has_transformers():
        peer, has_experts = weights.folder, arch.experts is not None
        found.append(
            compare.compare_transformers(
                ours, peer, rounded, tokens, rows, class_name=class_name, has_experts=has_experts
            )
        )
    wrong = [agreement for agreement in found if not agreement.holds]
    if wrong:
        raise LogitsDiffer(
            f"the converted model computes other logits; nothing was written: {'; '.join(map(str, wrong))}"
            f"{_not_finite(weights, rounded)}"
        )
    return tuple(found)


def _not_finite(weights: HubWeights, rounded: torch.dtype) -> str:
    """Return the end of a message that names tensors with numbers which are not finite; empty where there are none."""
    names = [each.name for each in weights.table if not weights.tensor(each.name).to(rounded).isfinite().all()]
    return f"; numbers that are not finite in {rounded} are in {', '.join(names)}" if names else ""


def _pieces(weights: HubWeights, dtype: torch.dtype | None) -> Iterator[Piece]:
    """Yield the logical tensors; each is read, and rounded to a dtype if one is given, when it is written."""

    def values(tensor: FileTensor, rows: RowRange) -> Tensor:
        found = rows_of(weights.tensor(tensor.name), rows)
        return found if dtype is None else found.to(dtype_of(tensor, dtype))

    for tensor in weights.table:
        stored = dtype_of(tensor, dtype) if dtype else weights.stored[tensor.name].dtype
        for rows in tensor.row_ranges():
            described = torch.empty(box_shape(rows.box), dtype=stored, device="meta")
            yield Piece(f"model.{rows.name}", rows.shape, rows.box, described, partial(values, tensor, rows))


def _values(checkpoint: Path, index: Index, table: Sequence[FileTensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the tensors of the files, read from a checkpoint in runs no larger than the largest tensor."""
    budget = max(num_bytes(tensor, dtype) for tensor in table)
    run: list[FileTensor] = []
    for tensor in (*table, None):
        if tensor is None or sum(num_bytes(each, dtype) for each in (*run, tensor)) > budget:
            values = [torch.full(each.shape, each.number or 0.0, dtype=dtype_of(each, dtype)) for each in run]
            pairs = [(rows, whole) for each, whole in zip(run, values, strict=True) for rows in each.row_ranges()]
            named = ((f"model.{rows.name}", rows.shape, rows.box, rows_of(whole, rows)) for rows, whole in pairs)
            store.load_with_index(checkpoint, index, [Piece(*piece) for piece in named])
            yield from values
            run = []
        run += [tensor] if tensor else []


def read_architecture(checkpoint: Path) -> Architecture:
    """Return the architecture of a checkpoint; raises UserError where an incompatible version wrote it."""
    said = read_meta(checkpoint).model
    try:
        return architecture_of_record(said)
    except (KeyError, TypeError) as error:
        raise UserError(f"{checkpoint}: its model is not described as this megatron3d does ({error})") from error


def stored_dtype(checkpoint: Path, index: Index, table: Sequence[FileTensor]) -> torch.dtype:
    """Return the dtype of a checkpoint's weights; raises UserError where they have several."""
    tensors = index.tensors
    names = {f"model.{name}" for tensor in table for name, _ in tensor.parts if not tensor.is_state}
    found = sorted({tensors[name].dtype for name in names if name in tensors})
    known = {dtype_name(dtype): dtype for dtype in DTYPES.values()}
    if len(found) == 1 and found[0] in known:
        return known[found[0]]
    raise UserError(f"{checkpoint}: weights of {' and '.join(found) or 'no'} type; choose one with --dtype")


def _data_section(request: ConversionRequest, checkpoint: Path) -> DataConfig:
    """Return the data section that names the tokenizer: the requested one, or the run's."""
    if request.tokenizer_type is not None:
        named = {"tokenizer_type": request.tokenizer_type, "tokenizer_model": request.tokenizer_model}
        return DataConfig.model_validate(named)
    path = run_folder(checkpoint) / "config.yaml"
    if not path.is_file():
        raise UserError(
            f"{path} does not exist, which would name the tokenizer; name it with --tokenizer-type and "
            "--tokenizer-model"
        )
    return read_config(path).config.data


def _write_record(
    folder: Path, request: ConversionRequest, agreements: Sequence[LogitComparison], arch: Architecture, model_type: str
) -> None:
    """Write the inputs and results of the comparison to conversion.json, so that it can be repeated."""
    tokens = compare.stored_inputs(arch.vocab_size, arch.max_position_embeddings)
    compared = [asdict(agreement) for agreement in agreements]
    dtype = request.dtype and _PRECISIONS[request.dtype]
    source = {"source": str(request.source), "model_type": model_type, "dtype": dtype}
    write_json(folder / RECORD, {**source, "tokens": tokens.tolist(), "logits": compared})


def write_start(request: ConversionRequest) -> ConversionReport:
    """Write the keys that follow from a folder to a YAML file; the run's data, layout and optimizer remain to be set.

    Raises UserError with every problem of config.json and of the weight files, whose values are not read.
    """
    if request.target.exists():
        raise UserError(f"--output {request.target}: exists already; name a new file, or remove it")
    hub = open_folder(request.source, request.seq_length)
    found = (request.tokenizer_type, request.tokenizer_model) if request.tokenizer_type else None
    kind, file = found or folder_tokenizer(request.source) or (None, None)
    train = _train_section(hub.weights, request.dtype)
    data = DataConfig.model_validate({"tokenizer_type": kind, "tokenizer_model": file} if kind else {})
    checkpoint = CheckpointConfig(load=str(request.source), finetune=True)
    title = f"# Starts with the weights of {request.source}: {hub.model_type}, {num_parameters(hub.arch):,} parameters."
    sections = {"model": hub.model, "train": train, "data": data, "checkpoint": checkpoint}
    lines = [title]
    for name, section in sections.items():
        if values := section.model_dump(mode="json", exclude_defaults=True):
            lines += ["", f"{name}:", *(f"  {key}: {json.dumps(value)}" for key, value in values.items())]
    write_text(request.target, "\n".join(lines) + "\n")
    missing = "" if kind else "; it has no tokenizer: set data.tokenizer_type and data.tokenizer_model"
    return ConversionReport((*hub.notes, f"set data.data_path, checkpoint.save, the layout and the optimizer{missing}"))


_DATA_FILE, _METADATA = "__0_0.distcp", ".metadata"
_CLASSES = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class _Call:
    """A call of a class by its module and name; with no arguments at all (None), the object of that name itself."""

    module: str
    name: str
    args: tuple[object, ...] | None = None


class WrittenBox(NamedTuple):
    """A box of a tensor of a shape: its values, which start at `offset`."""

    name: str
    shape: Shape
    offset: Shape
    values: Tensor


def to_torch(request: ConversionRequest) -> ConversionReport:
    """Write all tensors of a checkpoint, weights and optimizer state, under their names and in their dtypes there.

    Raises UserError where the checkpoint is missing or damaged, or the folder exists or cannot be written.
    """
    checkpoint = store.resolve(request.source)
    index = read_index(checkpoint)

    def boxes() -> Iterator[WrittenBox]:
        for name, stored in index.tensors.items():
            values = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
            box = tuple((0, size) for size in stored.shape)
            store.load_with_index(checkpoint, index, [Piece(name, stored.shape, box, values)])
            yield WrittenBox(name, stored.shape, (0,) * len(stored.shape), values)

    with output_folder(request.target) as folder:
        num_bytes = write_torch_folder(folder, boxes())
    return ConversionReport((f"{len(index.tensors)} tensors, {num_bytes:,} bytes",))


def write_torch_folder(folder: Path, boxes: Iterable[WrittenBox]) -> int:
    """Write boxes, of which each tensor has one or more, and the metadata; return the bytes of all boxes."""
    described: dict[str, tuple[_Call, _Call, list[object]]] = {}
    places: dict[object, object] = {}
    with (folder / _DATA_FILE).open("wb") as file:
        for name, shape, offset, values in boxes:
            start = file.tell()
            torch.save(values, file)
            properties = _Call(_CLASSES, "TensorProperties", (_Call("torch", dtype_name(values.dtype)),))
            *_, chunks = described.setdefault(name, (properties, _size(shape), []))
            chunks.append(_Call(_CLASSES, "ChunkStorageMetadata", (_size(offset), _size(tuple(values.shape)))))
            index = _Call(_CLASSES, "MetadataIndex", (name, _size(offset)))
            place = (_DATA_FILE, start, file.tell() - start)
            places[index] = _Call("torch.distributed.checkpoint.filesystem", "_StorageInfo", place)
        num_bytes = file.tell()
    fsync(folder / _DATA_FILE)
    tensors = {name: _Call(_CLASSES, "TensorStorageMetadata", each) for name, each in described.items()}
    metadata = _Call(_CLASSES, "Metadata", (tensors, None, places))
    (folder / _METADATA).write_bytes(b"\x80\x02" + _pickled(metadata) + b".")
    fsync(folder / _METADATA)
    return num_bytes


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
