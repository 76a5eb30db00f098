"""Fact: what predictions know of fp8 linears is what the step does, in every layout: collectives, storages, peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.memory.rank import rank_memory
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.time.traffic import step_flops, step_traffic
from megatron3d.linear.fp8_plan import RECIPES
from megatron3d.model.local_sizes import KERNELS
from megatron3d.pipeline.lower import lower
from megatron3d.verify.dry_run import run_rank, step_totals, with_few_microbatches
from tests.support.equality import VOCAB_SIZE
from tests.support.fp8_rows import ROWS, build, name_of
from tests.support.layout_rows import pick
from tests.support.operation_record import problems

TOLERANCE = 0.02
KERNEL = replace(KERNELS["cpu"], num_received=0)  # as the process group of a dry run
# What memory and traffic of a step depend on, each value of which a row that is run dry has.
STEP_FACTORS = ("form", "recipe", "pipeline", "context", "ZeRO", "recompute", "model")
FACTORS_OF = [frozenset((name, row[name]) for name in STEP_FACTORS) for row in ROWS]
PLACES = pick(FACTORS_OF)


def last_rank(place: int, **train: bool) -> RunSpec:
    """Return the run of a row with keys of training, seen from its last rank, whose coordinates are not 0."""
    case = build(ROWS[place])
    changed = case.config.model_copy(update={"train": case.config.train.model_copy(update=train)})
    return RunSpec(changed, case.num_ranks, VOCAB_SIZE, case.num_ranks - 1)


# The same of rows whose recipe may store weights in fp8.
STORABLE = [place for place, row in enumerate(ROWS) if RECIPES[row["recipe"]].w.is_square]
STORED = [STORABLE[place] for place in pick([FACTORS_OF[each] for each in STORABLE])]


@pytest.mark.parametrize("place", range(len(ROWS)), ids=lambda place: name_of(ROWS[place]))
def test_operations_are_those_of_the_step(place: int) -> None:
    """GEMMs, all-gathers of data and of scales, all-reduces of largest values, X^T and other storages."""
    assert problems(last_rank(place)) == []


@pytest.mark.parametrize("place", PLACES, ids=lambda place: name_of(ROWS[place]))
def test_a_dry_run_has_the_predicted_traffic_and_peak(place: int) -> None:
    compare(last_rank(place))


@pytest.mark.parametrize("place", STORED, ids=lambda place: name_of(ROWS[place]))
def test_weights_that_are_stored_in_fp8_are_not_quantized_by_microbatches(place: int) -> None:
    spec = last_rank(place, fp8_param_gather=True)
    assert problems(spec) == []
    compare(spec)


def compare(spec: RunSpec) -> None:
    """Compare calls, bytes sent, FLOPs and the peak of a dry run with the predicted ones."""
    run, step = run_rank(with_few_microbatches(spec)), make_step_spec(spec, KERNEL)
    dry, expected = step_totals(run, lower(spec.schedule)[run.coord]), step_traffic(step)
    assert dry.calls == expected.calls
    assert dry.sent == pytest.approx(expected.sent)
    assert dry.flops == step_flops(step)
    memory = rank_memory(step)
    assert abs(memory.total / dry.peak - 1) < TOLERANCE, f"{memory.total} bytes, {dry.peak} are measured"
