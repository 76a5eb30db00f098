"""Fact: the whole matrix of layouts equals one process: every mode, form, shape and schedule (pytest --full).

Modes, forms, axes and schedules come from the registries, so that a new one is covered as soon as it is registered.
tests/integration/test_equality.py covers every pair of these choices in less time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.parallel.mesh import DATA
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.schedules import FROM_FILE
from megatron3d.pipeline.validate import write_schedule
from tests.support.equality import (
    BATCHES,
    FORMS,
    MODELS,
    NUM_RANKS,
    SCHEDULES_WITH_STAGES,
    VOCAB_SIZE,
    configure,
    describe,
    divisions,
    random_owners,
    run_trace,
    shapes,
    small_batches,
    tensor_keys,
    wrong,
)
from tests.support.pool import Pool
from tests.support.toy_pipeline import any_schedule

NUM_TURNS = 2
NUM_PIPELINE_TURNS = 4
NUM_LAYERS = 5

pytestmark = pytest.mark.full


def layouts(num_ranks: int = NUM_RANKS) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return, by mode and form, all shapes on all ranks, and on half of them with data parallelism of 2."""
    return {
        form: [
            tensor_keys(form, shape)
            for size in (num_ranks, num_ranks // 2)
            for shape in shapes(len(MODES[form[0]].axis_names), size)
        ]
        for form in FORMS
    }


def matrix(name: str) -> list[Config]:
    """Return the layouts to try with a model: every second one, alternating with the other models."""
    every = [parallel for group in layouts().values() for parallel in group]
    mine = every[list(MODELS).index(name) % 2 :: 2]
    return [small_batches(name, parallel, NUM_RANKS, BATCHES[0], least=2) for parallel in mine]


def pipelines() -> list[dict[str, Any]]:
    """Return the keys of every schedule with every number of stages per rank."""
    return [
        {"pipeline_schedule": name, "virtual_pipeline_model_parallel_size": virtual}
        for name, virtual in SCHEDULES_WITH_STAGES
    ]


def pipeline_matrix(turn: int, folder: Path) -> list[tuple[str, Config]]:
    """Return every pipeline on 2 and 4 ranks; models, tensor axes, ZeRO stages and batches vary with `turn`."""
    names, found = list(MODELS), []
    for place, (pipeline, ranks) in enumerate(product(pipelines(), (2, 4))):
        index, choose = place // 2, random.Random(100 * turn + place)
        name, batches = names[(index + turn) % len(names)], BATCHES[(index + turn // 2) % 2]
        groups = list(layouts(NUM_RANKS // ranks).values())
        at, round_ = (turn * len(pipelines()) + index) % len(groups), (turn * len(pipelines()) + index) // len(groups)
        tensor = groups[at][(round_ + place) % len(groups[at])]
        alone = small_batches(name, tensor, NUM_RANKS // ranks, batches, least=3)
        inner, train = RunSpec(alone, NUM_RANKS // ranks), alone.train.model_dump(exclude_defaults=True)
        parallel = {**tensor, **pipeline, "pipeline_model_parallel_size": ranks}
        if inner.mesh.sizes["data"] > 1:
            parallel["zero_stage"] = turn % 4
        if pipeline["pipeline_schedule"] == FROM_FILE:
            where = random_owners(ranks, choose)
            parallel["pipeline_schedule_file"] = str(folder / f"{turn}-{place}.csv")
            schedule = any_schedule(choose, where, inner.num_microbatches)
            write_schedule(schedule, Path(parallel["pipeline_schedule_file"]))
        model = {**MODELS[name], "num_layers": NUM_LAYERS}
        where = RunSpec(configure(model, parallel, **train), NUM_RANKS).stage_owners  # type: ignore[assignment]
        division = list(divisions(where, NUM_LAYERS, choose).values())[(turn - index) % 4]
        found.append((name, configure(model, {**parallel, "pipeline_model_parallel_layout": division}, **train)))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("turn", range(NUM_TURNS))
def test_every_layout_equals_one_process(pool: Pool, name: str, turn: int) -> None:
    cases = [(name, config) for config in matrix(name)[turn::NUM_TURNS]]
    traces = [pool.run(run_trace, NUM_RANKS, config)[0] for _, config in cases]
    assert not (lines := wrong(cases, traces)), lines


@pytest.mark.parametrize("turn", range(NUM_PIPELINE_TURNS))
def test_every_pipeline_equals_one_process(pool: Pool, tmp_path: Path, turn: int) -> None:
    cases = pipeline_matrix(turn, tmp_path)
    assert [check(config, NUM_RANKS, VOCAB_SIZE) for _, config in cases] == [[]] * len(cases)
    traces = [pool.run(run_trace, NUM_RANKS, config)[0] for _, config in cases]
    assert not (lines := wrong(cases, traces)), lines


def test_the_matrix_has_every_mode_and_shape() -> None:
    """The layouts have, for each mode and form, all axes above 1 at once, unequal axes and data parallelism."""
    configs = [config for name in MODELS for config in matrix(name)]
    for mode, entry in MODES.items():
        for form in entry.forms:
            same = [c for c in configs if describe(c).startswith(f"{mode} {form} ")]
            axes = [RunSpec(c, NUM_RANKS).tensor_shape for c in same]
            assert any(min(shape) > 1 for shape in axes), f"{mode} {form}: no layout has all axes above 1"
            assert {math.prod(shape) for shape in axes} == {NUM_RANKS, NUM_RANKS // 2}
            assert len(entry.axis_names) == 1 or any(len(set(shape)) > 1 for shape in axes)
    assert {c.train.micro_batch_size for c in configs} >= {1, 2, 4}
    assert all(RunSpec(c, NUM_RANKS).num_microbatches > 1 for c in configs)


def facts(config: Config) -> Iterator[str]:
    """Yield descriptions of what a configuration of the pipeline matrix tests."""
    parallel, spec = config.parallel, RunSpec(config, NUM_RANKS, VOCAB_SIZE)
    ranks, m = spec.mesh.sizes["pipeline"], spec.num_microbatches
    where, layers = spec.stage_owners, parallel.pipeline_model_parallel_layout
    tied = "tied" if spec.arch.tie_embeddings else "untied"
    yield f"{tied}, ends {'on one rank' if where[0] == where[-1] else 'apart'}"
    yield f"{tied} {parallel.pipeline_schedule} {parallel.virtual_pipeline_model_parallel_size}"
    yield f"{parallel.tensor_parallel_mode} {parallel.tensor_parallel_form}"
    yield f"ZeRO {parallel.zero_stage} on {spec.mesh.size(DATA)} data ranks"
    yield from [f"{layers[0]} layers first", f"{layers[-1]} layers last"] if layers else ["layers by cost"]
    yield "microbatches: " + ("fewer than ranks" if m < ranks else f"{'no ' if m % ranks else ''}multiple of ranks")
    yield f"micro-batch {config.train.micro_batch_size}"


def test_the_pipelines_have_every_schedule(tmp_path: Path) -> None:
    """On 2 and 4 ranks: every schedule with tied and untied embeddings, every form of a mode, and rare features."""
    configs = [config for turn in range(NUM_PIPELINE_TURNS) for _, config in pipeline_matrix(turn, tmp_path)]
    forms = {f"{mode} {form}" for mode, form in layouts()}
    schedules = {" ".join(map(str, pipeline.values())) for pipeline in pipelines()}
    for ranks in (2, 4):
        same = [config for config in configs if config.parallel.pipeline_model_parallel_size == ranks]
        found = {fact for config in same for fact in facts(config)}
        wanted = forms | {f"{tied} {schedule}" for tied in ("tied", "untied") for schedule in schedules}
        wanted |= {f"{tied}, ends {how}" for tied in ("tied", "untied") for how in ("apart", "on one rank")}
        wanted |= {"ZeRO 0 on 1 data ranks", *(f"ZeRO {stage} on 2 data ranks" for stage in range(4))}
        wanted |= {"layers by cost", "0 layers first", "0 layers last", "micro-batch 1"}
        wanted |= {f"microbatches: {how}multiple of ranks" for how in ("", "no ")}
        assert wanted - found == set(), f"on {ranks} ranks"
    assert "microbatches: fewer than ranks" in found and len(configs) == 2 * NUM_PIPELINE_TURNS * len(schedules)
