"""Job script: `scripts/slurm/pretrain.sbatch` with the settings of a configuration and a cluster.

The lines from the first #SBATCH to `END` are generated; the rest, the commands of the job, is copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron3d.errors import UserError, is_one_line
from megatron3d.runtime.arguments import shorten

END = "# End of settings."
FIRST = "#SBATCH"
# A variable that bash expands, and nothing else: `${NAME:-$(command)}` or `$((NAME))` would run commands.
VARIABLE = r"(\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\}))"
# Cores of a rank without another number: step, backward, NCCL, loader and save are busy threads, and SLURM's default is
# one core.
CPUS_PER_TASK = 8
# Options of sbatch by name without the dashes; None for an option without a value.
Options = Mapping[str, str | int | None]


def options(num_nodes: int = 1, node_ranks: int = 8, time: str = "24:00:00", warn_s: int = 600) -> Options:
    """Return the options of a job with one rank per GPU, which SLURM warns `warn_s` seconds before its time limit.

    A rank has `CPUS_PER_TASK` cores, and nobody else computes on its nodes.  Raises UserError if the limit is shorter
    than the warning.
    """
    if not 0 < warn_s < seconds(time):
        raise UserError(f"--warn {warn_s}: not between 0 and --time {time}, {seconds(time)} s; use for example 600")
    return {
        "job-name": "megatron3d",
        "nodes": num_nodes,
        "ntasks-per-node": node_ranks,
        "gpus-per-node": node_ranks,
        "cpus-per-task": CPUS_PER_TASK,
        "exclusive": None,
        "time": time,
        "signal": f"B:USR1@{warn_s}",
        "requeue": None,
        "open-mode": "append",
        "output": "%x-%j.log",
    }


@dataclass(frozen=True)
class JobSettings:
    """Settings of a job script.

    Attributes:
        setup: shell lines that run first, such as `module load`.
        container: words before the program in each srun.
        arguments: arguments of pretrain_gpt.py.
        spares: nodes of the job that its ranks do not need.
        elastic: ranks go on without those that are lost.
        remarks: comments at the top.

    Raises UserError where a line would not be one line of the script, or an option not one of sbatch.
    """

    options: Options = field(default_factory=options)
    setup: tuple[str, ...] = ()
    python: tuple[str, ...] = (".venv/bin/python",)
    container: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    spares: int = 0
    elastic: bool = False
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        UserError.collect(problem for name, value in self.options.items() for problem in _option_problems(name, value))
        UserError.collect(
            f"{shorten(line)}: a control character in a line of the job script; use another name"
            for line in self.lines()
            if not is_one_line(line)
        )

    def lines(self) -> Iterator[str]:
        """Yield the generated lines."""
        yield from (f"# {remark}" for remark in self.remarks)
        yield from (
            f"{FIRST} --{name}" + ("" if value is None else f"={_option_value(str(value))}")
            for name, value in self.options.items()
        )
        yield from self.setup
        yield from (
            f"{name}=({' '.join(map(quoted, getattr(self, name)))})" for name in ("python", "container", "arguments")
        )
        yield f"spares={self.spares} elastic={int(self.elastic)}"
        yield END


def _option_problems(name: str, value: str | int | None) -> Iterator[str]:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name) is None:
        yield f"--sbatch {shorten(name)}: not the name of an option of sbatch; use for example account=me"
    elif value is not None and re.search(r"""["'\\]""", _unquoted(str(value))):
        yield f"--sbatch {name}={shorten(str(value))}: sbatch has no escape of quotes and backslashes; leave them out"


def _option_value(text: str) -> str:
    """Return the value of an option as one word of a line that sbatch reads."""
    text = _unquoted(text)
    return f'"{text}"' if re.search(r"[\s#]", text) else text


def _unquoted(text: str) -> str:
    return text[1:-1] if re.fullmatch(r"""(["']).*\1""", text) else text


def fill_template(template: str, settings: JobSettings) -> str:
    """Return the template with these settings in place of its own."""
    lines = template.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(FIRST))
    return "\n".join([*lines[:first], *settings.lines(), *lines[lines.index(END) + 1 :]]) + "\n"


def quoted(text: str) -> str:
    """Return `text` as one word of bash in which only `$NAME` and `${NAME}` are expanded when the job runs."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text, re.ASCII):
        return text
    return '"' + re.sub(rf'{VARIABLE}|[\\"`$]', lambda found: found[1] or f"\\{found[0]}", text) + '"'


def seconds(time: str) -> int:
    """Return the seconds of a SLURM time: m, m:s, h:m:s or d-h[:m[:s]]."""
    found = re.fullmatch(r"(?:([0-9]{1,6})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?", time)
    if found is None:
        raise UserError(f"--time {shorten(time)}: not a SLURM time; use for example 90, 24:00:00 or 2-12:00:00")
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _pyxis(image: str, mounts: Sequence[str]) -> tuple[str, ...]:
    places = ",".join(f"{mount}:{mount}" for mount in ("$PWD", *mounts))
    return f"--container-image={image}", f"--container-mounts={places}", "--container-workdir=$PWD"


def _apptainer(image: str, mounts: Sequence[str]) -> tuple[str, ...]:
    return "apptainer", "exec", "--nv", "--bind", ",".join(("$PWD", *mounts)), "--pwd", "$PWD", image


# Functions from an image and folders to mount to the words before the program: options of srun (pyxis), or a program.
CONTAINERS: Mapping[str, Callable[[str, Sequence[str]], tuple[str, ...]]] = {"pyxis": _pyxis, "apptainer": _apptainer}
