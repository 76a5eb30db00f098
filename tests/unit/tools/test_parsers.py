"""Fact: every program's --help says what each option is and its default, and what was typed once still works."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from megatron3d.__main__ import COMMANDS
from megatron3d.config import cli
from megatron3d.forecast.search.problem import SPARE
from megatron3d.runtime.arguments import ToolParser, add_load
from tests.support.tiny_run import ROOT

TOOLS = sorted(path.stem for path in ROOT.glob("tools/*.py") if "def make_parser" in path.read_text())


def parser_of(tool: str) -> argparse.ArgumentParser:
    return import_module(f"tools.{tool}").make_parser()


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every parser of the programs, those of their commands included."""
    yield "pretrain_gpt", cli.make_parser()
    for tool in TOOLS:
        parser = parser_of(tool)
        yield tool, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{tool} {name}", each) for name, each in action.choices.items())


def options() -> Iterator[tuple[str, argparse.ArgumentParser, argparse.Action]]:
    for name, parser in parsers():
        yield from ((name, parser, action) for action in parser._actions if action.option_strings)


def shown_help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the lines of --help about an option, as one line."""
    lines = parser.format_help().split("\noptions:\n")[1]
    first = action.option_strings[0]
    (found,) = (part for part in re.split(r"\n  (?=-)", f"\n{lines}") if re.match(rf"{first}\b", part))
    return " ".join(found.split())


def test_every_program_has_a_parser() -> None:
    programs = {command.program for command in COMMANDS.values() if command.program.startswith("tools/")}
    assert {program.removeprefix("tools/").removesuffix(".py") for program in programs} <= {*TOOLS}


def test_every_option_says_what_it_is() -> None:
    assert [(name, action.option_strings[0]) for name, _, action in options() if not action.help] == []


def test_every_default_is_shown() -> None:
    """In words where it is a rule, such as `default: the newest`, and else as it is."""
    silent = []
    for name, parser, action in options():
        given = None if action.default in (argparse.SUPPRESS, False, []) else action.default
        if given is not None and "default: " not in shown_help(parser, action):
            silent.append((name, action.option_strings[0]))
    assert silent == []


def test_the_planners_margin_is_as_it_says() -> None:
    assert f"(default: {100 * SPARE:g}, or 0 where" in parser_of("plan").format_help().replace("\n" + 24 * " ", " ")


def test_help_shows_one_name_for_one_idea() -> None:
    shown = {name: parser.format_help() for name, parser in parsers()}
    assert [name for name, text in shown.items() if re.search("--num-(gpus|ranks|nodes)", text)] == []
    assert [name for name, text in shown.items() if re.search(r"^  (load|run)|--(run|checkpoint)\b", text, re.M)] == []
    assert {name for name, text in shown.items() if "--input" in text} == {
        *("merge_datasets", "plot_schedule", "preprocess_data", "train_tokenizer")
    }


@pytest.mark.parametrize(
    ("tool", "once", "now"),
    [
        ("plan", "--num-gpus 8 --top 3", "--world-size 8 --top 3"),
        ("plan", "--num-gpus=8", "--world-size=8"),
        ("show_traffic", "--num-ranks 8 64", "--world-size 8 64"),
        ("show_memory", "--num-ranks 8", "--world-size 8"),
        ("show_memory", "--num-r 8", "--world-size 8"),
        ("convert_checkpoint", "to-hf --input run --output hf", "to-hf --load run --output hf"),
        ("convert_checkpoint", "--output hf --input run to-hf", "to-hf --load run --output hf"),
        ("plot_run", "one other --output x.png", "--load one other --output x.png"),
        ("plot_run", "--overwrite --output x.png one", "--load one --output x.png --overwrite"),
        ("checkpoint", "inspect --tensors run", "inspect --load run --tensors"),
        ("checkpoint", "inspect run --tensors", "inspect --load run --tensors"),
        ("checkpoint", "verify --workers 3 one other", "verify --load one other --workers 3"),
        ("checkpoint", "diff one other", "diff --load one other"),
        ("checkpoint", "average one other --save mean", "average --load one other --save mean"),
    ],
)
def test_what_was_typed_once_still_works(tool: str, once: str, now: str) -> None:
    sizes = ["--hidden-size", "8", "--seq-length", "8", "--micro-batch-size", "1"] if tool.startswith("show") else []
    heads = ["--num-attention-heads", "2"] if tool == "show_memory" else []
    before, after = (parser_of(tool).parse_args([*sizes, *heads, *words.split()]) for words in (once, now))
    assert vars(before) == vars(after)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], "the following arguments are required: --load"),
        (["one"], "argument --load: expected 2, not 1"),
        (["one", "two", "three"], "argument --load: expected 2, not 3"),
        (["--load", "one"], "argument --load: expected 2 arguments"),
    ],
)
def test_the_number_of_runs_is_checked(typed: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ToolParser("diff")
    add_load(parser, "two runs", 2)
    with pytest.raises(SystemExit):
        parser.parse_args(typed)
    assert message in capsys.readouterr().err
