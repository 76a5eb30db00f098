"""One rank's part of a training step: the values that determine its memory and traffic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import ITEMSIZES, OptimizerConfig
from megatron3d.model.expert_operations import expected_load
from megatron3d.model.local_sizes import KERNELS, KernelMemory, LocalSizes
from megatron3d.model.stage_plan import Stage
from megatron3d.optim.rule_spec import UpdateRule, rule_of
from megatron3d.parallel.mesh import PIPELINE, Axes
from megatron3d.pipeline.actions import Action
from megatron3d.pipeline.lower import lower
from megatron3d.pipeline.schedules import Pipeline


@dataclass(frozen=True)
class StepSpec:
    """Local sizes of a microbatch, the pipeline that runs many of them, and the state that stays between steps.

    Attributes:
        schedule: name of the pipeline schedule.
        rule: update rule of the optimizer.
        optimizer: its configuration.
        reduce_itemsize: bytes of a gradient element in the data-parallel reduction.
        zero_stage: what the data axis shards: 0 nothing, 1 optimizer state and master weights, 2 also gradients, 3 also
            weights.
        saves_in_background: a copy of the state that this rank writes is kept in host memory.
        saves_in_memory: copies of it, and of what another rank writes, are kept there as checkpoints.
    """

    local: LocalSizes
    pipeline: Pipeline
    schedule: str
    rule: UpdateRule
    optimizer: OptimizerConfig
    bucket_bytes: float
    zero_stage: int = 0
    reduce_itemsize: int = 4
    saves_in_background: bool = False
    saves_in_memory: bool = False

    def at(self, rank: int) -> StepSpec:
        """Return the same step seen from another rank."""
        return replace(self, local=replace(self.local, mesh=self.local.mesh.at(rank)))

    def unit_gathers(self, name: str) -> int:
        """Return how often a microbatch all-gathers an FSDP unit: forward and backward, or each use of a matrix.

        Of layers that are recomputed together, all but the last two are freed in between: few are whole at once.
        """
        if name not in ("embedding", "head"):
            runs = [
                run for stage in self.stages for run in self.local.recompute.runs(stage.layers) if run.is_recomputed
            ]
            return 2 + any(name == f"layers.{layer}" for run in runs for layer in run.layers[:-2])
        arch = self.local.arch
        first, last = (any(getattr(stage, end) for stage in self.stages) for end in ("has_embedding", "has_head"))
        heads, embeddings = last * (1 + arch.mtp_num_layers), first + last * arch.mtp_num_layers
        if arch.tie_embeddings:
            return heads + embeddings
        return heads if name == "head" else embeddings

    def on_pipeline_rank(self, coord: int) -> StepSpec:
        """Return the same step seen from another pipeline rank with this rank's other coordinates."""
        return self.at(self.local.mesh.ranks((PIPELINE,))[coord])

    @property
    def coord(self) -> int:
        """This rank's pipeline rank."""
        return self.local.mesh.coord(PIPELINE)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of this rank."""
        return self.pipeline.on_rank(self.coord)

    @property
    def actions(self) -> tuple[Action, ...]:
        """Actions that this rank executes, communication included."""
        return lower(self.pipeline.schedule)[self.coord]

    def state_bytes(self, rule: UpdateRule) -> int:
        """Return the bytes of optimizer state for an element that a rule updates, its moving average included."""
        average = 0 if self.optimizer.ema_decay is None else self.local.wide
        return sum(rule.state_itemsizes(self.optimizer, self.local.wide)) + average

    @property
    def zero_axes(self) -> Axes:
        """Axes over which ZeRO shards, of parameters that none of them shards itself."""
        return self.local.mesh.zero if self.zero_stage else ()

    def shards(self, stage: int) -> bool:
        """Return whether this ZeRO stage's state is sharded."""
        return self.zero_stage >= stage and self.local.mesh.size(self.zero_axes) > 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return len({action.mb for action in self.pipeline.schedule[self.coord]})


def typical_documents(spec: RunSpec) -> tuple[tuple[int, ...], ...] | None:
    """Return the first positions of the documents of typical sequences, by which predictions count attention.

    None: attention sees whole sequences, or nothing is known of their documents.
    """
    data, seq = spec.config.data, spec.config.model.seq_length
    if not data.reset_attention_mask:
        return None
    if data.mean_document_length is None:
        return spec.documents
    return (tuple(range(data.mean_document_length, seq, data.mean_document_length)),)


def local_sizes(spec: RunSpec, kernels: KernelMemory) -> LocalSizes:
    """Return the local sizes of a valid run, with typical documents and the expected load of experts."""
    data, train = spec.config.data, spec.config.train
    local = LocalSizes(
        spec.arch,
        spec.mode,
        spec.mesh,
        train.micro_batch_size,
        ITEMSIZES[train.precision],
        spec.recompute,
        spec.overlap,
        kernels,
        data.reset_attention_mask,
        data.reset_position_ids,
        narrow_wgrad=spec.narrow_wgrad,
        documents=typical_documents(spec),
        loss_chunk=spec.loss_chunk(kernels.on_gpu),
        is_compiled=spec.compiles(kernels.on_gpu),
        records_logits=spec.config.optimizer.qk_clip,
        fp8=spec.fp8,
        is_fp16=train.precision == "fp16",
    )
    return replace(local, expert_load=expected_load(local, spec.config.parallel.expert_load_imbalance))


def make_step_spec(spec: RunSpec, kernels: KernelMemory = KERNELS["cpu"]) -> StepSpec:
    """Return a rank's part of a step of a valid run."""
    config, local, rule = spec.config, local_sizes(spec, kernels), rule_of(spec.config.optimizer)
    return StepSpec(
        local,
        spec.pipeline,
        config.parallel.pipeline_schedule,
        rule,
        config.optimizer,
        bucket_bytes=spec.bucket_bytes(kernels.on_gpu),
        zero_stage=config.parallel.zero_stage,
        reduce_itemsize=2 if config.train.grad_reduce_in_bf16 else local.wide,
        saves_in_background=config.checkpoint.save is not None and config.checkpoint.async_save,
        saves_in_memory=config.checkpoint.in_memory_interval is not None and spec.mesh.world_size > 1,
    )
