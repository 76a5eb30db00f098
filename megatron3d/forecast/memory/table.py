"""Memory predictions as text: a line per stage, and a line per rank with the measured peak."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron3d.experts.plan import router_notes
from megatron3d.forecast.memory.rank import in_flight, rank_memory, stage_activations
from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.model.expert_operations import worst_load
from megatron3d.model.param_spec import stage_specs
from megatron3d.model.stage_plan import Stage
from megatron3d.pipeline.actions import ActionKind
from megatron3d.pipeline.schedules import stage_flops

BYTES: Mapping[str, float] = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
OPERATIONS: Mapping[str, float] = {"MFLOP": 1e6, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15}


def unit_for(largest: float, units: Mapping[str, float]) -> tuple[str, float]:
    """Return the largest unit of which there are at least ten, or else the smallest one."""
    fitting = [(name, size) for name, size in units.items() if largest >= 10 * size]
    return fitting[-1] if fitting else next(iter(units.items()))


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of aligned columns, the last to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows]


@dataclass(frozen=True)
class StageSummary:
    """Contents of a stage, its FLOPs for a microbatch over all ranks, and its activations on one rank.

    Attributes:
        in_flight: microbatches in flight when activations peak.
        activation_bytes: bytes that one microbatch keeps.
        what: contents of the stage in words.
    """

    index: int
    rank: int
    num_layers: int
    num_parameters: int
    flops: float
    in_flight: float
    activation_bytes: float
    what: str


def stage_summaries(step: StepSpec) -> list[StageSummary]:
    """Return the summary of every stage of the pipeline."""
    ranks = [step.on_pipeline_rank(coord) for coord in range(step.pipeline.num_ranks)]
    counts = {stage: count for rank in ranks for stage, count in in_flight(rank).items()}
    found = []
    for stage in step.pipeline.stages:
        owner = step.pipeline.owners[stage.index]
        flops = (
            sum(stage_flops(step.local.arch, stage)[kind] for kind in (ActionKind.F, ActionKind.B))
            * step.local.num_tokens
        )
        size, parameters = stage_activations(ranks[owner], stage), stage_num_parameters(ranks[owner], stage)
        count = counts[stage.index]
        facts = StageSummary(stage.index, owner, len(stage.layers), parameters, flops, count, size, describe(stage))
        found.append(facts)
    return found


def stage_table(step: StepSpec) -> list[str]:
    """Return the stages as text; activations are those of one microbatch times the microbatches in flight."""
    stages = stage_summaries(step)
    operations, per_operation = unit_for(max(stage.flops for stage in stages), OPERATIONS)
    name, size = unit_for(max(stage.in_flight * stage.activation_bytes for stage in stages), BYTES)
    header = (
        "stage",
        "rank",
        "layers",
        "parameters",
        f"{operations}/microbatch",
        "in flight",
        f"x {name}",
        f"= {name}",
        "",
    )
    rows = [
        (
            str(stage.index),
            str(stage.rank),
            str(stage.num_layers),
            f"{stage.num_parameters:,}",
            f"{stage.flops / per_operation:,.1f}",
            f"{stage.in_flight:.3g}",
            f"{stage.activation_bytes / size:,.1f}",
            f"{stage.in_flight * stage.activation_bytes / size:,.1f}",
            stage.what,
        )
        for stage in stages
    ]
    return align_columns([header, *rows])


def describe(stage: Stage) -> str:
    """Return the contents of a stage in words."""
    ends = stage.layers.start, stage.layers.stop - 1
    runs = {0: [], 1: [f"layer {ends[0]}"]}.get(len(stage.layers), [f"layers {ends[0]} to {ends[1]}"])
    return ", ".join(["embedding"] * stage.has_embedding + runs + ["head"] * stage.has_head)


def stage_num_parameters(step: StepSpec, stage: Stage) -> int:
    """Return the parameters of a stage of this rank over all ranks that shard it, without padding."""
    specs = stage_specs(step.local.arch, step.local.mode, step.pipeline, step.coord)[stage.index]
    return sum(math.prod(part.shape) for spec in specs.values() for part in spec.parts)


def memory_table(step: StepSpec, measured: Sequence[int] | None = None) -> list[str]:
    """Return the memory of one rank of each pipeline rank by category, and the measured peak.

    `measured` are the measured peak bytes of tensors by pipeline rank; None before the first step.
    """
    memories = [rank_memory(step.on_pipeline_rank(coord)) for coord in range(step.pipeline.num_ranks)]
    name, size = unit_for(max(memory.total for memory in memories), BYTES)
    header = ("rank", *memories[0].categories, f"total {name}", "measured", "largest moment")
    rows = []
    for coord, memory in enumerate(memories):
        cells = [f"{value / size:,.1f}" for value in (*memory.categories.values(), memory.total)]
        found = "-" if measured is None else f"{measured[coord] / size:,.1f}"
        peaks = memory.transient_peaks
        rows.append((str(coord), *cells, found, max(peaks, key=peaks.__getitem__, default="")))
    return align_columns([header, *rows]) + worst_load_lines(step) + router_notes(step.local.arch.balance)


def process_growth(step: StepSpec, grown: int, code: int) -> str:
    """Return of what the process of a rank on a CPU has grown in its first step, as text.

    Args:
        grown: bytes of the growth since before the model was built.
        code: those of them that are files in memory, which are code of libraries.
    """
    estimated = rank_memory(step).total
    rest = grown - estimated - code
    name, size = unit_for(max(estimated, grown), BYTES)
    parts = {"of libraries' code that the first step loads": code}
    if rest < 0:  # some memory was the process's own before
        parts["of tensors"] = grown - code
    else:
        parts = {"estimated": estimated, **parts, "of Python's objects and what the allocator keeps": rest}
    shown = " + ".join(f"{value / size:,.1f} {what}" for what, value in parts.items())
    return f"rank {step.local.mesh.rank}'s process grew by {grown / size:,.1f} {name} = {shown}"


def worst_load_lines(step: StepSpec) -> list[str]:
    """Return the memory where every token goes to one rank of its expert group, as text; none without such a group."""
    experts, ranks = step.local.arch.experts, step.local.mesh.size(step.local.mode.experts)
    if experts is None or ranks == 1:
        return []
    load = worst_load(step.local, experts)
    worst, even = (_largest(replace(step, local=replace(step.local, expert_load=each))) for each in (load, 1.0))
    name, size = unit_for(worst, BYTES)
    return [
        f"experts: at worst one rank has {load:.3g} times the balanced rows, and needs {worst / size:,.1f} {name} "
        f"in place of {even / size:,.1f}"
    ]


def _largest(step: StepSpec) -> int:
    """Return the bytes of the pipeline rank that needs most."""
    return max(rank_memory(step.on_pipeline_rank(coord)).total for coord in range(step.pipeline.num_ranks))
