"""A training state to and from the logical store: every tensor by name, and what makes continuing exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, JsonValue, ValidationError
from torch import Tensor

from megatron3d import __version__
from megatron3d.checkpoint import store
from megatron3d.checkpoint.async_saver import PieceSource
from megatron3d.checkpoint.param_pieces import param_pieces, ranges_to_write
from megatron3d.comm.run_on_all_ranks import run_on_all_ranks
from megatron3d.config.schema import CheckpointConfig, Config
from megatron3d.errors import UserError
from megatron3d.optim.optimizer import MOMENTS
from megatron3d.train.state import TrainState

LAYOUT_FIELDS = frozenset({"padded_vocab_size"})


class Meta(BaseModel):
    """What a checkpoint says beside its tensors; `config` and `mesh` are those of the run that wrote it."""

    model: dict[str, JsonValue]
    identity: dict[str, JsonValue]
    iteration: int
    consumed_samples: int
    optimizer_steps: float
    loss_scale: dict[str, float] = {}
    cursors: dict[str, list[int]] = {}
    config: dict[str, JsonValue] = {}
    mesh: dict[str, int] = {}
    versions: dict[str, str] = {}


@dataclass(frozen=True)
class Loading:
    """How much of a checkpoint is loaded: everything, or less.

    Attributes:
        progress: iteration and position in the data.
        optimizer: moments, count of updates and loss scale.
        accept: parts of the run's identity that may differ.
    """

    progress: bool = True
    optimizer: bool = True
    accept: frozenset[str] = frozenset()

    @staticmethod
    def of(config: CheckpointConfig) -> Loading:
        """What a configuration asks for."""
        whole = not config.finetune
        return Loading(whole, whole and not config.no_load_optim, frozenset(config.accept_changed))


EXACT, WEIGHTS = Loading(), Loading(progress=False, optimizer=False)
# What only the order of samples depends on, which who begins anew may change.
ORDER_OF_SAMPLES = frozenset({"corpus", "data.split", "train.seed"})


def source_of(state: TrainState) -> PieceSource:
    """What this rank writes of a state, every tensor passed through a function first."""
    return lambda copy: _pieces(state, copy)


def describe(state: TrainState, identity: Mapping[str, JsonValue], config: Config | None = None) -> Mapping[str, Any]:
    """What a checkpoint of this state says beside its tensors; `identity` names what who continues it must share."""
    return Meta(
        model=_architecture(state),
        identity=dict(identity),
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        optimizer_steps=state.optimizer.num_steps.item(),
        loss_scale={name: value.item() for name, value in state.loss_scale.state().items()},
        cursors=_cursors(state),
        config={} if config is None else config.model_dump(mode="json"),
        mesh=state.model.comm.mesh.sizes,
        versions={"megatron3d": __version__, "torch": str(torch.__version__)},
    ).model_dump()


def _cursors(state: TrainState) -> dict[str, list[int]]:
    """Where a stream is to be read on, as all ranks together know; on rank 0."""
    if state.stream is None:
        return {}
    known = state.model.comm.gather_object(state.stream.cursors(state.consumed_samples)) or []
    return {lane: list(cursor) for cursors in known for lane, cursor in cursors.items()}


def save_state(root: Path, state: TrainState, identity: Mapping[str, JsonValue]) -> Path:
    """Write a checkpoint with all ranks, now."""
    return store.save(root, state.iteration, _pieces(state, _as_it_is), describe(state, identity), state.model.comm)


def load_state(folder: Path, state: TrainState, identity: Mapping[str, JsonValue], loading: Loading = EXACT) -> None:
    """Fill the state from a checkpoint of any layout, as much of it as is asked for.

    Raises UserError where the checkpoint is of another model, or differs from `identity` (tokenizer, corpus, seed).
    """

    def load() -> None:
        index = store.read_index(folder)
        meta = _same(folder, index, state, identity, loading)
        if loading.optimizer and not any(name.startswith("optimizer.") for name in index.tensors):
            raise UserError(
                f"{folder}: holds weights only; set checkpoint.finetune=true to begin with them, or "
                "checkpoint.no_load_optim=true to go on without the optimizer's moments"
            )
        state.buffers.settle()
        for flat in state.buffers.flats:
            flat.main.zero_()  # padding, which no checkpoint has, must not stay what a run gone wrong has left
        store.load_with_index(folder, index, _pieces(state, None, None if loading.optimizer else "model"))
        state.buffers.publish()
        if loading.progress:
            state.iteration, state.consumed_samples = meta.iteration, meta.consumed_samples
            if state.stream is not None:
                state.stream.go_on(meta.consumed_samples, meta.cursors)
        if loading.optimizer:
            state.optimizer.set_num_steps(meta.optimizer_steps)
            state.loss_scale.load(meta.loss_scale)

    run_on_all_ranks(state.model.comm, load)


def read_meta(folder: Path) -> Meta:
    """What a checkpoint says beside its tensors; raises UserError where that is not a training run's."""
    return _meta(folder, store.read_index(folder))


def _meta(folder: Path, index: store.Index) -> Meta:
    try:
        return Meta.model_validate(index.meta)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, detail["loc"])) for detail in error.errors())
        raise UserError(f"{folder}: its index is not of a training run ({places}); load another checkpoint") from error


def load_weights(folder: Path, state: TrainState, identity: Mapping[str, JsonValue]) -> None:
    """Fill the parameters alone, for sampling and evaluation; raises as load_state."""
    load_state(folder, state, identity, WEIGHTS)


def _same(
    folder: Path, index: store.Index, state: TrainState, identity: Mapping[str, JsonValue], loading: Loading
) -> Meta:
    """What the checkpoint says, after it agreed with the model and `identity`, as far as that matters."""
    meta = _meta(folder, index)
    accepted = loading.accept | (frozenset() if loading.progress else ORDER_OF_SAMPLES)
    model = {f"model.{name}": value for name, value in _architecture(state).items()}
    found = {f"model.{name}": value for name, value in meta.model.items()} | meta.identity
    names = [*dict.fromkeys((*model, *(f"model.{name}" for name in meta.model)))]
    differing = [name for name in names if found.get(name) != model.get(name)]
    different = [name for name in identity if found.get(name) != identity[name] and name not in accepted]
    said = f"{folder}: saved with {{}}={{}}, but this run has {{}}; continue with the saved one"
    anyway = ", or set checkpoint.accept_changed=[{}] to go on with other samples"
    UserError.collect(
        [
            *(said.format(name, found.get(name), model.get(name)) for name in differing),
            *((said + anyway).format(name, found.get(name), identity[name], name) for name in different),
        ]
    )
    return meta


def _architecture(state: TrainState) -> dict[str, JsonValue]:
    """What the model is, without what depends on the layout."""
    return {name: value for name, value in asdict(state.model.arch).items() if name not in LAYOUT_FIELDS}


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _pieces(
    state: TrainState, copy: Callable[[Tensor], Tensor] | None = None, only: str | None = None
) -> Iterator[store.Piece]:
    """Every piece of weights and moments that this rank holds; with `copy`, of copies of those that it writes."""
    buffers, mesh = state.buffers, state.model.comm.mesh
    shares = ranges_to_write(buffers)
    flats = [("model", flat, flat.main) for flat in buffers.flats] + [
        (f"optimizer.{moment}", flat, state.optimizer.moment(flat, moment))
        for moment in MOMENTS
        for flat in buffers.flats
    ]
    for prefix, flat, memory in (each for each in flats if only in (None, each[0])):
        for name in flat.spans:
            start, where = flat.held(name)
            values, (_, spec, low, high) = memory[where], shares[name]
            if copy is not None:
                start, values = low, copy(values[low - start : high - start])
            yield from param_pieces(prefix, spec, values, mesh, start)
