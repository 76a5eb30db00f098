"""Whether a SLURM job that has ended is queued again: where another start will get further, and nowhere else.

    exit code 0      done                                             no
              2      what was given is wrong                          no: it would be refused again
              3      stopped and saved, before the time limit         yes
              3      stopped and saved, by a person or a key          no
              other  a crash, a killed rank, a bad node               yes

and in no case where two starts in a row have left the checkpoint that they began with as the newest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from megatron3d.checkpoint.publish import candidates, finished_checkpoints
from megatron3d.config.schema import Config
from megatron3d.config.validate.checkpoint import is_own
from megatron3d.config.validate.files import NON_PERSISTENT
from megatron3d.errors import UserError
from megatron3d.metrics.journal import read_journal
from megatron3d.runtime.exit_codes import ExitCode
from megatron3d.runtime.files import write_text
from megatron3d.runtime.launcher_env import SlurmJob

FILE_NAME = "slurm.jsonl"
# Starts in a row that may save nothing.
PATIENCE = 2


@dataclass(frozen=True)
class Start:
    """A line of `slurm.jsonl`, in the run's folder.

    Attributes:
        requeue: how often the job had been queued again.
        iteration: of the newest checkpoint at that time, 0 without any.
    """

    job: int
    requeue: int
    nodes: str
    iteration: int
    time: str


@dataclass(frozen=True)
class Ended:
    """How a start ended: the highest exit code of its ranks, and whether SLURM had warned of the time limit."""

    code: int
    before_limit: bool


def verdict(ended: Ended, begun_at: Sequence[int], newest: int) -> tuple[bool, str]:
    """Whether to queue the job again, and why.

    Args:
        begun_at: iterations with which its starts began, this one last; empty where this one was not noted.
        newest: iteration of the newest checkpoint now.
    """
    if ended.code == ExitCode.DONE:
        return False, "done"
    if ended.code == ExitCode.USER_ERROR:
        return False, "not queued again: what was given is wrong, as said above, and would be refused again"
    if ended.code == ExitCode.STOPPED and not ended.before_limit:
        return False, "not queued again: stopped on request; submit it again to go on"
    if not begun_at:
        return False, f"not queued again: it ended with code {ended.code} before its start could be noted"
    if len(begun_at) >= PATIENCE and min(begun_at[-PATIENCE:]) >= newest:
        return False, (
            f"not queued again: {PATIENCE} starts in a row have saved nothing beyond iteration {newest}, the last one "
            f"ended with code {ended.code}; find the cause above, or save more often than a start lasts"
        )
    how = "the time limit is near" if ended.before_limit else f"it ended with code {ended.code}"
    return True, f"queued again: {how}; the next start goes on from iteration {newest}"


def run_folder(config: Config) -> Path:
    """Where a run saves; raises UserError where its next start would not continue what is there."""
    if config.checkpoint.save is None or not is_own(config):
        raise UserError(
            f"checkpoint.load={config.checkpoint.load}, checkpoint.save={config.checkpoint.save}: a job that is queued "
            "again continues its own run; set both to one folder"
        )
    return Path(config.checkpoint.save)


def note_start(root: Path, slurm_job: SlurmJob) -> Start:
    """Add a line for this start, and return it."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    start = Start(slurm_job.job_id, slurm_job.num_requeues, slurm_job.nodes, newest_iteration(root), now)
    lines = [json.dumps(asdict(each)) + "\n" for each in (*_starts(root), start)]
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_text(root / FILE_NAME, "".join(lines))
    except OSError as error:
        raise UserError(f"checkpoint.save={root}: cannot be written to ({error.strerror}); use your own") from error
    return start


def begun_at(root: Path, slurm_job: SlurmJob) -> list[int]:
    """Iterations with which the starts of this job began; empty where the present one is not among them."""
    mine = [start for start in _starts(root) if start.job == slurm_job.job_id]
    is_noted = bool(mine) and mine[-1].requeue == slurm_job.num_requeues
    return [start.iteration for start in mine] if is_noted else []


def newest_iteration(root: Path) -> int:
    """Of the newest finished checkpoint, which the next start would try first; 0 without any."""
    numbers = {
        folder: number
        for place in (root, root / NON_PERSISTENT)
        for number, folder in finished_checkpoints(place).items()
    }
    return max((numbers[folder] for folder, refusal in candidates(root) if refusal is None), default=0)


def _starts(root: Path) -> list[Start]:
    path = root / FILE_NAME
    return [Start(**row) for row in read_journal(path)] if path.exists() else []
