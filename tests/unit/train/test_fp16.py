"""Fact: fp16 trains as fp32 does, from any initial loss scale.

A scale that is too large is halved while updates are skipped, and gradients that underflow in plain fp16 are kept.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.data.loader import Microbatch
from megatron3d.train.state import TrainState, build_state, connect
from megatron3d.train.step import StepSettings, train_step

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
SAMPLES, TOKENS = 4, 4 * 16


def build(**train: Any) -> TrainState:
    config = Config.model_validate({"model": MODEL, "train": {"micro_batch_size": 2, "global_batch_size": 4} | train})
    spec = RunSpec(config, 1, 61, 0)
    return build_state(spec, connect(spec), torch.device("cpu"))


def batch(step: int) -> list[Microbatch]:
    """Return a counting sequence from a random start, which is easy to learn."""
    first = torch.randint(0, 61, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    tokens = (first + torch.arange(17)) % 61
    return [Microbatch(tokens[:2], 0), Microbatch(tokens[2:], 2)]


def train(state: TrainState, steps: int, num_tokens: int = TOKENS) -> list[tuple[float, float, bool]]:
    """Return loss, gradient norm and whether the update was skipped, of each step."""
    results = [train_step(state, batch(step), 3e-3, StepSettings(1, num_tokens, SAMPLES)) for step in range(steps)]
    return [(r.loss.item(), r.grad_norm.item(), bool(r.skipped.item())) for r in results]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"initial_loss_scale": 2.0**10}, {"loss_scale": 2.0**10}])
def test_losses_and_norms_are_those_of_fp32(options: dict[str, float]) -> None:
    wide, narrow = train(build(), 20), train(build(precision="fp16", **options), 20)
    for (loss, norm, _), (loss16, norm16, skipped) in zip(wide, narrow, strict=True):
        assert loss16 == pytest.approx(loss, rel=2e-3)
        assert norm16 == pytest.approx(norm, rel=2e-2)
        assert not skipped
    assert wide[-1][0] < 0.9 * wide[0][0]


@pytest.mark.slow
def test_a_scale_that_is_too_large_falls_until_updates_are_made() -> None:
    state = build(precision="fp16", initial_loss_scale=2.0**32)
    results = train(state, 30)
    skipped = [s for _, _, s in results]
    num_skipped = sum(skipped)
    assert all(skipped[:5]) and num_skipped < 25
    assert float(state.loss_scale.factor) == 2.0 ** (32 - num_skipped + 1)
    assert state.optimizer.num_steps == 30 - num_skipped
    assert results[-1][0] < results[0][0]


@pytest.mark.slow
def test_the_loss_scale_preserves_gradients_below_fp16() -> None:
    """A loss divided by 2^40 tokens has gradients that are 0 in fp16 without a loss scale."""
    lost, kept = (train(build(precision="fp16", loss_scale=scale), 1, TOKENS * 2**34)[0][1] for scale in (1.0, 2.0**40))
    wide = train(build(), 1, TOKENS * 2**34)[0][1]
    assert lost == 0
    assert kept == pytest.approx(wide, rel=2e-2)
