"""Fact: MFU equals the published values of published runs, and HFU counts the FLOPs that are executed."""

from __future__ import annotations

import pytest

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.metrics.step_record import StepWork
from megatron3d.model.linear_spec import flops_per_token

A100, TPU_V4 = 312e12, 275e12


def gpt(layers: int, hidden: int, heads: int) -> ModelConfig:
    return ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=2048)


# GPT-3 175B, MT-NLG 530B and 1T of Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5: step seconds, number of
# sequences of 2048 tokens and number of A100, with sequence parallelism and selective recomputation.
MEGATRON = {
    "175B": (gpt(96, 12288, 96), 64, 64, 13.75, 0.514),
    "530B": (gpt(105, 20480, 128), 280, 280, 37.83, 0.560),
    "1T": (gpt(128, 25600, 160), 512, 512, 71.49, 0.563),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_mfu_of_megatrons_models(name: str) -> None:
    """By hand: 72 layers h^2 (1 + s / 6h + V / 12 h layers) FLOPs per token, the paper's appendix A."""
    model, num_gpus, batch, step_s, published = MEGATRON[name]
    per_token = flops_per_token(resolve_architecture(model, 51200))
    h, s, layers = model.hidden_size, 2048, model.num_layers
    assert per_token == pytest.approx(72 * layers * h * h * (1 + s / (6 * h) + 51200 / (12 * h * layers)), rel=1e-12)
    work = StepWork(batch * s, num_gpus, per_token, per_token * batch * s / num_gpus, A100)
    speed = work.throughput(step_s)
    assert speed.mfu == pytest.approx(published, abs=5e-4)
    assert speed.tflops_per_s_per_rank == pytest.approx(312 * published, abs=0.2)


def test_mfu_of_palm() -> None:
    """540B on 6144 TPU v4 at 238.3 thousand tokens/s: 46.2 % (Chowdhery et al. 2022, arXiv:2204.02311, table 3).

    By its appendix B: 6 N + 12 layers * heads * head size * length, with N = 540.35e9 and multi-query attention.
    """
    model = ModelConfig(
        family="llama",
        num_layers=118,
        hidden_size=18432,
        ffn_hidden_size=73728,
        num_attention_heads=48,
        num_query_groups=1,
        kv_channels=256,
        seq_length=2048,
        tie_embeddings=True,
    )
    per_token = flops_per_token(resolve_architecture(model, 256_000))
    assert per_token == pytest.approx(6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048, rel=1e-3)
    work = StepWork(2048 * 2048, 6144, per_token, 0.0, TPU_V4)
    assert work.throughput(work.num_tokens / 238.3e3).mfu == pytest.approx(0.462, abs=5e-4)


def test_recomputation_counts_only_for_hfu() -> None:
    work = StepWork(num_tokens=1000, num_ranks=4, flops_per_token=6.0, rank_flops=2000.0, peak_flops=4000.0)
    speed = work.throughput(0.5)
    assert (speed.tokens_per_s, speed.tokens_per_s_per_rank) == (2000.0, 500.0)
    assert speed.mfu == pytest.approx(3000 / 4000) and speed.hfu == pytest.approx(4000 / 4000)
    unknown = StepWork(1000, 4, 6.0, 2000.0, None).throughput(0.5)
    assert unknown.mfu is None and unknown.hfu is None and unknown.tflops_per_s_per_rank == pytest.approx(3e-9)
