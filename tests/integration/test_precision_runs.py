"""Fact: bf16 and fp16 train real text as fp32 does: over 200 iterations each mean of 20 losses is within 1 %."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron3d.metrics.journal import read_journal
from tests.support.tiny_run import in_run, run, steps, write_config

ITERATIONS, WINDOW, BAND = 200, 20, 0.01
LENGTH = [f"train.train_iters={ITERATIONS}", "optimizer.lr=3e-3", "optimizer.lr_warmup_iters=20"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("precision"))


def losses(config: Path, precision: str, *others: str) -> np.ndarray:
    """Return mean losses over windows of iterations."""
    folder = config.parent / precision
    outcome = run(config, *LENGTH, f"train.precision={precision}", *in_run(str(folder)), *others)
    assert outcome.code == 0, outcome.err
    found = np.array([loss for _, loss, _ in steps(folder)])
    return found.reshape(-1, WINDOW).mean(1)


@pytest.fixture(scope="module")
def reference(config: Path) -> np.ndarray:
    return losses(config, "fp32")


@pytest.mark.parametrize("typed", [["bf16"], ["fp16", "train.initial_loss_scale=4096.0"]])
def test_low_precisions_train_like_fp32(config: Path, reference: np.ndarray, typed: list[str]) -> None:
    found = losses(config, *typed)
    assert reference[-1] < 0.8 * reference[0], "fp32 itself learns nothing"
    assert np.abs(found / reference - 1).max() < BAND


def test_fp16_finds_its_loss_scale(config: Path) -> None:
    """Steps from Megatron's initial 2^32 overflow, are skipped and counted, until the scale fits."""
    folder = config.parent / "from above"
    assert run(config, "train.train_iters=40", "train.precision=fp16", *in_run(str(folder))).code == 0
    rows = [row for row in read_journal(folder / "metrics.jsonl") if "lm_loss" in row]
    skipped = [row["skipped_iterations"] for row in rows]
    first_good = skipped.index(0)
    assert 10 < sum(skipped) < 25 and sum(skipped[:first_good]) == first_good
    assert len({row["lm_loss"] for row in rows[:first_good]}) > 1, "other samples have other losses"
    assert rows[-1]["lm_loss"] < rows[0]["lm_loss"]
    scales = [row["loss_scale"] for row in rows]
    assert scales[0] == 2.0**32 and scales[first_good] == 2.0 ** (33 - first_good) >= min(scales)
