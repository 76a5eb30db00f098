"""Command `megatron3d COMMAND ...`: every program under one name, which runs as `python PROGRAM ...` does."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent
PRETRAIN = "pretrain_gpt.py"


class Command(NamedTuple):
    """A program, as a file of the repository, the arguments that come first, and what it does."""

    program: str
    about: str
    arguments: tuple[str, ...] = ()


COMMANDS: Mapping[str, Command] = {
    "train": Command(PRETRAIN, "pretrain: one process, or a rank under torchrun or srun"),
    "launch": Command("megatron3d/runtime/local_ranks.py", "pretrain on this machine: [N] processes", (PRETRAIN,)),
    "check": Command(PRETRAIN, "report every problem of a configuration", ("--check",)),
    "dry-run": Command(PRETRAIN, "simulate a step of any rank of any world", ("--dry-run",)),
    "plan": Command("tools/plan.py", "search the fastest layouts of a model on a cluster"),
    "memory": Command("tools/show_memory.py", "predict the memory of each rank"),
    "verify": Command("tools/verify_layout.py", "compare a layout with one process"),
    "tokenizer": Command("tools/train_tokenizer.py", "train a tokenizer"),
    "preprocess": Command("tools/preprocess_data.py", "make token files of text"),
    "inspect": Command("tools/inspect_dataset.py", "describe token files"),
    "generate": Command("tools/generate.py", "sample text from a checkpoint"),
    "serve": Command("tools/serve.py", "serve a checkpoint over OpenAI's completions API"),
    "evaluate": Command("tools/evaluate.py", "compute the loss of a checkpoint on a corpus"),
    "convert": Command("tools/convert_checkpoint.py", "to and from Hugging Face, Megatron-LM, torch"),
    "checkpoint": Command("tools/checkpoint.py", "inspect, verify and compare checkpoints"),
    "report": Command("tools/plot_run.py", "plot curves of runs, or a page about one"),
    "slurm": Command("tools/make_slurm.py", "write a job script"),
}


def program_file(name: str) -> str:
    """Return the path of a program in the repository; where the package was installed, tools are in `programs`."""
    here = PACKAGE.parent / name
    return str(here if here.exists() else PACKAGE / "programs" / here.name)


def usage() -> str:
    """Return the list of commands."""
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {each.about}" for name, each in COMMANDS.items())
    return "\n".join(("usage: megatron3d COMMAND ...   (megatron3d COMMAND --help has its options)", "", *lines))


def main() -> int:
    """Run the program of a command in this process; return the exit code where it runs none."""
    name, *rest = sys.argv[1:] or ("--help",)
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"megatron3d: {name!r} is no command\n{usage()}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    arguments = (program_file(each) if each == PRETRAIN else each for each in command.arguments)
    sys.argv[:] = [program_file(command.program), *arguments, *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
