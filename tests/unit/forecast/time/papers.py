"""Claims of the papers of tensor-parallel modes as runs of the cost model: 64 V100, and 1024 A100."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron3d.config.schema import Config
from megatron3d.forecast.search.options import LayoutChoice, TensorChoice
from megatron3d.forecast.search.problem import PlanningProblem
from megatron3d.forecast.time.practices import OURS, ExecutionProfile, narrow_wgrads
from megatron3d.parallel.modes import MODES

# 64 ranks, all of them on the tensor axes.
SHAPES: Mapping[str, tuple[int, ...]] = {"1d": (64,), "2d": (8, 8), "2.5d": (4, 4, 4), "3d": (4, 4, 4)}


def problem(
    cluster: str, num_ranks: int, precision: str, batch: int, model: Mapping[str, Any], profile: ExecutionProfile = OURS
) -> PlanningProblem:
    """Return the planning problem of a GPT with 51200 vocabulary entries on a cluster."""
    train = {"global_batch_size": batch, "precision": precision, "bucket_mb": 25.0}
    config = Config.model_validate({"model": {**model, "vocab_size": 51200}, "train": train})
    return PlanningProblem(config, 51200, cluster, num_ranks, profile)


def on_v100(mode: str, hidden: int, sequences: int) -> tuple[float, float]:
    """Return step seconds and GiB per rank of a mode's first form on 64 V100 of Longhorn: 24 layers, length 512.

    Weight gradients are reduced in fp16, as in the paper.
    """
    profile = OURS.also(narrow_wgrads)
    model = {"num_layers": 24, "hidden_size": hidden, "num_attention_heads": 64, "seq_length": 512}
    tensor = TensorChoice(mode, next(iter(MODES[mode].forms)), SHAPES[mode])
    plan = problem("longhorn", 64, "fp16", sequences, model, profile).plan(
        LayoutChoice(tensor, micro_batch_size=sequences)
    )
    return plan.step.step_s, plan.memory.total / 2**30


def on_perlmutter(layout: LayoutChoice, profile: ExecutionProfile = OURS) -> tuple[float, float]:
    """Return step seconds and MFU of AxoNN's 80B GPT on 1024 A100, with 2048 sequences of 2048 tokens."""
    model = {"num_layers": 42, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048}
    asked = problem("perlmutter", 1024, "bf16", 2048, model, profile)
    plan = asked.plan(layout)
    return plan.step.step_s, asked.mfu(plan)
