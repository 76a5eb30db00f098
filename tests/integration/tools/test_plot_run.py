"""Fact: tools/plot_run.py draws the curves of runs, also with NaN and gaps; other input is refused with exit code 2."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tools import plot_run

PNG = b"\x89PNG"


def write_run(folder: Path, steps: int = 5) -> Path:
    folder.mkdir()
    rows = [
        {
            "iteration": i,
            "lm_loss": 5 / i,
            "grad_norm": float("nan"),
            "learning_rate": 1e-3,
            "tokens_per_s": 10.0 * i,
            "elapsed_ms": 2.0,
        }
        for i in range(1, steps + 1)
    ]
    rows.append({"iteration": steps, "validation_loss": 1.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_one_and_several_runs_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", steps=1)
    output = tmp_path / "new" / "curves.png"
    for runs in ([first], [first, second]):
        assert plot_run.main([*map(str, runs), "--output", str(output), "--overwrite"]) == 0
        assert output.read_bytes().startswith(PNG)
        assert capsys.readouterr().out == f"{output}: curves of {len(runs)} run(s)\n"
    assert plot_run.main([str(first), str(second), "--output", str(tmp_path / "runs.html")]) == 2
    assert "a page is of one run, and these are 2" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_folder_whose_name_is_not_utf_8_is_drawn(suffix: str, tmp_path: Path) -> None:
    run = write_run(Path(os.fsdecode(os.fsencode(tmp_path / "r") + b"\xff\x1b[2J")))
    assert plot_run.main([str(run), "--output", str(tmp_path / f"a.{suffix}")]) == 0
    drawn = (tmp_path / f"a.{suffix}").read_bytes()
    assert drawn.startswith(PNG) if suffix == "png" else b"\x1b[" not in drawn  # pixels may have any bytes


def test_bytes_that_are_not_utf_8_are_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_bytes(b'{"iteration": 1, "a": "\xff"}\n')
    for suffix in ("png", "html"):
        assert plot_run.main([str(run), "--output", str(tmp_path / f"a.{suffix}")]) == 2
        assert "metrics.jsonl: cannot be read" in capsys.readouterr().err


def test_curves_of_several_runs_are_redrawn_until_all_have_ended(tmp_path: Path) -> None:
    """The first run has ended; the second, which wants seven steps, has one more step on each poll."""
    runs, output = [write_run(tmp_path / "ended"), write_run(tmp_path / "goes on")], tmp_path / "curves.png"
    pictures = list[bytes]()

    def look(seconds: float) -> None:
        pictures.append(output.read_bytes())
        with (runs[1] / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"iteration": 5 + len(pictures), "lm_loss": 9.0}) + "\n")

    for run, wanted in zip(runs, (5, 7), strict=True):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"iteration": 0, "start": {"train_iters": wanted}}) + "\n")
    with mock.patch.object(plot_run.time, "sleep", look):  # type: ignore[attr-defined]
        assert plot_run.main([*map(str, runs), "--output", str(output), "--refresh", "1"]) == 0
    pictures.append(output.read_bytes())
    assert len(set(pictures)) == 3 and all(picture.startswith(PNG) for picture in pictures)


def test_a_truncated_line_is_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "lm_')
    assert len(plot_run.read_run(run)) == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("", "holds no training step"),
        ('{"iteration": 3, "validation_loss": 1.0}\n', "holds no training step"),
        ("step,loss\n", "metrics.jsonl:1: not JSON"),
        ('{"loss": 3}\n', "metrics.jsonl:1: not a record of a run"),
        ("[1, 2]\n", "metrics.jsonl:1: not a record of a run"),
        ("[" * 100_000 + "\n", "metrics.jsonl:1: not JSON (recursion limit exceeded"),
        ('{"iteration": %s}\n' % ("9" * 5000), "metrics.jsonl:1: not JSON"),
        ('{"iteration": true}\n', "metrics.jsonl:1: not a record of a run (iteration "),
        ('{"iteration": -1}\n', "metrics.jsonl:1: not a record of a run (iteration "),
        ('{"iteration": 1, "lm_loss": "a"}\n', "not a record of a run (lm_loss Input should be a valid number)"),
        ('{"iteration": 1, "lm_loss": null}\n', "not a record of a run (lm_loss"),
        ('{"iteration": 1, "lm_loss": 1%s}\n' % ("0" * 400), "lm_loss Input should be a valid number"),
        ('{"iteration": 1, "tokens_per_s": "1"}\n', "tokens_per_s Input should be a valid number"),
        ('{"iteration": 1, "start": {}}\n', "not a record of a run (start.train_iters Field required)"),
        ('{"iteration": 1, "start": null}\n', "not a record of a run (start"),
    ],
)
def test_a_folder_without_a_run_is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    output = tmp_path / "curves.png"
    assert plot_run.main([str(tmp_path), "--output", str(output)]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"start": {"train_iters": 3}}, "metrics.jsonl: the last start has no time, versions, world_size, mesh, "),
        ({"first_step": {}}, "first_step.memory_bytes Field required"),
        ({"lm_loss": 1.0, "timers": {"optimizer": {"min": 1.0}}}, "timers.optimizer.max Field required"),
        ({"lm_loss": 1.0, "memory": {"peak": 3}}, "memory.peak Input should be"),
        ({"straggler": 3}, "straggler Input should be a valid string"),
        ({"lm_loss": 1.0, "grad_norm": None}, "grad_norm"),
    ],
)
def test_a_page_of_rows_that_lack_keys_is_refused(
    row: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 6, **row}) + "\n")
    assert plot_run.main([str(run), "--output", str(tmp_path / "run.html")]) == 2
    assert message in capsys.readouterr().err


def test_a_page_needs_no_more_than_losses(tmp_path: Path) -> None:
    """Names of folders are text, not formulas; a file of another kind that has the name of a trace is refused."""
    (run := tmp_path / "$\\frac{}$").mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n{"iteration": 2, "lm_loss": 1e308}\n')
    assert plot_run.main([str(run), "--output", str(tmp_path / "run.html")]) == 0
    assert plot_run.main([str(run), "--output", str(tmp_path / "run.png")]) == 0


def test_an_unknown_picture_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "curves.parquet"
    assert plot_run.main([str(write_run(tmp_path / "run")), "--output", str(output)]) == 2
    assert "--output" in capsys.readouterr().err


def test_a_run_of_only_nan_is_drawn_without_warnings(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": NaN}\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_run.main([str(tmp_path), "--output", str(tmp_path / "curves.png")]) == 0
