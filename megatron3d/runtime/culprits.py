"""Ranks at fault of launches, and nodes that were unfit for one: lines of `culprits.jsonl` in the run's folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron3d.runtime.launcher_env import SlurmJob

FILE_NAME = "culprits.jsonl"


def add_culprits(folder: Path, ranks: Sequence[int], world_size: int) -> None:
    """Add the ranks that have died, or kept the others waiting."""
    _add(folder, {"ranks": list(ranks), "world_size": world_size})


def add_unfit(folder: Path, job: SlurmJob, why: str) -> None:
    """Add this node, which a check before a launch of the job has found unfit."""
    _add(folder, {"node": job.node, "why": why, "job": job.job_id, "requeue": job.num_requeues})


def _add(folder: Path, line: Mapping[str, Any]) -> None:
    """Append a line with the time; a folder that cannot be written to costs the line, and is said."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / FILE_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "time": time.time()}) + "\n")
    except OSError as error:
        print(f"> {folder / FILE_NAME} cannot be written to: {error.strerror}", file=sys.stderr, flush=True)
