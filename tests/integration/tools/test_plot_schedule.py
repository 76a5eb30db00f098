"""Fact: tools/plot_schedule.py prints and writes schedules as documented, and bad input gives exit code 2."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron3d.pipeline.schedules import build_schedule
from megatron3d.pipeline.validate import read_schedule
from tools import plot_schedule

DOCUMENT = Path(__file__).parents[3] / "docs" / "pipeline.md"
ZB_V = ["--schedule", "zb-v", "-p", "3", "-m", "4"]


def examples() -> list[tuple[str, str]]:
    """Return commands in the documentation, each with the output printed below it."""
    return re.findall(
        r"^    \$ python (tools/plot_schedule\.py .*)\n((?:    .*\n|\n(?=    ))*)", DOCUMENT.read_text(), re.M
    )


def test_the_document_shows_every_schedule() -> None:
    shown = {shlex.split(command)[2] for command, _ in examples()}
    assert shown == set(plot_schedule.SCHEDULES)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("command", "output"), examples())
def test_the_documents_pictures_are_the_tools_output(
    command: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot_schedule.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.strip() == "\n".join(line[4:] for line in output.splitlines()).strip()


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_pictures(ending: str, start: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / f"picture{ending}"
    assert plot_schedule.main([*ZB_V, "--costs", "F=1,B=2,I=1,W=1,comm=0.1", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(start)
    assert capsys.readouterr().out.endswith(f"written: {output}\n")


def test_trace(tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    assert plot_schedule.main([*ZB_V, "--output", str(output)]) == 0
    events = json.loads(output.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 3 * 2 * 3 * 4
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(13000)


def test_a_schedule_survives_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "schedule.csv"
    assert plot_schedule.main([*ZB_V, "--output", str(output)]) == 0
    assert read_schedule(output) == build_schedule("zb-v", 3, 4)
    first = capsys.readouterr().out
    for more in ([], ["-p", "3", "-m", "4", "-v", "2"]):
        assert plot_schedule.main(["--schedule", "file", "--input", str(output), *more]) == 0
        assert first.splitlines()[:3] == capsys.readouterr().out.splitlines()[:3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "zbv", "-p", "3", "-m", "4"], "schedule zbv: there is none of this name; use gpipe, 1f1b"),
        (["--schedule", "zb-v", "-p", "3"], "--schedule=zb-v: needs -m"),
        ([*ZB_V, "-v", "3"], "takes v=2 virtual stages per rank, not v=3; use v=2"),
        (["--schedule", "1f1b", "-p", "0", "-m", "4"], "ranks p=0 must be at least 1"),
        ([*ZB_V, "--costs", "F=0"], "cost F=0: must be above 0"),
        ([*ZB_V, "--costs", "x"], "'x' is not one of F, I, W, B, comm"),
        ([*ZB_V, "--output", "picture.gif"], "use .png, .svg, .pdf, .json, .csv"),
        ([*ZB_V, "--output", "/dev/null/picture.png"], "cannot be written"),
        ([*ZB_V, "--input", "x.csv"], "--input=x.csv: is read with --schedule=file only"),
        (["--schedule", "file"], "add --input FILE.csv"),
        (["--schedule", "file", "--input", "/there/is/none.csv"], "none.csv: cannot be read"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_schedule.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_deadlocks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert plot_schedule.main(["--schedule", "file", "--input", str(path)]) == 2
    assert f"{path}: rank 0: 0B0, action 2 of 4, waits for 1B0" in capsys.readouterr().err
    path.write_text("0F0,0B0\n")
    for flag, number in (("-p", "2"), ("-m", "2"), ("-v", "2")):
        assert plot_schedule.main(["--schedule", "file", "--input", str(path), flag, number]) == 2
    assert not capsys.readouterr().out
