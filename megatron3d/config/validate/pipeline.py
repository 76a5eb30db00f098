"""Rules of pipelines: the schedule supports the stages, the layers fill them, and a schedule file fits the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron3d.config.section import LARGEST
from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts, plain, unreadable
from megatron3d.config.yaml_origins import show
from megatron3d.errors import UserError
from megatron3d.model.stages import divide
from megatron3d.pipeline.actions import stage_to_rank
from megatron3d.pipeline.schedules import FROM_FILE, SCHEDULES, num_microbatches, schedules_with
from megatron3d.pipeline.validate import read_schedule
from megatron3d.runtime.limits import shorten

SCHEDULE, FILE_KEY = "parallel.pipeline_schedule", "parallel.pipeline_schedule_file"
RANKS, VIRTUAL = "parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_model_parallel_size"
LAYOUT = "parallel.pipeline_model_parallel_layout"
MAKE_ONE = "a CSV with a row of actions per rank, as tools/plot_schedule.py writes"


def pipeline_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of the schedule's name, the stages per rank, and the layers per stage."""
    parallel = facts.config.parallel
    name, virtual = parallel.pipeline_schedule, parallel.virtual_pipeline_model_parallel_size
    if name == FROM_FILE:
        if parallel.pipeline_schedule_file is None:
            yield f"{facts.named(SCHEDULE)}: no {FILE_KEY}; name {MAKE_ONE}"
        if virtual is not None:
            yield (
                f"{facts.named(VIRTUAL)}: not used with {plain(facts.config, SCHEDULE)}, whose file determines it; "
                "leave it out"
            )
        return
    if parallel.pipeline_schedule_file is not None:
        other = plain(facts.config, SCHEDULE)
        yield f"{facts.named(FILE_KEY)}: not used with {other}; use {FROM_FILE}, or leave it out"
    entry = SCHEDULES[name]
    if virtual is not None and not entry.supports(virtual):
        takes = f"{entry.min_virtual}{' or more' if entry.max_virtual is None else ''}"
        yield (
            f"{facts.named(VIRTUAL)}: {plain(facts.config, SCHEDULE)} takes {takes} on each rank; use "
            f"{entry.min_virtual}, or pipeline_schedule {one_of(schedules_with(virtual))}"
        )
        return
    layout = parallel.pipeline_model_parallel_layout
    num_stages = parallel.pipeline_model_parallel_size * facts.spec.num_virtual_stages
    if num_stages > (LARGEST["num_layers"] if layout is not None else facts.config.model.num_layers):
        yield _too_many_stages(facts)
    elif layout is not None:
        yield from layout_problems(facts, facts.spec.stage_owners)


def _too_many_stages(facts: Facts) -> str:
    """Return the message for more stages than layers, with every single change that fixes it."""
    parallel, layers = facts.config.parallel, facts.config.model.num_layers
    name, ranks = parallel.pipeline_schedule, parallel.pipeline_model_parallel_size
    virtual = facts.spec.num_virtual_stages
    remedies = []
    others = facts.world_size // facts.spec.tensor_size
    if fitting := [n for n in range(1, layers // virtual + 1) if others % n == 0]:
        remedies.append(f"{max(fitting)}")
    if virtual > 1 and ranks <= layers:
        fewer = layers // ranks
        fits = SCHEDULES[name].supports(fewer)
        change = f"{VIRTUAL} {fewer}" if fits else f"{SCHEDULE} {one_of(schedules_with(1))}"
        remedies.append(change.removeprefix("parallel."))
    if ranks * virtual <= LARGEST["num_layers"] or not remedies:
        remedies.append(f"model.num_layers {ranks * virtual} or more")
    product = f"{ranks} rank{'s' * (ranks > 1)} x {virtual} stages = {ranks * virtual}"
    stages = f"{ranks} stages are" if virtual == 1 else f"{product} are"
    return f"{facts.named(RANKS)}: {stages} more than model.num_layers={layers}; use {', or '.join(remedies)}"


def layout_problems(facts: Facts, where: Sequence[int]) -> Iterator[str]:
    """Yield the problems of a given layout: one number per stage, layers in total, no rank without parameters."""
    layout, layers = facts.config.parallel.pipeline_model_parallel_layout, facts.config.model.num_layers
    assert layout is not None, "only a given layout is checked"
    between = sorted(set(where) - {where[0], where[-1]})
    if len(between) > layers:
        most = len(set(where)) - len(between) + layers
        yield (
            f"{facts.named(RANKS)}: {len(between)} ranks have neither the first nor the last stage, more than "
            f"model.num_layers={layers}; use at most {most}, or model.num_layers {len(between)} or more"
        )
        return
    example = show(_example(facts, where, between))
    holders = {owner for owner, count in zip(where, layout, strict=False) if count}
    if len(layout) != len(where):
        many = f"{len(layout)} number{'s' * (len(layout) != 1)} for {len(where)} stage{'s' * (len(where) != 1)}"
        without = ", or leave it out" if layers >= len(where) else ""
        yield f"{facts.named(LAYOUT)}: {many} that hold model.num_layers={layers}; use for example {example}{without}"
    elif sum(layout) != layers:
        total = " = ".join(dict.fromkeys((shorten("+".join(map(str, layout))), str(sum(layout)))))
        yield f"{facts.named(LAYOUT)}: {total} is not model.num_layers={layers}; use for example {example}"
    elif empty := [rank for rank in between if rank not in holders]:
        ranks = shorten(f"rank{'s' * (len(empty) > 1)} {', '.join(map(str, empty))}")
        yield f"{facts.named(LAYOUT)}: {ranks} of the pipeline would hold no parameter; use for example {example}"


def _example(facts: Facts, where: Sequence[int], between: Sequence[int]) -> tuple[int, ...]:
    """Return a valid layout, balanced by cost; if layers are too few, ranks `between` the ends get them first."""
    layers = facts.config.model.num_layers
    if layers >= len(where):
        return divide(facts.arch, len(where), where)
    first = {rank: stage for stage, rank in reversed(list(enumerate(where)))}
    needed = dict.fromkeys(first[rank] for rank in between)
    chosen = {*list(needed | dict.fromkeys(range(len(where))))[:layers]}
    return tuple(int(stage in chosen) for stage in range(len(where)))


def file_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of a schedule file: deadlocks, and sizes that are not those of this run."""
    parallel, where = facts.config.parallel, facts.named(FILE_KEY)
    if parallel.pipeline_schedule != FROM_FILE or parallel.pipeline_schedule_file is None:
        return
    path = Path(parallel.pipeline_schedule_file)
    if problem := unreadable(path, may_be_empty=True):
        yield f"{where}: {problem}; use {MAKE_ONE}"
        return
    try:
        schedule = read_schedule(path)
    except UserError as error:
        yield from (f"{where}: {problem.removeprefix(f'{path}: ')}" for problem in error.problems)
        return
    ranks = parallel.pipeline_model_parallel_size
    if (there := len(schedule)) != ranks:
        rule = f"is for {there} rank{'s' * (there > 1)}, not {plain(facts.config, RANKS)}"
        yield f"{where}: {rule}; use {there}, or a file for {ranks}"
    yield from _microbatch_problems(facts, num_microbatches(schedule))
    stages, layers = tuple(stage_to_rank(schedule).values()), facts.config.model.num_layers
    if parallel.pipeline_model_parallel_layout is not None:
        yield from layout_problems(facts, stages)
    elif len(stages) > layers:
        yield (
            f"{where}: has {len(stages)} stages, more than model.num_layers={layers}; use num_layers {len(stages)} or "
            f"more, or a file of at most {layers} stages"
        )


def _microbatch_problems(facts: Facts, microbatches: int) -> Iterator[str]:
    """Yield a message if the file is for another number of microbatches; batch_problems reports a fractional one."""
    train, sizes = facts.config.train, facts.spec.sizes
    step = train.micro_batch_size * sizes.data
    if sizes.mismatch or train.global_batch_size % step:
        return
    if (asked := train.global_batch_size // step) != microbatches:
        yield (
            f"{facts.named(FILE_KEY)}: is for {microbatches} microbatches, and train.global_batch_size="
            f"{train.global_batch_size} / (micro_batch_size {train.micro_batch_size} x data parallel {sizes.data}) is "
            f"{asked}; use global_batch_size {microbatches * step}, or a file for {asked}"
        )
