"""Which checkpoints stay: the newest k, every n-th iteration for ever, and short-lived ones until there is a newer one.

run/iter_0000100 ...                  permanent, as far as `RetentionPolicy` says
run/non_persistent/iter_0000130       of the short-lived ones only the newest, until a permanent one is newer
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron3d.checkpoint.publish import finished_checkpoints, read_tracker, removal_folder
from megatron3d.config.schema import CheckpointConfig
from megatron3d.config.validate.files import NON_PERSISTENT, TRACKER


@dataclass(frozen=True)
class RetentionPolicy:
    """The newest `latest` checkpoints (None: all), and those of iterations that `interval` divides."""

    latest: int | None = None
    interval: int | None = None

    @staticmethod
    def of(config: CheckpointConfig) -> RetentionPolicy:
        """`save_retain_interval` alone keeps the newest one beside, as Megatron's does."""
        alone = 1 if config.save_retain_interval else None
        return RetentionPolicy(config.keep_latest_k or alone, config.save_retain_interval)

    def has(self, iteration: int, newer: int) -> bool:
        """Whether a checkpoint stays when there are so many newer ones."""
        is_kept = self.interval is not None and iteration % self.interval == 0
        return is_kept or self.latest is None or newer < self.latest


def prune(root: Path, keep: RetentionPolicy) -> None:
    """Remove what need not stay, now that the checkpoint that the tracker names is complete.

    What lies beyond the tracker is left alone: nobody has said that it is older.
    """
    last = read_tracker(root)
    assert last is not None, f"{root} has a checkpoint, but no tracker"
    past = sorted((iteration for iteration in finished_checkpoints(root) if iteration <= last), reverse=True)
    for newer, iteration in enumerate(past):
        if not keep.has(iteration, newer):
            _remove(finished_checkpoints(root)[iteration])


def remove_non_persistent(root: Path, iteration: int) -> None:
    """Remove short-lived checkpoints that are not newer than the permanent one of this iteration."""
    place = root / NON_PERSISTENT
    last = read_tracker(place)
    if last is not None and last <= iteration:
        (place / TRACKER).unlink()
        _remove(place)


def _remove(folder: Path) -> None:
    """Under another name first, so that at no moment a part of it looks like a checkpoint."""
    gone = removal_folder(folder)
    folder.rename(gone)
    shutil.rmtree(gone)
