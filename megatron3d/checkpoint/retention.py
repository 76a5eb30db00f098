"""Retention of checkpoints: the newest k, every n-th iteration permanently, and the newest non-persistent one.

run/iter_0000100 ...                  permanent, as far as `RetentionPolicy` says
run/non_persistent/iter_0000130       only the newest, until a permanent one is newer
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron3d.checkpoint.publish import finished_checkpoints, read_tracker, removal_folder
from megatron3d.config.io_schema import CheckpointConfig
from megatron3d.config.validate.files import NON_PERSISTENT, TRACKER
from megatron3d.runtime.files import remove


@dataclass(frozen=True)
class RetentionPolicy:
    """Retain the newest `latest` checkpoints (None: all), and those of iterations that `interval` divides."""

    latest: int | None = None
    interval: int | None = None

    @staticmethod
    def of(config: CheckpointConfig) -> RetentionPolicy:
        """Return the configured policy; `save_retain_interval` alone also retains the newest, as in Megatron."""
        alone = 1 if config.save_retain_interval else None
        return RetentionPolicy(config.keep_latest_k or alone, config.save_retain_interval)

    def retains(self, iteration: int, num_newer: int) -> bool:
        """Return whether a checkpoint stays when there are `num_newer` newer ones."""
        is_kept = self.interval is not None and iteration % self.interval == 0
        return is_kept or self.latest is None or num_newer < self.latest


def prune(root: Path, policy: RetentionPolicy) -> None:
    """Remove checkpoints that the policy does not retain, after the one that the tracker names is complete.

    Checkpoints later than the tracker are left alone.
    """
    last = read_tracker(root)
    assert last is not None, f"{root} has a checkpoint, but no tracker"
    past = sorted((iteration for iteration in finished_checkpoints(root) if iteration <= last), reverse=True)
    for newer, iteration in enumerate(past):
        if not policy.retains(iteration, newer):
            _remove(finished_checkpoints(root)[iteration])


def remove_non_persistent(root: Path, iteration: int) -> None:
    """Remove non-persistent checkpoints that are not newer than the permanent one of `iteration`."""
    place = root / NON_PERSISTENT
    last = read_tracker(place)
    if last is not None and last <= iteration:
        (place / TRACKER).unlink()
        _remove(place)


def _remove(folder: Path) -> None:
    """Remove a folder after renaming it, so that a partly removed one never looks like a checkpoint."""
    gone = removal_folder(folder)
    remove(gone)
    folder.rename(gone)
    remove(gone)
