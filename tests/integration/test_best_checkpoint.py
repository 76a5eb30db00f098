"""Fact: with `keep_best` the checkpoint of the lowest validation loss stays, is recorded, and can be asked for."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.checkpoint.publish import BEST_TRACKER, Best, finished_checkpoints, read_best, resolve
from megatron3d.config.validate.files import NON_PERSISTENT, TRACKER
from megatron3d.errors import ExitCode, UserError
from megatron3d.metrics.journal import read_journal
from megatron3d.runtime import process
from megatron3d.train import loop
from tests.integration.test_rollback import spoiled
from tests.support.pool import Pool
from tests.support.tiny_run import in_run, run, run_as_rank, write_config
from tools import convert_checkpoint, evaluate, generate

KEEPS = ("checkpoint.keep_best=true", "train.eval_interval=1", "checkpoint.keep_latest_k=1")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("best"))


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[int, float]], None]:
    """Return a function that gives the validation losses of iterations in place of the model's; of others it is 9."""

    def use(by_iteration: Mapping[int, float]) -> None:
        report = loop.report_validation_loss

        def told(run: Any) -> float | None:
            loss = by_iteration.get(run.state.iteration, 9.0)
            with monkeypatch.context() as patch:
                patch.setattr(loop, "evaluate", lambda *_: torch.tensor([loss], dtype=torch.float64))
                return report(run)

        monkeypatch.setattr(loop, "report_validation_loss", told)

    return use


def kept(folder: Path) -> list[int]:
    return sorted(finished_checkpoints(folder))


@pytest.mark.parametrize("is_async", ["false", "true"])
def test_the_best_checkpoint_stays_until_a_better_one_is_complete(
    config: Path, tmp_path: Path, losses: Callable[[Mapping[int, float]], None], is_async: str
) -> None:
    """It is saved where nothing else asks for that, also in a later launch; neither NaN nor an equal loss is lower."""
    losses({1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: math.nan, 6: 2.0, 9: 2.5, 11: 1.5})
    typed = [*in_run(f"{tmp_path}/run"), *KEEPS, f"checkpoint.async_save={is_async}"]
    outcome = run(config, *typed)
    assert outcome.code == 0, outcome.err
    saves = [line for line in outcome.out.splitlines() if line.startswith("> saved")]
    names = [f"> saved {tmp_path}/run/iter_{iteration:07d}" for iteration in (1, 2, 4, 8)]
    assert saves == [*(f"{name}, the best so far" for name in names[:3]), names[3]]
    assert kept(tmp_path / "run") == [4, 8] and read_best(tmp_path / "run") == Best(4, 2.0)
    assert (tmp_path / "run" / BEST_TRACKER).read_text() == "4 2.0\n"
    assert run(config, *typed, "train.train_iters=10").code == 0
    assert kept(tmp_path / "run") == [4, 10] and read_best(tmp_path / "run") == Best(4, 2.0)
    assert run(config, *typed, "train.train_iters=12").code == 0
    assert kept(tmp_path / "run") == [11, 12] and read_best(tmp_path / "run") == Best(11, 1.5)


def test_checkpoints_of_an_interval_stay_as_without_it(
    config: Path, tmp_path: Path, losses: Callable[[Mapping[int, float]], None]
) -> None:
    """Without `keep_latest_k` all of these stay; what was only the best one goes."""
    losses({1: 5.0, 3: 4.0, 4: 3.0, 6: 2.0})
    typed = [*in_run(f"{tmp_path}/run"), *KEEPS[:2], "checkpoint.save_interval=3", "train.train_iters=7"]
    assert run(config, *typed).code == 0
    assert kept(tmp_path / "run") == [3, 6, 7] and read_best(tmp_path / "run") == Best(6, 2.0)


def test_every_rank_agrees(config: Path, tmp_path: Path, pool: Pool) -> None:
    typed = [*in_run(f"{tmp_path}/run"), *KEEPS, "parallel.tensor_model_parallel_size=2", "checkpoint.async_save=true"]
    typed += ["parallel.pipeline_model_parallel_size=2"]
    assert pool.run(run_as_rank, 4, config, [typed]) == [[0]] * 4
    rows = read_journal(tmp_path / "run/metrics.jsonl")
    found = [Best(row["iteration"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    assert read_best(tmp_path / "run") == min(found, key=lambda best: best.loss)
    assert {best.iteration for best in found} == set(range(1, 9))


@pytest.mark.parametrize(("interval", "expected"), [(5, Best(5, 3.0)), (7, Best(10, 4.0))])
def test_a_rollback_forgets_a_best_checkpoint_that_it_gives_up(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: Callable[[Mapping[int, float]], None],
    interval: int,
    expected: Best,
) -> None:
    """Step 10 goes wrong, its checkpoint is the best one so far, and the run goes back to 5 or 7.

    There an interval has kept 5, the second best, or nothing that was evaluated: then the next evaluation is the best.
    """
    times: list[int] = []
    spoiled(monkeypatch, lambda s: s.iteration == 9 and not times and times.append(1) is None, math.nan)
    seen: dict[int, float] = {5: 3.0, 10: 1.0}
    losses(seen)
    forgotten = loop.train_step  # type: ignore[attr-defined]

    def train_step(state: Any, *rest: Any, **named: Any) -> Any:
        if times and state.iteration == interval:
            assert read_best(tmp_path / "run") == (Best(5, 3.0) if interval == 5 else None)
            assert interval == 5 or not (tmp_path / "run/iter_0000010").exists()
            seen[10] = 4.0
        return forgotten(state, *rest, **named)

    monkeypatch.setattr(loop, "train_step", train_step)
    typed = [*in_run(f"{tmp_path}/run"), KEEPS[0], "train.eval_interval=5", "train.rollback_nonfinite_steps=1"]
    outcome = run(config, *typed, f"checkpoint.save_interval={interval}", "train.train_iters=12")
    assert outcome.code == 0, outcome.err
    assert f"rolled back from iteration 11 to {interval}" in outcome.out and seen[10] == 4.0
    assert read_best(tmp_path / "run") == expected


@pytest.fixture(scope="module")
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a run whose second checkpoint is the best of three."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", lambda *_: torch.tensor([float((run_of["now"].state.iteration - 4) ** 2)]))
        run_of: dict[str, Any] = {}
        report = loop.report_validation_loss
        patch.setattr(loop, "report_validation_loss", lambda run: run_of.update(now=run) or report(run))
        typed = [*in_run(str(folder / "run")), *KEEPS[:2], "checkpoint.save_interval=2", "train.train_iters=6"]
        assert run(config, *typed).code == 0
    assert kept(folder / "run") == [2, 4, 6]
    yield folder / "run"


def test_tools_take_the_best_checkpoint_or_that_of_an_iteration(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs: dict[str, Callable[[list[str]], str]] = {}

    def printed(main: Callable[[list[str]], int], *typed: str) -> Callable[[list[str]], str]:
        def call(chosen: list[str]) -> str:
            assert main([*chosen, *typed]) == 0
            return capsys.readouterr().out

        return call

    programs["generate"] = printed(generate.main, "--max-new-tokens", "20", "--prompt", "def ", "--temperature", "2")
    programs["evaluate"] = printed(evaluate.main, "--samples", "2", "--json")
    for name, call in programs.items():
        by_folder = {number: call(["--load", str(trained / f"iter_{number:07d}")]) for number in (2, 4, 6)}
        assert len(set(by_folder.values())) == 3, name
        assert call(["--load", str(trained), "--iteration", "best"]) == by_folder[4], name
        assert call(["--load", str(trained), "--iteration", "2"]) == by_folder[2], name
    for place, (source, more) in enumerate({trained / "iter_0000004": [], trained: ["--iteration", "best"]}.items()):
        typed = ["to-hf", "--input", str(source), "--output", str(tmp_path / str(place)), "--without-logits", *more]
        assert convert_checkpoint.main(typed) == 0
    first, second = ((tmp_path / place / "model.safetensors").read_bytes() for place in "01")
    assert first == second


def test_tools_take_the_newest_checkpoint_of_a_run_that_goes_on(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug that this finds: where that is not a permanent one, the run's config.yaml was looked for next to it."""
    shutil.copytree(trained, tmp_path / "run")
    place = tmp_path / "run" / NON_PERSISTENT
    place.mkdir()
    (tmp_path / "run/iter_0000004").rename(place / "iter_0000007")
    (place / TRACKER).write_text("7\n")
    said = []
    for load, chosen in (
        (tmp_path / "run", []),
        (tmp_path / "run", ["--iteration", "7"]),
        (trained, ["--iteration", "4"]),
    ):
        assert generate.main(["--load", str(load), *chosen, "--temperature", "2", "--max-new-tokens", "9"]) == 0
        said.append(capsys.readouterr().out)
    assert len(set(said)) == 1
    typed = ["to-hf", "--input", str(tmp_path / "run"), "--output", str(tmp_path / "hf"), "--without-logits"]
    assert convert_checkpoint.main(typed) == 0


def test_what_cannot_be_taken_is_named(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / BEST_TRACKER).unlink()
    said = "load one of iter_0000002, iter_0000004, iter_0000006 by its folder"
    for load, chosen, problem in (
        (tmp_path / "run", "best", f"has no {BEST_TRACKER}, which checkpoint.keep_best writes; {said}"),
        (tmp_path / "run", "3", f"--iteration 3: {tmp_path}/run has no checkpoint iter_0000003; {said}"),
        (trained / "iter_0000004", "best", f"is one checkpoint; give its run's folder, {trained}"),
    ):
        code = process.run_program(lambda: generate.main(["--load", str(load), "--iteration", chosen]))  # noqa: B023
        assert code == ExitCode.USER_ERROR and problem in capsys.readouterr().err
    for text in ("", "4", "4 low", "4 nan", "-1 2.0", "4 2.0 1"):
        (tmp_path / "run" / BEST_TRACKER).write_text(text)
        with pytest.raises(UserError, match="not an iteration and its loss; remove it"):
            resolve(tmp_path / "run", "best")
    typed = ["from-hf", "--input", str(trained), "--output", str(tmp_path / "out"), "--iteration", "4"]
    assert convert_checkpoint.main(typed) == ExitCode.USER_ERROR
    assert "--iteration: not used with from-hf, only with to-hf and to-dcp and to-megatron" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        generate.make_parser().parse_args(["--load", "run", "--iteration", "worst"])


def test_a_removed_best_checkpoint_is_replaced_by_the_next_best_one(
    config: Path, trained: Path, tmp_path: Path, losses: Callable[[Mapping[int, float]], None]
) -> None:
    """The journal has the losses of all checkpoints that are left; `keep_best` may also begin in a later launch."""
    losses({})
    for gone in (trained / "iter_0000004").name, BEST_TRACKER:
        root = tmp_path / gone
        shutil.copytree(trained, root)
        (root / gone).unlink() if gone == BEST_TRACKER else shutil.rmtree(root / gone)
        typed = [*in_run(str(root)), *KEEPS[:2], "checkpoint.save_interval=2", "train.train_iters=7"]
        assert run(config, *typed).code == 0
        assert read_best(root) == (Best(4, 0.0) if gone == BEST_TRACKER else Best(2, 4.0))


def test_keep_best_needs_evaluations(config: Path, tmp_path: Path) -> None:
    outcome = run(config, *in_run(f"{tmp_path}/run"), KEEPS[0])
    assert outcome.code == ExitCode.USER_ERROR
    expected = "checkpoint.keep_best=true (command line): no validation loss to compare; set train.eval_interval"
    assert expected in outcome.err, json.dumps(outcome.err)
