"""Objects that a run consists of on one rank: data, state, outputs and observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from megatron3d.checkpoint.async_saver import CheckpointSaver
from megatron3d.checkpoint.in_memory import InMemoryCheckpoints
from megatron3d.checkpoint.publish import FolderLock
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.data.loader import BatchLoader, PrefetchingLoader
from megatron3d.data.packing import Packing
from megatron3d.data.ramp_plan import Batch, Batches
from megatron3d.hardware.devices import Peak
from megatron3d.metrics import MetricsWriter, ProcessMemory
from megatron3d.metrics.timers import Timers
from megatron3d.optim.optimizer import learning_rate, weight_decay
from megatron3d.runtime.process import Runtime
from megatron3d.train.state import TrainState
from megatron3d.train.step import StepSettings


@dataclass(frozen=True, kw_only=True)
class Run:
    """Data, state, outputs and observers of a run on one rank.

    Attributes:
        train_data: global batches of the training split, prefetched.
        valid_data: the validation split; None without one.
        metrics: writer of the metrics on rank 0; None elsewhere.
        saver: writer of checkpoints; None if the run has no folder.
        memory: in-memory checkpoints; None where none are asked for.
        lock: lock of that folder on rank 0; None elsewhere.
        identity: values that a later launch must share to continue this run.
        comm: the communicator of `state`.
        timers: timers of a step's phases and of waiting for other ranks.
        peak: peak FLOP/s of one device; None if unknown.
        baseline: memory of the process before the model was built.
        packing: treatment of documents within a sample.
        consumed_tokens: returns the logged tokens of each corpus of a blend within the first n samples.
        faults: returns what is wrong with the first records that this rank has skipped so far.
    """

    runtime: Runtime
    state: TrainState
    train_data: PrefetchingLoader
    valid_data: BatchLoader | None
    metrics: MetricsWriter | None
    saver: CheckpointSaver | None
    memory: InMemoryCheckpoints | None
    lock: FolderLock | None
    identity: Mapping[str, JsonValue]
    comm: ProcessComm
    timers: Timers
    peak: Peak | None
    baseline: ProcessMemory
    packing: Packing
    consumed_tokens: Callable[[int], Mapping[str, float]]
    faults: Callable[[], Sequence[str]]

    @property
    def spec(self) -> RunSpec:
        """Resolved configuration, and the values derived from it."""
        return self.state.spec

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.spec.config

    @property
    def batches(self) -> Batches:
        """The global batch of every iteration."""
        return self.spec.batches

    def rates(self, batch: Batch) -> tuple[float, float]:
        """Return the learning rate and the weight decay of the next step, on `batch`."""
        state, phases = self.state, self.spec.lr_phases
        position = phases.position(state.iteration + 1, state.consumed_samples + batch.num_samples)
        config = self.config.optimizer
        return learning_rate(config, phases, position), weight_decay(config, phases, position)

    def step_settings(self, batch: Batch) -> StepSettings:
        """Return the constants of a step on `batch`."""
        return StepSettings(self.config.train.seed, batch.num_tokens, batch.num_samples, self.packing)

    def close(self) -> None:
        """Close the metrics and release the folder."""
        if self.metrics:
            self.metrics.close()
        if self.lock:
            self.lock.release()
