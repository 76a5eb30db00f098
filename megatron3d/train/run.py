"""Everything that a run consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from megatron3d.checkpoint.async_saver import CheckpointSaver
from megatron3d.checkpoint.lock import FolderLock
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.data.loader import BatchLoader, PrefetchingLoader
from megatron3d.data.packing import Packing
from megatron3d.data.ramp import Batch, Batches
from megatron3d.hardware.peaks import Peak
from megatron3d.metrics import MetricsWriter
from megatron3d.metrics.timers import Timers
from megatron3d.runtime.process import Runtime
from megatron3d.train.state import TrainState
from megatron3d.train.step import Settings


@dataclass(frozen=True)
class Run:
    """Everything that a run consists of.

    Attributes:
        metrics: on rank 0, None elsewhere.
        saver: writes checkpoints; None where the run has no folder.
        lock: of that folder, on rank 0.
        identity: what a later run must share to continue this one.
        comm: the state's, to and from every rank.
        timers: are told what the step does, and what the ranks wait for.
        peak: of one device, None where unknown.
        baseline_bytes: peak memory before the model was built.
        packing: what documents in samples mean.
        consumed_tokens: of each corpus of a blend in the first samples, to be logged.
        faults: what is wrong with the first records that this rank has left out so far.
    """

    runtime: Runtime
    state: TrainState
    train_data: PrefetchingLoader
    valid_data: BatchLoader | None
    metrics: MetricsWriter | None
    saver: CheckpointSaver | None
    lock: FolderLock | None
    identity: Mapping[str, JsonValue]
    comm: ProcessComm
    timers: Timers
    peak: Peak | None
    baseline_bytes: int
    packing: Packing
    consumed_tokens: Callable[[int], Mapping[str, float]]
    faults: Callable[[], Sequence[str]]

    @property
    def spec(self) -> RunSpec:
        """Everything that is derived from the configuration."""
        return self.state.spec

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.spec.config

    @property
    def batches(self) -> Batches:
        """The global batch of every iteration."""
        return self.spec.batches

    def settings(self, batch: Batch) -> Settings:
        """Constants of a step."""
        return Settings(self.config.train.seed, batch.num_tokens, batch.num_samples, self.packing)

    def close(self) -> None:
        """Let go of the folder."""
        if self.metrics:
            self.metrics.close()
        if self.lock:
            self.lock.release()
