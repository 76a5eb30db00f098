"""Numbers that follow from a configuration; computed where they are needed, never stored."""

from __future__ import annotations

import math
from pathlib import Path

from megatron3d.config.schema import Config, ParallelConfig
from megatron3d.model.architecture import Architecture
from megatron3d.model.stages import divide, make_stages
from megatron3d.parallel.mesh import DATA, Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.parallel.modes.mode import Mode
from megatron3d.parallel.tp_overlap import TPOverlap
from megatron3d.pipeline.action_costs import Costs
from megatron3d.pipeline.actions import Schedule, stage_to_rank
from megatron3d.pipeline.schedules import FROM_FILE, SCHEDULES, build_schedule, load_schedule
from megatron3d.pipeline.spec import Pipeline, layer_flops

SEQUENCE_PARALLEL = "sequence_parallel"


def tensor_mode(parallel: ParallelConfig) -> Mode:
    """The tensor-parallel mode with its axes' sizes."""
    form = SEQUENCE_PARALLEL if parallel.sequence_parallel else parallel.tensor_parallel_form
    return build_mode(parallel.tensor_parallel_mode, form, tensor_shape(parallel))


def tensor_shape(parallel: ParallelConfig) -> tuple[int, ...]:
    """Sizes of the tensor axes."""
    if parallel.tensor_parallel_shape is not None:
        return parallel.tensor_parallel_shape
    return MODES[parallel.tensor_parallel_mode].default_shape(parallel.tensor_model_parallel_size or 1)


def tensor_size(parallel: ParallelConfig) -> int:
    """TP: the product of the tensor axes."""
    return math.prod(tensor_shape(parallel))


def vocab_multiple(mode: Mode) -> int:
    """The padded vocabulary's divisor."""
    return mode.vocab_multiple


def overlap_of(parallel: ParallelConfig) -> TPOverlap:
    """Return the overlaps of tensor-parallel communication that a configuration switches on."""
    return TPOverlap(
        parallel.tp_num_panels,
        parallel.tp_comm_overlap_input_grad,
        parallel.tp_comm_overlap_weight_grad,
        parallel.tp_comm_overlap_weight_gather,
        parallel.tp_keep_gathered_weights,
    )


def make_mesh(parallel: ParallelConfig, world_size: int, rank: int = 0) -> Mesh:
    """The grid `pipeline x replica x data x tensor axes`, data parallelism taking what is left."""
    pipeline = parallel.pipeline_model_parallel_size
    replicas = parallel.num_distributed_optimizer_instances
    data = world_size // (pipeline * replicas * tensor_size(parallel))
    return Mesh((("pipeline", pipeline), ("replica", replicas), ("data", data), *tensor_mode(parallel).axes), rank)


def num_microbatches(config: Config, mesh: Mesh) -> int:
    """global_batch_size = micro_batch_size x data-parallel size x number of microbatches."""
    return config.train.global_batch_size // (config.train.micro_batch_size * mesh.size(DATA))


def make_pipeline(config: Config, arch: Architecture, mesh: Mesh) -> Pipeline:
    """The pipeline of a valid configuration; raises UserError where its schedule is a file that cannot be run."""
    schedule = make_schedule(config, arch, mesh)
    where = tuple(stage_to_rank(schedule).values())
    counts = config.parallel.pipeline_model_parallel_layout or divide(arch, len(where), where)
    return Pipeline(make_stages(counts), where, schedule)


def virtual_size(parallel: ParallelConfig) -> int:
    """Stages per pipeline rank of a schedule that has a name."""
    given = parallel.virtual_pipeline_model_parallel_size
    return SCHEDULES[parallel.pipeline_schedule].min_virtual if given is None else given


def stage_owners(parallel: ParallelConfig) -> tuple[int, ...]:
    """The pipeline rank of each stage, by the schedule's name or from its file."""
    if parallel.pipeline_schedule == FROM_FILE:
        return tuple(stage_to_rank(load_schedule(schedule_file(parallel))).values())
    place, ranks = SCHEDULES[parallel.pipeline_schedule].rank_of_stage, parallel.pipeline_model_parallel_size
    return tuple(place(stage, ranks) for stage in range(ranks * virtual_size(parallel)))


def schedule_file(parallel: ParallelConfig) -> Path:
    """Where a schedule without a name is."""
    assert parallel.pipeline_schedule_file is not None, "a schedule from a file has a file"
    return Path(parallel.pipeline_schedule_file)


def make_schedule(config: Config, arch: Architecture, mesh: Mesh) -> Schedule:
    """The computations of every pipeline rank, by the schedule's name or from its file."""
    parallel, p, m = config.parallel, mesh.sizes["pipeline"], num_microbatches(config, mesh)
    if parallel.pipeline_schedule == FROM_FILE:
        return load_schedule(schedule_file(parallel), p, m)
    flops = {kind.value: float(count) for kind, count in layer_flops(arch).items()}
    return build_schedule(parallel.pipeline_schedule, p, m, virtual_size(parallel), Costs(**flops))
