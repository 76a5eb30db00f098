"""Check that two layouts compute equal numbers: train some steps with each and compare every logical tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron3d.checkpoint.pieces import param_pieces, ranges_to_write
from megatron3d.comm.interface import Comm
from megatron3d.config.run_spec import RunSpec
from megatron3d.data.loader import BatchLoader
from megatron3d.data.packing import Packing
from megatron3d.model.router_state import is_first
from megatron3d.optim.optimizer import learning_rate, weight_decay
from megatron3d.train.state import TrainState, build_state
from megatron3d.train.step import StepSettings, evaluate, train_step

CPU = torch.device("cpu")
StepTrace = Mapping[str, Tensor]
# Kind of the values that are experts of tokens.
CHOICES = "choices"


@dataclass(frozen=True)
class RandomSamples:
    """Sequences of random tokens as a pure function of their index.

    Attributes:
        document_length: mean length of documents, which end with token 0; 0: tokens only, of which any may be 0.
    """

    seed: int
    vocab_size: int
    seq_length: int
    document_length: int = 0

    def read(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return [samples, seq_length + 1] tokens."""
        return np.stack([self._sample(int(index)) for index in samples])

    def _sample(self, index: int) -> npt.NDArray[np.int64]:
        random, shape = np.random.default_rng((self.seed, index)), self.seq_length + 1
        tokens = random.integers(self.vocab_size, size=shape)
        if self.document_length:
            tokens[random.random(shape) * self.document_length < 1] = 0
        return tokens


def trace(
    spec: RunSpec,
    comm: Comm,
    num_steps: int,
    after_step: Callable[[TrainState], None] = lambda _: None,
    device: torch.device = CPU,
) -> StepTrace | None:
    """Return, on rank 0, choices of experts, loss, gradient norm, gradients and state of routers of each step,
    parameters and validation loss; None elsewhere.

    Args:
        spec: its sections `model`, `parallel`, `train` and `optimizer` are used, on random tokens, and the options of
            `data` for documents, which token 0 ends: with such options about four in a sequence.
        after_step: called with the state after every step.
        device: what this rank computes on; the trace is in host memory.
    """
    config, arch = spec.config, spec.arch
    state = build_state(spec, comm, device)
    train, num_tokens = config.train, config.train.global_batch_size * arch.seq_length
    sizes, packing = (train.micro_batch_size, train.global_batch_size), spec.packing(0)
    document_length = 0 if packing == Packing(0) else max(2, arch.seq_length // 4)
    samples = RandomSamples(train.seed, arch.vocab_size, arch.seq_length, document_length)
    loader = BatchLoader(samples, spec.mesh, spec.mode.batch_axes, *sizes, device, packing=packing)
    assert len(loader.step(0)) == spec.num_microbatches, "the loader disagrees with the batch arithmetic"
    settings = StepSettings(train.seed, num_tokens, train.global_batch_size, packing)
    values: dict[str, Tensor] = {}
    routers = state.model.routers
    for step in range(1, num_steps + 1):
        batch, routers.choices = loader.step(state.consumed_samples), []
        position = spec.lr_phases.position(step, step * train.global_batch_size)
        lr, decay = (of(config.optimizer, spec.lr_phases, position) for of in (learning_rate, weight_decay))
        result = train_step(state, batch, lr, settings, weight_decay=decay)
        values |= _choices(routers.choices, f"of step {step}", comm)
        values |= {f"loss of step {step}": result.loss, f"gradient norm of step {step}": result.grad_norm}
        values |= {
            f"loss {depth} further of step {step}": each for depth, each in enumerate(result.mtp_losses, start=1)
        }
        values |= _logical(state, "grad", f"of step {step}", comm)
        values |= _router_values(state, f"of step {step}", comm)
        after_step(state)
    values |= _logical(state, "main", "at the end", comm)
    values |= _averages(state, comm)
    loss, *mtp_losses = evaluate(state.executor, [loader.step(state.consumed_samples)], settings)
    values["validation loss"] = loss
    values |= {f"validation loss {depth} further": each for depth, each in enumerate(mtp_losses, start=1)}
    return {name: value.to(CPU) for name, value in values.items()} if spec.rank == 0 else None


def _averages(state: TrainState, comm: Comm) -> dict[str, Tensor]:
    """Return, on rank 0, the moving averages of the weights, where the run keeps them."""
    if not state.optimizer.averages:
        return {}
    with state.optimizer.averaged_weights():
        state.buffers.settle()
        return _logical(state, "main", "averaged", comm)


def _logical(state: TrainState, which: str, when: str, comm: Comm) -> dict[str, Tensor]:
    """Return, on rank 0, whole tensors assembled from the pieces that the save rule selects."""
    prefix = {"grad": "gradient", "main": "parameter"}[which]
    mine = ranges_to_write(state.buffers)
    pieces = []
    for name, start, values in state.buffers.shards(which):
        _, spec, low, high = mine[name]
        pieces += param_pieces(prefix, spec, values[low - start : high - start], comm.mesh, low)
    gathered = comm.gather_object([(p.name, p.shape, p.box, p.tensor.tolist()) for p in pieces])
    whole: dict[str, Tensor] = {}
    for name, shape, box, values in (piece for rank in gathered or [] for piece in rank):
        target = whole.setdefault(f"{name} {when}", torch.full(shape, torch.nan, dtype=torch.float64))
        target[tuple(slice(low, high) for low, high in box)] = torch.tensor(values, dtype=torch.float64)
    return whole


def _router_values(state: TrainState, when: str, comm: Comm) -> dict[str, Tensor]:
    """Return, on rank 0, the biases and loads of all routers, those of the first rank of each pipeline rank."""
    rows = state.model.routers.rows() if is_first(comm.mesh) else ()
    gathered = comm.gather_object([(f"{table}.{name} {when}", row.tolist()) for name, table, row in rows]) or []
    return {name: torch.tensor(row, dtype=torch.float64) for rows in gathered for name, row in rows}


def _choices(kept: Sequence[tuple[str, Tensor, Tensor]], when: str, comm: Comm) -> dict[str, Tensor]:
    """Return, on rank 0, the experts of every token of the global batch [tokens, K] by router."""
    gathered = comm.gather_object([(name, rows_M.tolist(), chosen_MK.tolist()) for name, rows_M, chosen_MK in kept])
    by_router: dict[str, dict[int, list[int]]] = {}
    for name, rows, chosen in (each for rank in gathered or [] for each in rank):
        by_router.setdefault(name, {}).update(zip(rows, chosen, strict=True))
    return {
        f"{CHOICES}.{name} {when}": torch.tensor([experts for _, experts in sorted(of_tokens.items())])
        for name, of_tokens in sorted(by_router.items())
    }


def flips(reference: StepTrace, other: StepTrace) -> Iterator[str]:
    """Yield for each router in the first step how many tokens choose other experts than in the reference."""
    for name in (name for name in reference if name.startswith(f"{CHOICES}.") and name.endswith(" of step 1")):
        router = name.removeprefix(f"{CHOICES}.").partition(" ")[0]
        yield f"{router}: {_flipped(reference[name], other[name])} of {len(other[name])} tokens choose other experts"


def _flipped(expected_MK: Tensor, got_MK: Tensor) -> int:
    """Return the number of tokens whose experts differ."""
    if expected_MK.shape != got_MK.shape:
        return len(expected_MK)
    return int((expected_MK != got_MK).any(-1).sum())


def differences(reference: StepTrace, other: StepTrace, tolerance: float) -> Iterator[str]:
    """Yield what differs by more than `tolerance`, in the order of the computation.

    Errors are relative to the tensor's largest value, or to a thousandth of the largest of its kind and step where that
    is more: some gradients are zero but for rounding (a key's bias moves no softmax).
    """
    for name in sorted(reference.keys() ^ other.keys()):
        yield f"{name} exists on one side only"
    floors: dict[tuple[str, str], float] = {}
    for name, expected in reference.items():
        floors[_kind(name)] = max(floors.get(_kind(name), 0.0), 1e-3 * expected.abs().max().item())
    for name in (name for name in reference if name in other):
        expected, got = reference[name], other[name]
        if name.startswith(f"{CHOICES}."):
            if count := _flipped(expected, got):
                yield f"{name}: {count} of {len(expected)} tokens choose other experts than in one process"
            continue
        size = max(expected.abs().max().item(), floors[_kind(name)])
        error = (expected - got).abs().max().item() / (size or 1.0)  # 0 where no label counts
        if not error <= tolerance:
            yield f"{name}: {_show(expected)} in one process, {_show(got)} in this layout, relative error {error:.1e}"


def _kind(name: str) -> tuple[str, str]:
    """Return ("gradient", "of step 1") for "gradient.layers.0.mlp.up.bias of step 1"."""
    tensor, _, when = name.partition(" ")
    return tensor.partition(".")[0], when


def _show(x: Tensor) -> str:
    return f"{x.item():.12g}" if x.numel() == 1 else f"largest {x.abs().max().item():.12g}"
