"""Processes that join an elastic run that is under way: where they find it, and what they must have in common.

The run's folder names the processes of the run; a new one asks the lowest of them that answers, and waits there as a
spare that the others do not know yet.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron3d.errors import UserError
from megatron3d.runtime.epochs import Member
from megatron3d.runtime.files import write_text

FILE_NAME = "members.json"


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
    """Return what the folder of an elastic run says; raises UserError where there is none."""
    path = folder / FILE_NAME
    try:
        values = json.loads(path.read_bytes())
        members = [Member(*each) for each in values["members"]]
        return Meeting(members, int(values["world_size"]), values["config"])
    except OSError as error:
        raise UserError(
            f"--join {folder}: {FILE_NAME} cannot be read ({error.strerror}): name the checkpoint.save of a run with "
            "train.elastic=true that is under way"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"--join {folder}: {FILE_NAME} is damaged; it is written again when ranks change") from error
