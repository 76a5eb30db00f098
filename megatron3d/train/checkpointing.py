"""Saving and loading of a training state: every tensor by name, and metadata for an exact continuation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue, ValidationError
from torch import Tensor

from megatron3d import __version__
from megatron3d.checkpoint import read, store
from megatron3d.checkpoint.async_saver import PieceSource
from megatron3d.checkpoint.index import AVERAGES, READERS, Meta, meta_of, read_meta
from megatron3d.checkpoint.pieces import param_pieces, ranges_to_write
from megatron3d.checkpoint.publish import Best, candidates, finished_checkpoints, read_best, write_best
from megatron3d.checkpoint.store import first_intact
from megatron3d.comm.interface import ObjectCollectives
from megatron3d.comm.objects import on_rank_0, run_on_all_ranks
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ModelConfig
from megatron3d.config.validate.files import continues_own, is_hub_folder
from megatron3d.config.yaml_origins import show
from megatron3d.errors import UserError
from megatron3d.metrics.journal import FILE_NAME as JOURNAL
from megatron3d.metrics.journal import validation_losses
from megatron3d.model.router_state import is_first
from megatron3d.model.spec import (
    EXPERT_BIAS,
    LOAD,
    FieldChange,
    architecture_record,
    changed_fields,
    is_longer_table,
    may_change,
)
from megatron3d.optim.optimizer import StateShard
from megatron3d.parallel.mesh import DATA
from megatron3d.train.state import TrainState


@dataclass(frozen=True)
class SourceFormat:
    """How the index of a checkpoint is read, and how its files are; `is_foreign` where no run of ours wrote them."""

    read_index: Callable[[Path], store.Index] = store.read_index
    open_file: read.OpenFile = read.BoxFile
    is_foreign: bool = False


@dataclass(frozen=True)
class LoadOptions:
    """Parts of a checkpoint that are loaded in addition to the weights.

    Attributes:
        progress: iteration and position in the data.
        optimizer: its state tensors, number of updates, loss scale.
        accept: parts of the run's identity that may differ.
        source: format of the files.
    """

    progress: bool = True
    optimizer: bool = True
    accept: frozenset[str] = frozenset()
    source: SourceFormat = SourceFormat()


EVERYTHING, WEIGHTS = LoadOptions(), LoadOptions(progress=False, optimizer=False)
LEARNED = "each learned position is a parameter: use model.max_position_embeddings={0}, and seq_length up to {0}"
# Parts of the identity that decide the order of samples only: free to change if the data start from the first sample.
ORDER_OF_SAMPLES = frozenset({"corpus", "data.split", "train.seed"})


def source_of(state: TrainState) -> PieceSource:
    """Return a function that yields the pieces this rank writes, each tensor copied by the function it is given."""
    return lambda copy: chain(_pieces(state, copy), _home_pieces(state, copy))


def describe(state: TrainState, identity: Mapping[str, JsonValue], config: Config | None = None) -> Mapping[str, Any]:
    """Return the metadata of a checkpoint; a run that continues it must have the same `identity`."""
    known = state.model.comm.gather_object(_cursors(state)) if state.stream is not None else []
    cursors = {lane: cursor for cursors in known or () for lane, cursor in cursors.items()}
    return {**describe_alone(state, identity, config), "cursors": cursors}


def describe_alone(
    state: TrainState, identity: Mapping[str, JsonValue], config: Config | None = None
) -> Mapping[str, Any]:
    """Return the metadata of a checkpoint without communication, with the places in a stream that this rank knows."""
    return Meta(
        model=architecture_record(state.model.arch),
        identity=dict(identity),
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        optimizer_steps=state.optimizer.num_steps.item(),
        loss_scale={name: value.item() for name, value in state.loss_scale.state().items()},
        cursors=_cursors(state),
        config={} if config is None else config.model_dump(mode="json"),
        mesh=dict(state.model.comm.mesh.axes),
        versions={"megatron3d": __version__, "torch": str(torch.__version__)},
        model_type=state.model_type,
        changes=list(state.changes),
    ).model_dump()


def _cursors(state: TrainState) -> dict[str, list[int]]:
    """Return the position in each lane of a streamed dataset that this rank knows; empty without a stream."""
    known = {} if state.stream is None else state.stream.cursors(state.consumed_samples)
    return {lane: list(cursor) for lane, cursor in known.items()}


def load_state(
    folder: Path, state: TrainState, identity: Mapping[str, JsonValue], options: LoadOptions = EVERYTHING
) -> None:
    """Load a checkpoint of any layout into the state.

    The model may differ in options that no parameter depends on: published recipes end with other coefficients of
    losses, dropout, capacity, and longer sequences.  Raises UserError, on all ranks, if the checkpoint is damaged, is
    of another model or has another `identity` (tokenizer, corpus, seed).
    """
    read.raise_if_damaged(folder, try_load(folder, state, identity, options))


def try_load(
    folder: Path, state: TrainState, identity: Mapping[str, JsonValue], options: LoadOptions = EVERYTHING
) -> Sequence[str]:
    """Load a checkpoint like `load_state`, but return its damage, on all ranks, instead of raising.

    Where there is damage, the weights and the optimizer state are undefined until another checkpoint is loaded.
    """
    names = {piece.name for piece in held_pieces(state, options)}
    prefix = "" if options.optimizer else "model."
    device = state.buffers.flat_buffers[0].main.device
    try:
        index = read.read_index_on_all_ranks(folder, state.model.comm, names, prefix, options.source.read_index, device)
    except UserError as error:
        if options.source.is_foreign:  # there is no older checkpoint to try
            raise
        return error.problems
    return fill_state(read.CheckpointFolder(folder, index, options.source.open_file), state, identity, options)


def held_pieces(state: TrainState, options: LoadOptions = EVERYTHING) -> list[store.Piece]:
    """Return all pieces of weights and optimizer state that this rank holds, replicas as well; they are views."""
    return [*_pieces(state, None, _only(options)), *(_home_pieces(state) if options.optimizer else ())]


def _only(options: LoadOptions) -> str | None:
    """Return the one prefix of names that is loaded; None: all."""
    return None if options.optimizer else "model"


def fill_state(
    source: read.BoxSource, state: TrainState, identity: Mapping[str, JsonValue], options: LoadOptions = EVERYTHING
) -> Sequence[str]:
    """Load a state from boxes, wherever they are; otherwise like `try_load`."""
    comm, buffers, index = state.model.comm, state.buffers, source.index
    only = _only(options)
    pieces = list(_pieces(state, None, only))
    own = list(_home_pieces(state)) if options.optimizer else []
    metas: list[Meta] = []
    run_on_all_ranks(comm, lambda: metas.append(_check_compatible(source.name, index, state, identity, options)))
    if options.optimizer and changed_rule(metas[0], state):
        pieces = [piece for piece in pieces if piece.name in index.tensors or piece.name.startswith("model.")]
        own = [piece for piece in own if piece.name in index.tensors]
    restarts = not options.optimizer or lacks_averages(index, state)
    if restarts:
        pieces = [piece for piece in pieces if not piece.name.startswith(AVERAGES)]
    buffers.settle()
    for each in state.optimizer.home_state if options.optimizer else ():
        each.reset()
    # What no checkpoint has, the padding, becomes 0: it must not keep non-finite values after a rollback.
    tables = state.model.routers.tables()
    memory = [shard.values for _, shard in _flat_memory(state, only)]
    memory += [values for table, values in tables.items() if only in (None, _ROUTERS[table])]
    mode, sharded = state.model.mode, buffers.sharding.axes
    replicas = state.model.comm.mesh.without((*DATA, *mode.context), (*sharded, *mode.experts, *mode.etensor))
    damage = read.load_on_all_ranks(source, pieces, memory, comm, replicas, own)
    if damage:
        return damage
    if restarts:
        state.optimizer.restart_averages()
    buffers.publish()
    (meta,) = metas
    state.model_type = meta.model_type
    changed = changed_fields(meta.model, state.model.arch)
    state.changes = [*meta.changes, *({"iteration": meta.iteration, **each._asdict()} for each in changed)]
    if options.progress:
        state.iteration, state.consumed_samples = meta.iteration, meta.consumed_samples
        if state.stream is not None:
            state.stream.go_on(meta.consumed_samples, meta.cursors)
    if options.optimizer:
        state.optimizer.set_num_steps(meta.optimizer_steps)
        state.loss_scale.load(meta.loss_scale)
    return ()


def load_newest(
    root: Path, state: TrainState, identity: Mapping[str, JsonValue], options: LoadOptions = EVERYTHING
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Load the newest intact checkpoint of a run; return it (None: there is none) and those skipped, with reasons.

    Raises UserError, on all ranks, if it is of another model or has another `identity`.
    """
    found = on_rank_0(state.model.comm, lambda: candidates(root))
    return first_intact(found, lambda folder: try_load(folder, state, identity, options))


def find_best(root: Path, iteration: int, comm: ObjectCollectives) -> Best | None:
    """Return the best checkpoint of a run that goes on after `iteration`, on all ranks, and record it.

    It is the recorded one, unless that is a later one or was removed: then, of the run's checkpoints, the one with the
    lowest validation loss in metrics.jsonl.
    """
    found = on_rank_0(comm, lambda: _find_best(root, iteration))
    return Best(*found) if found else None


def _find_best(root: Path, iteration: int) -> Best | None:
    recorded, saved = read_best(root), [each for each in finished_checkpoints(root) if each <= iteration]
    if recorded and recorded.iteration in saved:
        return recorded
    losses = validation_losses(root / JOURNAL)
    known = [Best(each, loss) for each in saved if math.isfinite(loss := losses.get(each, math.nan))]
    best = min(known, key=lambda each: each.loss, default=None)
    if best != recorded:
        write_best(root, best)
    return best


def load_weights(folder: Path, state: TrainState, identity: Mapping[str, JsonValue], weights: str = "model") -> None:
    """Load the parameters only, for sampling and evaluation; raises as `load_state`.

    Args:
        weights: what is taken as the weights, a name in `READERS`.
    """
    load_state(folder, state, identity, replace(WEIGHTS, source=SourceFormat(READERS[weights])))


def model_problems(folder: Path | str, record: Mapping[str, JsonValue], spec: RunSpec) -> list[str]:
    """Return what is to be done where a checkpoint with this record of its model is of another one than the run."""
    changes = [each for each in changed_fields(record, spec.arch) if not may_change(each, spec.arch)]
    if not changes:
        return []
    named = _without_derived(changes, record, spec)
    saved = ", ".join(f"model.{each.name}={each.saved}" for each in named)
    own = ", ".join(str(each.own) for each in named)
    return [
        f"{folder}: saved with {saved}, but this run has {own}; continue with the saved value{'s'[: len(named) - 1]}, "
        "or train another model in another folder, with checkpoint.save and checkpoint.load",
        *(LEARNED.format(each.saved) for each in changes if is_longer_table(each, spec.arch)),
    ]


def _without_derived(
    changes: Sequence[FieldChange], record: Mapping[str, JsonValue], spec: RunSpec
) -> Sequence[FieldChange]:
    """Return the changes without those that follow from others: of what the configuration leaves open."""
    keys = spec.config.model.model_dump()
    saved = {each.name: each.saved for each in changes if keys.get(each.name) is not None}
    try:
        model = ModelConfig.model_validate({**keys, **saved})
    except ValidationError:
        return changes
    left = changed_fields(record, resolve_architecture(model, spec.arch.vocab_size))
    return [each for each in changes if each.name in saved or each in left]


def check_continued(spec: RunSpec) -> None:
    """Raise UserError, before the model is built, if the run continues or starts from a checkpoint of another model.

    What is damaged, or missing, is said where it is loaded.
    """
    config = spec.config
    load, own = config.checkpoint.load, continues_own(config)
    root = config.checkpoint.save if own and config.checkpoint.save is not None else load
    if root is None or (not own and is_hub_folder(Path(root))):
        return
    problems: list[str] = []
    with contextlib.suppress(UserError):
        good = (folder for folder, reason in candidates(Path(root)) if reason is None) if own else ()
        folder = next(iter(good), None) if own else store.resolve(Path(root))
        problems = [] if folder is None else model_problems(folder, read_meta(folder).model, spec)
    UserError.collect(problems)


def _check_compatible(
    folder: str, index: store.Index, state: TrainState, identity: Mapping[str, JsonValue], options: LoadOptions
) -> Meta:
    """Return the metadata after comparing it with the model and, unless accepted, with `identity`."""
    meta = meta_of(folder, index)
    problems = model_problems(folder, meta.model, state.spec)
    accepted = options.accept | (frozenset() if options.progress else ORDER_OF_SAMPLES)
    found = meta.identity
    compared = [name for name in identity if name in found or not options.source.is_foreign]
    different = [name for name in compared if found.get(name) != identity[name] and name not in accepted]
    said = f"{folder}: saved with {{}}={{}}, but this run has {{}}; continue with the saved one"
    anyway = ", or set checkpoint.accept_changed=[{}] to continue with other samples"
    if options.optimizer and (rules := changed_rule(meta, state)) and "optimizer" not in options.accept:
        problems = [
            *problems,
            f"{folder}: saved with {rules[0]}, but this run has {rules[1]}; continue "
            "with the saved one, or set checkpoint.accept_changed=[optimizer] to begin with state that it has not at 0",
        ]
    if options.optimizer and "optimizer" not in options.accept:
        problems = [*problems, *_average_problems(folder, meta, index, state)]
    UserError.collect(
        [
            *problems,
            *((said + anyway).format(name, found.get(name), identity[name], name) for name in different),
        ]
    )
    if options.optimizer and index.tensors and not any(name.startswith("optimizer.") for name in index.tensors):
        raise UserError(
            f"{folder}: for optimizer.optimizer={state.optimizer.rule.name} it holds weights only; set "
            "checkpoint.finetune=true to start with them, or "
            "checkpoint.no_load_optim=true to continue without the optimizer's state"
        )
    return meta


def _average_problems(folder: str, meta: Meta, index: store.Index, state: TrainState) -> Iterator[str]:
    """Yield a message where either the checkpoint or the run has moving averages of the weights."""
    decay, section = state.spec.config.optimizer.ema_decay, meta.config.get("optimizer")
    if lacks_averages(index, state):
        yield (
            f"{folder}: saved without the moving average that this run keeps with optimizer.ema_decay={decay}; leave "
            "that out, or set checkpoint.accept_changed=[optimizer] to begin the average with the current weights"
        )
    saved = section.get("ema_decay") if isinstance(section, dict) else None
    if saved is not None and decay is None:
        yield (
            f"{folder}: saved with optimizer.ema_decay={saved}, but this run keeps no moving average; continue with "
            "the saved one, or set checkpoint.accept_changed=[optimizer] to drop the average"
        )


def lacks_averages(index: store.Index, state: TrainState) -> bool:
    """Return whether the run keeps moving averages of the weights, and a checkpoint has none."""
    has_none = bool(index.tensors) and not any(name.startswith(AVERAGES) for name in index.tensors)
    return bool(state.optimizer.averages) and has_none


def changed_rule(meta: Meta, state: TrainState) -> tuple[str, str] | None:
    """Return the key and value of the update rules that a checkpoint was saved with, and this run's, if they differ."""
    section, config = meta.config.get("optimizer"), state.optimizer.config
    if not isinstance(section, dict):
        return None
    if isinstance(saved := section.get("optimizer"), str) and saved != config.optimizer:
        return f"optimizer.optimizer={saved}", config.optimizer
    kept, ours = _other_rules(section.get("param_groups", ())), _other_rules(config.param_groups)
    return None if kept == ours else (f"optimizer.param_groups={show(kept)}", show(ours))


def _other_rules(groups: Any) -> list[dict[str, object]]:
    """Return of groups of parameters those with a rule of their own: their patterns and it."""
    found = [{key: dict(each)[key] for key in ("params", "optimizer")} for each in groups]
    return [
        each | {"params": [each["params"]] if isinstance(each["params"], str) else [*each["params"]]}
        for each in found
        if each["optimizer"]
    ]


def new_state(folder: Path, index: store.Index, state: TrainState) -> Iterator[str]:
    """Yield, for each kind of optimizer state, of which tensors a checkpoint with other state has none."""
    if lacks_averages(index, state):
        yield f"{AVERAGES.rstrip('.')}: the current weights at first, since {folder} has none"
    kept_apart = ("model", AVERAGES.rstrip("."))
    begins = {prefix: "0" for prefix, _ in _flat_memory(state) if prefix not in kept_apart}
    for each in state.optimizer.home_state:
        begins[f"optimizer.{each.kind.name}"] = "the identity" if each.kind.is_identity else "0"
    held = {prefix: list[str]() for prefix in begins}
    for piece in (*_pieces(state), *_home_pieces(state)):
        prefix = next((each for each in held if piece.name.startswith(f"{each}.")), None)
        if prefix is not None:
            held[prefix].append(piece.name)
    for prefix, names in held.items():
        missing = {*names} - index.tensors.keys()
        if missing:
            which = "all its" if len(missing) == len({*names}) else f"{len(missing)} of {len({*names})}"
            yield f"{prefix}: {begins[prefix]} at first for {which} tensors, which {folder} has not"


def _pieces(
    state: TrainState, copy: Callable[[Tensor], Tensor] | None = None, only: str | None = None
) -> Iterator[store.Piece]:
    """Yield the pieces of weights and optimizer state that this rank holds; with `copy`, copies of those it writes."""
    buffers, mesh = state.buffers, state.model.comm.mesh
    shares = ranges_to_write(buffers)
    for prefix, shard in _flat_memory(state, only):
        for name in shard.flat.spans:
            start, where = shard.flat.shard_range(name)
            values, (_, spec, low, high) = shard.of(where), shares[name]
            if values is None:
                continue
            if copy is not None:
                start, values = low, copy(values[low - start : high - start])
            yield from param_pieces(prefix, spec, values, mesh, start)
    if copy is None or is_first(mesh):
        yield from _router_pieces(state, copy or (lambda tensor: tensor), only)


def _home_pieces(state: TrainState, copy: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Iterator[store.Piece]:
    """Yield the state of the whole matrices whose home this rank is, which no other rank holds."""
    for kind, parts, values in state.optimizer.home_state:
        for part, each in zip(parts, values, strict=True):
            box = tuple((0, size) for size in each.shape)
            yield store.Piece(f"optimizer.{kind.name}.{part}", tuple(each.shape), box, copy(each))


# Prefixes of the names of routers' tables: the bias of the choice belongs to the model, the load to its training.
_ROUTERS = {EXPERT_BIAS: "model", LOAD: "optimizer"}


def _router_pieces(state: TrainState, copy: Callable[[Tensor], Tensor], only: str | None) -> Iterator[store.Piece]:
    for name, table, values in state.model.routers.rows():
        if only in (None, _ROUTERS[table]):
            shape = tuple(values.shape)
            yield store.Piece(f"{_ROUTERS[table]}.{name}.{table}", shape, ((0, shape[0]),), copy(values))


def _flat_memory(state: TrainState, only: str | None = None) -> Iterator[tuple[str, StateShard]]:
    """Yield this rank's shards of the master weights and of each kind of optimizer state, with the prefix of names.

    Args:
        only: the one prefix that is wanted; None: all.
    """
    weights = (StateShard("model", flat, 0, flat.main) for flat in state.buffers.flat_buffers)
    kinds = (("model", weights), *((f"optimizer.{each.name}", (each,)) for each in state.optimizer.state))
    for prefix, shards in kinds:
        if only in (None, prefix):
            yield from ((prefix, shard) for shard in shards)
