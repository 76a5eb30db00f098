"""Fact: gpu_day.py keeps every row that a section printed, ends sections at their limits, and all sections run.

On the CPU the sections only show that they work; a section that printed nothing, or a run that lost rows of a section
that was ended, would be found.
"""

from __future__ import annotations

import json
from pathlib import Path

import gpu_day
import gpu_sections
import pytest
import torch
from gpu_timing import Place

ROWS = {"hardware": "device", "mfu": "step_ms", "ranks": "action_ms", "kernels": "proposal", "profile": "operation"}
MORE = {"switches": "speed_up", "overlap": "overlap", "nccl": "subgroup_timeout"}


@pytest.mark.parametrize("name", [*ROWS, *MORE])
def test_a_section_measures(name: str, tmp_path: Path) -> None:
    rows = list(gpu_sections.SECTIONS[name](Place(torch.device("cpu"), quick=True, output=tmp_path)))
    assert any({**ROWS, **MORE}[name] in row for row in rows)
    assert not [row for row in rows if "error" in row]
    json.dumps(rows)
    if name == "profile":
        assert [path.name for path in tmp_path.iterdir()] == ["trace_eager.json.gz"]


def test_programs_stop_and_resume(tmp_path: Path) -> None:
    stopped, resumed = gpu_sections.program(Place(torch.device("cpu"), quick=True, output=tmp_path))
    assert stopped["is_right"] and resumed["code"] == 0 and resumed["from"] >= 3, (stopped, resumed)


def test_every_section_has_a_program_and_a_limit_of_the_ten_minutes() -> None:
    assert {*gpu_day.SECTIONS, *gpu_day.SECOND} - {"tests"} == set(gpu_sections.SECTIONS)
    total_s = sum(section.limit_s for section in gpu_day.SECTIONS.values())
    assert total_s <= 20 * 60, "even where all sections take their limits, two commands suffice"


def results(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def test_rows_are_kept_when_a_section_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sections: one prints a row and hangs with a child, one fails; both are in the results and the table."""
    hangs = "import subprocess, time; print('{\"a\": 1}', flush=True); subprocess.run(['sleep', '60'])"
    fails = "import sys; print('{\"b\": 2}'); sys.exit('broken')"
    sections = {"hangs": gpu_day.Section(1, ("-c", hangs), ""), "fails": gpu_day.Section(9, ("-c", fails), "")}
    monkeypatch.setattr(gpu_day, "SECTIONS", sections)
    assert gpu_day.main(["--output", str(tmp_path)]) == 1
    run, first, ended, second, failed = results(tmp_path)
    assert run["command"] == f"python benchmarks/gpu_day.py --output {tmp_path}" and run["date"] and run["commit"]
    assert (first["section"], first["a"]) == ("hangs", 1) and (second["section"], second["b"]) == ("fails", 2)
    assert ended["timed_out"] and ended["exit_code"] != 0
    assert failed["exit_code"] == 1 and failed["last_line"] == "broken" and not failed["timed_out"]
    assert "a=1" in (tmp_path / "table.txt").read_text(encoding="utf-8")


def test_the_table_comes_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section gets the time that is left, the next one none."""
    section = gpu_day.Section(60, ("-c", "import time; time.sleep(60)"), "")
    monkeypatch.setattr(gpu_day, "SECTIONS", {"hangs": section, "waits": section})
    assert gpu_day.main(["--minutes", "0.11", "--output", str(tmp_path)]) == 1
    _, ended, skipped = results(tmp_path)
    assert ended["timed_out"] and skipped["last_line"] == "no time left of --minutes 0.11"


def test_the_command_runs_a_section_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert gpu_day.main(["--cpu", "--quick", "--sections", "hardware", "--output", str(tmp_path)]) == 0
    assert any("torch" in row for row in results(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "table.txt", "log.txt"}


def test_a_folder_of_eight_files_comes_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "MAX_FILE_BYTES", 10)
    for name, size in (("results.jsonl", 5), ("large.gz", 11), *((f"{place}.gz", 1) for place in range(9))):
        (tmp_path / name).write_text("x" * size)
    removed = list(gpu_day.trim(tmp_path))
    assert len(removed) == 3 and any("large.gz" in line for line in removed)
    assert (tmp_path / "results.jsonl").exists() and len(list(tmp_path.iterdir())) == gpu_day.MAX_FILES


def test_two_nodes_run_the_same_layouts(tmp_path: Path) -> None:
    args = [gpu_day.parse_args(["--two-nodes", "node0:29500", "--node-rank", str(rank)]) for rank in (0, 1)]
    one, other = (list(gpu_day.two_node_commands(each)) for each in args)
    assert len(one) == len(gpu_day.TWO_NODES)
    for mine, theirs in zip(one, other, strict=True):
        assert {*mine} ^ {*theirs} == {"0", "1"} and "node0" in mine


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_day.parse_args(["--sections", "mfu,everything"])
    assert "--sections everything: use some of hardware, tests" in capsys.readouterr().err
