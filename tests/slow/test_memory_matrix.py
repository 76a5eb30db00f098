"""Fact: memory savings and communication overlap compute what one process computes (pytest --full).

The tolerance is 1e-10 in float64.  The configurations cover every pair of ZeRO stage, HSDP, activation recomputation,
overlap of tensor-parallel communication, schedule, mode and form on eight ranks.  In each configuration a non-finite
gradient skips one update, on all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.parallel.mesh import DATA
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.schedules import SCHEDULES
from tests.support.equality import (
    FORMS,
    MODELS,
    NUM_RANKS,
    OVERLAPS,
    RECOMPUTATIONS,
    VOCAB_SIZE,
    configure,
    describe,
    run_trace_and_skip,
    shapes,
    wrong,
)
from tests.support.pool import Pool

NAMES = ("gpt2, tied, dropout", "fewer key/value heads than ranks, QK-norm, tied")
BATCH = 8
NUM_TURNS = 4

pytestmark = pytest.mark.full

Keys = Mapping[str, Any]

ZERO: list[Keys] = [{"zero_stage": stage} for stage in range(4)]
GROUPED: list[Keys] = [{}, {"num_distributed_optimizer_instances": 2}]
RECOMPUTED = list(RECOMPUTATIONS.values())
EXECUTED = list(OVERLAPS.values())
MODE_FORMS: list[Keys] = [{"tensor_parallel_mode": mode, "tensor_parallel_form": form} for mode, form in FORMS]
PIPELINES: list[Keys] = [{}, *({"pipeline_model_parallel_size": 2, "pipeline_schedule": name} for name in SCHEDULES)]


class Choice(NamedTuple):
    """One value of each factor, as an index into its list."""

    zero: int
    groups: int
    recompute: int
    execution: int
    form: int
    pipeline: int

    def pairs(self) -> set[tuple[tuple[int, int], tuple[int, int]]]:
        """Return the pairs that it covers; forms with pipelines are left to the equality of layouts."""
        met = set(combinations(enumerate(self), 2))
        return {pair for pair in met if {place for place, _ in pair} != {4, 5}}


SIZES = (len(ZERO), len(GROUPED), len(RECOMPUTED), len(EXECUTED), len(MODE_FORMS), len(PIPELINES))


def build(choice: Choice) -> Config | None:
    """Return the configuration with the first valid shape and microbatch, or None where there is none."""
    zero, pipeline, form = (
        {**ZERO[choice.zero], **GROUPED[choice.groups]},
        PIPELINES[choice.pipeline],
        MODE_FORMS[choice.form],
    )
    ranks = 2 if pipeline or choice.groups else 4
    model = {**MODELS[NAMES[sum(choice) % len(NAMES)]], "num_layers": 4}
    for shape, micro in product(shapes(len(MODES[form["tensor_parallel_mode"]].axis_names), ranks), (1, 2)):
        keys = {**zero, **pipeline, **form, **EXECUTED[choice.execution], "tensor_parallel_shape": shape}
        train = {"micro_batch_size": micro, "global_batch_size": BATCH, **RECOMPUTED[choice.recompute]}
        config = configure(model, keys, **train)
        if not check(config, NUM_RANKS, VOCAB_SIZE):
            return config
    return None


@cache
def configurations() -> list[tuple[str, Config]]:
    """Return few configurations that cover every pair: repeatedly the random one with the most new pairs."""
    choose = random.Random(1)
    many = [Choice(*(choose.randrange(size) for size in SIZES)) for _ in range(4000)]
    valid = {choice: config for choice in many if (config := build(choice)) is not None}
    missing, found = set().union(*(choice.pairs() for choice in valid)), []
    while missing:
        best = max(valid, key=lambda choice: len(choice.pairs() & missing))
        missing -= best.pairs()
        found.append((NAMES[sum(best) % len(NAMES)], valid[best]))
    return found


@pytest.mark.parametrize("turn", range(NUM_TURNS))
def test_every_memory_saving_option_equals_one_process(pool: Pool, turn: int) -> None:
    cases = configurations()[turn::NUM_TURNS]
    results = [pool.run(run_trace_and_skip, NUM_RANKS, config) for _, config in cases]
    problems = [
        f"{describe(config)}: {text}"
        for (_, config), ranks in zip(cases, results, strict=True)
        for _, texts in ranks
        for text in texts
    ]
    assert not problems, "\n".join(problems)
    assert not (lines := wrong(cases, [ranks[0][0] for ranks in results])), lines


def test_the_matrix_has_every_pair_of_options() -> None:
    """Each value of each factor occurs, and HSDP with and without a pipeline."""
    configs = [config for _, config in configurations()]
    tried = [config.parallel.model_dump() | config.train.model_dump() for config in configs]
    for keys in (*ZERO, *GROUPED, *RECOMPUTED, *EXECUTED, *MODE_FORMS, *PIPELINES):
        wanted = {name: tuple(value) if isinstance(value, list) else value for name, value in keys.items()}
        assert any(wanted.items() <= each.items() for each in tried), keys
    sizes = [RunSpec(config, NUM_RANKS).mesh.sizes for config in configs]
    assert any(all(each[axis] > 1 for axis in DATA) for each in sizes)
    assert any(min(each["pipeline"], each["data"]) > 1 for each in sizes)
