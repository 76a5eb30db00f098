"""Fact: a finished run is a row for predictions, with its own configuration, ranks and measured step time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron3d.config.read import read_config, read_values
from megatron3d.errors import UserError
from megatron3d.forecast.search.rows import row_of_run
from tools import plan as tool

RUN = Path(__file__).parents[3] / "integration/data/stored_run/four_ranks/run"


def test_a_run_on_cpus_is_a_row() -> None:
    """Its configuration is the run's, and its time the median of what it logged, without the first step."""
    row = row_of_run(RUN, "perlmutter")
    config, stored = read_values(row["config"], "row"), read_config(RUN / "config.yaml").config
    assert (config.parallel, config.train) == (stored.parallel, stored.train)
    assert config.model == stored.model.model_copy(update={"vocab_size": 257})
    lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    times = sorted(line["elapsed_ms"] / 1e3 for line in lines if "elapsed_ms" in line and line["iteration"] > 1)
    assert len(times) == 3 and row["measured_s"] == times[1]
    assert (row["num_gpus"], row["cluster"]) == (4, "perlmutter")


def test_the_tool_predicts_runs_next_to_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps(row_of_run(RUN, "eos")) + "\n", encoding="utf-8")
    assert tool.main(["--predict", str(RUN), str(rows), "--cluster", "eos", "--output", str(out)]) == 0
    first, second = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert first == second and first["refused"] is None and first["step_s"] > 0
    assert "2 rows predicted, 0 refused" in capsys.readouterr().out


def test_what_is_missing_of_a_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the run's cluster is not known; give --cluster"):
        row_of_run(RUN)
    (tmp_path / "config.yaml").write_bytes((RUN / "config.yaml").read_bytes())
    with pytest.raises(UserError, match=r"metrics\.jsonl: there is no such file"):
        row_of_run(tmp_path, "eos")
    lines = (RUN / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:3], ""]), encoding="utf-8")
    with pytest.raises(UserError, match="no step of whole batches after the first line"):
        row_of_run(tmp_path, "eos")
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[1:], ""]), encoding="utf-8")
    with pytest.raises(UserError, match="no launch with its ranks is logged"):
        row_of_run(tmp_path, "eos")
