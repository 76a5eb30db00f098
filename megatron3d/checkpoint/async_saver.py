"""Checkpoint saving: in the foreground before the next step, or in a background thread while training continues.

    training   | step | step | step | step | step | step | step | step ...
    copy              |      |                    |      |
    thread                   | write, fsync, gather, publish |  | write ...

Both run `store.save`.  The background thread gets copies in host memory and a separate connection to the rendezvous
store, by which rank 0 learns that all ranks have written before it publishes; training's connections must neither be
shared between threads nor wait for disks.  Unlike marker files, a store does not depend on how soon a file system such
as NFS shows new files, and a wait for a rank that died ends after a limit.

Copy of a rank's state in host memory, from which a checkpoint is written while training continues.

    training   | step 4   | step 5: forward, backward   | update | ...
    side                  | copy of the state after 4   |                the update waits for the copy
    thread                                              | write, fsync, publish

One flat buffer per dtype, of the size that is needed, is made when the run starts and used by every save.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from pydantic import JsonValue
from torch import Tensor

from megatron3d.checkpoint.pieces import Piece
from megatron3d.checkpoint.publish import (
    Best,
    RetentionPolicy,
    prune,
    remove_non_persistent,
    remove_superseded,
    write_best,
)
from megatron3d.checkpoint.store import save
from megatron3d.comm.interface import ObjectCollectives
from megatron3d.comm.objects import run_on_all_ranks
from megatron3d.config.validate.files import NON_PERSISTENT
from megatron3d.errors import UserError
from megatron3d.ops.recompute import SideStream, SideWork, host_memory, side_stream

# Returns the pieces that a rank writes, after passing each of their tensors through a function (such as a copy).
PieceSource = Callable[[Callable[[Tensor], Tensor]], Iterable[Piece]]
Buffers = dict[torch.dtype, Tensor]


class Snapshot:
    """Host memory for one copy of the state of a rank, overwritten by the next one.

    Args:
        device: the device of the tensors.
        stream: the stream that copies; None: a new side stream of the device.
        key: the key that asks for the copy, for messages.
    """

    def __init__(
        self, device: torch.device, stream: SideStream | None = None, key: str = "checkpoint.async_save=true"
    ) -> None:
        self._device, self._stream, self._key = device, stream or side_stream(device), key
        self._making: Future[Buffers] | None = None
        self._copying = SideWork()

    def allocate(self, source: PieceSource) -> None:
        """Start to make the memory for what `source` yields, in a thread, since page-locking takes seconds."""
        sizes = Counter[torch.dtype]()

        def measure(x: Tensor) -> Tensor:
            sizes[x.dtype] += x.numel()
            return x

        list(source(measure))
        thread = ThreadPoolExecutor(1, "snapshot")
        self._making = thread.submit(
            lambda: {dtype: host_memory(numel, dtype, self._device) for dtype, numel in sizes.items()}
        )
        thread.shutdown(wait=False)

    def take(self, source: PieceSource) -> list[Piece]:
        """Start to copy what `source` yields; return pieces whose tensors are complete after `wait`.

        Raises UserError where the memory cannot be page-locked.
        """
        buffers, used = self._made(source), Counter[torch.dtype]()
        copies: list[tuple[Tensor, Tensor]] = []

        def place(x: Tensor) -> Tensor:
            start = used[x.dtype]
            used[x.dtype] += x.numel()
            here = buffers[x.dtype][start : used[x.dtype]].view(x.shape)
            copies.append((here, x.detach()))
            return here

        def copy() -> None:
            for here, x in copies:
                here.copy_(x, non_blocking=True)

        pieces = list(source(place))
        assert used == {dtype: len(memory) for dtype, memory in buffers.items()}, "the state has another size"
        self._copying = self._stream.run(copy)
        return pieces

    def _made(self, source: PieceSource) -> Buffers:
        if self._making is None:
            self.allocate(source)
        assert self._making is not None, "allocate starts to make the memory"
        try:
            return self._making.result()
        except RuntimeError as error:
            raise UserError(f"{self._key}: {error}; leave it out, or use fewer ranks per node") from error

    def hold_update(self) -> None:
        """Let the next update of the state wait for the copy; the host does not wait."""
        self._copying.hold_compute()

    def wait(self) -> None:
        """Wait until the copy is complete."""
        self._copying.wait()

    @property
    def buffers(self) -> Buffers:
        """The memory of the copy, by dtype."""
        return self._making.result() if self._making else {}

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(memory.nbytes for memory in self.buffers.values())


class CheckpointSaver:
    """Saves the checkpoints of one run.

    Args:
        comm: communicator of all ranks; reserved for the background thread if there is one.
        snapshot: memory and stream of the copy that the background thread writes; None: on the CPU.
        log: called with a line for each checkpoint, and for each that the thread could not write.

    Attributes:
        saved_at: iteration of the newest permanent checkpoint known to be complete; None before the first.
        best: the complete checkpoint with the lowest validation loss; None before the first evaluation.
        num_bytes: bytes of tensors that this rank has written so far, and one for each old file that it has removed.
    """

    def __init__(
        self,
        root: Path,
        comm: ObjectCollectives,
        retention: RetentionPolicy | None = None,
        in_background: bool = False,
        log: Callable[[str], None] = lambda line: None,
        snapshot: Snapshot | None = None,
    ) -> None:
        self.root, self.comm = root, comm
        self.in_background = in_background
        self._retention, self._log = retention or RetentionPolicy(), log
        self.saved_at: int | None = None
        self.best: Best | None = None
        self.num_bytes = 0
        self._snapshot = snapshot or Snapshot(torch.device("cpu"))
        self._thread: Thread | None = None
        self._crash: Exception | None = None

    def prepare(self, source: PieceSource) -> None:
        """Start to make what the first save would otherwise wait for: the memory of the copy."""
        if self.in_background:
            self._snapshot.allocate(source)

    def hold_update(self) -> None:
        """Let the next update of the state wait until a save that was started has copied it."""
        self._snapshot.hold_update()

    def start_from(self, best: Best | None) -> None:
        """Take the best checkpoint of the run that is continued; remove the known one where that is a later one."""
        past, self.best = self.best, best
        if self.comm.mesh.rank == 0 and past and (best is None or past.iteration > best.iteration):
            remove_superseded(self.root, self._retention, past.iteration)

    def is_best(self, loss: float) -> bool:
        """Return whether a validation loss is below that of the best checkpoint, after waiting for the previous one."""
        self.wait()
        return math.isfinite(loss) and (self.best is None or loss < self.best.loss)

    def save(
        self,
        iteration: int,
        source: PieceSource,
        meta: Mapping[str, JsonValue],
        permanent: bool = True,
        best_loss: float | None = None,
    ) -> None:
        """Write a checkpoint, or start to write it in the background, after waiting for the previous one.

        In the foreground a failure raises UserError on all ranks.  In the background a failure is logged at once,
        `saved_at` stays, and the next save tries again; the caller calls `hold_update` before it changes the state.

        Args:
            best_loss: its validation loss, if that makes it the best one; it is permanent then.
        """
        self.wait()
        if not self.in_background:
            self._write(iteration, source(lambda tensor: tensor), meta, permanent, best_loss)
            return
        pieces = self._snapshot.take(source)
        write = partial(self._write, iteration, pieces, meta, permanent, best_loss)
        self._thread = Thread(target=self._write_in_thread, args=(write,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the background write; raise the exception of a thread that crashed, but no logged UserError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash

    def wait_for_progress(self, idle_s: float = 20.0) -> None:
        """Wait for the background write of a run that has failed, while this rank has written within `idle_s`.

        A rank that has ended would be waited for in vain.
        """
        thread, seen = self._thread, -1
        if thread is not None and thread.is_alive():
            self._log("the run has failed; waiting for the checkpoint that is being written")
        while thread is not None and thread.is_alive() and seen != self.num_bytes:
            seen = self.num_bytes
            thread.join(idle_s)

    def finish(self, iteration: int, source: PieceSource, meta: Mapping[str, JsonValue]) -> None:
        """Write a last checkpoint of this iteration in the foreground, unless it has been saved already.

        Returns on all ranks when rank 0 has removed older ones: launchers kill the last process of a job that goes on
        for long after the others.
        """
        self.wait()
        if self.saved_at != iteration:
            self.in_background = False
            self.save(iteration, source, meta)
        run_on_all_ranks(self.comm, lambda: None)

    def _write_in_thread(self, write: Callable[[], None]) -> None:
        try:
            self._snapshot.wait()
            write()
        except UserError as error:
            for problem in error.problems:
                self._log(f"not saved, training goes on and the next save is the next try: {problem}")
        except Exception as crash:
            self._crash = crash
            self._log(f"not saved: {crash!r}")

    def _write(
        self,
        iteration: int,
        pieces: Iterable[Piece],
        meta: Mapping[str, JsonValue],
        permanent: bool,
        best_loss: float | None,
    ) -> None:
        assert permanent or best_loss is None, "the best checkpoint is permanent"
        root = self.root if permanent else self.root / NON_PERSISTENT
        folder = save(root, iteration, pieces, meta, self.comm, self._count)
        self.saved_at = iteration if permanent else self.saved_at
        past = self.best
        if best_loss is not None:
            self.best = Best(iteration, best_loss)
        self._log(f"saved {folder}" + (", the best so far" if best_loss is not None else ""))
        if self.comm.mesh.rank == 0:
            self._remove_old(folder, iteration, permanent, past)

    def _count(self, num_bytes: int = 1) -> None:
        self.num_bytes += num_bytes

    def _remove_old(self, folder: Path, iteration: int, permanent: bool, past: Best | None) -> None:
        """Remove what the policy does not retain; that a new checkpoint is the best one is recorded before.

        Args:
            past: the best checkpoint before this one.
        """
        try:
            if not permanent:
                prune(folder.parent, RetentionPolicy(latest=1), self._count)
                return
            if self.best != past:
                write_best(self.root, self.best)
                if past and past.iteration != iteration:
                    remove_superseded(self.root, self._retention, past.iteration, self._count)
            prune(self.root, self._retention, self._count, self.best and self.best.iteration)
            remove_non_persistent(self.root, iteration, self._count)
        except (OSError, UserError) as error:
            self._log(f"checkpoint.save={self.root}: older checkpoints cannot be removed: {error}")
