"""Fact: the noise scale is that of the samples: the same in every layout, in a resumed run, and by a slow reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.errors import ExitCode
from megatron3d.metrics.journal import read_journal
from megatron3d.train.noise_scale import DECAY, signal_and_noise, small_square_norm
from megatron3d.train.state import build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples
from tests.support.tiny_run import in_run, run, steps, stored, write_config
from tests.support.turn_ranks import connect, run_turns

VOCAB_SIZE, BATCH, SMALL, CPU = 61, 16, 4, torch.device("cpu")
MODEL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ZeRO 0": {},
    "ZeRO 1": {"zero_stage": 1, "tensor_model_parallel_size": 2},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3, "num_distributed_optimizer_instances": 2},
    "2-D": {"tensor_parallel_mode": "2d", "tensor_parallel_shape": [2, 2]},
    "pipeline": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1", "zero_stage": 2},
    "interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}


def configure(layout: str, batch: int = BATCH, micro: int | None = None, precision: str = "fp64") -> Config:
    micro = micro or (2 if layout == "2-D" else 1)  # which splits sequences of a microbatch
    train = {"micro_batch_size": micro, "global_batch_size": batch, "precision": precision}
    train |= {"initial_loss_scale": 1024.0} if precision == "fp16" else {}
    return Config.model_validate({"model": MODEL, "parallel": LAYOUTS[layout], "train": train})


def squares(rank: int, world_size: int, config: Config, first: int = 0) -> tuple[float, float, float]:
    """Return the squared norms of small batches and of the whole one, and the loss, from sample `first` on."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    state, train = build_state(spec, connect(spec), CPU), config.train
    samples = RandomSamples(train.seed, VOCAB_SIZE, 8)
    sizes = train.micro_batch_size, train.global_batch_size
    batches = BatchLoader(samples, spec.mesh, spec.mode.batch_axes, *sizes, CPU).step(first)
    settings = StepSettings(train.seed, 8 * train.global_batch_size, train.global_batch_size)
    small = small_square_norm(state, batches, settings, min(SMALL, train.global_batch_size)).item()
    result = train_step(state, batches, 1e-3, settings)
    return small, result.grad_norm.item() ** 2, result.loss.item()


@pytest.fixture(scope="module")
def reference() -> tuple[float, float]:
    """Return the squared norms of one process that trains on each small batch as a batch of its own."""
    small = [squares(0, 1, configure("one rank", SMALL, SMALL), first)[1] for first in range(0, BATCH, SMALL)]
    return sum(small) / len(small), squares(0, 1, configure("one rank", BATCH, BATCH // 4))[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_measures_the_batches_of_its_samples(layout: str, reference: tuple[float, float]) -> None:
    ranks = 1 if layout == "one rank" else 4
    plain, *_ = run_turns(train_only, ranks, configure(layout))
    for small, whole, loss in run_turns(squares, ranks, configure(layout)):
        assert (small, whole) == pytest.approx(reference, rel=1e-10)
        assert (whole, loss) == pytest.approx(plain, rel=1e-13)  # the step is that of a run that measures nothing
    assert reference[0] > 1.5 * reference[1]


def train_only(rank: int, world_size: int, config: Config) -> tuple[float, float]:
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    state, train = build_state(spec, connect(spec), CPU), config.train
    samples = RandomSamples(train.seed, VOCAB_SIZE, 8)
    batches = BatchLoader(samples, spec.mesh, spec.mode.batch_axes, train.micro_batch_size, BATCH, CPU).step(0)
    result = train_step(state, batches, 1e-3, StepSettings(train.seed, 8 * BATCH, BATCH))
    return result.grad_norm.item() ** 2, result.loss.item()


def test_fp16_measures_unscaled_gradients() -> None:
    found = [squares(0, 1, configure("one rank", precision=precision))[:2] for precision in ("fp16", "fp32")]
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_signal_and_noise_are_unbiased() -> None:
    """Noise is the trace of the covariance of samples; the mean over many batches is the true square of the mean."""
    torch.manual_seed(0)
    mean, size, small, num_batches = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), 12, 3, 20_000
    samples = mean + torch.randn(num_batches, size, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0])
    whole = samples.mean(1).square().sum(-1).mean().item()
    groups = samples.view(num_batches, size // small, small, 3).mean(2).square().sum(-1).mean().item()
    signal, noise = signal_and_noise(whole, groups, size, small)
    assert signal == pytest.approx(mean.square().sum().item(), rel=0.02)
    assert noise == pytest.approx(1 + 4 + 9, rel=0.02)


KEYS = ["logging.noise_scale_interval=2", "logging.noise_scale_batch_size=8", "train.precision=fp64"]


def measured(folder: Path) -> list[tuple[int, dict[str, float]]]:
    rows = read_journal(folder / "metrics.jsonl")
    return [(row["iteration"], row["noise_scale"]) for row in rows if "noise_scale" in row]


def test_a_run_logs_it_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """It changes nothing of training, and a resumed run goes on with the averages of its rows."""
    config, folder = write_config(tmp_path), tmp_path / "run"
    assert run(config, "train.precision=fp64", *in_run(f"{tmp_path}/plain")).code == ExitCode.DONE
    assert run(config, *KEYS, *in_run(f"{tmp_path}/whole")).code == ExitCode.DONE
    assert run(config, *KEYS, "train.exit_interval=5").code == ExitCode.STOPPED
    assert run(config, *KEYS).code == ExitCode.DONE
    rows = measured(folder)
    assert rows == measured(tmp_path / "whole") and steps(folder) == steps(tmp_path / "plain")
    plain, mine = stored(tmp_path / "plain", 8), stored(folder, 8)
    assert all(torch.equal(mine[name], tensor) for name, tensor in plain.items())
    assert [iteration for iteration, _ in rows] == [2, 4, 6, 8]
    signal = noise = 0.0
    for _, row in rows:
        signal, noise = DECAY * signal + row["signal"], DECAY * noise + row["noise"]
        assert row["samples"] == (pytest.approx(noise / signal) if signal > 0 else None)
    assert rows[-1][1]["samples"] is not None


def test_a_growing_batch_is_measured_when_it_is_full(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert run(config, *KEYS, "train.rampup_batch_size=[4,4,40]").code == ExitCode.DONE
    first = next(row["iteration"] for row in read_journal(tmp_path / "run/metrics.jsonl") if row.get("lm_loss"))
    full = [
        row["iteration"]
        for row in read_journal(tmp_path / "run/metrics.jsonl")
        if row.get("global_batch_size") == 16 and row["iteration"] % 2 == 0
    ]
    assert first == 1 and full and [iteration for iteration, _ in measured(tmp_path / "run")] == full


@pytest.mark.parametrize(
    ("size", "micro", "said"),
    [
        (None, 2, "noise_scale_interval=5: without noise_scale_batch_size; the batch of 16 samples is computed in"),
        (3, 2, "noise_scale_batch_size=3: does not divide it into these; .* use .*noise_scale_batch_size 4 or 8"),
        (16, 2, "noise_scale_batch_size=16: does not divide it into these; .* use .*noise_scale_batch_size 8"),
        (4, 4, "noise_scale_batch_size=4: does not divide it into these; .*microbatches of 8 .*_batch_size 8"),
        (8, 8, "noise_scale_interval=5: .* so that there is no smaller batch to compare with"),
    ],
)
def test_sizes_that_a_layout_does_not_compute_are_refused(size: int | None, micro: int, said: str) -> None:
    """On two data-parallel ranks."""
    logging = {"noise_scale_interval": 5, "noise_scale_batch_size": size}
    config = configure("one rank", BATCH, micro).model_dump() | {"logging": logging}
    (problem,) = check(Config.model_validate(config), 2, VOCAB_SIZE)
    assert re.search(said, problem), problem
