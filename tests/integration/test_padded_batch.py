"""Fact: with empty microbatches, where ranks do not divide the global batch, every layout has one process's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.validate.rules import check
from tests.support.equality import MODELS, VOCAB_SIZE, configure, run_trace, tensor_keys, wrong
from tests.support.turn_ranks import run_turns

DENSE = [name for name, keys in MODELS.items() if "num_moe_experts" not in keys]
PIPELINE = {"pipeline_model_parallel_size": 2}
# Keys of the layout, data-parallel ranks, and all ranks; six sequences in microbatches of two.
LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({"zero_stage": 0}, 2),
    ({"zero_stage": 1, **tensor_keys(("1d", "sequence_parallel"), (2,))}, 4),
    ({"zero_stage": 2, **PIPELINE}, 4),
    ({"zero_stage": 3, **tensor_keys(("2d", "summa"), (2, 1))}, 4),
    ({"zero_stage": 1, **PIPELINE, "pipeline_schedule": "zb-h1"}, 4),
    ({"zero_stage": 1, "context_parallel_size": 2}, 4),
    ({"zero_stage": 3, "num_distributed_optimizer_instances": 2}, 2),
]


@pytest.mark.parametrize("documents", ["one", "positions restart"])
@pytest.mark.parametrize("place", range(len(LAYOUTS)))
def test_empty_microbatches_add_nothing(place: int, documents: str) -> None:
    parallel, num_ranks = LAYOUTS[place]
    name = DENSE[place % len(DENSE)]
    train = {"micro_batch_size": 2, "global_batch_size": 6, "pad_global_batch": True}
    config = configure(MODELS[name], parallel, documents, **train)
    assert check(config, num_ranks, VOCAB_SIZE) == []
    trace = run_turns(run_trace, num_ranks, config)[0]
    assert trace is not None, "rank 0 has the numbers"
    assert not (lines := wrong([(name, config)], [trace])), lines
