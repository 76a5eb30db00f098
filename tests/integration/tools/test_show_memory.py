"""Fact: tools/show_memory.py prints the closed forms of activation memory, and the documentation quotes its output.

For 1-D they are the table of Korthikanti et al. (2022, arXiv:2205.05198, table 2) minus what fused attention and hashed
dropout masks save.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tools import show_memory

DOCUMENT = Path(__file__).parents[3] / "docs" / "memory.md"
SIZES = ["--hidden-size", "8192", "--num-attention-heads", "8", "--seq-length", "16"]


def test_the_documents_table_is_the_tools_output(capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCUMENT.read_text()
    commands = re.findall(r"^python (tools/show_memory\.py .*)$", text, re.MULTILINE)
    assert len(commands) == 1
    assert show_memory.main(shlex.split(commands[0])[1:]) == 0
    assert capsys.readouterr().out in text


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_1d_memory_is_as_published(t: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Dropout masks are 2 of the 10 + 24/t and of the 34/t bytes; norm and score statistics are negligible."""
    assert show_memory.main([*SIZES, "--world-size", str(t)]) == 0
    cells = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in capsys.readouterr().out.splitlines()]
    kept = {row[2]: [float(cell) for cell in row[4:]] for row in cells[2:] if row[1] == "1d"}
    assert kept["replicated"] == pytest.approx([8 + 24 / t, 8 + 24 / t, 8 + 16 / t, 2], abs=0.02)
    assert kept["sequence_parallel"] == pytest.approx([32 / t, 32 / t, 24 / t, 2 / t], abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "16"], "t = 16 does not divide model.num_attention_heads=8"),
        (["--world-size", "8", "--micro-batch-size", "1"], "train.micro_batch_size=1: not a multiple of"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_memory.main([*SIZES, *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err and not output.out
