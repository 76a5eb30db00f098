"""Fact: a run cools down from any of its checkpoints by one changed key, like a run that was planned so, bit for bit.

With WSD the key is the length, `train.train_iters` or `train.train_samples`; after a constant rate it is
`optimizer.lr_decay_style=WSD`, where the length is the one that is wanted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron3d.errors import ExitCode
from megatron3d.metrics.journal import read_journal
from tests.support.tiny_run import in_run, run, steps, stored, write_config

SHAPES = ("linear", "cosine", "exponential", "minus_sqrt")
ITERS = ["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=4", "train.precision=fp64"]
SAMPLES = [
    *("optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_samples=64", "train.precision=fp64"),
    *("optimizer.lr_warmup_iters=0", "optimizer.lr_warmup_samples=32", "train.train_iters=null"),
]


def rates(folder: Path) -> list[float]:
    return [row["learning_rate"] for row in read_journal(folder / "metrics.jsonl") if "lm_loss" in row]


def assert_cools_down(tmp_path: Path, long: list[str], override: list[str], planned: list[str]) -> list[float]:
    """Train a long run, go on from its checkpoint of iteration 4 with an override, and compare with a planned run."""
    config, saved = write_config(tmp_path), "checkpoint.save_interval=4"
    assert run(config, *long, saved, *in_run(f"{tmp_path}/long")).code == ExitCode.DONE
    places = [f"checkpoint.load={tmp_path}/long/iter_0000004", f"checkpoint.save={tmp_path}/cooled"]
    assert run(tmp_path / "long/config.yaml", *places, *override).code == ExitCode.DONE
    assert run(config, *planned, *in_run(f"{tmp_path}/planned")).code == ExitCode.DONE
    cooled, expected = tmp_path / "cooled", tmp_path / "planned"
    assert steps(cooled) == steps(expected)[4:] and rates(cooled) == rates(expected)[4:]
    got, wanted = stored(cooled, 8), stored(expected, 8)
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
    assert rates(tmp_path / "long")[4:7] == 3 * [rates(expected)[3]]
    return rates(expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_with_wsd_cools_down_where_it_is_made_to_end(shape: str, tmp_path: Path) -> None:
    keys = [*ITERS, f"optimizer.lr_wsd_decay_style={shape}"]
    found = assert_cools_down(
        tmp_path, [*keys, "train.train_iters=16"], ["train.train_iters=8"], [*keys, "train.train_iters=8"]
    )
    quarters = {"linear": 0.75, "cosine": 0.853553391, "exponential": 2 * 0.5**0.25 - 1, "minus_sqrt": 0.5}
    assert found[3:5] + found[7:] == pytest.approx([1e-2, 1e-2 * quarters[shape], 0.0])


def test_a_run_of_samples_cools_down_where_it_is_made_to_end(tmp_path: Path) -> None:
    found = assert_cools_down(
        tmp_path,
        [*SAMPLES, "train.train_samples=256"],
        ["train.train_samples=128"],
        [*SAMPLES, "train.train_samples=128"],
    )
    assert found[3:] == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2, 0.0])


def test_a_run_with_a_constant_rate_cools_down_by_the_style(tmp_path: Path) -> None:
    keys = ["optimizer.lr_wsd_decay_iters=4", "train.precision=fp64"]
    constant, wsd = "optimizer.lr_decay_style=constant", "optimizer.lr_decay_style=WSD"
    assert_cools_down(tmp_path, [*keys, constant], [wsd], [*keys, wsd])
