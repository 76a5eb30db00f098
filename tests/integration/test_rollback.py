"""Fact: a diverged run rolls back to an earlier good checkpoint, skips the samples of that window, and reports it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron3d.config.schema import TrainConfig
from megatron3d.errors import ExitCode
from megatron3d.metrics.journal import read_journal
from megatron3d.train import loop, rollback
from megatron3d.train.rollback import MIN_LOSSES, Spike, SpikeDetector
from megatron3d.train.state import TrainState
from tests.support.tiny_run import in_run, refuse, run, steps, write_config

SAMPLES = 16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("rollback"))


def test_nonfinite_steps_in_a_row() -> None:
    detector = SpikeDetector(TrainConfig(rollback_nonfinite_steps=3))
    assert detector.is_enabled and not SpikeDetector(TrainConfig()).is_enabled
    seen = [detector.check(loss, skipped) for loss, skipped in [(1, True), (math.nan, False), (1, False), (1, True)]]
    assert seen == [None] * 4
    assert detector.check(math.inf, True) is None
    assert detector.check(2.0, True) == Spike(3, "3 steps in a row had a non-finite loss or gradient")
    assert detector.check(2.0, True) is None, "the count restarts"


def test_a_spike_is_far_from_the_others() -> None:
    detector = SpikeDetector(TrainConfig(rollback_loss_spike_score=6.0, rollback_window=16))
    wave = [5 + 0.1 * math.sin(i) for i in range(MIN_LOSSES)]
    assert [detector.check(loss, False) for loss in [9.0, *wave]] == [None] * (MIN_LOSSES + 1), (
        "the first are not judged"
    )
    assert detector.check(5.3, False) is None and detector.check(4.0, False) is None
    spike = detector.check(6.5, False)
    assert spike is not None and spike.num_steps == 1 and spike.reason.startswith("loss 6.5 is ")
    assert spike.reason.endswith("deviations above the last 16 losses")
    assert detector.check(6.5, False) is not None, "it is not one of the last"


def spoiled(monkeypatch: pytest.MonkeyPatch, at: Callable[[TrainState], bool], value: float) -> None:
    """Multiply the weights before the steps in `at`."""
    step = loop.train_step  # type: ignore[attr-defined]

    def train_step(state: TrainState, *rest: Any, **named: Any) -> Any:
        if at(state):
            state.buffers.settle()
            for flat in state.buffers.flat_buffers:
                flat.main.mul_(value)
            state.buffers.publish()
        return step(state, *rest, **named)

    monkeypatch.setattr(loop, "train_step", train_step)


@pytest.mark.parametrize(
    ("key", "value", "first"),
    [("rollback_nonfinite_steps=2", math.nan, 25), ("rollback_loss_spike_score=30.0", 30.0, 24)],
)
def test_a_rollback_skips_the_samples(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: float, first: int
) -> None:
    """Step 23 is corrupted and detected one step after the last bad one; checkpoints exist for iterations 10 and 20."""
    times: list[int] = []
    spoiled(monkeypatch, lambda s: s.iteration == 22 and not times and times.append(1) is None, value)
    typed = [*in_run(f"{tmp_path}/run"), f"train.{key}", "train.train_iters=30", "checkpoint.save_interval=10"]
    outcome = run(config, *typed)
    assert outcome.code == ExitCode.DONE, outcome.err
    (event,) = [row for row in read_journal(tmp_path / "run/metrics.jsonl") if "rollback" in row]
    assert event["iteration"] == 20
    assert event["rollback"].endswith(
        f"back from iteration {first} to 20, skipping samples {20 * SAMPLES} to {first * SAMPLES - 1}"
    )
    rows = [row for row in read_journal(tmp_path / "run/metrics.jsonl") if "lm_loss" in row]
    assert [row["iteration"] for row in rows] == list(range(1, 31))
    assert [row["consumed_samples"] for row in rows[20:]] == [SAMPLES * (first + n) for n in range(1, 11)]
    assert all(math.isfinite(row["lm_loss"]) and row["lm_loss"] < rows[0]["lm_loss"] for row in rows[20:])
    monkeypatch.undo()
    assert run(config, *in_run(f"{tmp_path}/plain"), *typed[2:]).code == ExitCode.DONE
    assert steps(tmp_path / "plain")[:20] == steps(tmp_path / "run")[:20] != []
    assert steps(tmp_path / "plain")[20] != steps(tmp_path / "run")[20], "other samples"


def spoiled_once(monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
    times: list[int] = []
    spoiled(monkeypatch, lambda s: s.iteration == iteration and not times and times.append(1) is None, math.nan)


ROLLS_BACK = ("train.rollback_nonfinite_steps=1", "checkpoint.save_interval=5")


def test_the_last_step_is_checked(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug that this finds: a run ends with the weights of a step that no later one has checked."""
    spoiled_once(monkeypatch, 9)
    outcome = run(config, *in_run(f"{tmp_path}/run"), *ROLLS_BACK, "train.train_iters=10")
    assert outcome.code == ExitCode.DONE, outcome.err
    (event,) = [row for row in read_journal(tmp_path / "run/metrics.jsonl") if "rollback" in row]
    assert event["rollback"].endswith(f"from iteration 10 to 5, skipping samples {5 * SAMPLES} to {10 * SAMPLES - 1}")
    assert [row[0] for row in steps(tmp_path / "run")] == list(range(1, 11))
    assert all(math.isfinite(loss) for _, loss, _ in steps(tmp_path / "run"))


def test_skipped_samples_stay_skipped_in_the_next_launch(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug that this finds: a run that ends before its next save reads the samples that it had skipped."""
    spoiled_once(monkeypatch, 6)
    roll_back = rollback.roll_back

    def roll_back_and_die(*arguments: Any, **named: Any) -> None:
        roll_back(*arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rollback, "roll_back", roll_back_and_die)
        assert run(config, *in_run(f"{tmp_path}/run"), *ROLLS_BACK).code == ExitCode.INTERRUPTED
    assert run(config, *in_run(f"{tmp_path}/run"), *ROLLS_BACK).code == ExitCode.DONE
    rows = [row for row in read_journal(tmp_path / "run/metrics.jsonl") if "lm_loss" in row]
    assert [(row["iteration"], row["consumed_samples"] // SAMPLES) for row in rows[5:]] == [(6, 9), (7, 10), (8, 11)]


def test_a_skipped_iteration_does_not_hide_a_spoiled_checkpoint(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug that this finds: step 5 goes wrong and is saved, 6 is skipped, and 7 takes 5 for a good checkpoint."""
    spoiled_once(monkeypatch, 4)
    typed = [*in_run(f"{tmp_path}/run"), "train.rollback_nonfinite_steps=1", "checkpoint.save_interval=1"]
    assert run(config, *typed, "train.iterations_to_skip=[6]").code == ExitCode.DONE
    (event,) = [row for row in read_journal(tmp_path / "run/metrics.jsonl") if "rollback" in row]
    assert event["iteration"] == 4


def test_a_rollback_accepts_what_the_run_accepts(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug that this finds: a checkpoint of another train.seed, which the launch accepted, ends the rollback."""
    typed = [*in_run(f"{tmp_path}/run"), *ROLLS_BACK]
    assert run(config, *typed, "train.train_iters=5").code == ExitCode.DONE
    spoiled_once(monkeypatch, 6)
    outcome = run(config, *typed, "train.seed=7", "checkpoint.accept_changed=[train.seed]")
    assert outcome.code == ExitCode.DONE, outcome.err
    assert "rolled back from iteration 8 to 5" in outcome.out


@pytest.mark.parametrize(
    ("typed", "last"),
    [(["train.max_nonfinite_steps=3", "train.train_iters=20"], 8), (["train.train_iters=7"], 7)],
)
def test_a_run_without_a_finite_step_fails(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], last: int
) -> None:
    """Bug that this finds: a run that skips every step exits 0, and its checkpoints replace the good ones."""
    saves = [*in_run(f"{tmp_path}/run"), "checkpoint.save_interval=1", "checkpoint.keep_latest_k=2"]
    assert run(config, *saves, "train.train_iters=5").code == ExitCode.DONE
    spoiled(monkeypatch, lambda s: s.iteration >= 5, math.nan)
    outcome = run(config, *saves, *typed)
    assert outcome.code == ExitCode.CRASH and "Traceback" not in outcome.err
    (line,) = outcome.err.splitlines()
    assert line.startswith(f"iteration {last}: the last {last - 5} steps had a non-finite loss or gradient; ")
    assert f"{tmp_path}/run/iter_0000005 is the last good checkpoint before" in line
    assert (tmp_path / "run/iter_0000005").is_dir() and not (tmp_path / "run/iter_0000007").exists()


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost weights", "good weights"])
def test_a_stop_after_skipped_steps_saves_only_finite_weights(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Bug that this finds: a stop requested while every step is skipped replaces the good checkpoint by NaN."""
    saves = [*in_run(f"{tmp_path}/run"), "checkpoint.keep_latest_k=1", "train.train_iters=20"]
    assert run(config, *saves, "train.exit_interval=5").code == ExitCode.STOPPED
    if is_lost:
        spoiled(monkeypatch, lambda s: s.iteration >= 5, math.nan)
    else:
        saves += ["train.precision=fp16", "train.loss_scale=1e12"]
    outcome = run(config, *saves, "train.exit_interval=8")
    assert "3 of 3 steps had non-finite gradients, and updated nothing" in outcome.out
    assert [path.name for path in (tmp_path / "run").glob("iter_*")] == [f"iter_{5 if is_lost else 8:07d}"]
    assert outcome.code == (ExitCode.CRASH if is_lost else ExitCode.STOPPED)
    assert ("run/iter_0000005 is the last good checkpoint before" in outcome.err) == is_lost


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["checkpoint.save=null", "checkpoint.load=null"], ("train.rollback_", "set checkpoint.save")),
        (["checkpoint.keep_latest_k=1"], ("checkpoint.keep_latest_k=1", "use checkpoint.keep_latest_k=2")),
        (
            ["checkpoint.keep_latest_k=3", "train.rollback_nonfinite_steps=20", "checkpoint.save_interval=5"],
            ("checkpoint.keep_latest_k=3", "use checkpoint.keep_latest_k=5"),
        ),
    ],
)
def test_a_rollback_without_a_checkpoint_is_refused(config: Path, typed: list[str], words: tuple[str, ...]) -> None:
    refuse(config, ["train.rollback_loss_spike_score=8", *typed], words)


def test_too_many_rollbacks_fail(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, lambda s: s.iteration == 5, math.nan)
    typed = ["train.rollback_nonfinite_steps=2", "train.max_rollbacks=2", "train.train_iters=20"]
    often = run(config, *typed, *in_run(f"{tmp_path}/run"), "checkpoint.save_interval=5")
    nowhere = run(config, *typed, *in_run(f"{tmp_path}/other"))
    for outcome, words in (
        (often, r"iteration 8: .*, after train.max_rollbacks=2 rollbacks\n"),
        (nowhere, r"iteration 8: .* holds no good checkpoint from before to roll back to\n"),
    ):
        assert outcome.code == ExitCode.CRASH and re.fullmatch(words, outcome.err), outcome.err


def test_a_stop_file_saves_and_stops_once(config: Path, tmp_path: Path) -> None:
    typed = in_run(f"{tmp_path}/run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/stop").touch()
    outcome = run(config, *typed, "logging.log_interval=100")
    assert outcome.code == ExitCode.STOPPED and f"> stopping: found {tmp_path}/run/stop" in outcome.out
    assert [iteration for iteration, _, _ in steps(tmp_path / "run")] == [2], "where it has stopped is logged"
    assert not (tmp_path / "run/stop").exists()
    assert run(config, *typed).code == ExitCode.DONE
    assert [iteration for iteration, _, _ in steps(tmp_path / "run")] == list(range(2, 9))
