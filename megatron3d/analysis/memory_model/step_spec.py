"""A rank's part of a training step: the values that its memory follows from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron3d.analysis.memory_model.local_sizes import KERNELS, KernelMemory, LocalSizes
from megatron3d.config.run_spec import RunSpec
from megatron3d.model.stages import Stage
from megatron3d.pipeline.actions import Action, Schedule
from megatron3d.pipeline.lower import lower
from megatron3d.pipeline.spec import Pipeline

ITEMSIZES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class StepSpec:
    """A microbatch's work, the pipeline that many of them flow through, and what is kept from step to step.

    Attributes:
        schedule: name of the pipeline's schedule.
        lowered: what its ranks execute.
        moment_itemsizes: bytes of each of AdamW's two averages.
        reduce_itemsize: bytes of a gradient on its way over the data axis.
        zero_stage: what the data axis shares out: 0 nothing, 1 optimizer state and main weights, 2 gradients too, 3
            weights too.
    """

    local: LocalSizes
    pipeline: Pipeline
    schedule: str
    lowered: Schedule
    moment_itemsizes: tuple[int, int]
    loss_chunk_tokens: int
    bucket_bytes: float
    zero_stage: int = 0
    reduce_itemsize: int = 4

    def at(self, rank: int) -> StepSpec:
        """The same on another rank."""
        return replace(self, local=replace(self.local, mesh=self.local.mesh.at(rank)))

    def on_pipeline_rank(self, coord: int) -> StepSpec:
        """The same on the rank of another part of the pipeline that is otherwise where I am."""
        return self.at(self.local.mesh.ranks(("pipeline",))[coord])

    @property
    def coord(self) -> int:
        """My position along the pipeline."""
        return self.local.mesh.coord("pipeline")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """My stages."""
        return self.pipeline.on_rank(self.coord)

    @property
    def actions(self) -> tuple[Action, ...]:
        """What I execute."""
        return self.lowered[self.coord]

    @property
    def zero_ranks(self) -> int:
        """Among how many ranks something is shared out."""
        return self.local.mesh.sizes["data"] if self.zero_stage else 1

    def shards(self, stage: int) -> bool:
        """Whether what a stage of ZeRO shares out is shared out."""
        return self.zero_stage >= stage and self.zero_ranks > 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return len({action.mb for action in self.pipeline.schedule[self.coord]})


def make_step_spec(spec: RunSpec, kernels: KernelMemory = KERNELS["cpu"]) -> StepSpec:
    """Return a rank's part of a step of a valid configuration."""
    config, train, optimizer = spec.config, spec.config.train, spec.config.optimizer
    local = LocalSizes(
        spec.arch,
        spec.mode,
        spec.mesh,
        train.micro_batch_size,
        ITEMSIZES[train.precision],
        spec.recompute,
        spec.overlap,
        kernels,
        config.data.reset_attention_mask,
        config.data.reset_position_ids,
    )
    moments = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
    first, second = (local.wide if name is None else ITEMSIZES[name] for name in moments)
    return StepSpec(
        local,
        spec.pipeline,
        config.parallel.pipeline_schedule,
        lower(spec.schedule),
        (first, second),
        train.loss_chunk_tokens,
        bucket_bytes=train.bucket_mb * 2**20,
        zero_stage=config.parallel.zero_stage,
        reduce_itemsize=2 if train.grad_reduce_in_bf16 else local.wide,
    )
