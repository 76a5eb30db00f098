"""In-memory checkpoints: each rank keeps a copy of its boxes in host memory, and one of another rank's (GEMINI).

    training     | step 10 | step 11 | step 12 ...        | step 20 | ...
    copy                   |                                        |         the update of the next step waits for it
    thread                 | to the peer, from the source |         | ...     over connections of its own

    rank on host A   two copies of its own boxes    two of those of a rank on host B
    rank on host B   two copies of its own boxes    two of those of a rank on host A

The older copy stays until all ranks have the newer one: at any moment one step is complete without a lost node, as
long as the nodes of a rank and of its peer are not lost together.  (Wang et al. 2023, SOSP, "GEMINI: Fast Failure
Recovery in Distributed Training with In-Memory Checkpoints")
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from megatron3d.checkpoint.async_saver import PieceSource, Snapshot
from megatron3d.checkpoint.held import Held, HeldStep
from megatron3d.checkpoint.pieces import Piece, dtype_name
from megatron3d.comm.interface import ObjectCollectives
from megatron3d.comm.objects import run_on_all_ranks
from megatron3d.comm.peer_link import PeerLink
from megatron3d.errors import RunFailed
from megatron3d.ops.recompute import side_stream
from megatron3d.parallel.layout import box_shape
from megatron3d.parallel.peers import NUM_COPIES

# Seconds that a step may wait for the copies of the snapshot before without a word.
QUIET_WAIT_S = 1.0


@dataclass
class _Copy:
    """Memory of one step: this rank's boxes, and those of another rank; each is a step once it is complete."""

    mine: Snapshot
    theirs: Mapping[torch.dtype, Tensor]
    their_pieces: Sequence[Piece]
    my_step: HeldStep | None = None
    their_step: HeldStep | None = None


class InMemoryCheckpoints:
    """Copies of the state in the host memory of ranks.

    Args:
        comm: communicator of all ranks, reserved for the background thread.
        link: connections to the rank that keeps a copy, and from the one whose copy this rank keeps.
        device: the device of the state.
        log: called with a line where a step had to wait.

    Attributes:
        sent_bytes: bytes that this rank has sent to its peer.
    """

    def __init__(
        self,
        comm: ObjectCollectives,
        link: PeerLink,
        device: torch.device,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._comm, self._link, self._log = comm, link, log
        stream = side_stream(device)
        self._snapshots = [Snapshot(device, stream, "checkpoint.in_memory_interval") for _ in range(NUM_COPIES)]
        self._copies: list[_Copy] = []
        self._num_taken = 0
        self._thread: Thread | None = None
        self._failure: Exception | None = None
        self.sent_bytes = 0

    def prepare(self, source: PieceSource) -> None:
        """Make the memory of all copies; all ranks call this together."""
        for snapshot in self._snapshots:
            snapshot.allocate(source)
        first = self._snapshots[0]
        pieces = first.take(source)
        theirs = json.loads(self._swap_bytes(json.dumps(_describe(first, pieces)).encode()))
        first.wait()
        self._copies = [_Copy(snapshot, *_room(theirs)) for snapshot in self._snapshots]
        self.sent_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        theirs = sum(memory.nbytes for copy in self._copies for memory in copy.theirs.values())
        return sum(snapshot.num_bytes for snapshot in self._snapshots) + theirs

    def take(self, meta: Mapping[str, Any], source: PieceSource) -> None:
        """Start a checkpoint of this step, after the one before is complete on all ranks.

        The caller calls `hold_update` before it changes the state.  Raises RunFailed where the last one failed.
        """
        begin = time.monotonic()
        self.wait()
        waited_s = time.monotonic() - begin
        if waited_s > QUIET_WAIT_S:
            where = f"in-memory checkpoint of iteration {meta['iteration']}"
            how = "a larger checkpoint.in_memory_interval makes that rarer"
            self._log(f"{where}: waited {waited_s:.1f} s for the one before; {how}")
        copy = self._copies[self._num_taken % NUM_COPIES]
        self._num_taken += 1
        copy.my_step = copy.their_step = None
        pieces = copy.mine.take(source)
        step = HeldStep(meta, pieces)
        self._thread = Thread(target=self._run, args=(copy, step), name="in-memory checkpoint", daemon=True)
        self._thread.start()

    def hold_update(self) -> None:
        """Let the next update of the state wait until the checkpoint that was started has copied it."""
        self._snapshots[(self._num_taken - 1) % NUM_COPIES].hold_update()

    def held(self) -> Held:
        """Return the steps in this rank's memory that are complete here, its own boxes and another rank's.

        This communicates nothing.  The newest one may be incomplete elsewhere.
        """
        found = (step for copy in self._copies for step in (copy.my_step, copy.their_step))
        return [step for step in found if step is not None]

    def wait(self) -> None:
        """Wait until the checkpoint that was started is complete on all ranks; raise RunFailed where that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise RunFailed(f"in-memory checkpoint: {self._failure}") from self._failure

    def forget(self) -> None:
        """Drop all steps, on all ranks, where the run goes back to an earlier one."""
        self.wait()
        for copy in self._copies:
            copy.my_step = copy.their_step = None

    def _run(self, copy: _Copy, step: HeldStep) -> None:
        try:
            self._complete(copy, step)
        except Exception as error:  # of a connection to a rank that is gone; training finds the same
            self._failure = error

    def _complete(self, copy: _Copy, step: HeldStep) -> None:
        """Send a copy that was started, receive another rank's, and wait until all ranks have done so."""
        copy.mine.wait()
        copy.my_step = step
        meta = json.loads(self._swap_bytes(json.dumps(step.meta).encode()))
        mine, theirs = (
            [memory[dtype] for dtype in sorted(memory, key=str)] for memory in (copy.mine.buffers, copy.theirs)
        )
        self._link.swap(mine, theirs)
        self.sent_bytes += sum(each.nbytes for each in mine)
        copy.their_step = HeldStep(meta, copy.their_pieces)
        run_on_all_ranks(self._comm, lambda: None)

    def _swap_bytes(self, content: bytes) -> bytes:
        """Send bytes of any number to the peer, and return those of the rank that sends to this one."""
        mine, size = torch.frombuffer(bytearray(content), dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
        self._link.swap([torch.tensor([len(mine)])], [size])
        theirs = torch.empty(int(size), dtype=torch.uint8)
        self._link.swap([mine], [theirs])
        self.sent_bytes += size.nbytes + mine.nbytes
        return theirs.numpy().tobytes()


def _describe(snapshot: Snapshot, pieces: Sequence[Piece]) -> list[Any]:
    """Return what another rank needs to hold these pieces: the size of each flat buffer, and where in it they are."""
    sizes = {dtype_name(dtype): len(memory) for dtype, memory in snapshot.buffers.items()}
    places = [
        [each.name, each.shape, each.box, dtype_name(x.dtype), x.stride(), x.storage_offset()]
        for each in pieces
        for x in [each.tensor]
    ]
    return [sizes, places]


def _room(described: Any) -> tuple[dict[torch.dtype, Tensor], list[Piece]]:
    """Return memory for another rank's pieces as it describes them, and the pieces in it."""
    sizes, places = described
    memory = {name: torch.empty(size, dtype=getattr(torch, name)) for name, size in sizes.items()}
    pieces = []
    for name, shape, ends, dtype, stride, offset in places:
        box = tuple((low, high) for low, high in ends)
        pieces.append(Piece(name, tuple(shape), box, memory[dtype].as_strided(box_shape(box), stride, offset)))
    return {each.dtype: each for each in memory.values()}, pieces
