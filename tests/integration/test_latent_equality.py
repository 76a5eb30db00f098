"""Fact: latent attention computes the numbers of one process in every mode, with pipelines, ZeRO and context ranks."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.validate.rules import check
from megatron3d.parallel.modes import MODES
from tests.support.equality import (
    FORMS,
    LATENT_MODELS,
    NUM_RANKS,
    OVERLAPS,
    RECOMPUTATIONS,
    VOCAB_SIZE,
    configure,
    run_trace,
    tensor_keys,
    wrong,
)
from tests.support.turn_ranks import run_turns

FIRST, SECOND, EXPERTS = LATENT_MODELS
FROM_LATENTS = "attention from its latents"
RECOMPUTED: dict[str, dict[str, Any]] = {
    **RECOMPUTATIONS,
    FROM_LATENTS: {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
}
PIPELINE = {"pipeline_model_parallel_size": 2}
ROUNDS, KEPT = OVERLAPS["in rounds with the GEMM"], OVERLAPS["gathered weights kept, nothing else"]


def context(exchange: str) -> dict[str, Any]:
    return {"context_parallel_size": 2, "cp_comm_type": exchange}


# Mode and form, two ranks along each of its axes and 8 in all; then model, other keys of `parallel`, recomputation.
CASES: list[tuple[tuple[str, str], str, dict[str, Any], str]] = [
    (("1d", "replicated"), FIRST, {**PIPELINE, "zero_stage": 3}, FROM_LATENTS),
    (("1d", "replicated"), FIRST, {**context("p2p"), "zero_stage": 3}, "every two layers"),
    (("1d", "replicated"), SECOND, context("all_gather"), FROM_LATENTS),
    (("1d", "replicated"), EXPERTS, {**context("p2p"), **PIPELINE, "zero_stage": 1}, "every two layers"),
    (("1d", "sequence_parallel"), FIRST, {**context("a2a"), **PIPELINE}, "attention core and activation"),
    (("1d", "sequence_parallel"), SECOND, {**ROUNDS, **PIPELINE}, "first layer"),
    (("2d", "summa"), SECOND, {"zero_stage": 2}, "nothing"),
    (("1d", "sequence_parallel"), EXPERTS, {**PIPELINE, "expert_model_parallel_size": 4}, "attention core"),
    (("2d", "weight_stationary"), FIRST, {**PIPELINE, **KEPT}, "attention core"),
    (("2.5d", "summa"), FIRST, {"tp_keep_gathered_weights": True}, FROM_LATENTS),
    (("2.5d", "weight_stationary"), SECOND, {}, "every two layers"),
    (("3d", "heads"), FIRST, ROUNDS, "attention core"),
    (("3d", "heads"), SECOND, {}, "nothing"),
    (("3d", "heads"), EXPERTS, {"expert_model_parallel_size": 8}, "nothing"),
    (("3d", "tokens"), FIRST, {}, "first layer"),
    (("3d", "tokens"), SECOND, KEPT, FROM_LATENTS),
    (("grid", "all_reduce"), FIRST, KEPT, "nothing"),
    (("grid", "all_reduce"), SECOND, {}, "attention core"),
    (("grid", "scatter"), FIRST, ROUNDS, "attention core and activation"),
]


def test_every_form_has_a_row() -> None:
    assert list(dict.fromkeys(form for form, *_ in CASES)) == FORMS


@pytest.mark.parametrize("place", range(len(CASES)))
def test_latent_attention_equals_one_process(place: int) -> None:
    form, model, keys, recompute = CASES[place]
    parallel = {**tensor_keys(form, len(MODES[form[0]].axis_names) * (2,)), **keys}
    train = {"micro_batch_size": 4, "global_batch_size": 16, **RECOMPUTED[recompute]}
    config = configure(LATENT_MODELS[model], parallel, **train)
    assert check(config, NUM_RANKS, VOCAB_SIZE) == []
    got = [trace for trace in run_turns(run_trace, NUM_RANKS, config) if trace is not None]
    assert not (lines := wrong([(model, config)], got)), lines
