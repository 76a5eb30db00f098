"""Fact: numbers of command lines are ASCII, finite and bounded; files that people write are regular and small."""

from __future__ import annotations

import argparse
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron3d.errors import UserError
from megatron3d.runtime.arguments import ToolParser, naming_options, positive, read_limited, real, whole


@pytest.mark.parametrize("text", ["", "²", "٣", "1.5", "1e3", "nan", "-", "1__0", "_1", " 1", "1" * 400, "-1", "1001"])
def test_other_whole_numbers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of 0 to 1000") as caught:
        whole(0, 1000)(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["", "²", "nan", "inf", "-inf", "1e400", "-1", "1" * 400, "0x1", "abc", "1001"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of 0 to 1000"):
        real(0, 1000)(text)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [(positive, "1", 1), (whole(-5), "-5", -5), (whole(), "1_000", 1000), (real(), "1e-3", 0.001), (real(), "0", 0)],
)
def test_numbers_are_read(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value


def test_a_message_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ToolParser("tool")
    parser.add_argument("--mode", choices=["a", "b"])
    for typed in (["--mode", "x" * 100_000], ["x" * 100_000], ["y " * 100_000]):
        with pytest.raises(SystemExit) as stopped:
            parser.parse_args(typed)
        assert stopped.value.code == 2
        assert len(capsys.readouterr().err) < 3000


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert read_limited(tmp_path / "a", 3) == b"abc"
    for path in (tmp_path / "a", tmp_path, Path("/dev/zero"), Path("a\0"), tmp_path / "absent"):
        with pytest.raises(OSError) as caught:
            read_limited(path, 2)
        assert caught.value.strerror


def test_a_high_limit_needs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    tracemalloc.start()
    try:
        assert read_limited(tmp_path / "a", 2**30) == b"abc"
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_tool_names_its_options_and_not_the_keys_of_a_configuration() -> None:
    said = "--tokenizer-model /nope: cannot read; set --tokenizer-type ByteTokenizer"
    with pytest.raises(UserError, match=f"^{said}$"), naming_options():
        raise UserError("data.tokenizer_model=/nope: cannot read; set data.tokenizer_type=ByteTokenizer")
