"""Fact: a step that is predicted from a few microbatches takes as long as one of which all are simulated.

The bug that this finds: the steady state is taken from periods that still fill the queues before a slow stage, so that
the predicted step is shorter than the work of its busiest rank.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.time.breakdown import TimeBreakdown
from megatron3d.forecast.time.step import Durations, SimulatedStep, load_machine, schedule_times, simulated_step
from megatron3d.pipeline.actions import ActionKind
from megatron3d.pipeline.schedules import SCHEDULES

RANKS, MICROBATCHES = 4, 40
SHARES = {ActionKind.F: 1, ActionKind.B: 2, ActionKind.I: 1, ActionKind.W: 1}


def steps(name: str) -> tuple[SimulatedStep, SimulatedStep]:
    """Return the inputs of a step with a few of its microbatches, and with all of them."""
    entry = SCHEDULES[name]
    parallel = {"pipeline_model_parallel_size": RANKS, "pipeline_schedule": name}
    parallel |= {"virtual_pipeline_model_parallel_size": max(entry.min_virtual, 1)}
    model = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
    train = {"micro_batch_size": 1, "global_batch_size": MICROBATCHES, "precision": "bf16"}
    config = Config.model_validate({"model": model, "parallel": parallel, "train": train})
    spec = RunSpec(config, RANKS, 500)
    few = simulated_step(spec, load_machine("selene", "bf16", RANKS))
    return few, replace(few, pipeline=spec.pipeline, shorter=None)


def uneven(step: SimulatedStep, seed: int) -> tuple[Durations, float]:
    """Return random seconds of each stage, and those of the busiest rank's microbatches."""
    draw, stages = random.Random(seed), step.pipeline.stages
    sizes = [draw.uniform(0.2, 2.0) for _ in stages]
    seconds = {
        (stage.index, kind): TimeBreakdown({"work": share * sizes[stage.index]})
        for stage in stages
        for kind, share in SHARES.items()
    }
    owned = [sum(3 * sizes[stage.index] for stage in step.pipeline.on_rank(rank)) for rank in range(RANKS)]
    return seconds, MICROBATCHES * max(owned)


@pytest.mark.parametrize("name", SCHEDULES)
def test_few_microbatches_predict_many(name: str) -> None:
    few, all_of_them = steps(name)
    for seed in range(12):
        durations, busiest_s = uneven(few, seed)
        expected, found = (schedule_times(step, durations).total_s for step in (all_of_them, few))
        assert found >= busiest_s * (1 - 1e-9)
        assert found == pytest.approx(expected, rel=0.015)
