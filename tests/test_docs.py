"""Every command that README and docs show is one that works, and every message that they explain is one that is said.

The walk through getting_started.md is done in a folder of its own, as far as it needs one process.  Elsewhere each
command is read by its program's own parser, and a configuration that it names is held against every rule.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest

from megatron3d.config.cli import parse_args, resolve
from megatron3d.config.derive import tensor_size
from megatron3d.config.read import read_config
from tests.end_to_end import ROOT, run

WALK = ROOT / "docs" / "getting_started.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LAUNCHERS = ("python", "torchrun", "srun", "bash", "sbatch")
PROGRAM = r"(?:tools|benchmarks)/\w+\.py|pretrain_gpt\.py"
# Of the walk: what needs several processes or minutes, and is tested elsewhere.
ONLY_READ = ("bash", "tools/verify_layout.py")
Words = list[str]


class ReadError(Exception):
    """The parser has taken the words: raised in place of going on."""


@contextlib.contextmanager
def only_parsing() -> Iterator[None]:
    """While entered, a program stops when its arguments are read."""

    def stopping(name: str) -> object:
        parse = getattr(argparse.ArgumentParser, name)

        def parse_and_stop(*args: object) -> None:
            parse(*args)
            raise ReadError

        return parse_and_stop

    patches: Mapping[str, object] = {name: stopping(name) for name in ("parse_args", "parse_intermixed_args")}
    with mock.patch.multiple(argparse.ArgumentParser, **patches), pytest.raises(ReadError):
        yield


def code(page: Path) -> tuple[str, str]:
    """Fenced and indented code of a page without a language or in bash, lines that go on joined; and the rest."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fence, indented = r"^```(\w*)\n(.*?)^```\n", r"(?<=\n\n)(?: {4}.*\n)+"
    fenced = "".join(body for language, body in re.findall(fence, text, re.M | re.S) if language in ("", "bash"))
    text = re.sub(fence, "", text, flags=re.M | re.S)
    return fenced + "".join(re.findall(indented, text)), re.sub(indented, "", text)


def commands(page: Path) -> list[Words]:
    """Of the code, and those within sentences that are whole."""
    lines, prose = code(page)
    begun = [line.strip().removeprefix("$ ") for line in lines.splitlines()]
    shown = [line for line in begun if line.partition(" ")[0] in LAUNCHERS]
    spans = re.findall(rf"`((?:python|torchrun .*?) (?:{PROGRAM}) [^`\n]+)`", prose)
    return [shlex.split(line, comments=True) for line in (*shown, *spans)]


def parse(program: str, typed: Words, num_ranks: int | None = None) -> None:
    """Arguments as the program's own parser reads them; a preset must keep every rule with them."""
    assert (ROOT / program).is_file(), f"there is no {program}"
    if program != "pretrain_gpt.py":
        with only_parsing():
            importlib.import_module(program.removesuffix(".py").replace("/", ".")).main(typed)
        return
    given = parse_args(typed)
    if (ROOT / given.config).is_file():
        parallel = read_config(ROOT / given.config, given.overrides).config.parallel
        least = tensor_size(parallel) * parallel.pipeline_model_parallel_size
        resolve(ROOT / given.config, given.overrides, given.world_size or num_ranks or least, elsewhere=True)


def check(words: Words) -> None:
    """A command is one of ours, and would be understood."""
    match words:
        case ["python", program, *typed] | ["srun", "python" | ".venv/bin/python", program, *typed]:
            parse(program, typed)
        case ["torchrun", "--nproc-per-node", number, program, *typed]:
            parse(program, typed, int(number))
        case ["bash", "scripts/launch_local.sh", number, *typed]:
            parse("pretrain_gpt.py", typed, int(number))
        case ["bash", "scripts/slurm/preprocess.sbatch", number, prefix, *typed]:
            assert number.isdigit(), number
            parse("tools/preprocess_data.py", ["--output-prefix", prefix, *typed])
        case ["sbatch", *_] if "scripts/slurm/pretrain.sbatch" in words:
            parse("pretrain_gpt.py", words[words.index("scripts/slurm/pretrain.sbatch") + 1 :])
        case ["bash", script, *_]:
            assert (ROOT / script).is_file(), f"there is no {script}"
        case ["sbatch", script]:
            assert script.endswith(".sbatch"), script
        case _:
            raise AssertionError(f"not a way to start anything here: {shlex.join(words)}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    for words in commands(page):
        try:
            check(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page.name}: {shlex.join(words)}: {error}") from error


def test_commands_are_found() -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert len(found) > 60 and {words[0] for words in found} == set(LAUNCHERS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_is_overlooked(page: Path) -> None:
    lines = [line for line in code(page)[0].splitlines() if re.search(rf"python\d? (?:{PROGRAM})", line)]
    assert [line for line in lines if line.strip().removeprefix("$ ").split()[0] not in LAUNCHERS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_and_options_that_are_mentioned_are_there(page: Path) -> None:
    for program, rest in re.findall(rf"`(?:python )?({PROGRAM}|scripts/[\w/]+\.\w+)( [^`\n]*)?`", code(page)[1]):
        reader = "megatron3d/config/cli.py" if program == "pretrain_gpt.py" else program
        source = (ROOT / reader).read_text(encoding="utf-8")
        assert [flag for flag in re.findall(r"--[a-z-]+", rest) if f'"{flag}"' not in source] == [], f"{program}{rest}"


def test_the_walk_can_be_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("configs", "scripts", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    (path, text), *more = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", WALK.read_text(encoding="utf-8"), re.M | re.S)
    assert not more
    Path(path).parent.mkdir(parents=True)
    Path(path).write_text(text)
    for words in commands(WALK):
        if not any(word in ONLY_READ for word in words):
            assert walk(words[1], words[2:]) == 0, shlex.join(words)
    assert Path("runs/first/run/latest_checkpointed_iteration.txt").read_text() == "30\n"


def walk(program: str, typed: Words) -> int:
    """Do a command in this process; its exit code."""
    if program != "pretrain_gpt.py":
        code: int = importlib.import_module(program.removesuffix(".py").replace("/", ".")).main(typed)
        return code
    elsewhere = typed.index("--world-size") + 1 if "--world-size" in typed else None
    config = Path(typed[typed.index("--config") + 1])
    if "--check" in typed:
        given = parse_args(typed)
        resolve(config, given.overrides, given.world_size or 1, elsewhere=elsewhere is not None)
        return 0
    outcome = run(config, *parse_args(typed).overrides)
    print(outcome.out, outcome.err)
    return outcome.code


def test_explained_messages_are_said() -> None:
    """The words between what differs stand in a text of the code."""
    files = [*(ROOT / "megatron3d").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    said = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in files))
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    messages = [message for row in rows for message in re.findall("`([^`]+)`", row)]
    parts = [part.strip() for message in messages for part in re.split("…", message)]
    assert len(messages) > 20
    assert [part for part in parts if part and part not in said] == []
