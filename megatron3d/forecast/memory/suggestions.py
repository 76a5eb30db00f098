"""Changes of a configuration that reduce a rank's memory, each with the bytes that it saves, the cheapest first.

Bytes are those of the closed form for the changed step.  The price is the fraction of the step time that a change adds,
from recomputed FLOPs or from a larger bubble.  Changes that move other bytes or make kernels smaller have a nominal
price, which only puts them in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from megatron3d.config.validate.layout import feature_dimensions
from megatron3d.forecast.memory.rank import rank_memory
from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.model.linear_spec import flops_per_token
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.spec import CORE_ATTN, MLP_ACT, NO_RECOMPUTE, Architecture, Recompute
from megatron3d.model.stage_plan import divide, make_stages
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.pipeline.actions import ActionKind, stage_to_rank
from megatron3d.pipeline.schedules import FROM_FILE, SCHEDULES, Pipeline, build_schedule, layer_flops, stage_flops
from megatron3d.pipeline.simulate import num_virtual_stages, simulate_durations

# Nominal prices.
_FORM, _SHARE_STATE = 0.0, 0.001
_SHARE_GRADIENTS, _ELEMENTWISE = 0.01, 0.01
_SMALLER_KERNELS, _SHARE_WEIGHTS = 0.04, 0.05

# The least part of a rank's memory that is worth naming.
_WORTH = 0.01

Candidates = Iterator[tuple[str, float, StepSpec]]


@dataclass(frozen=True)
class Suggestion:
    """Settings with which a rank needs less memory.

    Attributes:
        settings: overrides as on the command line.
        price: fraction of the step time that it adds; a nominal price only determines the order.
        saves: bytes that it saves.
        total: bytes that the rank needs with it.
    """

    settings: str
    price: float
    saves: int
    total: int

    def __str__(self) -> str:
        return f"{self.settings}: {self.saves / 2**20:,.0f} MiB less, {self.total / 2**20:,.0f} MiB on this rank"


def suggest(step: StepSpec, count: int = 3) -> list[Suggestion]:
    """Return the cheapest change of each kind that saves memory worth naming, by price."""
    now, price_of, best = rank_memory(step).total, attrgetter("price"), []
    for candidates in (_recomputations, _zero_stages, _forms, _smaller_micro_batches, _schedules):
        evaluated = [(settings, price, rank_memory(changed).total) for settings, price, changed in candidates(step)]
        changes = [Suggestion(settings, price, now - total, total) for settings, price, total in evaluated]
        best += sorted((change for change in changes if change.saves >= _WORTH * now), key=price_of)[:1]
    return sorted(best, key=price_of)[:count]


def _recomputations(step: StepSpec) -> Candidates:
    arch, now = step.local.arch, step.local.recompute
    whole = flops_per_token(arch)
    forward = arch.num_layers * layer_flops(arch)[ActionKind.F] / whole
    core = arch.num_layers * 4 * arch.num_attention_heads * arch.kv_channels * arch.seq_length / whole
    both = f"selective train.recompute_modules=[{CORE_ATTN},{MLP_ACT}]"
    steps = (
        ("selective", core, Recompute("selective", frozenset({CORE_ATTN}), offloads=now.offloads)),
        (both, core + _ELEMENTWISE, Recompute("selective", frozenset({CORE_ATTN, MLP_ACT}), offloads=now.offloads)),
        ("full", forward, Recompute("full", offloads=now.offloads)),
    )
    undone = " train.recompute_method=null train.recompute_num_layers=null" if now.granularity == "full" else ""
    modules = " train.recompute_modules=null" if now.modules != NO_RECOMPUTE.modules else ""
    # A linear in fp8 keeps its own input, so that nothing is saved by recomputing the activation before it.
    refused = {both} if step.local.fp8 is not None else set[str]()
    for settings, price, recompute in steps:
        if recompute != now and settings not in refused:
            rest = undone + (modules if settings != both else "")
            changed = replace(step, local=replace(step.local, recompute=recompute))
            yield f"train.recompute_granularity={settings}{rest}", price, changed


def _zero_stages(step: StepSpec) -> Candidates:
    prices = {1: _SHARE_STATE, 2: _SHARE_GRADIENTS, 3: _SHARE_WEIGHTS}
    for stage, price in prices.items():
        if stage > step.zero_stage:
            yield f"parallel.zero_stage={stage}", price, replace(step, zero_stage=stage)


def _forms(step: StepSpec) -> Candidates:
    """Yield other forms of the tensor-parallel mode at this shape, such as sequence parallelism."""
    mode = step.local.mode
    shape = tuple(size for _, size in mode.axes)
    for form in MODES[mode.name].forms:
        other = build_mode(mode.name, form, shape)
        changed = replace(step.local, mode=other)
        if other != mode and fits(changed):
            yield f"parallel.tensor_parallel_form={form}", _FORM, replace(step, local=changed)


def _smaller_micro_batches(step: StepSpec) -> Candidates:
    size = step.local.micro_batch_size
    changed = replace(step.local, micro_batch_size=size // 2)
    if size % 2 == 0 and fits(changed) and step.schedule != FROM_FILE:
        smaller = with_schedule(replace(step, local=changed), step.schedule, 2 * step.num_microbatches)
        yield f"train.micro_batch_size={size // 2}", _SMALLER_KERNELS, smaller


def _schedules(step: StepSpec) -> Candidates:
    ranks, arch = step.pipeline.num_ranks, step.local.arch
    if ranks == 1:
        return
    now, counts = makespan(step.pipeline, arch), [len(stage.layers) for stage in step.pipeline.stages]
    undone = " parallel.pipeline_schedule_file=null" if step.schedule == FROM_FILE else ""
    if tuple(counts) != divide(arch, len(counts), step.pipeline.owners):
        undone += " parallel.pipeline_model_parallel_layout=null"
    for name, entry in SCHEDULES.items():
        if name != step.schedule and ranks * entry.min_virtual <= arch.num_layers:
            other = with_schedule(step, name, step.num_microbatches)
            settings = f"parallel.pipeline_schedule={name}{undone}"
            if num_virtual_stages(other.pipeline.schedule) != num_virtual_stages(step.pipeline.schedule):
                settings += (
                    f" parallel.virtual_pipeline_model_parallel_size={num_virtual_stages(other.pipeline.schedule)}"
                )
            yield settings, makespan(other.pipeline, arch) / now - 1, other


def with_schedule(step: StepSpec, name: str, num_microbatches: int) -> StepSpec:
    """Return the step with the named schedule; another schedule also divides the layers again."""
    ranks, entry = step.pipeline.num_ranks, SCHEDULES[name]
    virtual = num_virtual_stages(step.pipeline.schedule)
    takes = entry.min_virtual <= virtual <= (entry.max_virtual or virtual)
    schedule = build_schedule(name, ranks, num_microbatches, virtual if takes else None)
    where = tuple(stage_to_rank(schedule).values())
    counts = tuple(len(stage.layers) for stage in step.pipeline.stages)
    if name != step.schedule:
        counts = divide(step.local.arch, len(where), where)
    pipeline = Pipeline(make_stages(counts), where, schedule)
    return replace(step, pipeline=pipeline, schedule=name)


def makespan(pipeline: Pipeline, arch: Architecture) -> float:
    """Return the FLOPs of the busiest pipeline rank, bubbles included and transfers free."""
    flops = [stage_flops(arch, stage) for stage in pipeline.stages]
    return simulate_durations(pipeline.schedule, lambda action: flops[action.stage][action.kind]).makespan


def fits(local: LocalSizes) -> bool:
    """Return whether the mode's axes divide all that they split, into whole blocks of fp8's recipe."""
    mode, mesh = local.mode, local.mesh
    plans = (mode.expand, mode.contract, mode.embed)
    tokens = [mesh.size(layout[0]) for plan in plans for layout in (plan.x_layout, plan.y_layout)]
    return (
        local.micro_batch_size % mesh.size(mode.inner[0]) == 0
        and all(local.num_tokens % ranks == 0 for ranks in tokens)
        and all(d.size % mesh.size(axes) == 0 for d in feature_dimensions(local.arch, mode) for axes in d.splits)
        and local.arch.padded_vocab_size % mode.vocab_multiple == 0
        and all(_has_whole_blocks(local, path) for path in local.linears)
    )


def _has_whole_blocks(local: LocalSizes, path: str) -> bool:
    """Return whether shards of a linear's operands are whole blocks, if it multiplies in fp8."""
    recipe, size, mesh = local.recipe_of(path), local.linears[path], local.mesh
    if recipe is None or recipe.block is None:
        return True
    plan = size.plan(local.mode)
    inputs, outputs = ({*plan.w_layout[1], *plan.x_layout[1]}, {*plan.w_layout[0], *plan.y_layout[1]})
    split = (local.num_tokens, {*plan.x_layout[0], *plan.y_layout[0]}), (size.num_inputs, inputs)
    parts = *split, *((part, outputs) for part in size.outputs.values())
    return all(whole % (recipe.block * mesh.size(axes)) == 0 for whole, axes in parts)
