"""Fact: tools/plot_run.py draws the curves of runs, also with NaN and gaps; other input is refused with exit code 2."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
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
        assert plot_run.main([*map(str, runs), "--output", str(output)]) == 0
        assert output.read_bytes().startswith(PNG)
        assert capsys.readouterr().out == f"{output}: curves of {len(runs)} run(s)\n"
    assert plot_run.main([str(first), str(second), "--output", str(tmp_path / "runs.html")]) == 2
    assert "a page is of one run, and these are 2" in capsys.readouterr().err


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
        ('{"iteration": true}\n', "metrics.jsonl:1: not a record of a run"),
        ('{"iteration": 1' + "0" * 400 + "}\n", "metrics.jsonl:1: not a record of a run"),
        ('{"iteration": 1' + "0" * 5000 + "}\n", "metrics.jsonl:1: not JSON"),
        ("[" * 100_000 + "\n", "metrics.jsonl:1: not JSON"),
        ('{"iteration": 1, "lm_loss": "low"}\n', "lm_loss of iteration 1 is 'low', not a number"),
        ('{"iteration": 1, "lm_loss": 1' + "0" * 400 + "}\n", "lm_loss of iteration 1 is 1000"),
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
        ({}, "KeyError: 'train_iters'"),
        (None, "TypeError: "),
        ({"train_iters": 3}, "KeyError: 'time'"),
        ({"train_iters": 3, "time": "now"}, "KeyError: "),
    ],
)
def test_rows_that_lack_keys_are_refused(
    row: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 0, "start": row}) + "\n")
    assert plot_run.main([str(run), "--output", str(tmp_path / "run.html"), "--refresh", "1"]) == 2
    told = capsys.readouterr().err
    assert message in told and f"{run}/metrics.jsonl: its rows are not those that a run writes" in told
    assert not (tmp_path / "run.html").exists()


def test_an_unknown_picture_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "curves.parquet"
    assert plot_run.main([str(write_run(tmp_path / "run")), "--output", str(output)]) == 2
    assert "--output" in capsys.readouterr().err


def test_a_run_of_only_nan_is_drawn_without_warnings(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": NaN}\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_run.main([str(tmp_path), "--output", str(tmp_path / "curves.png")]) == 0
