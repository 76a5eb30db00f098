"""Processes that join an elastic run that is under way: where they find it, and what they must have in common.

The run's folder names the processes of the run; a new one asks the lowest of them that answers, and waits there as a
spare that the others do not know yet.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron3d.errors import UserError
from megatron3d.runtime.connections import Liveness, ask
from megatron3d.runtime.epochs import Member
from megatron3d.runtime.files import write_text

FILE_NAME = "members.json"
# Limit for an answer of a process.
ANSWER_S = 3.0


@dataclass(frozen=True)
class Meeting:
    """What the folder of an elastic run says to processes that join it.

    Attributes:
        world_size: number of ranks that the run was launched with.
        config: its configuration then, by section and key.
    """

    members: Sequence[Member]
    world_size: int
    config: Mapping[str, Mapping[str, Any]]

    def differences(self, config: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        """Yield a message per key of another value in the configuration of a process that joins."""
        for section, keys in self.config.items():
            for key, value in keys.items():
                if (own := config.get(section, {}).get(key)) != value:
                    yield f"{section}.{key}={json.dumps(own)}: the run that is joined has {json.dumps(value)}; use that"


def write_meeting(folder: Path, meeting: Meeting) -> None:
    """Write the file that `read_meeting` reads; a folder that cannot be written to has none."""
    with contextlib.suppress(OSError):
        write_text(folder / FILE_NAME, json.dumps(asdict(meeting)))


def read_meeting(folder: Path) -> Meeting:
    """Return what the folder of an elastic run says; raises UserError where it cannot be read."""
    path = folder / FILE_NAME
    try:
        values = json.loads(path.read_bytes())
        members = [Member(*each) for each in values["members"]]
        return Meeting(members, int(values["world_size"]), values["config"])
    except OSError as error:
        raise UserError(f"--join: {path} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"--join: {path} is damaged; it is written again when ranks change") from error


def find_meeting(folder: Path, limit_s: float) -> Meeting:
    """Wait until a process of a run in this folder answers, and return what the folder says; raises UserError."""
    end_s, is_told = time.monotonic() + limit_s, False
    while True:
        meeting = read_meeting(folder) if (folder / FILE_NAME).exists() else None
        for member in meeting.members if meeting else ():
            if meeting and ask(member.host, member.responder, ANSWER_S)[0] is Liveness.YES:
                return meeting
        if time.monotonic() > end_s:
            raise UserError(
                f"--join: no process of a run in {folder} has answered for {limit_s:.0f} s "
                "(train.distributed_timeout_minutes): is one with train.elastic=true under way there?"
            )
        if not is_told:
            print(f"> waits for the run in {folder} to begin", file=sys.stderr, flush=True)
        is_told = True
        time.sleep(1.0)
