"""Atomic publication of checkpoints: at every moment the tracker of a run names a complete one.

.iter_0000100.tmp  --rename-->  iter_0000100      then latest_checkpointed_iteration.txt is replaced
iter_0000100       --rename-->  .iter_0000100.old     just before, where that iteration had been saved already
iter_0000050       --rename-->  .iter_0000050.gone    before it is removed

Retention of checkpoints: the newest k, every n-th iteration permanently, and the newest non-persistent one.

run/iter_0000100 ...                  permanent, as far as `RetentionPolicy` says
run/best_checkpointed_iteration.txt   "100 2.345": with checkpoint.keep_best, the permanent one with the lowest loss
run/non_persistent/iter_0000130       only the newest, until a permanent one is newer
"""

from __future__ import annotations

import errno
import math
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from safetensors import SafetensorError

from megatron3d.checkpoint.index import FILE_NAME, refuse_torch_folder
from megatron3d.config.schema import CheckpointConfig
from megatron3d.config.validate.files import NON_PERSISTENT, TRACKER
from megatron3d.errors import UserError, is_machine_fault
from megatron3d.runtime.arguments import BEST
from megatron3d.runtime.files import hidden, open_locked, publish_folder, remove, retried, write_text

LOCK_FILE = ".lock"
BEST_TRACKER = "best_checkpointed_iteration.txt"


class FolderLock:
    """Lock held from construction until `release` or the end of the process.

    Where another process holds it and does not end in a few seconds, raises OSError, which names it: that is no fault
    of what was typed, since an earlier launch of the same run may still be ending.
    """

    def __init__(self, root: Path) -> None:
        path = root / LOCK_FILE
        try:
            self._file = retried(path, lambda: open_locked(path))
        except OSError as error:
            if error.errno == errno.EAGAIN:
                with path.open("rb") as file:
                    owner = file.read(200).decode(errors="backslashreplace").strip() or "another process"
                busy = f"{owner} is saving to this folder; wait for it, end it, or set checkpoint.save to another"
                raise OSError(errno.EBUSY, busy, str(root)) from None
            if is_machine_fault(error):
                raise
            raise UserError(
                f"checkpoint.save={root}: {path.name} cannot be locked ({error.strerror}); save to a folder that you "
                "own, on a file system with flock"
            ) from error
        self._write(f"process {os.getpid()} on {socket.gethostname()}")

    def _write(self, text: str) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self._file.write(text.encode())

    def release(self) -> None:
        """Release the lock."""
        if not self._file.closed:
            self._write("")
            self._file.close()


def iteration_folder(root: Path, iteration: int) -> Path:
    """Return the folder of a finished checkpoint."""
    return root / f"iter_{iteration:07d}"


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def make_temporary_folder(folder: Path) -> None:
    """Create the temporary folder, after removing what a killed run left behind."""
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    for old in sorted(root.glob(".iter_*.old")):
        whole = old.with_name(old.name[1 : -len(".old")])
        if whole.exists() or not old.is_dir():
            remove(old)
        else:
            old.rename(whole)
    for leftover in [*root.glob(".iter_*.tmp"), *root.glob(".*.gone")]:
        remove(leftover)
    hidden(folder).mkdir()


def publish(folder: Path, iteration: int) -> None:
    """Rename the temporary folder to the checkpoint `folder`, and make it the newest one of the run."""
    old = _replaced(folder)
    if folder.exists():
        folder.rename(old)
    publish_folder(hidden(folder), folder)
    _write_tracker(folder.parent, iteration)
    remove(old)


def _write_tracker(root: Path, iteration: int) -> None:
    write_text(root / TRACKER, f"{iteration}\n")


def move_tracker_back(root: Path, iteration: int) -> None:
    """Make an earlier permanent checkpoint the newest one of a run, also if the run is killed before it saves again.

    Later checkpoints stay on disk, but are ignored until they are saved again.
    """
    assert iteration in finished_checkpoints(root), f"{root} has no checkpoint of iteration {iteration}"
    if (read_tracker(root / NON_PERSISTENT) or 0) > iteration:
        (root / NON_PERSISTENT / TRACKER).unlink()
    _write_tracker(root, iteration)


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError while writing into a UserError that names the run's folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"checkpoint.save={folder.parent}: {folder.name} cannot be written: {reason}; earlier checkpoints are "
            "intact; free space on that disk, make the folder writable, or save to another folder"
        ) from error


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, permanent or not; None where the run has none yet.

    Raises UserError where a tracker is damaged or names a checkpoint that is not there.
    """
    found = [
        (iteration, _tracked_folder(place, iteration))
        for place in (root, root / NON_PERSISTENT)
        if (iteration := read_tracker(place)) is not None
    ]
    return max(found, key=lambda each: each[0])[1] if found else None


def is_non_persistent(folder: Path) -> bool:
    """Return whether a checkpoint is a non-persistent one."""
    return folder.parent.name == NON_PERSISTENT


def run_folder(checkpoint: Path) -> Path:
    """Return the folder of the run that saved a checkpoint, permanent or not."""
    return checkpoint.parent.parent if is_non_persistent(checkpoint) else checkpoint.parent


def read_tracker(root: Path) -> int | None:
    """Return the iteration that the tracker names; None without a tracker.  Raises UserError where it is damaged."""
    tracker = root / TRACKER

    def read() -> bytes | None:
        if not tracker.exists():
            return None
        if not tracker.is_file():
            raise UserError(f"{tracker} is not a file; {_available(root)}")
        with tracker.open("rb") as file:
            return file.read(100).strip()

    try:
        written = retried(tracker, read)
    except OSError as error:
        if is_machine_fault(error):
            raise
        raise UserError(f"{tracker} cannot be read: {error}") from error
    if written is None:
        return None
    if not re.fullmatch(b"[0-9]{1,18}", written):
        text = written[:40].decode(errors="backslashreplace")
        raise UserError(f"{tracker} holds {text!r}, not the number of an iteration")
    return int(written)


class Best(NamedTuple):
    """The iteration of a checkpoint, and its loss on the validation split."""

    iteration: int
    loss: float


def read_best(root: Path) -> Best | None:
    """Return a run's best checkpoint as it is recorded, None without a record.  Raises UserError for a damaged one."""
    path = root / BEST_TRACKER
    try:
        with path.open("rb") as file:
            words = file.read(100).decode(errors="backslashreplace").split()
    except FileNotFoundError:
        return None
    try:
        iteration, loss = words
        best = Best(int(iteration), float(loss))
    except ValueError:
        best = Best(-1, math.nan)
    if best.iteration < 0 or not math.isfinite(best.loss):
        raise UserError(f"{path} holds {' '.join(words)[:40]!r}, not an iteration and its loss; remove it")
    return best


def write_best(root: Path, best: Best | None) -> None:
    """Record a run's best checkpoint; None removes the record."""
    if best is None:
        (root / BEST_TRACKER).unlink(missing_ok=True)
    else:
        write_text(root / BEST_TRACKER, f"{best.iteration} {best.loss!r}\n")


def _tracked_folder(root: Path, iteration: int) -> Path:
    """Return the folder of the checkpoint that a tracker names."""
    folder = iteration_folder(root, iteration)
    found = next((path for path in (folder, _replaced(folder)) if path.is_dir()), None)
    if found is None:
        raise UserError(f"{root / TRACKER} names {folder.name}, which is not there; {_available(root)}")
    return found


def candidates(root: Path) -> list[tuple[Path, str | None]]:
    """Return all finished checkpoints of a run, newest and permanent first, each with a reason to ignore it or None.

    None is ignored where the tracker is damaged.
    """
    found: list[tuple[int, int, Path, str | None]] = []
    for place, order in ((root, 1), (root / NON_PERSISTENT, 0)):
        try:
            last = read_tracker(place)
        except UserError:
            last = None
        if last is None and place != root and (root / TRACKER).exists():
            continue
        for iteration, folder in finished_checkpoints(place).items():
            beyond = last is not None and iteration > last
            refusal = f"{TRACKER} names {last}: a later save was not finished, or the run went back" if beyond else None
            found.append((iteration, order, folder, refusal))
    return [(folder, refusal) for _, _, folder, refusal in sorted(found, key=lambda each: each[:2], reverse=True)]


def newest_saved(root: Path, iteration: int) -> int | None:
    """Return the iteration of the newest permanent checkpoint of a run up to `iteration`."""
    usable = [folder for folder, refusal in candidates(root) if refusal is None and not is_non_persistent(folder)]
    return max((saved for folder in usable if (saved := iteration_of(folder)) <= iteration), default=None)


def iteration_of(folder: Path) -> int:
    """Return the iteration that the name of a finished checkpoint's folder ends with."""
    return int(folder.name.removesuffix(".old").rpartition("_")[2])


def finished_checkpoints(root: Path) -> dict[int, Path]:
    """Return a run's checkpoint folders by iteration, including one that was about to be replaced."""
    patterns = (r"\.iter_([0-9]{7,})\.old", r"iter_([0-9]{7,})")
    names = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    matches = [(match, name) for pattern in patterns for name in names if (match := re.fullmatch(pattern, name))]
    return {int(match[1]): root / name for match, name in matches}


def resolve(load: Path, iteration: int | Literal["best"] | None = None) -> Path:
    """Return the checkpoint of a run's folder or of an iter_ folder; raise UserError where there is none.

    Args:
        iteration: of the run's checkpoint, or "best" for that with the lowest validation loss; None: the newest.
    """
    if iteration is not None:
        return _of_iteration(load, iteration)
    if (load / FILE_NAME).is_file():
        return load
    found = latest(load)
    if found is None:
        refuse_torch_folder(load)
        where = f"there is neither {TRACKER} nor {FILE_NAME}" if load.is_dir() else "there is no such folder"
        raise UserError(f"checkpoint.load={load}: {where}; {_available(load)}")
    return found


def _of_iteration(load: Path, iteration: int | Literal["best"]) -> Path:
    if (load / FILE_NAME).is_file():
        raise UserError(f"--iteration {iteration}: {load} is one checkpoint; give its run's folder, {load.parent}")
    number = iteration
    if number == BEST:
        best = read_best(load)
        if best is None:
            rule = f"{load} has no {BEST_TRACKER}, which checkpoint.keep_best writes"
            raise UserError(f"--iteration {iteration}: {rule}; {_available(load)}")
        number = best.iteration
    found = {**finished_checkpoints(load / NON_PERSISTENT), **finished_checkpoints(load)}
    if number not in found:
        missing = f"{load} has no checkpoint {iteration_folder(load, number).name}"
        raise UserError(f"--iteration {iteration}: {missing}; {_available(load)}")
    return found[number]


def _available(root: Path) -> str:
    """Return the part of an error message that names the checkpoints that can be loaded instead."""
    names = sorted(path.name for path in root.glob("iter_*") if (path / FILE_NAME).is_file())
    return f"load one of {', '.join(names)} by its folder" if names else "give a folder that a run has saved to"


@dataclass(frozen=True)
class RetentionPolicy:
    """Retain the newest `latest` checkpoints (None: all), and those of iterations that `interval` divides.

    Checkpoints of iterations that `save_interval` does not divide were saved for another reason.
    """

    latest: int | None = None
    interval: int | None = None
    save_interval: int | None = None

    @staticmethod
    def of(config: CheckpointConfig) -> RetentionPolicy:
        """Return the configured policy; `save_retain_interval` alone also retains the newest, as in Megatron."""
        alone = 1 if config.save_retain_interval else None
        return RetentionPolicy(config.keep_latest_k or alone, config.save_retain_interval, config.save_interval)

    def is_scheduled(self, iteration: int) -> bool:
        """Return whether an interval asks for a checkpoint of this iteration."""
        return any(
            interval is not None and iteration % interval == 0 for interval in (self.interval, self.save_interval)
        )

    def retains(self, iteration: int, num_newer: int) -> bool:
        """Return whether a checkpoint stays when there are `num_newer` newer ones."""
        is_kept = self.interval is not None and iteration % self.interval == 0
        return is_kept or self.latest is None or num_newer < self.latest


def prune(
    root: Path, policy: RetentionPolicy, count: Callable[[], None] = lambda: None, best: int | None = None
) -> None:
    """Remove checkpoints that the policy does not retain, after the one that the tracker names is complete.

    Checkpoints later than the tracker are left alone, and so is that of the iteration `best`.  `count` is called after
    each file, which a file system may take seconds to remove.
    """
    last = read_tracker(root)
    assert last is not None, f"{root} has a checkpoint, but no tracker"
    past = sorted((iteration for iteration in finished_checkpoints(root) if iteration <= last), reverse=True)
    for newer, iteration in enumerate(past):
        if iteration != best and not policy.retains(iteration, newer):
            _remove(finished_checkpoints(root)[iteration], count)


def remove_non_persistent(root: Path, iteration: int, count: Callable[[], None] = lambda: None) -> None:
    """Remove non-persistent checkpoints that are not newer than the permanent one of `iteration`."""
    place = root / NON_PERSISTENT
    last = read_tracker(place)
    if last is not None and last <= iteration:
        (place / TRACKER).unlink()
        _remove(place, count)


def remove_superseded(
    root: Path, policy: RetentionPolicy, iteration: int, count: Callable[[], None] = lambda: None
) -> None:
    """Remove a checkpoint that was saved for being the best one, and is no more; not where an interval asks for it."""
    folder = finished_checkpoints(root).get(iteration)
    if folder is not None and not policy.is_scheduled(iteration):
        _remove(folder, count)


def _remove(folder: Path, count: Callable[[], None]) -> None:
    """Remove a folder after renaming it, so that a partly removed one never looks like a checkpoint."""
    gone = folder.with_name(f".{folder.name}.gone")
    remove(gone)
    folder.rename(gone)
    inside = () if gone.is_symlink() else tuple(gone.rglob("*"))
    for file in (path for path in inside if path.is_symlink() or not path.is_dir()):
        file.unlink(missing_ok=True)
        count()
    remove(gone)
