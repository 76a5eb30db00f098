"""Shared parts of all benchmarks: interleaved timing, hardware and versions, tables and JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks import `tools` and `tests` from the repository, which is not installed

Row = Mapping[str, Any]


class Turn(NamedTuple):
    """Seconds of one step: wall-clock time, and CPU time of all threads of this process."""

    wall_s: float
    cpu_s: float


Turns = Mapping[str, Sequence[Turn]]


def interleaved(
    steps: Mapping[str, Callable[[], object]], rounds: int, warmup: int, meet: Callable[[], object] = lambda: None
) -> dict[str, list[Turn]]:
    """Measure steps round robin, each round starting one further, so that disturbances of the machine affect all alike.

    The first `warmup` rounds are discarded; `meet` is called before each step, untimed, to synchronize ranks.
    """
    names = list(steps)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            meet()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            if number >= 0:
                turns[name].append(Turn(time.perf_counter() - wall, time.process_time() - cpu))
    return turns


def times_faster(turns: Turns, ours: str, peer: str) -> float:
    """Return the speed-up: the median over rounds of the baseline's time / our time in the same round."""
    return statistics.median(p.wall_s / o.wall_s for p, o in zip(turns[peer], turns[ours], strict=True))


def milliseconds(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the medians of both times, and the best step, which is the least disturbed by other programs."""
    return {
        "step_ms": 1e3 * statistics.median(turn.wall_s for turn in turns),
        "best_ms": 1e3 * min(turn.wall_s for turn in turns),
        "cpu_ms": 1e3 * statistics.median(turn.cpu_s for turn in turns),
    }


def circumstances() -> dict[str, Any]:
    """Return command, date, hardware and versions."""
    packages = ("torch", "transformers")
    return {
        "command": shlex.join(["python", *_program(), *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
        "load_average": os.getloadavg()[0],
    }


def _program() -> list[str]:
    """Return the program that runs, as it was started."""
    spec = sys.modules["__main__"].__spec__
    return ["-m", spec.name] if spec else sys.argv[:1]


def _processor() -> str:
    """Return vendor, name, family and model of the CPU: virtual machines often hide the name."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = (line.partition(":") for line in info.read_text().partition("\n\n")[0].splitlines())
    found = {key.strip(): value.strip() for key, _, value in lines}
    if "vendor_id" not in found:
        return platform.processor()
    return f"{found['vendor_id']} {found['model name']}, family {found['cpu family']}, model {found['model']}"


def show(title: str, rows: Sequence[Row]) -> None:
    """Print rows as a table; floats with three significant digits or as integers."""
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(width=140).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def write(output: Path, rows: Sequence[Row], **details: Any) -> None:
    """Write circumstances, details and rows as JSON."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**circumstances(), **details, "rows": rows}, indent=1) + "\n")
    print(f"written to {output}")
