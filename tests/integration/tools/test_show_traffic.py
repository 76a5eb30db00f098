"""Fact: tools/show_traffic.py prints the closed forms that the documentation derives and quotes.

Sizes that a mode cannot split are refused with exit code 2.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.parallel.modes import build_mode
from tools import show_traffic

DOCUMENT = Path(__file__).parents[3] / "docs" / "tensor_parallel.md"
SIZES = ["--hidden-size", "48", "--seq-length", "8", "--micro-batch-size", "4"]


def test_the_documents_table_is_the_tools_output(capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCUMENT.read_text()
    commands = re.findall(r"^python (tools/show_traffic\.py .*)$", text, re.MULTILINE)
    assert len(commands) == 1
    assert show_traffic.main(shlex.split(commands[0])[1:]) == 0
    assert capsys.readouterr().out in text


def sent(name: str, form: str, shape: tuple[int, ...], hidden: int, seq_length: int) -> float:
    layer = show_traffic.Layer(16, seq_length, hidden, 4 * hidden, itemsize=2)
    return sum(step.wire_bytes for step in layer.traffic(build_mode(name, form, shape)))


@given(p=st.integers(2, 5), hidden=st.integers(1, 50), seq_length=st.integers(1, 50))
def test_the_documents_formulas(p: int, hidden: int, seq_length: int) -> None:
    ranks, x, w = p**3, 16 * seq_length * hidden, hidden**2
    once = (ranks - 1) / ranks * x * 2
    assert sent("1d", "replicated", (ranks,), hidden, seq_length) == pytest.approx(8 * once)
    assert sent("1d", "sequence_parallel", (ranks,), hidden, seq_length) == pytest.approx(10 * once)
    cube = (p - 1) / p**3 * (39 * x + 36 * w) * 2
    for form in ("heads", "tokens"):
        assert sent("3d", form, (p, p, p), hidden, seq_length) == pytest.approx(cube)


@pytest.mark.parametrize("p,plain,sequence_parallel", [(2, 2.1, 1.16), (3, 0.55, 0.40), (4, 0.28, 0.21)])
def test_the_documents_break_even_points(p: int, plain: float, sequence_parallel: float) -> None:
    """3-D sends less than the others above this ratio of tokens to hidden size, and more below it."""
    for form, ratio in (("replicated", plain), ("sequence_parallel", sequence_parallel)):
        for factor, cube_wins in ((0.95, False), (1.05, True)):
            hidden = 10_000
            sizes = hidden, round(factor * ratio * hidden / 16)
            assert (sent("3d", "heads", (p, p, p), *sizes) < sent("1d", form, (p**3,), *sizes)) == cube_wins


def test_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_traffic.main([*SIZES, "--world-size", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows and all("| 1 | 1 | 0 | 0.00 | - |  |" in row for row in rows)


def test_a_given_shape_is_shown_next_to_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_traffic.main([*SIZES, "--world-size", "4", "--shape", "3d=1x4x1", "grid=1x4x1"]) == 0
    out = capsys.readouterr().out
    assert "| 4 | 3d | heads | 1·2·2 |" in out and "| 4 | 3d | heads | 1·4·1 |" in out
    cells = {tuple(row.split(" | ")[1:4]): row.split(" | ")[4:9] for row in out.splitlines()}
    assert cells["3d", "heads", "1·4·1"] == cells["1d", "sequence_parallel", "4"]
    assert cells["grid", "all_reduce", "1·4·1"] == cells["1d", "replicated", "4"]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--world-size", "5"], "dimension of qkv=144 is split over 5 ranks; use a multiple of 5"),
        (["--world-size", "8", "--micro-batch-size", "1"], "2d 2·4: --micro-batch-size=1 is split over 2 ranks"),
        (
            ["--world-size", "8", "--shape", "3d=4x4x4"],
            "3d=4x4x4: has 64 ranks; add that number to --world-size",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_traffic.main([*SIZES, *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err and not output.out


@pytest.mark.parametrize("shape", ["4d=2x2", "3d=2x2", "3d", "3d=2x2x0", "3d=axbxc"])
def test_bad_shapes_are_refused(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        show_traffic.main([*SIZES, "--world-size", "8", "--shape", shape])
    assert stop.value.code == 2 and "--shape" in capsys.readouterr().err
