"""Processes of an elastic run: who is left when some are lost, who decides, and the ranks that they get.

Every process serves a store of its own from the start, so that the death of none takes the others' meeting place:

    lost    ->  sign in at the store of the lowest process that answers: the leader
            ->  the leader waits for all that are not known to be dead, decides, and publishes ranks and layout
            ->  the chosen connect under these ranks: the next epoch; the others stay signed in, as spares

A process that comes too late finds a newer epoch without itself, and is a spare from then on.  A loss while an epoch
connects begins another one.  All waits are bounded, but those of spares for the run's end.

    some are slow, or others wait to join  ->  all leave the epoch after the same step, and agree in the same way

A process that joins signs in at the leader's store without a number, which it gets with the next epoch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megatron3d.errors import ExitCode, RunFailed
from megatron3d.runtime.connections import (
    Liveness,
    Responder,
    ask,
    local_address,
    open_sockets,
    shut_down,
    stop_polling,
)
from megatron3d.runtime.epochs import Epoch, Member, Note, Planner, choose, newest
from megatron3d.runtime.joining import Meeting, read_meeting
from megatron3d.runtime.launcher_env import LauncherEnv
from megatron3d.runtime.machine import CPU_BACKEND, GPU_BACKEND
from megatron3d.runtime.waits import LOSSES, keep_for_ever
from megatron3d.runtime.watchdog import Losses, Watchdog

# The leader waits so long for a process that may live but does not answer; one whose store answers, and which is late,
# gets as long as a rank without progress.
GRACE_S = 5.0
# Limit for an answer of another process's store, and time between two looks for a process or a decision.
ANSWER_S, POLL_S = 3.0, 0.05
# Losses in a row without a step in between, after which a run fails.
MAX_FRUITLESS = 5
# The processes wait so long at the end until spares have read it.
FAREWELL_S = 5.0
# Limit for the wait at the end for ranks that are not there yet.
LEAVE_S = 20.0
# Processes whose stores are tried at once.
PROBES = 32
# Keys of an epoch's meetings: ranks that leave hand over first what they have, and then the others train.
PHASES, HAND_OVER, TRAIN = 2, 0, 1
NEWS, ENDED = "news", "ended"
# Counters at a store: processes that have signed in to join, and those of them that were let in, or had ended.
JOINERS, ADMITTED = "joiners", "admitted"


class RanksLost(RuntimeError):
    """Some ranks of an elastic run were lost: the others can go on without them."""


class HandOver(Protocol):
    """Gives the first `num_kept` of the connected ranks what those have in memory that leave.

    It returns whether this process has something in memory then.
    """

    def __call__(self, rank: int, num_ranks: int, num_kept: int) -> bool: ...


class Connect(Protocol):
    """Connects the ranks of an epoch, and watches them."""

    def meet(self, env: LauncherEnv, epoch: int) -> Any:
        """Make the process group of all ranks, and return the store that they meet at."""

    def watch(self, env: LauncherEnv, epoch: int, losses: Losses) -> Watchdog:
        """Return a watchdog that tells `losses` instead of ending this process."""


class Members:
    """All processes of an elastic run, seen from one of them; while entered, it is connected with the others.

    Args:
        env: the launcher's; its store is the meeting place of the first epoch.
        limit_s: time that a live process may take to sign in.
        joined: folder of the run under way that this process joins; None: it was launched with the others.

    Attributes:
        number: of this process; -1 until it is let into a run that it joins.
        num_launched: number of ranks that the run was launched with.
        epoch: the one that this process trains in, or was in last.
        env: rank, world size and meeting place in that epoch.
        watchdog: that of the epoch.
        store: the meeting place; None in an epoch without other ranks.
        place_at_loss: what `follow` said then.
        lost_at_s: time of the last loss, as this process noticed it; connect_s: seconds until the ranks had met again.
    """

    def __init__(self, env: LauncherEnv, connect: Connect, limit_s: float, joined: Path | None = None) -> None:
        self._first, self.env, self._connect, self._limit_s = env, env, connect, limit_s
        self.number, self._joined = -1 if joined else env.rank, joined
        self.num_launched = env.world_size
        self._loss_lock, self._lost = threading.Lock(), threading.Event()
        self._reason, self._blamed = "", set[int]()
        self._dead, self._slow, self._left = set[int](), set[int](), dict[int, int]()
        self._has_gone = threading.Event()
        self._attempt = self._num_fruitless = 0
        self._holds, self._key = False, 0
        self._place: Callable[[], object] = lambda: None
        self._is_stopped: Callable[[], bool] = lambda: False
        self.place_at_loss: object = None
        self.lost_at_s = self.connect_s = 0.0
        self.watchdog: Watchdog | None = None
        self.store: Any = None
        self._responder = Responder()
        self._server = _serve_store()
        self._kept = {*open_sockets()}  # connections of other parts of the process, and to its own store
        self._made: set[str] | None = None
        self._entries = set[int]()
        self.book: dict[int, Member] = {}
        self.epoch = Epoch(-1, ()) if joined else Epoch(0, tuple(range(env.world_size)))
        self._ranks = self.epoch.members

    @property
    def is_new(self) -> bool:
        """Whether this process waits to be let into a run under way."""
        return self.number < 0

    @property
    def is_leader(self) -> bool:
        """Whether this process serves the store of the epoch."""
        return self.number == self.epoch.leader

    def __enter__(self) -> Members:
        LOSSES.is_lost = self._lost.is_set
        if self._joined is not None:
            self._reason = f"waits to join the run in {self._joined}"
            self._read_meeting(self._joined)
            return self
        self.store = self._connect.meet(self._first, 0)
        self.store.set(f"member/{self.number}", json.dumps(self._seen_from(self._first.address, self._first.port)))
        texts = self.store.multi_get([f"member/{number}" for number in range(self._first.world_size)])
        self.book = {number: Member(*json.loads(text)) for number, text in enumerate(texts)}
        self._watch()
        return self

    def _seen_from(self, host: str, port: int) -> Member:
        """Return this process under the address by which another one reaches it."""
        address = local_address(host, port)
        return Member(self.number, address, self._server.port, self._responder.port, socket.gethostname(), os.getpid())

    def _read_meeting(self, folder: Path) -> None:
        """Find the processes of the run that this one joins."""
        meeting = read_meeting(folder)
        self.book, self._dead = {member.number: member for member in meeting.members}, set()
        self.num_launched = meeting.world_size

    def meeting(self, config: Mapping[str, Any]) -> Meeting:
        """Return what processes must know that join the run, which has this configuration."""
        return Meeting(list(self.book.values()), self.num_launched, config)

    def _watch(self) -> None:
        losses = Losses(self._lose, self._state_of, self._state_of_keeper)
        self.watchdog = self._connect.watch(self.env, self._key, losses).__enter__()

    def note_connections(self) -> None:
        """Take the connections that exist now for those of this epoch; later ones are no concern of other ranks."""
        self._made = {*open_sockets()} - self._kept

    # A loss

    def _lose(self, reason: str, ranks: Sequence[int] = ()) -> None:
        """Note that ranks of this epoch are lost, and end all waits for other ranks; called from any thread."""
        members = {self._ranks[rank] for rank in ranks}
        with self._loss_lock:
            self._blamed |= members
            if self._lost.is_set():
                return
            self._reason, self.lost_at_s, self._responder.left = reason, time.time(), self.epoch.number
            self._has_gone.clear()
            self.place_at_loss = self._place()
            self._lost.set()
        if self.number in members:
            print(f"> rank {self.env.rank} ends: the other ranks go on without it", file=sys.stderr, flush=True)
            os._exit(ExitCode.CRASH)
        if self.watchdog is not None:
            self.watchdog.tell_loss(reason)
        _abort_groups()
        self._shut_down()
        threading.Thread(target=self._keep_shut, daemon=True).start()

    def _shut_down(self) -> None:
        shut_down(self._connections(), self._ports())

    def _connections(self) -> set[str]:
        """Return the connections of this epoch."""
        return {*open_sockets()} - self._kept if self._made is None else self._made

    def _keep_shut(self) -> None:
        """End also connections that the main thread makes, or completes, until it notices the loss."""
        while not self._has_gone.wait(10 * POLL_S):
            with self._loss_lock:
                if not self._has_gone.is_set():  # then it connects with others
                    self._shut_down()

    def _ports(self) -> set[int]:
        """Return the ports that this process serves: other processes still need them."""
        own = {self._server.port, self._responder.port}
        return own | {self._first.port} if self.number == 0 else own

    # A change that is no loss

    @property
    def num_spares(self) -> int:
        """Number of spares that can take another rank's place."""
        return len({*self.epoch.spares} - {*self.epoch.slow})

    def num_waiting(self) -> int:
        """Return how many processes wait to join, on rank 0."""
        store = self._server if self.is_leader else self._reach(self.epoch.leader)
        if store is not None:
            with contextlib.suppress(RuntimeError):
                return int(store.add(JOINERS, 0) - store.add(ADMITTED, 0))
        return 0

    def change(self, reason: str, slow: Sequence[int] = ()) -> NoReturn:
        """Leave the epoch, so that the next one is without the slow ranks, which are spares then, and with new ones.

        All ranks call it after the same step.
        """
        self._slow |= {self._ranks[rank] for rank in slow}
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self._leave_together(self.store)
        self._lose(reason)
        raise RanksLost(reason)

    def keep(self, holds: bool) -> None:
        """Note whether this process has something of the training in memory."""
        self._holds = holds

    def is_loss(self, error: BaseException, is_connection: bool) -> bool:
        """Return whether an exception means that ranks are lost, and this process can go on without them.

        Args:
            is_connection: the exception is of a connection to another rank.
        """
        if not isinstance(error, Exception) or not (self._lost.is_set() or is_connection):
            return False
        self._lose(f"rank {self.env.rank} lost a connection")
        return True

    # The next epoch

    def follow(self, place: Callable[[], object]) -> None:
        """Ask for the place in training when a loss is noticed, before kernels that wait for others are aborted."""
        self._place = place

    def stop_spare(self, is_stopped: Callable[[], bool]) -> None:
        """End the wait of a spare once this says so, unless the others meet at its store."""
        self._is_stopped = is_stopped

    def regroup(self, plan: Planner, made_progress: bool, hand_over: HandOver) -> Epoch | ExitCode:
        """Leave the epoch, agree on the next one, and connect; return it, or the exit code of a run that has ended.

        A spare returns when it gets a rank, or when the run ends.  Raises RunFailed where the others cannot go on, and
        RanksLost where more are lost meanwhile: the caller tries again.

        Args:
            hand_over: is called where ranks leave that have something in memory.
        """
        self._num_fruitless = 0 if made_progress else self._num_fruitless + 1
        if self._num_fruitless > MAX_FRUITLESS:
            raise RunFailed(f"ranks were lost {self._num_fruitless} times in a row without a step in between")
        print(f"> rank {self.env.rank}: {self._reason}", file=sys.stderr, flush=True)
        self._leave_epoch()
        while True:
            decided = self._agree(plan)
            if isinstance(decided, ExitCode):
                return decided
            self._stop_culprits(decided)
            if decided.leaving:
                everyone = (*decided.members, *decided.leaving)
                self._begin_epoch(decided, everyone, HAND_OVER)
                self._hold(hand_over, everyone.index(self.number), decided)
                self._leave_epoch()
            if self.number in decided.members:
                self._begin_epoch(decided, decided.members, TRAIN)
                return decided

    def _hold(self, hand_over: HandOver, rank: int, epoch: Epoch) -> None:
        """Hand over what is in memory, among all ranks that have something; raises RanksLost."""
        try:
            self._holds = hand_over(rank, len(epoch.members) + len(epoch.leaving), len(epoch.members))
            self._leave_together(self.store)
        except (RuntimeError, OSError) as error:
            self._lose(f"rank {rank} cannot hand over: {str(error).splitlines()[0]}")
            raise RanksLost(self._reason) from None

    def _leave_epoch(self) -> None:
        """Stop the watchdog and forget the process groups of this epoch, whose connections have ended."""
        with self._loss_lock:
            self._has_gone.set()
        self._stop_watching()
        _destroy_groups()
        stop_polling(self._connections(), self._ports())
        self.store = None

    def _stop_watching(self) -> None:
        if self.watchdog is not None:
            self.watchdog.__exit__(None, None, None)
            self.watchdog = None

    def _begin_epoch(self, epoch: Epoch, members: Sequence[int], phase: int) -> None:
        """Connect with the other ranks of an epoch; raises RanksLost where one of them is not there in time.

        Args:
            members: its own, or to hand over also those that leave.
            phase: `HAND_OVER` or `TRAIN`, which meet at different keys.
        """
        self._learn(epoch)
        leader, rank = self.book[epoch.leader], members.index(self.number)
        self._fresh_loss()
        self.epoch, self._made = epoch, None
        self._kept = {*open_sockets()}
        began_s = time.monotonic()
        self.env = replace(self._first, rank=rank, world_size=len(members), address=leader.host, port=leader.port)
        self._ranks, self._key = tuple(members), PHASES * epoch.number + phase
        if len(members) == 1:
            return
        try:
            self._watch()
            self.store = self._connect.meet(self.env, self._key)
        except (RuntimeError, OSError, ValueError) as error:
            self._lose(f"rank {rank} cannot connect: {str(error).splitlines()[0]}")
            raise RanksLost(self._reason) from None
        self.connect_s = time.monotonic() - began_s

    def _learn(self, epoch: Epoch) -> None:
        """Note which processes have joined."""
        self.book |= {member.number: member for member in epoch.joined}

    def _fresh_loss(self) -> None:
        with self._loss_lock:
            self._blamed, self._reason = set(), ""
            self._lost.clear()

    def _stop_culprits(self, epoch: Epoch) -> None:
        """End lost processes on this machine, which may only be stopped: one that goes on later would do harm."""
        here = socket.gethostname()
        for number in epoch.lost:
            if self.book[number].machine == here:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.book[number].pid, signal.SIGKILL)

    def _agree(self, plan: Planner) -> Epoch | ExitCode:
        """Return the next epoch that this process is in, or the exit code of the run."""
        self._attempt += 1
        while True:
            leader, store = self._find_leader()
            if store is None and self.is_new:
                self._look_again()
                continue
            decided = self._lead(plan) if store is None else self._follow(leader, store)
            if decided is not None:
                return decided

    def _look_again(self) -> None:
        """Read again which processes the run has, none of which answers; raises RunFailed where that is so for long."""
        assert self._joined is not None, "only a process that joins is new"
        if self._attempt > GRACE_S / ANSWER_S + 1:
            raise RunFailed(f"--join: the run in {self._joined} has ended; start it again without --join")
        self._attempt += 1
        time.sleep(ANSWER_S)
        self._read_meeting(self._joined)

    def _find_leader(self) -> tuple[int, Any]:
        """Return the lowest process that answers, and a connection to its store: None where it is this process."""
        silent = set[str]()
        for number, member in sorted(self.book.items()):
            if number == self.number:
                break
            if number in self._dead or number in self._blamed or member.machine in silent:
                continue
            if (store := self._reach(number)) is not None:
                return number, store
            if number not in self._dead and member.machine != socket.gethostname():
                silent.add(member.machine)
        return self.number, None

    def _ask(self, number: int) -> Liveness:
        """Return what is known of a process now; that it has ended is kept."""
        member = self.book[number]
        answer, self._left[number] = ask(member.host, member.responder, ANSWER_S)
        if answer is Liveness.ENDED:
            self._dead.add(number)
        return answer

    def _reach(self, number: int) -> Any:
        """Return a connection to a process's store; None where it does not answer.

        The store of one that answers may be late, and is tried again: others find it, and it must not be passed over.
        """
        end_s = time.monotonic() + self._limit_s
        while self._ask(number) is Liveness.YES and time.monotonic() < end_s:
            with contextlib.suppress(RuntimeError):
                return _connect_store(self.book[number])
        return None

    def _state_of(self, rank: int, is_silent: bool) -> str | None:
        """Return what is wrong with the process of a rank: one that only does not answer may be late."""
        answer = self._ask(number := self._ranks[rank])
        if self._left[number] >= self.epoch.number:  # and it could tell nobody
            self._lose(f"the process of rank {rank} has left, since ranks are lost")
        return answer.value if answer is Liveness.ENDED or (is_silent and answer is Liveness.NONE) else None

    def _state_of_keeper(self) -> str | None:
        """Return what is wrong with the process whose store this epoch uses, which takes no heartbeats."""
        answer = self._ask(self.epoch.leader)
        if answer is Liveness.NONE:
            self._blamed.add(self.epoch.leader)
        return None if answer is Liveness.YES else answer.value

    def _note(self) -> Note:
        lost, slow = (tuple(sorted(numbers)) for numbers in (self._blamed | self._dead, self._slow))
        return Note(self._attempt, self.epoch, lost, self._holds, slow)

    # As one of the others

    def _follow(self, leader: int, store: Any) -> Epoch | ExitCode | None:
        """Sign in and wait for a decision; None: the leader does not answer any more, takes too long, or is none."""
        look_s, end_s = time.monotonic() + GRACE_S, time.monotonic() + 2 * self._limit_s + 2 * GRACE_S
        next_s = 0.0
        guard = self._guard(leader)
        try:
            key = self._sign_in(leader, store)
            while not store.check([key]):
                time.sleep(POLL_S)
                if time.monotonic() < next_s:
                    continue
                next_s = time.monotonic() + 10 * POLL_S
                if store.check([ENDED]):
                    return self._bid_farewell(store, int(store.get(ENDED)))
                if self._is_stopped() and self.number not in self.epoch.members:
                    return self._bid_farewell(store, ExitCode.STOPPED)
                if store.check([NEWS]):
                    self._hear(Epoch.of(json.loads(store.get(NEWS))))
                if time.monotonic() > look_s:
                    look_s = time.monotonic() + GRACE_S
                    if self._has_passed_over(leader):
                        return None
                if self.number in self.epoch.members and time.monotonic() > end_s:
                    self._blamed.add(leader)
                    return None
            values = json.loads(store.get(key))
        except RuntimeError:
            self._ask(leader)
            return None
        finally:
            guard.set()
        if "failed" in values:
            raise RunFailed(values["failed"])
        decided = Epoch.of(values)
        self._learn(decided)
        if self.is_new:
            self._enter(decided)
        return decided if self.number in (*decided.members, *decided.leaving) else None

    def _sign_in(self, leader: int, store: Any) -> str:
        """Tell the leader that this process is here, and return the key of its decision."""
        if not self.is_new:
            store.set(f"present/{self.number}", json.dumps(asdict(self._note())))
            return f"decision/{self.number}/{self._attempt}"
        entry, member = store.add(JOINERS, 1), self.book[leader]
        store.set(f"joiner/{entry}", json.dumps(self._seen_from(member.host, member.port)))
        return f"decision/joiner {entry}"

    def _enter(self, epoch: Epoch) -> None:
        """Take the number under which this process was let into the run."""
        mine = self._server.port, os.getpid(), socket.gethostname()
        (self.number,) = (each.number for each in epoch.joined if (each.port, each.pid, each.machine) == mine)
        self.epoch = epoch

    def _has_passed_over(self, leader: int) -> bool:
        """Return whether a lower process answers now that did not when the leader was looked for."""
        passed_over = [each for each in self.book if each < leader and each not in self._dead | self._blamed]
        return any(self._ask(each) is Liveness.YES for each in passed_over)

    def _guard(self, leader: int) -> threading.Event:
        """End the connection to the leader's store where it does not answer, until the event is set."""
        done, names = threading.Event(), {*open_sockets()} - self._kept

        def watch() -> None:
            while not done.wait(1.0):
                if self._ask(leader) is not Liveness.YES and self._ask(leader) is not Liveness.YES:
                    shut_down(names, self._ports())
                    return

        threading.Thread(target=watch, daemon=True).start()
        return done

    def _hear(self, news: Epoch) -> None:
        """Become a spare where the others have begun an epoch without this process."""
        if news.number <= self.epoch.number or self.number in news.members or self.is_new:
            return
        self._learn(news)
        if self.number in self.epoch.members:
            print(f"> rank {self.env.rank} is spare: {len(news.members)} ranks train", file=sys.stderr, flush=True)
        self.epoch = news

    def _bid_farewell(self, store: Any, code: int) -> ExitCode:
        """Return the exit code of this spare, and say that nobody need wait for it."""
        store.add("farewells", 1)
        return ExitCode(code)

    # As the leader

    def _lead(self, plan: Planner) -> Epoch | ExitCode | None:
        """Wait for the others, decide, and publish the decision."""
        began_s = time.monotonic()
        notes = self._wait_for_notes()
        if notes is None:
            return ExitCode(int(self._server.get(ENDED)))
        last = newest(notes)
        self._learn(last)
        new = self._let_in()
        keys = {number: f"{number}/{note.attempt}" for number, note in notes.items()} | new
        self._probe([each for each in notes if each in last.spares])
        lost = self._dead.union(*(note.lost for note in notes.values())) - {self.number}
        here = sorted({*keys} - lost)
        slow = {*last.slow}.union(*(note.slow for note in notes.values()))
        agreed_s = time.monotonic()
        try:
            members, layout = choose(last, here, slow, plan, has_new=bool(new))
        except Exception as error:
            self._publish({each: keys[each] for each in here}, {"failed": str(error)})
            raise RunFailed(str(error)) from error
        leaving = tuple(each for each in here if each not in members and each in notes and notes[each].holds)
        seconds = {"agree": agreed_s - began_s, "plan": time.monotonic() - agreed_s}
        epoch = Epoch(
            1 + last.number,
            members,
            self.number,
            layout,
            lost=tuple(sorted({*last.members} - {*here})),
            spares=tuple(each for each in here if each not in members),
            leaving=leaving,
            slow=tuple(sorted(slow)),
            joined=tuple(each for number, each in sorted(self.book.items()) if number >= self.num_launched),
            new=tuple(new),
            seconds=seconds,
        )
        self._server.set(NEWS, json.dumps(asdict(epoch)))
        self._publish({each: keys[each] for each in (*members, *leaving, *new)}, asdict(epoch))
        if self.number in (*members, *leaving):
            return epoch
        self.epoch = epoch
        return None

    def _let_in(self) -> dict[int, str]:
        """Give numbers to the processes that wait to join; return the key of each one's decision."""
        found = dict[int, str]()
        for entry in range(1, self._server.add(JOINERS, 0) + 1):
            if entry in self._entries or not self._server.check([f"joiner/{entry}"]):
                continue
            self._entries.add(entry)
            self._server.add(ADMITTED, 1)
            number = max(self.book) + 1
            self.book[number] = Member(*json.loads(self._server.get(f"joiner/{entry}")))._replace(number=number)
            if self._ask(number) is Liveness.YES:
                found[number] = f"joiner {entry}"
        return found

    def _publish(self, keys: Mapping[int, str], decision: Mapping[str, Any]) -> None:
        """Publish a decision for some processes, each under its key."""
        for number, key in keys.items():
            if number != self.number:
                self._server.set(f"decision/{key}", json.dumps(decision))
                self._server.delete_key(f"present/{number}")

    def _wait_for_notes(self) -> dict[int, Note] | None:
        """Return the notes of all processes that are here, this one's included; None where the run has ended.

        Spares look less often for their leader's end than ranks that train notice it, and are waited for a while.  A
        spare that leads waits until one that trained has signed in, or none of them is left, nor has answered for long.
        """
        began_s = heard_s = time.monotonic()
        silent = set[int]()
        while not self._server.check([ENDED]):
            notes = dict(self._valid_notes())
            members, spares = newest(notes).members, newest(notes).spares
            known = {number for note in notes.values() for number in note.lost} | self._dead | silent
            missing = [each for each in (*members, *spares) if each not in notes and each not in known]
            has_active = any(number in members for number in notes)
            if not missing:
                return notes
            waited_s = time.monotonic() - began_s
            heard_s = time.monotonic() if self._probe(missing) or has_active else heard_s
            if time.monotonic() - heard_s > self._limit_s:
                silent |= {*missing}
            if waited_s > GRACE_S and has_active:
                silent |= {each for each in missing if each in spares or self._ask(each) is not Liveness.YES}
            if waited_s > self._limit_s + GRACE_S and has_active:
                silent |= {*missing}
            time.sleep(POLL_S if has_active else 10 * POLL_S)
        return None

    def _valid_notes(self) -> Iterator[tuple[int, Note]]:
        """Yield all notes but those from before an epoch that their process has trained in since."""
        notes = {self.number: self._note()}
        for number in self.book:
            if number != self.number and self._server.check([f"present/{number}"]):
                notes[number] = Note.of(self._server.get(f"present/{number}"))
        last = newest(notes)
        for number, note in notes.items():
            if number not in last.members or note.epoch.number == last.number:
                yield number, note

    def _probe(self, numbers: Sequence[int]) -> bool:
        """Find out which of some processes have ended, many at once; return whether any of them answers."""
        with ThreadPoolExecutor(PROBES) as pool:
            return Liveness.YES in [*pool.map(self._ask, numbers)]

    # The end

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        LOSSES.is_lost = None
        if self.watchdog is not None:
            self.watchdog.__exit__(kind, error, trace)  # type: ignore[arg-type]

    def end(self, code: int) -> None:
        """Leave a run that has ended when all its ranks do, so that none takes the first one's end for a loss.

        Spares are told; the process whose store they wait at waits until they have read it.
        """
        if self.number not in self.epoch.members:
            return
        self._stop_watching()
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self._leave_together(self.store)
            _destroy_groups()
        if not (self.is_leader or self.env.rank == 0):
            return
        num_others = len(self.epoch.spares) + self.num_waiting()
        store = self._server if self.is_leader or not num_others else self._reach(self.epoch.leader)
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(ENDED, str(int(code)))
        end_s = time.monotonic() + FAREWELL_S * self.is_leader
        while self._server.add("farewells", 0) < num_others and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def _leave_together(self, store: Any) -> None:
        """Wait until all ranks of the epoch are here."""
        count, all_left = f"left {self._key}", f"all left {self._key}"
        num_left, end_s = store.add(count, 1), time.monotonic() + LEAVE_S
        while self.env.rank == 0 and num_left < self.env.world_size and time.monotonic() < end_s:
            time.sleep(POLL_S)
            num_left = store.add(count, 0)
        if self.env.rank == 0:
            store.set(all_left, "")
        store.wait([all_left], timedelta(seconds=LEAVE_S))


def _serve_store() -> Any:
    """Return a store that this process serves, at any free port."""
    import torch.distributed as dist

    return dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def _connect_store(member: Member) -> Any:
    """Return a connection to another process's store; raises RuntimeError where it has ended."""
    import torch.distributed as dist

    limit = timedelta(seconds=ANSWER_S)
    return dist.TCPStore(  # type: ignore[attr-defined]
        member.host, member.port, is_master=False, timeout=limit, wait_for_workers=False
    )


def _abort_groups() -> None:
    """Abort collectives of GPUs, whose kernels wait for other ranks; gloo's end with its connections."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() == GPU_BACKEND:
        dist.distributed_c10d._abort_process_group()


def _destroy_groups() -> None:
    """Forget all process groups, whatever state they are in.

    torch also counts one that was not made, and ranks with other counts would look for the next group of all ranks at
    other keys of the store: the count begins again with the end of a group of all ranks.
    """
    import torch.distributed as dist

    if not LOSSES.is_idle():
        keep_for_ever(dist.distributed_c10d._world.pg_map)
    LOSSES.forget()
    if not dist.is_initialized():
        dist.init_process_group(CPU_BACKEND, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError, ValueError):
        dist.destroy_process_group()
