"""Commands quoted on documentation pages: find them, parse them with their programs' own parsers, and run them.

Commands run in this process, in the working folder.  Workers of the pool replace torchrun's processes and get the
environment variables that torchrun would set.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import pretrain_gpt
from megatron3d.config.cli import ConfigParser, parse_args
from megatron3d.config.read import read_config
from megatron3d.config.resolve import resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.runtime import process
from tests.support.pool import Pool
from tests.support.tiny_run import ROOT, Outcome

LAUNCHERS = (
    *("python", "torchrun", "srun", "bash", "sbatch"),
    *("scancel", "touch", "pip", "docker", "enroot", "apptainer"),
)
PROGRAM = r"(?:tools|benchmarks)/\w+\.py|pretrain_gpt\.py"
# Overrides added to a command on a preset so that it takes seconds.
FEW_LAYERS = ("model.num_layers=4",)
TINY = (
    *("model.num_layers=4", "model.hidden_size=32", "model.num_attention_heads=8", "model.seq_length=16"),
    *("train.micro_batch_size=4", "train.global_batch_size=16", "train.train_iters=2"),
    *("optimizer.lr_decay_iters=100000", "data.split=90,10,0"),
)
Words = list[str]


def code(page: Path) -> tuple[str, str]:
    """Return the bash and untagged code of a page, with continued lines joined, and the rest of the page."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fence, indented = r"^```(\w*)\n(.*?)^```\n", r"(?<=\n\n)(?: {4}.*\n)+"
    fenced = "".join(body for language, body in re.findall(fence, text, re.M | re.S) if language in ("", "bash"))
    text = re.sub(fence, "", text, flags=re.M | re.S)
    return fenced + "".join(re.findall(indented, text)), re.sub(indented, "", text)


def commands(page: Path) -> list[Words]:
    """Return the commands in a page's code blocks, and complete commands within its sentences."""
    lines, prose = code(page)
    begun = [line.strip().removeprefix("$ ") for line in lines.splitlines()]
    shown = [line for line in begun if line.partition(" ")[0] in LAUNCHERS]
    spans = re.findall(rf"`((?:python|torchrun .*?) (?:{PROGRAM})(?: [^`\n]+)?)`", prose)
    return [shlex.split(line, comments=True) for line in (*shown, *spans)]


class ReadError(Exception):
    """Raised by the patched parser once the arguments are parsed, so that the program stops there."""


@contextlib.contextmanager
def only_parsing() -> Iterator[None]:
    """Stop each program inside the context as soon as its arguments are parsed."""

    def stopping(parse: Callable[..., object]) -> Callable[..., None]:
        def parse_and_stop(*args: object) -> None:
            parse(*args)
            raise ReadError

        return parse_and_stop

    with contextlib.ExitStack() as patches:
        for parser in (argparse.ArgumentParser, ConfigParser):
            patches.enter_context(mock.patch.object(parser, "parse_args", stopping(parser.parse_args)))
        patches.enter_context(pytest.raises(ReadError))
        yield


def module(program: str) -> Any:
    """Import a tool by its path."""
    assert (ROOT / program).is_file(), f"there is no {program}"
    return importlib.import_module(program.removesuffix(".py").replace("/", "."))


def parse(program: str, typed: Words, num_ranks: int | None = None) -> None:
    """Parse arguments with the program's own parser; a preset with these overrides must satisfy every rule."""
    if program != "pretrain_gpt.py":
        with only_parsing():
            module(program).main(typed)
        return
    given = parse_args(typed)
    config = read_config(ROOT / given.config, given.overrides).config
    least = RunSpec(config).sizes.model
    resolve(ROOT / given.config, given.overrides, given.world_size or num_ranks or least, elsewhere=True)


def understand(words: Words) -> None:
    """Parse a command that cannot run here."""
    match words:
        case ["python", program, *typed]:
            parse(program, typed)
        case ["srun", ".venv/bin/python", program, *typed] | ["torchrun", "--nproc-per-node", _, program, *typed]:
            parse(program, typed)
        case ["bash", "scripts/slurm/preprocess.sbatch", number, prefix, *typed]:
            assert number.isdigit(), number
            parse("tools/preprocess_data.py", ["--output-prefix", prefix, *typed])
        case ["sbatch", *_] if "scripts/slurm/pretrain.sbatch" in words:
            parse("pretrain_gpt.py", words[words.index("scripts/slurm/pretrain.sbatch") + 1 :])
        case ["bash", script, *_]:
            assert (ROOT / script).is_file(), f"there is no {script}"


def perform(words: Words, pool: Pool) -> Outcome:
    """Run a command."""
    match words:
        case ["python", program, *typed]:
            return alone(program, [*typed, *smaller(program, typed)], pool)
        case ["torchrun", "--nproc-per-node", number, program, *typed]:
            return together(int(number), program, [*typed, *smaller(program, typed)], pool)
        case ["bash", "scripts/launch_local.sh", number, *typed]:
            return perform(["torchrun", "--nproc-per-node", number, "pretrain_gpt.py", *typed], pool)
    raise AssertionError(f"not a way to start anything here: {shlex.join(words)}")


def smaller(program: str, typed: Sequence[str]) -> Sequence[str]:
    """Return the extra arguments that make a command finish in seconds."""
    always = {"tools/preprocess_data.py": ("--workers", "1"), "tools/generate.py": ("--max-new-tokens", "8")}
    if program in always:
        return always[program]
    if "--check" in typed or "--compare" in typed or not any(word.startswith("configs/") for word in typed):
        return ()
    small = FEW_LAYERS if "--dry-run" in typed else TINY
    searched = () if "--explain" in typed else ("--modes", "1d")
    return {"pretrain_gpt.py": small, "tools/plan.py": (*FEW_LAYERS, *searched)}.get(program, ())


def begin(program: str, typed: Words) -> int:
    """Call the program's `main` and return its exit code."""
    if program != "pretrain_gpt.py":
        exit_code: int = module(program).main(typed)
        return exit_code
    with mock.patch.object(sys, "argv", [program, *typed]):
        return pretrain_gpt.main()


def alone(program: str, typed: Words, pool: Pool) -> Outcome:
    """Run a program in this process; ranks that it launches run on the pool."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(process, "launch", functools.partial(launch, pool)),
        mock.patch.object(sys, "stdin", io.StringIO("def \n")),
        mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            exit_code = process.run_program(lambda: begin(program, typed))
        except SystemExit as stop:  # raised by argparse
            exit_code = int(stop.code or 0)
    return Outcome(exit_code, out.getvalue(), err.getvalue())


def together(num_ranks: int, program: str, typed: Words, pool: Pool) -> Outcome:
    """Run a program on several ranks of the pool and return the outcome of rank 0; all exit codes must be equal."""
    outcomes = pool.run(as_rank, num_ranks, *meeting(), begin, (program, typed), meet=False)
    assert len({outcome.code for _, outcome in outcomes}) == 1
    return outcomes[0][1]


def launch(pool: Pool, num_ranks: int, rank: Callable[..., Any], *args: object) -> Any:
    """Replacement for `runtime.process.launch` that runs the ranks on the pool."""
    return pool.run(as_rank, num_ranks, *meeting(), rank, args, meet=False)[0][0]


def meeting() -> tuple[Path, int]:
    """Return the working folder of the ranks and a free port for their rendezvous."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return Path.cwd(), probe.getsockname()[1]


def as_rank(
    rank: int, world_size: int, folder: Path, port: int, fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, Outcome]:
    """Run `fn` as a rank with torchrun's environment in a folder; return its result and what it printed."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    out, back = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()}),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            found = fn(*args)
    finally:
        os.chdir(back)
    return found, Outcome(found if isinstance(found, int) else 0, out.getvalue(), "")
