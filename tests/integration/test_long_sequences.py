"""Fact: memory grows linearly with the length of sequences, as predicted; no tensor has all logits or all scores."""

from __future__ import annotations

from typing import Any

import attention
import pytest

from megatron3d.attention.context.plan import BOTH, CONTEXT_EXCHANGES
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.rank import predict_memory
from megatron3d.verify.dry_run import dry_run, run_rank, step_totals, with_few_microbatches

VOCAB_SIZE = 32_000
MODEL: dict[str, Any] = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 1024,
    "norm_placement": "sandwich",
    "qk_layernorm": True,
    "rotary_scaling": "llama3",
    "rotary_scaling_factor": 8.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.slow
@pytest.mark.parametrize("length", [8192, 32_768])
def test_memory_of_long_sequences_is_predicted(length: int) -> None:
    """All logits in fp32 would be 4 GB at 32k positions, the scores of a layer 16 GB in bf16; the step needs 3.3 GB."""
    model = {**MODEL, "seq_length": length}
    train = {"micro_batch_size": 1, "global_batch_size": 2, "precision": "bf16"}
    spec = RunSpec(Config.model_validate({"model": model, "train": train}), 1, VOCAB_SIZE)
    (run,) = dry_run(spec, [0])
    measured = step_totals(run, spec.pipeline.schedule[0]).peak
    assert predict_memory(spec).total == pytest.approx(measured, rel=0.05)
    assert measured < 0.9e9 + length * 80e3


@pytest.mark.slow
@pytest.mark.parametrize("exchange", CONTEXT_EXCHANGES)
def test_memory_of_every_exchange_is_predicted(exchange: str) -> None:
    """Recomputed attention leaves neither gathered keys nor exchanged heads behind."""
    parallel: dict[str, Any] = {"context_parallel_size": 4, "cp_comm_type": exchange}
    parallel |= {"hierarchical_context_parallel_sizes": (2, 2)} if exchange == BOTH else {}
    train = {"micro_batch_size": 1, "global_batch_size": 2, "precision": "bf16", "recompute_granularity": "selective"}
    model = {**MODEL, "seq_length": 32_768, "num_query_groups": 8}
    spec = RunSpec(Config.model_validate({"model": model, "train": train, "parallel": parallel}), 4, VOCAB_SIZE, 1)
    measured = step_totals(run_rank(with_few_microbatches(spec)), spec.pipeline.schedule[0]).peak
    assert predict_memory(spec).total == pytest.approx(measured, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "length"), [("eight documents", 8192), ("window of 1024", 16_384)])
def test_resident_memory_of_attention_is_predicted(case: str, length: int) -> None:
    """The process grows by what the meter counts; docs/long_context.md has longer sequences."""
    row = attention.resident_row(case, length)
    assert row["predicted_over_measured"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("case", attention.CASES)
def test_attention_needs_live_bytes_that_grow_with_the_length(case: str) -> None:
    """Beyond a mask of a window, twice the length needs twice the memory; all scores would need four times as much."""
    rows = [attention.peak_row(length, case, attention.CASES[case](length)) for length in (8192, 16_384, 32_768)]
    assert [row["predicted_over_measured"] for row in rows] == pytest.approx([1] * 3, abs=0.01)
    first, second, third = (float(row["bytes"]) for row in rows)
    assert third - second == pytest.approx(2 * (second - first), rel=0.01)
