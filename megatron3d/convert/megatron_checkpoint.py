"""Convert a checkpoint of Megatron-LM in its `torch_dist` format to a run's folder, tensor by tensor.

    FOLDER/latest_checkpointed_iteration.txt   "100"           RUN/config.yaml
    FOLDER/iter_0000100/metadata.json          its format      RUN/iter_0000100/ ...
    FOLDER/iter_0000100/common.pt              arguments, counters of the optimizer
    FOLDER/iter_0000100/.metadata, *.distcp    tensors: `torch_folder`

Weights in fp32 and both moments come with their parameters' names where Megatron-LM saves its optimizer without its
buckets; then the run goes on as Megatron-LM's would.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megatron3d.checkpoint import store
from megatron3d.checkpoint.index import Meta
from megatron3d.checkpoint.publish import iteration_folder
from megatron3d.checkpoint.store import Piece
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.read import SECTIONS, Resolved, read_config
from megatron3d.config.report import write_resolved
from megatron3d.config.schema import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from megatron3d.config.validate.files import TRACKER
from megatron3d.convert.conversion import ConversionReport, ConversionRequest, output_folder
from megatron3d.convert.hub_weights import read_json, rows_of
from megatron3d.convert.megatron_table import Form, MegatronTensor, Slot, megatron_tensors, read_arguments
from megatron3d.convert.tensor_names import RowRange
from megatron3d.convert.tokenizer import import_tokenizer
from megatron3d.convert.torch_folder import COMMON, METADATA, TorchFolder
from megatron3d.errors import UserError
from megatron3d.model.spec import LOAD, Architecture, architecture_record, router_names
from megatron3d.parallel.layout import Box, Shape, box_shape
from megatron3d.parallel.mesh import DATA, PIPELINE, Mesh
from megatron3d.runtime.arguments import read_limited

FORMAT_FILE, FORMAT = "metadata.json", "torch_dist"
_WORDS, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
# Names of the weights in fp32 among the optimizer's state, and of the moments.
_MASTERS, MOMENTS = ("fp32_param", "param"), ("exp_avg", "exp_avg_sq")
MAX_NAMES = 8
# Arguments that have the name and the meaning of a key of these sections.
TRAINING: Mapping[str, tuple[type[TrainConfig | OptimizerConfig], tuple[str, ...]]] = {
    "train": (TrainConfig, ("micro_batch_size", "global_batch_size", "train_iters", "train_samples", "seed")),
    "optimizer": (
        OptimizerConfig,
        (
            *("lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_decay_iters", "weight_decay"),
            *("lr_warmup_samples", "lr_warmup_fraction", "lr_decay_samples", "lr_warmup_init"),
            *("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
            *("adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
        ),
    ),
}
ACCEPT = "checkpoint.accept_changed=[tokenizer,corpus,data.split,train.seed]"


def find_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint of a folder of Megatron-LM, or the folder if it is one itself.

    Raises UserError where there is none, or it is of another format, with the way to convert it.
    """
    path, tracker = folder, folder / TRACKER
    if tracker.is_file():
        said = read_limited(tracker, 100).decode(errors="replace").strip()
        if said != "release" and not re.fullmatch(r"\d{1,9}", said):
            raise UserError(f"{tracker}: holds {said[:40]!r}, not the number of an iteration; write that, such as 100")
        path = folder / said if said == "release" else iteration_folder(folder, int(said))
    if next(path.glob("mp_rank_*/*.pt"), None) is not None:
        raise UserError(
            f"{path}: is of Megatron-LM's format `torch`, whose files are pickles for one layout and are not read; "
            "convert it with Megatron-LM's own pretrain_gpt.py: its arguments, and --ckpt-convert-format torch_dist "
            "--ckpt-convert-save FOLDER"
        )
    if not (path / METADATA).is_file():
        raise UserError(
            f"{path}: is no checkpoint of Megatron-LM, which has a file {METADATA}; give the folder that Megatron-LM "
            f"saved to, with {TRACKER}, or one of its iter_ folders"
        )
    form = read_json(path / FORMAT_FILE).get("sharded_backend") if (path / FORMAT_FILE).is_file() else FORMAT
    if form != FORMAT:
        raise UserError(f"{path}: is of Megatron-LM's format {form}; save it with --ckpt-format {FORMAT}")
    return path


class MegatronWeights:
    """The tensors of a checkpoint of Megatron-LM that hold a model, and perhaps its optimizer's state.

    Raises UserError with the names that are missing, have another shape or are not in the model.
    """

    def __init__(self, files: TorchFolder, arch: Architecture) -> None:
        self.files = files
        states = {name: found for name in files.tensors if (found := _STATE.fullmatch(name))}
        self._states = {(found[1], found[2]): name for name, found in states.items()}
        stored = files.tensors.keys() - states.keys()
        if arch.tie_embeddings and _HEAD in stored:
            stored -= {_HEAD}
            if not torch.equal(*(files.read(name, _whole(files.tensors[name].shape)) for name in (_WORDS, _HEAD))):
                raise UserError(
                    f"{files.folder}: the model ties the embedding and the head, but {_HEAD} differs from {_WORDS}; "
                    "describe a model with model.tie_embeddings=false"
                )
        table = megatron_tensors(arch)
        forms: list[Form] = [
            next((form for form in each.forms if stored.issuperset(_names(form))), ()) for each in table
        ]
        self.places = tuple(zip(table, forms, strict=True))
        problems = list(chain.from_iterable(self._differences(*place) for place in self.places))
        unknown = stored - {name for form in forms for name in _names(form)}
        problems += [f"tensor {name} is not in the model" for name in sorted(unknown)]
        more = len(problems) - MAX_NAMES
        UserError.collect(
            [f"{files.folder}: {problem}" for problem in dict.fromkeys(problems[:MAX_NAMES])]
            + ([f"{files.folder}: and {more} more tensors"] if more > 0 else [])
        )

    def _differences(self, each: MegatronTensor, form: Form) -> Iterator[str]:
        if not form:
            yield f"tensor {each.forms[0][0].name} of the model is not in it"
        for slot in form:
            found, wanted = self.files.tensors[slot.name].shape, stored_shape(each, form, slot)
            is_padded = each.tensor.has_vocabulary and found[1:] == wanted[1:] and found[:1] > wanted[:1]
            if found != wanted and not is_padded:
                yield f"tensor {slot.name} is {list(found)}, and {list(wanted)} in the model"

    def kinds(self) -> tuple[str | None, ...]:
        """Return the kind of state that is read as weights (None: the weights), then those of the moments, if complete.

        Biases of routers are no parameters, so that the optimizer has no state of them.
        """
        trained = {slot.name for each, form in self.places if not each.tensor.is_state for slot in form}
        complete = {kind for kind, _ in self._states if all((kind, name) in self._states for name in trained)}
        masters = next((kind for kind in _MASTERS if kind in complete), None)
        return (masters, *(MOMENTS if complete.issuperset(MOMENTS) else ()))

    def dtype(self, each: MegatronTensor, form: Form, kind: str | None) -> torch.dtype:
        """Return the dtype of a tensor, or of the optimizer's state of a kind."""
        return self.files.tensors[self._name(each, form[0], kind)].dtype

    def read(self, each: MegatronTensor, form: Form, kind: str | None) -> Tensor:
        """Return a tensor, or the optimizer's state of a kind, as Megatron-LM concatenates our logical tensors."""
        parts = []
        for slot in form:
            name, shape = self._name(each, slot, kind), stored_shape(each, form, slot)
            entry = tuple((index, index + 1) for index, _ in slot.entry)
            box = (*entry, *_whole(shape[len(entry) :]))
            parts.append(self._box(name, shape, box).reshape(shape[len(entry) :]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _name(self, each: MegatronTensor, slot: Slot, kind: str | None) -> str:
        return slot.name if kind is None or each.tensor.is_state else self._states[kind, slot.name]

    def _box(self, name: str, shape: Shape, box: Box) -> Tensor:
        """Return a box of a tensor of a shape, which the optimizer of versions before 0.14 holds by shards.

        A tensor of N dims is one of N + 1 there: the grid of the shards, and the elements of a shard.
        """
        stored = self.files.tensors[name].shape
        if len(stored) == len(shape):
            return self.files.read(name, box)
        *grid, numel = stored
        sizes = [size // count for size, count in zip(shape, grid, strict=True)]
        if prod(sizes) != numel or any(low % size or high % size for (low, high), size in zip(box, sizes, strict=True)):
            raise UserError(f"{self.files.folder}: {name} is {list(stored)}, no division of {list(shape)} into shards")
        shards = [(low // size, high // size) for (low, high), size in zip(box, sizes, strict=True)]
        values, places = self.files.read(name, (*shards, (0, numel))), len(shape)
        order = chain.from_iterable((dim, places + dim) for dim in range(places))
        return values.reshape(*box_shape(tuple(shards)), *sizes).permute(*order).reshape(box_shape(box))


def _whole(shape: Shape) -> Box:
    return tuple((0, size) for size in shape)


def _names(form: Form) -> Iterator[str]:
    return (slot.name for slot in form)


def stored_shape(each: MegatronTensor, form: Form, slot: Slot) -> Shape:
    """Return the shape of a whole tensor of a checkpoint, which holds an entry of its own for each layer and expert."""
    rows, *others = each.tensor.shape
    return (*(count for _, count in slot.entry), rows // len(form), *others)


@dataclass(frozen=True)
class _Described:
    """What a checkpoint of Megatron-LM says of its run, and what its arguments did not say or is left out."""

    model: ModelConfig
    arch: Architecture
    config: Config
    consumed_samples: int
    optimizer_steps: float
    notes: tuple[str, ...]


def from_megatron(request: ConversionRequest) -> ConversionReport:
    """Write a run's folder with the weights, and the optimizer's state if it is there, of a Megatron-LM checkpoint.

    Raises UserError.
    """
    path = find_checkpoint(request.source)
    files = TorchFolder(path)
    if _WORDS not in files.tensors:
        raise UserError(f"{path}: has no tensor {_WORDS}; only checkpoints of Megatron-LM's GPT are converted")
    found = re.fullmatch(r"iter_(\d+)", path.name)
    iteration = int(found[1]) if found else 0
    described = _describe(files, request.config, iteration)
    weights = MegatronWeights(files, described.arch)
    kinds, notes = weights.kinds(), list(described.notes)
    with output_folder(request.target) as folder:
        data, fingerprint = DataConfig(), None
        if request.tokenizer_type is not None:
            tokenizer, kind, name = import_tokenizer(
                request.source, folder, request.tokenizer_type, request.tokenizer_model
            )
            if tokenizer.vocab_size > described.arch.vocab_size:
                raise UserError(
                    f"--tokenizer-type {kind}: has {tokenizer.vocab_size} tokens, the model "
                    f"{described.arch.vocab_size}; name the model's own tokenizer"
                )
            data = DataConfig.model_validate({"tokenizer_type": kind, "tokenizer_model": name})
            fingerprint = tokenizer.fingerprint
        meta = Meta(
            model=architecture_record(described.arch),
            identity={} if fingerprint is None else {"tokenizer": fingerprint},
            iteration=iteration,
            consumed_samples=described.consumed_samples,
            optimizer_steps=described.optimizer_steps,
        )
        alone = ProcessComm(Mesh(tuple((axis, 1) for axis in (PIPELINE, *DATA)), 0), ())
        store.save(folder, iteration, _pieces(weights, described.arch, kinds), meta.model_dump(), alone)
        config = described.config.model_copy(update={"data": data})
        origins = {
            f"{part}.{key}": f"{path}" if key in getattr(config, part).model_fields_set else "default"
            for part, keys in SECTIONS.items()
            for key in keys
        }
        write_resolved(Resolved(config, origins), folder / "config.yaml", described.arch.vocab_size)
    counts = f"{len(weights.places)} tensors of iteration {iteration}"
    return ConversionReport((counts, *notes, *_continuation(request, weights, kinds, files)))


def _continuation(
    request: ConversionRequest, weights: MegatronWeights, kinds: tuple[str | None, ...], files: TorchFolder
) -> Iterator[str]:
    """Yield sentences on what is left out and how the run goes on."""
    if kinds[0] is not None:
        yield f"the weights are those of the optimizer in fp32 ({kinds[0]})"
    others = {name.partition("/")[0].rpartition(".")[2] for name in files.objects}
    if others:
        yield f"objects that are no tensors are left out: {', '.join(sorted(others))}"
    load = f"go on with checkpoint.load={request.target} {ACCEPT}"
    if len(kinds) > 1:
        yield f"the optimizer's moments are converted: {load}"
    else:
        yield (
            "the optimizer's state is not there, or in Megatron-LM's buckets, which are of one layout: moments start "
            f"at 0; {load} checkpoint.no_load_optim=true"
        )


def _describe(files: TorchFolder, config: Path | None, iteration: int) -> _Described:
    """Return the model and the run: of `config`, a file of ours, or of Megatron-LM's arguments."""
    rows = files.tensors[_WORDS].shape[0]
    if config is not None:
        given = read_config(config).config
        vocab_size = given.model.vocab_size or rows
        model = given.model.model_copy(update={"vocab_size": vocab_size})
        left_out = (f"rows of the vocabulary beyond {vocab_size} of {rows} are left out",) * (vocab_size < rows)
        arch = resolve_architecture(model, vocab_size)
        return _Described(model, arch, given.model_copy(update={"model": model}), 0, float(iteration), left_out)
    said = files.common.get("args")
    if said is None or not hasattr(said, "__dict__"):
        raise UserError(f"{files.folder / COMMON}: holds no arguments of Megatron-LM; describe the model with --config")
    arguments = vars(said)
    try:
        model = ModelConfig.model_validate({**read_arguments(arguments), "vocab_size": rows})
    except ValidationError as error:
        raise UserError(
            *(
                f"{files.folder / COMMON}: {'.'.join(map(str, each['loc']))}={each['input']!r}: {each['msg']}; "
                "describe the model with --config"
                for each in error.errors()
            )
        ) from error
    training, notes = _read_training(arguments)
    samples, steps = arguments.get("consumed_train_samples"), _optimizer_steps(files.common.get("optimizer"))
    return _Described(
        model,
        resolve_architecture(model, rows),
        Config(model=model, **training),
        samples if isinstance(samples, int) and samples >= 0 else 0,
        float(iteration) if steps is None else steps,
        tuple(notes),
    )


def _read_training(arguments: Mapping[str, object]) -> tuple[dict[str, Any], list[str]]:
    """Return the sections `train` and `optimizer`, and a sentence for each argument that has no such value here."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    precision = next((name for name in names.values() if arguments.get(name)), "fp32")
    sections, notes = dict[str, Any](), list[str]()
    is_constant = arguments.get("weight_decay_incr_style", "constant") == "constant"
    follows = {"start_weight_decay", "end_weight_decay"} if is_constant else {"weight_decay"}
    for section, (kind, keys) in TRAINING.items():
        values: dict[str, object] = {"precision": precision} if section == "train" else {}
        for name in (name for name in keys if name not in follows):
            value = arguments.get(name)
            if value is None or (name == "train_iters" and arguments.get("train_samples")):  # which follow from these
                continue
            is_float = kind.model_fields[name].annotation is float
            value = float(value) if is_float and isinstance(value, int) else value
            try:
                kind.model_validate({name: value})
                values[name] = value
            except ValidationError as error:
                notes.append(f"{section}.{name}={value!r} is not taken over: {error.errors()[0]['msg']}")
        sections[section] = kind.model_validate(values)
    return sections, notes


def _optimizer_steps(state: object) -> float | None:
    """Return the number of updates that an optimizer counted; None where none is found."""
    if isinstance(state, Mapping):
        for name in ("common_step", "step"):
            if isinstance(value := state.get(name), int | float | Tensor):
                return float(value)
        return next((found for each in state.values() if (found := _optimizer_steps(each)) is not None), None)
    if isinstance(state, list | tuple):
        return next((found for each in state if (found := _optimizer_steps(each)) is not None), None)
    return None


class _LastTensor:
    """The tensor of a checkpoint that was read last, of which several logical tensors are rows."""

    def __init__(self, weights: MegatronWeights) -> None:
        self._weights = weights
        self._key: object = None
        self._values = torch.empty(0)

    def rows(self, place: int, kind: str | None, rows: RowRange) -> Tensor:
        """Return rows of a logical tensor, or of the optimizer's state of a kind."""
        if self._key != (place, kind):
            self._values = torch.empty(0)  # so that memory holds one tensor
            each, form = self._weights.places[place]
            self._values, self._key = self._weights.read(each, form, kind), (place, kind)
        return rows_of(self._values, rows)


def _pieces(weights: MegatronWeights, arch: Architecture, kinds: tuple[str | None, ...]) -> Iterator[Piece]:
    """Yield the logical tensors of weights and moments; each is read when it is written."""
    last = _LastTensor(weights)
    for kind, prefix in zip(kinds, ("model", *(f"optimizer.{name}" for name in MOMENTS)), strict=False):
        for place, (each, form) in enumerate(weights.places):
            if each.tensor.is_state and prefix != "model":
                continue
            dtype = weights.dtype(each, form, kind)
            for rows in each.tensor.row_ranges():
                described = torch.empty(box_shape(rows.box), dtype=dtype, device="meta")
                compute = partial(last.rows, place, kind, rows)
                yield Piece(f"{prefix}.{rows.name}", rows.shape, rows.box, described, compute)
    if len(kinds) > 1 and arch.experts is not None:  # the load of the step before, which losses of the batch use
        for name in router_names(arch):
            load = torch.zeros(arch.experts.num_experts)
            yield Piece(f"optimizer.{name}.{LOAD}", tuple(load.shape), ((0, len(load)),), load)
