"""A training state to and from the logical store: every tensor by name, and what makes continuing exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, JsonValue, ValidationError

from megatron3d.checkpoint import store
from megatron3d.checkpoint.state import param_pieces, written
from megatron3d.checkpoint.together import together
from megatron3d.errors import UserError
from megatron3d.optim import MOMENTS
from megatron3d.train.state import TrainState

LAYOUT_FIELDS = frozenset({"padded_vocab_size"})


class Meta(BaseModel):
    """What a checkpoint says beside its tensors."""

    model: dict[str, JsonValue]
    identity: dict[str, JsonValue]
    iteration: int
    consumed_samples: int
    optimizer_steps: float
    loss_scale: dict[str, float] = {}


def save_state(root: Path, state: TrainState, identity: Mapping[str, JsonValue]) -> Path:
    """Write a checkpoint with all ranks; `identity` names what a run that continues it must share."""
    meta = Meta(
        model=_architecture(state),
        identity=dict(identity),
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        optimizer_steps=state.optimizer.num_steps.item(),
        loss_scale={name: value.item() for name, value in state.loss_scale.state().items()},
    )
    return store.save(root, state.iteration, _pieces(state, mine=True), meta.model_dump(), state.model.comm)


def load_state(folder: Path, state: TrainState, identity: Mapping[str, JsonValue]) -> None:
    """Fill the state from a checkpoint of any layout.

    Raises UserError where the checkpoint is of another model, or differs from `identity` (tokenizer, corpus, seed).
    """

    def load() -> None:
        meta = _read_same(folder, state, identity)
        state.buffers.settle()
        store.load(folder, _pieces(state))
        state.buffers.publish()
        state.iteration, state.consumed_samples = meta.iteration, meta.consumed_samples
        state.optimizer.set_num_steps(meta.optimizer_steps)
        state.loss_scale.load(meta.loss_scale)

    together(state.model.comm, load)


def read_meta(folder: Path) -> Meta:
    """What a checkpoint says beside its tensors; raises UserError where that is not a training run's."""
    try:
        return Meta.model_validate(store.read_meta(folder))
    except ValidationError as error:
        places = ", ".join(".".join(map(str, detail["loc"])) for detail in error.errors())
        raise UserError(f"{folder}: its index is not of a training run ({places}); load another checkpoint") from error


def load_weights(folder: Path, state: TrainState, identity: Mapping[str, JsonValue]) -> None:
    """Fill the parameters alone, for sampling and evaluation; raises as load_state."""

    def load() -> None:
        _read_same(folder, state, identity)
        state.buffers.settle()
        store.load(folder, (piece for piece in _pieces(state) if piece.name.startswith("model.")))
        state.buffers.publish()

    together(state.model.comm, load)


def _read_same(folder: Path, state: TrainState, identity: Mapping[str, JsonValue]) -> Meta:
    """What the checkpoint says, after it agreed with the model and `identity`."""
    meta = read_meta(folder)
    wanted = {f"model.{name}": value for name, value in _architecture(state).items()} | dict(identity)
    found = {f"model.{name}": value for name, value in meta.model.items()} | meta.identity
    UserError.collect(
        f"{folder}: saved with {name}={found.get(name)}, but this run has {value}; continue with the saved one"
        for name, value in wanted.items()
        if found.get(name) != value
    )
    return meta


def _architecture(state: TrainState) -> dict[str, JsonValue]:
    """What the model is, without what depends on the layout."""
    return {name: value for name, value in asdict(state.model.arch).items() if name not in LAYOUT_FIELDS}


def _pieces(state: TrainState, mine: bool = False) -> Iterator[store.Piece]:
    """Every piece of weights and moments that this rank holds, or those that are its own to write."""
    buffers, mesh = state.buffers, state.model.comm.mesh
    shares = written(buffers)
    flats = [("model", flat, flat.main) for flat in buffers.flats] + [
        (f"optimizer.{moment}", flat, state.optimizer.moment(flat, moment))
        for moment in MOMENTS
        for flat in buffers.flats
    ]
    for prefix, flat, memory in flats:
        for name in flat.spans:
            start, where = flat.held(name)
            values, (_, spec, low, high) = memory[where], shares[name]
            if mine:
                start, values = low, values[low - start : high - start]
            yield from param_pieces(prefix, spec, values, mesh, start)
