"""Layouts of latent attention: two ranks along each axis of a mode's form, and 8 ranks in all."""

from __future__ import annotations

from typing import Any

from megatron3d.config.schema import Config
from megatron3d.parallel.modes import MODES
from tests.support.equality import LATENT_MODELS, OVERLAPS, RECOMPUTATIONS, configure, tensor_keys

FIRST, SECOND, EXPERTS = LATENT_MODELS
FROM_LATENTS = "attention from its latents"
RECOMPUTED: dict[str, dict[str, Any]] = {
    **RECOMPUTATIONS,
    FROM_LATENTS: {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
}
PIPELINE = {"pipeline_model_parallel_size": 2}
ROUNDS, KEPT = OVERLAPS["in rounds with the GEMM"], OVERLAPS["gathered weights kept, nothing else"]


def context(exchange: str) -> dict[str, Any]:
    """Return the keys of two context ranks."""
    return {"context_parallel_size": 2, "cp_comm_type": exchange}


# Mode and form, model, other keys of `parallel`, recomputation.
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


def latent_config(place: int) -> Config:
    """Return the configuration of a case."""
    form, model, keys, recompute = CASES[place]
    parallel = {**tensor_keys(form, len(MODES[form[0]].axis_names) * (2,)), **keys}
    return configure(LATENT_MODELS[model], parallel, micro_batch_size=4, global_batch_size=16, **RECOMPUTED[recompute])
