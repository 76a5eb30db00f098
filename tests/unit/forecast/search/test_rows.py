"""Fact: rows of runs are predicted as the planner predicts them; a bad row is refused and the others are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron3d.errors import UserError
from megatron3d.forecast.search.rows import error_table, predict_line, predict_rows, rank_correlation, regrets
from megatron3d.forecast.time.practices import PROFILES, fitted_terms, practice
from tools import plan as tool

CONFIG = {
    "model.num_layers": 4,
    "model.hidden_size": 1024,
    "model.num_attention_heads": 16,
    "model.seq_length": 1024,
    "model.vocab_size": 8192,
    "train.global_batch_size": 8,
    "train.precision": "bf16",
}
ROW: dict[str, Any] = {"config": CONFIG, "cluster": "eos", "num_gpus": 4, "practice": "nanotron", "mine": [1]}


def predicted(**changes: Any) -> dict[str, Any]:
    return predict_line(json.dumps({**ROW, **changes}).encode(), 1)


def with_config(**changes: Any) -> dict[str, Any]:
    return predicted(config=CONFIG | {key.replace("__", "."): value for key, value in changes.items()})


def test_a_row_comes_back_with_its_prediction() -> None:
    row = predicted()
    assert row["refused"] is None and row["fits"] is True and row["mine"] == [1]
    assert 0 < row["step_s_p10"] <= row["step_s"] <= row["step_s_p90"]
    assert row["tokens_per_s_per_gpu"] == pytest.approx(8 * 1024 / row["step_s"] / 4)
    assert 0 < row["mfu"] < 1 and row["memory_bytes_per_rank"] > 2**30
    assert row["memory_bytes_p10"] < row["memory_bytes_per_rank"] < row["memory_bytes_p90"]


def test_a_practice_has_its_name_in_any_case() -> None:
    assert predicted(practice="NANOTRON")["step_s"] == predicted()["step_s"]
    assert predicted(practice=None)["refused"] is None
    for name in PROFILES:
        assert practice(name).fitted == fitted_terms().get(name, practice("llm.c").fitted)
    with pytest.raises(UserError, match="practice=nanotrom: unknown; use nanotron"):
        practice("nanotrom")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (lambda: predict_line(b"{", 7), "not a JSON object"),
        (lambda: predict_line(b"[" * 100000, 7), "not a JSON object"),
        (lambda: predict_line(b"3", 7), "not a JSON object"),
        (lambda: predicted(num_gpus=0), "num_gpus=0: not allowed; use a whole number"),
        (lambda: predicted(num_gpus=True), "num_gpus=true: not allowed"),
        (lambda: predicted(num_gpus=10**30), "not allowed"),
        (lambda: predicted(measured_s=-1), "measured_s=-1: not allowed; use a number"),
        (lambda: predicted(cluster="moon"), "cluster moon: there is none"),
        (lambda: predicted(cluster=None), "cluster: missing"),
        (lambda: predicted(practice=3), "practice: not a name"),
        (lambda: predicted(practice="what"), "practice=what: unknown"),
        (lambda: predicted(config={}), "config: missing"),
        (lambda: predicted(config={"model.num_layers": 2}), "model.vocab_size: missing"),
        (lambda: with_config(model__n_layers=2), "unknown key; use model.num_layers"),
        (lambda: with_config(model__num_layers="two"), "model.num_layers=two"),
        (lambda: with_config(train__precision="fp64x"), "train.precision"),
        (lambda: with_config(parallel__tensor_model_parallel_size=3), "3"),
    ],
)
def test_bad_rows_are_refused(row: Any, reason: str) -> None:
    found = row()
    assert reason in found["refused"] and "step_s" not in found


def test_the_tool_writes_rows_and_their_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    right = predicted()["step_s"]
    lines = [json.dumps({**ROW, "measured_s": factor * right, "group": "mine"}) for factor in (1.1, 0.9)]
    rows.write_text("\n".join([*lines, "", "no JSON"]), encoding="utf-8")
    assert tool.main(["--predict", str(rows), "--output", str(out)]) == 0
    assert [json.loads(line)["refused"] is None for line in out.read_text().splitlines()] == [True, True, False]
    told = capsys.readouterr().out
    assert "2 rows predicted, 1 refused" in told and " 10.0 " in told and "mine" in told and "not a JSON object" in told
    assert tool.main(["--predict", str(rows)]) == 2
    assert tool.main(["--predict", str(tmp_path / "none"), "--output", str(tmp_path / "other")]) == 2
    assert tool.main(["--config", "configs/gpt2-124m.yaml", "--cluster", "eos"]) == 2
    told = capsys.readouterr().err
    assert "--output: missing" in told and "no such file" in told and "--world-size: missing" in told


def test_rows_are_written_as_they_are_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the tool, the rows that it has predicted are in the file."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text((json.dumps(ROW) + "\n") * 2, encoding="utf-8")
    each = predict_rows(rows)

    def stopped(_: Path) -> Iterator[dict[str, Any]]:
        yield next(each)
        assert json.loads(out.read_text()) == predicted()
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "predict_rows", stopped)
    assert tool.main(["--predict", str(rows), "--output", str(out)]) == 130
    assert json.loads(out.read_text()) == predicted()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--predict", "x", "--output", "y", "--practice", "nanotron"], "--practice: not with --predict"),
        (["--predict", "x", "--output", "y", "--world-size", "8"], "--world-size: not with --predict"),
        (["--explain", "--config", "x", "--fix", "zero_stage=1"], "--fix: not with --explain"),
        (["--compare", "x", "y", "--memory-margin", "5"], "--memory-margin: not with --compare"),
        (["--predict", "x", "--output", "nowhere/y"], "--output nowhere/y: nowhere is no folder"),
    ],
)
def test_options_that_a_task_does_not_use_are_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(words) == 2
    assert reason in capsys.readouterr().err


def test_errors_by_group() -> None:
    """Positive errors are too fast; the regret is of the layout that is predicted best."""
    rows = [
        {
            **ROW,
            "config": CONFIG | {"parallel.zero_stage": n},
            "step_s": step,
            "step_s_p10": step,
            "step_s_p90": 2 * step,
        }
        | {"refused": None, "measured_s": measured}
        for n, (step, measured) in enumerate([(1.0, 1.5), (2.0, 1.2), (3.0, 3.0)])
    ]
    assert regrets(rows) == pytest.approx([25.0])
    (line,) = (line for line in error_table(rows) if "nanotron on eos" in line)
    assert line.split()[:6] == ["3", "30.0", "40.0", "50.0", "+0.0", "66.7"]
    assert rank_correlation([1, 2, 3], [1, 2, 3]) == pytest.approx(1)
    assert rank_correlation([1, 1, 2], [5, 5, 7]) == pytest.approx(1)
    assert rank_correlation([1, 1], [1, 2]) is None
