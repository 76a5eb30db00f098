"""When a checkpoint is written: before the next step, or by a thread while training goes on.

    training   | step | copy | step | step | step | step | copy | step ...
    thread                   | write, sync, agree, publish |    | write ...

Both are the same code, `store.save`; in the background it is given copies in host memory, and a communicator of its
own: rank 0 must know that all ranks are through before it publishes, and training's own connections are not to be
shared between threads, nor to wait for disks.  A rank that dies breaks that communicator, so that no thread waits for
ever, and a file system that shows new files late, as NFS does, delays nothing, as it would marker files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Thread

import torch
from pydantic import JsonValue
from torch import Tensor

from megatron3d.checkpoint.piece import Piece
from megatron3d.checkpoint.retention import RetentionPolicy, prune, remove_non_persistent
from megatron3d.checkpoint.store import save
from megatron3d.comm.interface import ObjectCollectives
from megatron3d.config.validate.files import NON_PERSISTENT
from megatron3d.errors import UserError

# What a rank writes, with every tensor passed through a function first.
PieceSource = Callable[[Callable[[Tensor], Tensor]], Iterable[Piece]]


class CheckpointSaver:
    """The checkpoints of one run.

    Args:
        comm: of all ranks; in the background a thread uses it, and nothing else may.
        tell: is given a line for each checkpoint, and for each that a thread could not write.

    Attributes:
        saved_at: iteration of the newest permanent checkpoint that is known to be complete; None before the first.
    """

    def __init__(
        self,
        root: Path,
        comm: ObjectCollectives,
        keep: RetentionPolicy | None = None,
        in_background: bool = False,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.root, self.comm, self.in_background = root, comm, in_background
        self._keep, self._tell = keep or RetentionPolicy(), tell
        self.saved_at: int | None = None
        self._snapshot = Snapshot()
        self._thread: Thread | None = None
        self._crash: Exception | None = None

    def save(self, iteration: int, source: PieceSource, meta: Mapping[str, JsonValue], permanent: bool = True) -> None:
        """Write a checkpoint, or begin to; one at a time, so that this waits for the one before.

        In the foreground a UserError says why it cannot be written, on all ranks.  In the background that is told at
        once, `saved_at` stays, and the next save is the next try.
        """
        self.wait()
        if not self.in_background:
            self._write(iteration, source(lambda tensor: tensor), meta, permanent)
            return
        self._snapshot.begin()
        pieces = list(source(self._snapshot.copy))
        self._snapshot.settle()
        self._thread = Thread(target=self._try, args=(iteration, pieces, meta, permanent), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written; raises what made a thread crash, but what it told of is past."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash

    def finish(self, iteration: int, source: PieceSource, meta: Mapping[str, JsonValue]) -> None:
        """Leave with a checkpoint of this iteration, which is now written in the foreground unless it is there."""
        self.wait()
        if self.saved_at != iteration:
            self.in_background = False
            self.save(iteration, source, meta)

    def _try(self, iteration: int, pieces: Iterable[Piece], meta: Mapping[str, JsonValue], permanent: bool) -> None:
        try:
            self._write(iteration, pieces, meta, permanent)
        except UserError as error:
            for problem in error.problems:
                self._tell(f"not saved, training goes on and the next save is the next try: {problem}")
        except Exception as crash:
            self._crash = crash
            self._tell(f"not saved: {crash!r}")

    def _write(self, iteration: int, pieces: Iterable[Piece], meta: Mapping[str, JsonValue], permanent: bool) -> None:
        place = self.root if permanent else self.root / NON_PERSISTENT
        folder = save(place, iteration, pieces, meta, self.comm)
        self.saved_at = iteration if permanent else self.saved_at
        self._tell(f"saved {folder}")
        if self.comm.mesh.rank == 0:
            self._clear(folder, iteration, permanent)

    def _clear(self, folder: Path, iteration: int, permanent: bool) -> None:
        try:
            prune(folder.parent, self._keep if permanent else RetentionPolicy(latest=1))
            if permanent:
                remove_non_persistent(self.root, iteration)
        except (OSError, UserError) as error:
            self._tell(f"checkpoint.save={self.root}: older checkpoints cannot be removed: {error}")


class Snapshot:
    """Memory that the next snapshot uses again: pinned where the tensors are on an accelerator."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._num_used = 0
        self._device: torch.device | None = None

    def begin(self) -> None:
        """What was copied so far may be overwritten."""
        self._num_used = 0

    def copy(self, x: Tensor) -> Tensor:
        """A copy, complete after `settle`."""
        is_on_host = x.device.type == "cpu"
        if self._num_used == len(self._held):
            self._held.append(x.new_empty(0))
        into = self._held[self._num_used]
        if (into.shape, into.dtype) != (x.shape, x.dtype) or into.device.type != "cpu":
            into = torch.empty(x.shape, dtype=x.dtype, pin_memory=not is_on_host)
            self._held[self._num_used] = into
        self._num_used += 1
        into.copy_(x.detach(), non_blocking=True)
        self._device = None if is_on_host else x.device
        return into

    def settle(self) -> None:
        """Wait until everything is copied."""
        if self._device is not None:
            torch.accelerator.synchronize(self._device)

    @property
    def num_bytes(self) -> int:
        """Host memory that is held."""
        return sum(tensor.nbytes for tensor in self._held)
