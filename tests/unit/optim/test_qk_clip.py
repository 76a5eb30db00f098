"""Fact: after an update the logits of a head whose largest one was above the threshold are at most at it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.attention.largest_logits import LargestLogits, largest_logits
from megatron3d.attention.packed import Visible
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.forecast.memory.rank import predict_memory
from megatron3d.pipeline.lower import lower
from megatron3d.train.state import TrainState, build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.dry_run import microbatches, run_rank, step_totals
from tests.support.turn_ranks import connect

VOCAB_SIZE = 61
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8, "init_method_std": 0.3}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "all heads": {"family": "gpt2", "add_bias_linear": True},
    "groups": {"family": "llama", "num_query_groups": 2},
    "latent": {"family": "llama", **LATENT},
    "latent of queries": {"family": "llama", **LATENT, "q_lora_rank": 16},
}


def reference(q: Tensor, k: Tensor, positions: list[int], starts: tuple[int, ...], window: int | None) -> Tensor:
    """Return the largest logit of each head of one sequence from its whole matrix of logits."""
    logits = torch.einsum("nld,nsd->nls", q, k) / math.sqrt(q.shape[-1])
    for row, query in enumerate(positions):
        for key in range(k.shape[1]):
            is_seen = key <= query and (window is None or query - key < window)
            document = [sum(start <= at for start in starts) for at in (query, key)]
            if not is_seen or document[0] != document[1]:
                logits[:, row, key] = -math.inf
    return logits.amax((1, 2))


@pytest.mark.parametrize("window", [None, 3, 150])
@pytest.mark.parametrize("starts", [None, ((), (5, 170))])
@pytest.mark.parametrize("chunks", [(range(200),), (range(50, 100), range(150, 200))])
def test_the_largest_logit_is_that_of_pairs_that_attention_sees(
    window: int | None, starts: tuple[tuple[int, ...], ...] | None, chunks: tuple[range, ...]
) -> None:
    """Sequences of more than one piece, whole ones and the chunks of a context rank."""
    generator = torch.Generator().manual_seed(0)
    positions = [place for chunk in chunks for place in chunk]
    q = torch.randn(2, 3, len(positions), 4, dtype=torch.float64, generator=generator)
    k = torch.randn(2, 3, 200, 4, dtype=torch.float64, generator=generator)
    each = [reference(q[row], k[row], positions, starts[row] if starts else (), window) for row in range(2)]
    found = largest_logits(q, k, [positions], Visible(starts, window))
    torch.testing.assert_close(found, torch.maximum(*each), rtol=1e-12, atol=0)


def build(model: str, **optimizer: Any) -> TrainState:
    train = {"micro_batch_size": 2, "global_batch_size": 8, "precision": "fp64"}
    sections = {"model": {**MODEL, **MODELS[model]}, "train": train, "optimizer": {"qk_clip": True, **optimizer}}
    spec = RunSpec(Config.model_validate(sections), 1, VOCAB_SIZE)
    assert not check(spec.config, 1, VOCAB_SIZE)
    return build_state(spec, connect(spec), torch.device("cpu"))


def step(state: TrainState, monkeypatch: pytest.MonkeyPatch, lr: float = 0.0) -> dict[str, Tensor]:
    """Train a step on the same samples each time, and return the largest logits by layer."""
    found: dict[str, Tensor] = {}
    take = LargestLogits.take

    def watched(self: LargestLogits) -> dict[str, Tensor]:
        found.update(take(self))
        return dict(found)

    monkeypatch.setattr(LargestLogits, "take", watched)
    train_step(state, microbatches(state.spec), lr, StepSettings(1, 64, 8))
    monkeypatch.setattr(LargestLogits, "take", take)
    return found


@pytest.mark.parametrize("alpha", [0.5, 0.2])
@pytest.mark.parametrize("model", MODELS)
def test_logits_shrink_to_the_threshold(model: str, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input of the first layer stays, and so its logits are those of before times the factor."""
    before = step(build(model), monkeypatch)["layers.0.attention"]
    assert before.numel() == 4
    threshold = before.median().item()
    state = build(model, qk_clip_threshold=threshold, qk_clip_alpha=alpha)
    step(state, monkeypatch)
    clip = state.optimizer.qk_clip
    assert clip is not None and clip.largest is not None and clip.largest >= before.max()
    gamma = (threshold / before).clamp(max=1)
    if model == "groups":
        gamma = gamma.view(2, 2).amin(1).repeat_interleave(2)
    after = step(state, monkeypatch)["layers.0.attention"]
    torch.testing.assert_close(after, gamma * before, rtol=1e-10, atol=0)
    assert (gamma < 1).any() and (model == "groups" or (gamma == 1).any())


def test_a_skipped_update_clips_nothing_and_forgets_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    state = build("all heads", qk_clip_threshold=1e-3)
    step(state, monkeypatch)
    state.buffers.settle()
    before = [values.clone() for _, _, values in state.buffers.shards("main")]
    state.optimizer.qk_clip._logits.record("layers.0.attention", torch.full((4,), 5.0, dtype=torch.float64))  # type: ignore[union-attr]
    state.optimizer.step(torch.tensor(math.nan), 0.1)
    assert all(torch.equal(a, b) for a, (_, _, b) in zip(before, state.buffers.shards("main"), strict=True))
    for _, _, grad in state.buffers.shards("grad"):
        grad.zero_()  # the norm that was not finite has clipped them
    state.optimizer.step(torch.tensor(1.0), 0.0)
    assert all(torch.equal(a, b) for a, (_, _, b) in zip(before, state.buffers.shards("main"), strict=True))


def test_the_memory_of_the_search_is_predicted() -> None:
    """Long sequences in a small model, so that the logits of a piece of the queries have the peak."""
    model = {**MODEL, **MODELS["all heads"], "seq_length": 512}
    train = {"micro_batch_size": 2, "global_batch_size": 2}
    config = Config.model_validate({"model": model, "train": train, "optimizer": {"qk_clip": True}})
    spec = RunSpec(config, 1, VOCAB_SIZE)
    run, memory = run_rank(spec), predict_memory(spec)
    assert memory.transient_peaks["logits of queries"] == max(memory.transient_peaks.values())
    assert memory.total == pytest.approx(step_totals(run, lower(spec.schedule)[run.coord]).peak, rel=0.02)


def test_evaluation_records_nothing() -> None:
    state = build("all heads")
    batch = microbatches(state.spec)
    with torch.no_grad():
        state.executor.evaluate([state.model.begin(each.tokens, 7, each.first_sample) for each in batch])
    assert not state.optimizer.qk_clip._logits.take()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "train", "problem"),
    [
        ({"family": "llama", "qk_layernorm": True}, {}, "model.qk_layernorm=true undoes what it does to the weights"),
        ({}, {"compile": True}, "no logit is recorded with train.compile=true; use train.compile=auto"),
    ],
)
def test_what_does_not_fit_is_refused(model: dict[str, Any], train: dict[str, Any], problem: str) -> None:
    config = Config.model_validate({"model": {**MODEL, **model}, "train": train, "optimizer": {"qk_clip": True}})
    assert [told for told in check(config, 1, VOCAB_SIZE) if told.startswith("optimizer.qk_clip=true: " + problem)]
