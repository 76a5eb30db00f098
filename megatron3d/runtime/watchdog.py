"""A run of many ranks never hangs without an end, and its end names the culprit.

Each rank's watchdog notes, twice a second, on a board that all can read: iteration, where its program is, and its
last collective.  Who makes no progress for too long, or loses a connection, has the notes compared:

    a note that is not renewed       that rank is dead, stopped, or its machine is gone
    else, who is not in a collective    keeps the others waiting
    else, who has done the fewest

Then all ranks end.  The main thread is looked at from outside (`sys._current_frames`), so that nothing is measured
while training goes well.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

from megatron3d.errors import UserError
from megatron3d.runtime.status_store import Board

PACKAGE = Path(__file__).parents[1]
WAITS_IN = "comm.py"
VERDICT = "verdict"
FRAMES = 4
# A collective and its axes.
Begun = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Note:
    """What a rank says of itself.

    Attributes:
        beat: grows with every note.
        calls: collectives begun so far.
        where: the innermost frames of the package, outermost first.
        still_s: seconds since anything of this changed.
    """

    beat: int
    host: str
    process: int
    iteration: int | None
    calls: int
    last_call: str
    where: tuple[str, ...]
    still_s: float

    @property
    def is_waiting(self) -> bool:
        """Whether the rank is inside of a collective."""
        return bool(self.where) and self.where[-1].startswith(WAITS_IN)

    def __str__(self) -> str:
        when = "before the first iteration" if self.iteration is None else f"after iteration {self.iteration}"
        call = f"last collective {self.last_call}" if self.last_call else "no collective yet"
        return f"{when}, in {' > '.join(self.where) or 'no code of ours'}; {call}; for {self.still_s:.0f} s"

    @staticmethod
    def read(text: str) -> Note:
        """What `json.dumps(asdict(note))` was made of."""
        values = json.loads(text)
        return Note(**{**values, "where": tuple(values["where"])})


def where_is(frame: FrameType | None) -> tuple[str, ...]:
    """The innermost `FRAMES` frames of the package below a frame, as `file:line function`."""
    found: list[str] = []
    while frame is not None and len(found) < FRAMES:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and path != Path(__file__):
            found.append(f"{path.relative_to(PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(found))


def verdict(before: Mapping[int, Note | None], after: Mapping[int, Note | None]) -> Iterator[str]:
    """Who is to blame, a line each, then where the others are; notes of all ranks from two moments some beats apart."""
    silent = [rank for rank, note in after.items() if note is None or note == before[rank]]
    answering = {rank: note for rank, note in after.items() if rank not in silent and note is not None}
    busy = [rank for rank, note in answering.items() if not note.is_waiting]
    if silent:
        blamed, what = silent, "does not answer"
    elif busy and len(busy) < len(answering):
        blamed, what = busy, "keeps the others waiting"
    else:
        least = min((note.iteration or 0, note.calls) for note in answering.values())
        blamed = [rank for rank, note in answering.items() if (note.iteration or 0, note.calls) == least]
        what = "has done the least" if len(blamed) < len(answering) else "waits, as all do"
    for rank in blamed:
        note = after[rank]
        said = "and was never heard of" if note is None else f"(host {note.host}, process {note.process}): {note}"
        yield f"rank {rank} {what} {said}"
    yield from _grouped({rank: note for rank, note in answering.items() if rank not in blamed})


def _grouped(notes: Mapping[int, Note]) -> Iterator[str]:
    """Where ranks are, those at one place together."""
    places: dict[str, list[int]] = {}
    for rank, note in notes.items():
        places.setdefault(str(note).rpartition("; for")[0], []).append(rank)
    for place, ranks in places.items():
        shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        yield f"rank{'s' * (len(ranks) > 1)} {shown}: {place}"


class Watchdog:
    """While entered, notes where this rank is, and ends it when it has made no progress for `timeout_s`.

    Args:
        end: leaves the process at once.
    """

    def __init__(self, board: Board, rank: int, world_size: int, timeout_s: float, end: Callable[[], None]) -> None:
        self._board, self._rank, self._world_size, self._timeout_s, self._end = board, rank, world_size, timeout_s, end
        self._beat_s = max(0.5, world_size / 500)
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._iteration: Callable[[], int | None] = lambda: None
        self._begun: Callable[[], tuple[int, Begun]] = lambda: (0, ("", ()))

    def follow(self, iteration: Callable[[], int], begun: Callable[[], tuple[int, Begun]]) -> None:
        """Note from now on how many iterations are done, how many collectives begun, and the last of these."""
        self._iteration, self._begun = iteration, begun

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After a connection was lost, the notes say whose; the thread goes on noting that this rank is alive."""
        if isinstance(error, Exception) and not isinstance(error, UserError) and _broke_in(trace) == WAITS_IN:
            self._tell(f"rank {self._rank} lost a connection")
        self._stop.set()
        self._thread.join(2 * self._beat_s + 10)  # a thread inside of the store when the process ends would abort it

    def _note(self, beat: int, still_s: float) -> Note:
        calls, (name, axes) = self._begun()
        last_call = f"{name} over {' x '.join(axes)}, the {calls}th" if calls else ""
        where = where_is(sys._current_frames().get(self._main))
        return Note(beat, socket.gethostname(), os.getpid(), self._iteration(), calls, last_call, where, still_s)

    def _watch(self) -> None:
        """Note, and compare with what was noted before."""
        beat, since, known, is_ending = 0, time.monotonic(), None, False
        while not self._stop.wait(self._beat_s if beat else 0):
            beat += 1
            note = self._note(beat, time.monotonic() - since)
            if (state := (note.iteration, note.calls, note.where)) != known:
                known, since = state, time.monotonic()
            try:
                self._board.post(str(self._rank), json.dumps(asdict(note)))
            except OSError:
                continue  # whoever keeps the board is gone: connections to it break, which is told elsewhere
            if time.monotonic() - since > self._timeout_s and not is_ending:
                is_ending = True
                threading.Thread(target=self._give_up, daemon=True).start()

    def _give_up(self) -> None:
        """End the process, with a word; meanwhile it goes on noting that it is alive."""
        self._tell(f"no progress for {self._timeout_s:.0f} s")
        self._end()

    def _tell(self, what: str) -> None:
        """The first to come compares the notes and says what it found; the others wait until it has."""
        try:
            if self._board.claim("speaker"):
                lines = [what, *verdict(*self._two_looks())]
                print("\n".join(f"> watchdog: {line}" for line in lines), file=sys.stderr, flush=True)
                self._board.post(VERDICT, "told")
                time.sleep(self._beat_s)  # rank 0's end is the end of the board
                return
            end_s = time.monotonic() + 10 * self._beat_s
            while self._board.read(VERDICT) is None and time.monotonic() < end_s:
                time.sleep(0.1)
        except OSError as error:
            said = f"{what}, and rank 0's process, where notes are kept, cannot be reached ({error})"
            print(f"> watchdog: rank {self._rank}: {said}", file=sys.stderr, flush=True)

    def _two_looks(self) -> Sequence[Mapping[int, Note | None]]:
        first = self._look()
        time.sleep(3 * self._beat_s)
        return first, self._look()

    def _look(self) -> dict[int, Note | None]:
        texts = {rank: self._board.read(str(rank)) for rank in range(self._world_size)}
        return {rank: Note.read(text) if text else None for rank, text in texts.items()}


def _broke_in(trace: TracebackType | None) -> str | None:
    """The innermost file of the package that an exception came through."""
    found: str | None = None
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        found = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else found
        trace = trace.tb_next
    return found
