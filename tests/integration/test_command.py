"""Fact: `megatron3d COMMAND` runs each program as `python PROGRAM` does, and its list of commands imports nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron3d.__main__ import COMMANDS, program_file, usage
from tests.support.tiny_run import ROOT, steps, write_config

# What the installed command does.
ENTRY = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from megatron3d.__main__ import main"


def done(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=300)


def test_every_command_is_a_program_of_the_repository() -> None:
    for command in COMMANDS.values():
        assert (ROOT / command.program).samefile(program_file(command.program))
        assert '__name__ == "__main__"' in (ROOT / command.program).read_text()


def test_the_list_of_commands_needs_no_library() -> None:
    code = f"{ENTRY}; main(); print({{'torch', 'pydantic'}} & {{*sys.modules}})"
    shown = done("-c", code)
    assert (shown.returncode, shown.stderr, shown.stdout) == (0, "", f"{usage()}\nset()\n")


@pytest.mark.parametrize("program", [*COMMANDS, *sorted(path.name for path in ROOT.glob("tools/*.py"))])
def test_help_imports_no_library(program: str) -> None:
    """Not by the clock: numpy takes a tenth of a second, and torch and matplotlib take more than one."""
    if program in COMMANDS:
        typed = [str(ROOT / "megatron3d/__main__.py"), program, "--help"]
    else:
        typed = [str(ROOT / "tools" / program), "--help"]
        if '__name__ == "__main__"' not in Path(typed[0]).read_text():
            return  # a part of tools/calibrate.py
    ended = "import atexit, sys; atexit.register(lambda: print({'torch', 'numpy', 'matplotlib'} & {*sys.modules}))"
    shown = done("-c", f"{ended}; import runpy; sys.argv = {typed}; runpy.run_path(sys.argv[0], run_name='__main__')")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("usage: ") and shown.stdout.endswith("\nset()\n")


def test_an_unknown_command_is_refused_with_the_list() -> None:
    outcome = done("-m", "megatron3d", "pretrain")
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert outcome.stderr == f"megatron3d: 'pretrain' is no command\n{usage()}\n"


@pytest.mark.parametrize("name", ["train", "inspect", "slurm"])
def test_a_command_is_its_program(name: str) -> None:
    command = done("-m", "megatron3d", name, "--help")
    program = done(COMMANDS[name].program, "--help")
    assert program.stdout and (command.returncode, command.stdout) == (program.returncode, program.stdout)


def test_a_wrong_option_is_its_programs_message() -> None:
    outcome = done("-m", "megatron3d", "check", "--config", "none.yaml")
    assert outcome.returncode == 2 and "none.yaml" in outcome.stderr and "Traceback" not in outcome.stderr


def test_ranks_are_launched_from_any_folder(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    typed = ["launch", "2", "--config", str(config), "train.train_iters=3"]
    outcome = done("-c", f"{ENTRY}; sys.exit(main())", *typed, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert [iteration for iteration, *_ in steps(tmp_path / "run")] == [1, 2, 3]
