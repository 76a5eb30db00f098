"""Decision whether a SLURM job that has ended is requeued: only if another launch will get further.

    exit code 0      done                                             no
              2      user error                                       no: it would be refused again
              3      stopped and saved, before the time limit         yes
              3      stopped and saved, by a person or a key          no
              other  a crash, a killed rank, a bad node               yes

and never if two launches in a row have saved no newer checkpoint than the one they started from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, StrictInt, StrictStr, TypeAdapter
from pydantic.dataclasses import dataclass

from megatron3d.checkpoint.publish import candidates, finished_checkpoints
from megatron3d.config.schema import Config
from megatron3d.config.validate.files import NON_PERSISTENT
from megatron3d.errors import ExitCode, UserError
from megatron3d.metrics.journal import read_lines
from megatron3d.runtime.files import write_text
from megatron3d.runtime.launcher_env import SlurmJob

FILE_NAME = "slurm.jsonl"
# Launches in a row without a new checkpoint after which the job is not requeued.
MAX_FRUITLESS = 2


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Launch:
    """Line of `slurm.jsonl` in the run's folder.

    Attributes:
        requeue: how often the job had been requeued before.
        iteration: iteration of the newest checkpoint at that time, 0 without any.
    """

    job: StrictInt
    requeue: StrictInt
    nodes: StrictStr
    iteration: Annotated[StrictInt, Field(ge=0)]
    time: StrictStr


LAUNCH = TypeAdapter(Launch)


def decide_requeue(code: int, before_limit: bool, starts: Sequence[int], newest: int) -> tuple[bool, str]:
    """Return whether to requeue the job, and why.

    Args:
        code: highest exit code of the ranks of the launch that has ended.
        before_limit: whether SLURM had warned of the time limit.
        starts: iterations from which the launches of the job started, this one last; empty if it was not recorded.
        newest: iteration of the newest checkpoint now.
    """
    if code == ExitCode.DONE:
        return False, "done"
    if code == ExitCode.USER_ERROR:
        return False, "not requeued: the configuration or its files are wrong, see above, and would be refused again"
    if code == ExitCode.STOPPED and not before_limit:
        return False, "not requeued: stopped on request; submit it again to continue"
    if not starts:
        return False, f"not requeued: it ended with code {code} before its launch could be recorded"
    if len(starts) >= MAX_FRUITLESS and min(starts[-MAX_FRUITLESS:]) >= newest:
        return False, (
            f"not requeued: {MAX_FRUITLESS} launches in a row have saved nothing beyond iteration {newest}, the last "
            f"one ended with code {code}; find the cause above, or save more often"
        )
    how = "the time limit is near" if before_limit else f"it ended with code {code}"
    return True, f"requeued: {how}; the next launch continues from iteration {newest}"


def run_folder(config: Config) -> Path:
    """Return the folder that a run saves to; raises UserError if its next launch would not continue from there."""
    if config.checkpoint.save is None or config.checkpoint.load is None:
        raise UserError(
            f"checkpoint.load={config.checkpoint.load}, checkpoint.save={config.checkpoint.save}: a job that is "
            "requeued continues its own run; set both to one folder, or load to what its first launch starts from"
        )
    return Path(config.checkpoint.save)


def record_launch(root: Path, slurm_job: SlurmJob) -> Launch:
    """Append this launch to `slurm.jsonl`, and return it."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    launch = Launch(slurm_job.job_id, slurm_job.num_requeues, slurm_job.nodes, newest_iteration(root), now)
    lines = [json.dumps(asdict(each)) + "\n" for each in (*_launches(root), launch)]
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_text(root / FILE_NAME, "".join(lines))
    except OSError as error:
        raise UserError(f"checkpoint.save={root}: cannot be written to ({error.strerror}); use your own") from error
    return launch


def start_iterations(root: Path, slurm_job: SlurmJob) -> list[int]:
    """Return the iterations from which the launches of this job started; empty if the present one is not recorded."""
    mine = [launch for launch in _launches(root) if launch.job == slurm_job.job_id]
    is_recorded = bool(mine) and mine[-1].requeue == slurm_job.num_requeues
    return [launch.iteration for launch in mine] if is_recorded else []


def newest_iteration(root: Path) -> int:
    """Return the iteration of the newest finished checkpoint, which the next launch tries first; 0 without any."""
    numbers = {
        folder: number
        for place in (root, root / NON_PERSISTENT)
        for number, folder in finished_checkpoints(place).items()
    }
    return max((numbers[folder] for folder, refusal in candidates(root) if refusal is None), default=0)


def _launches(root: Path) -> list[Launch]:
    return [launch for _, launch in read_lines(root / FILE_NAME, LAUNCH)]
