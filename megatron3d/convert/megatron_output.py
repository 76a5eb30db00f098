"""Write a run's checkpoint as one of Megatron-LM in its `torch_dist` format, tensor by tensor.

    RUN/iter_0000100/  ->  FOLDER/latest_checkpointed_iteration.txt, FOLDER/iter_0000100/{common.pt, metadata.json, ...}

Names are those of layers of Transformer Engine, which Megatron-LM builds by default.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from megatron3d.checkpoint import store
from megatron3d.checkpoint.index import Meta, read_index, read_meta
from megatron3d.checkpoint.publish import iteration_folder, run_folder
from megatron3d.checkpoint.store import Index, Piece
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ModelConfig
from megatron3d.config.validate.files import TRACKER
from megatron3d.convert.conversion import (
    ConversionReport,
    ConversionRequest,
    WrittenBox,
    output_folder,
    read_architecture,
    stored_dtype,
    write_torch_folder,
)
from megatron3d.convert.hub_weights import dtype_of, rows_of
from megatron3d.convert.megatron_checkpoint import FORMAT, FORMAT_FILE, MOMENTS, TRAINING, stored_shape
from megatron3d.convert.megatron_table import MegatronTensor, megatron_tensors, read_arguments, write_arguments
from megatron3d.convert.torch_folder import COMMON
from megatron3d.errors import UserError
from megatron3d.model.spec import Architecture, architecture_record, changed_fields
from megatron3d.runtime.files import fsync, write_text

# What Megatron-LM compares with its own arguments, or reads, when it loads a checkpoint of any layout.
_LAYOUT = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "world_size": 1, "ckpt_format": FORMAT}
# Version of its checkpoints, since which queries, keys and values are fused by group.
_VERSION = 3.0


def to_megatron(request: ConversionRequest) -> ConversionReport:
    """Write a folder of Megatron-LM with the weights of a checkpoint, and the moments that it has.

    With the run's config.yaml it also has the optimizer's groups of parameters and the learning-rate schedule.  Raises
    UserError where Megatron-LM's GPT has not what the model has.
    """
    checkpoint = store.resolve(request.source)
    arch, meta, index = read_architecture(checkpoint), read_meta(checkpoint), read_index(checkpoint)
    table = megatron_tensors(arch)
    arguments = _checked_arguments(arch)
    dtype = request.dtype or stored_dtype(checkpoint, index, [each.tensor for each in table])
    arguments |= {"params_dtype": dtype, "bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16}
    arguments |= {"iteration": meta.iteration, "consumed_train_samples": meta.consumed_samples, **_LAYOUT}
    has_moments = all(
        f"optimizer.{kind}.{name}" in index.tensors
        for kind in MOMENTS
        for each in table
        for name, _ in each.tensor.parts
        if not each.tensor.is_state
    )
    path = run_folder(checkpoint) / "config.yaml"
    config = read_config(path).config if path.is_file() else None
    if config is not None:
        sections = {"train": config.train, "optimizer": config.optimizer}
        arguments |= {name: getattr(sections[part], name) for part, (_, names) in TRAINING.items() for name in names}
        arguments["train_iters"] = RunSpec(config).train_iters
    common = {"args": Namespace(**arguments), "checkpoint_version": _VERSION, "iteration": meta.iteration}
    if has_moments:
        state: dict[str, object] = {"state": {"common_step": torch.tensor(meta.optimizer_steps)}}
        if config is not None:
            ranks = {len(each.tensor.shape) for each in table if not each.tensor.is_state}
            state["param_groups"] = _groups(config, meta, ranks)
            common["opt_param_scheduler"] = _schedule(config, meta)
        common["optimizer"] = state if dtype is torch.float32 else {"optimizer": state}
    with output_folder(request.target) as folder:
        place = iteration_folder(folder, meta.iteration)
        place.mkdir()
        num_bytes = write_torch_folder(place, _boxes(checkpoint, index, table, dtype, has_moments))
        torch.save(common, place / COMMON)
        fsync(place / COMMON)
        versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        write_text(place / FORMAT_FILE, json.dumps({"sharded_backend": FORMAT, **versions}))
        write_text(folder / TRACKER, str(meta.iteration))
    counts = f"{len({each.forms[0][0].name for each in table})} tensors of iteration {meta.iteration}"
    goes_on = has_moments and config is not None
    moments = "moments are written as optimizer.state.exp_avg and exp_avg_sq"
    groups = (
        "with groups of parameters and the schedule"
        if goes_on
        else f"no groups of parameters, since there is no {path}"
    )
    without = "--no-load-rng" if goes_on else "--no-load-optim --no-load-rng"
    load = f"Megatron-LM loads it with {without} --dist-ckpt-strictness log_all"
    load += ", without --use-distributed-optimizer" * goes_on
    return ConversionReport((f"{counts}, {num_bytes:,} bytes", *(f"{moments}, {groups}",) * has_moments, load))


def _groups(config: Config, meta: Meta, ranks: set[int]) -> list[dict[str, object]]:
    """Return the optimizer's groups of parameters, which Megatron-LM knows by their factors: matrices, then vectors.

    Megatron-LM itself adds which parameters these are; `ranks` are numbers of dims of the model's tensors.
    """
    ours, step = config.optimizer, int(meta.optimizer_steps)
    shared: dict[str, object] = {"lr": ours.lr, "betas": (ours.adam_beta1, ours.adam_beta2), "eps": ours.adam_eps}
    shared |= {"bias_correction": True, "step": step, "max_lr": ours.lr, "min_lr": ours.min_lr, "lr_mult": 1.0}
    shared |= {"is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
    factors = (1.0, 0.0) if 1 in ranks else (1.0,)
    return [{**shared, "wd_mult": factor, "weight_decay": factor * ours.weight_decay} for factor in factors]


def _schedule(config: Config, meta: Meta) -> dict[str, object]:
    """Return the state of Megatron-LM's schedule of learning rates, which counts samples."""
    ours, phases = config.optimizer, RunSpec(config).lr_phases
    batch = 1 if phases.counts_samples else config.train.global_batch_size
    num_steps = config.train.train_samples or RunSpec(config).train_iters
    rates = {"max_lr": ours.lr, "min_lr": ours.min_lr, "lr_decay_style": ours.lr_decay_style}
    steps = {"lr_warmup_steps": phases.warmup * batch, "lr_decay_steps": phases.end * batch}
    steps |= {"num_steps": meta.consumed_samples, "wd_incr_steps": num_steps * batch}
    ends = {"start_wd": ours.start_weight_decay, "end_wd": ours.end_weight_decay}
    decay = {name: ours.weight_decay if value is None else value for name, value in ends.items()}
    return {**rates, **steps, **decay, "wd_incr_style": ours.weight_decay_incr_style}


def _checked_arguments(arch: Architecture) -> dict[str, object]:
    """Return Megatron-LM's arguments of a model; raises UserError with each option that they cannot say."""
    arguments = write_arguments(arch)
    try:
        model = ModelConfig.model_validate({**read_arguments(arguments), "vocab_size": arch.vocab_size})
    except ValidationError as error:
        raise AssertionError(f"arguments that are written are not read: {error}") from error
    back = resolve_architecture(model, arch.vocab_size)
    UserError.collect(
        f"model.{change.name}={json.dumps(change.saved)}: Megatron-LM's GPT has {json.dumps(change.own)}; "
        "train a model with that to convert it"
        for change in changed_fields(architecture_record(arch), back)
    )
    return arguments


def _boxes(
    checkpoint: Path, index: Index, table: tuple[MegatronTensor, ...], dtype: torch.dtype, has_moments: bool
) -> Iterator[WrittenBox]:
    """Yield the tensors, of stacked ones a layer and expert at a time: weights, then those of the optimizer in fp32."""
    kinds = {"": ("model", dtype)}
    if has_moments:
        kinds |= {f"optimizer.state.{kind}.": (f"optimizer.{kind}", torch.float32) for kind in MOMENTS}
        kinds |= {"optimizer.state.fp32_param.": ("model", torch.float32)} if dtype.itemsize < 4 else {}
    for (start, (prefix, kept)), each in product(kinds.items(), table):
        if start and each.tensor.is_state:
            continue
        form = each.forms[0]
        (slot,) = form
        shape, values = stored_shape(each, form, slot), _values(checkpoint, index, each, prefix, kept)
        entry = tuple(place for place, _ in slot.entry)
        offset = (*entry, *((0,) * (len(shape) - len(entry))))
        yield WrittenBox(f"{start}{slot.name}", shape, offset, values.reshape((1,) * len(entry) + tuple(values.shape)))


def _values(checkpoint: Path, index: Index, each: MegatronTensor, prefix: str, dtype: torch.dtype) -> Tensor:
    values = torch.zeros(each.tensor.shape, dtype=dtype_of(each.tensor, dtype))
    pieces = [
        Piece(f"{prefix}.{rows.name}", rows.shape, rows.box, rows_of(values, rows)) for rows in each.tensor.row_ranges()
    ]
    store.load_with_index(checkpoint, index, pieces)
    return values
