"""Fact: every process of an elastic run finds the same leader, and none waits for one that has left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist

from megatron3d.comm.process_groups import ProcessGroups
from megatron3d.errors import ExitCode, RunFailed
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime import connections
from megatron3d.runtime import members as place
from megatron3d.runtime.connections import ATTEMPTS, Liveness, Responder, ask, open_sockets
from megatron3d.runtime.epochs import Epoch, Member, Note
from megatron3d.runtime.launcher_env import LauncherEnv
from megatron3d.runtime.members import Members
from megatron3d.runtime.process import lost_rank
from megatron3d.runtime.waits import LOSSES
from megatron3d.runtime.watchdog import Losses, Watchdog

LIMIT_S = 20.0
Make = Callable[[int], Members]


class NoConnect:
    """Connects nobody: these processes only talk over their stores."""

    def meet(self, env: LauncherEnv, epoch: int) -> Any:
        raise ConnectionError("no ranks")

    def watch(self, env: LauncherEnv, epoch: int, losses: Losses) -> Watchdog:
        raise ConnectionError("no ranks")


def member(number: int, port: int, responder: int) -> Member:
    return Member(number, "127.0.0.1", port, responder, socket.gethostname(), os.getpid())


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that makes the process of a number, all of which know each other."""
    made: dict[int, Members] = {}

    def make_one(number: int) -> Members:
        one = Members(LauncherEnv(rank=number, world_size=3), NoConnect(), LIMIT_S)
        made[number] = one
        for each in made.values():
            each.book = {n: member(n, other._server.port, other._responder.port) for n, other in made.items()}
        return one

    yield make_one
    for each in made.values():
        each._has_gone.set()


def test_the_responder_says_which_epoch_was_left() -> None:
    responder = Responder()
    assert ask("127.0.0.1", responder.port, 1.0) == (Liveness.YES, -1)
    responder.left = 12
    assert ask("127.0.0.1", responder.port, 1.0) == (Liveness.YES, 12)


@pytest.mark.parametrize("num_broken", [0, 1, 2, 10])
def test_a_broken_connection_is_not_taken_for_the_end_of_a_process(num_broken: int) -> None:
    """This process ends its own connections when ranks are lost: a live process that it asks would be killed."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for number in range(min(num_broken + 1, ATTEMPTS)):
                connection, _ = server.accept()
                with connection:
                    if number == num_broken:
                        connection.sendall(b"3")

        threading.Thread(target=answer, daemon=True).start()
        expected = (Liveness.YES, 3) if num_broken < ATTEMPTS else (Liveness.ENDED, -1)
        assert ask("127.0.0.1", server.getsockname()[1], 5.0) == expected


def test_no_other_connection_is_shut_down_that_has_got_the_number_of_a_closed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the look at all files and the end of one, other threads close and open some."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        old = socket.create_connection(server.getsockname())
        with socket.create_connection(server.getsockname(), timeout=0.2) as new:
            name = next(name for name, number in open_sockets().items() if number == old.fileno())
            old.close()
            monkeypatch.setattr(connections, "open_sockets", lambda: {name: new.fileno()})
            assert connections.shut_down({name}, ()) == 0
            with pytest.raises(TimeoutError):
                new.recv(1)


def test_no_thread_polls_connections_that_have_ended() -> None:
    """It would be told of their end again and again; those of a server that other processes need stay."""
    with (
        socket.create_server(("127.0.0.1", 0)) as kept,
        socket.create_server(("127.0.0.1", 0)) as other,
        select.epoll() as poll,
        contextlib.ExitStack() as stack,
    ):
        for each in (kept, other):
            stack.enter_context(socket.create_connection(each.getsockname()))
        accepted = [stack.enter_context(each.accept()[0]) for each in (kept, other)]
        for each in accepted:
            poll.register(each.fileno(), select.EPOLLIN)
        names, ports = {*open_sockets()}, {kept.getsockname()[1]}
        for each in accepted:
            each.shutdown(socket.SHUT_RDWR)
        assert {number for number, _ in poll.poll(0)} == {each.fileno() for each in accepted}
        connections.stop_polling(names, ports)
        assert [number for number, _ in poll.poll(0)] == [accepted[0].fileno()]
        connections.stop_polling((), ())
        assert poll.poll(0)


def test_waits_of_an_elastic_run_are_given_up_when_ranks_are_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOSSES, "is_lost", None)
    one = make(0)
    with pytest.raises(ConnectionError):
        one.__enter__()  # which connects with nobody here
    assert LOSSES.is_lost is not None and not LOSSES.is_lost()
    one._lost.set()
    assert LOSSES.is_lost()
    one.__exit__(None, None, None)
    assert LOSSES.is_lost is None


def test_a_process_that_has_left_the_epoch_is_a_loss_for_the_one_before_it(make: Make) -> None:
    """It could not tell: nobody would notice, since it lives, and all would wait for it until the timeout."""
    first, second = make(0), make(1)
    assert first._state_of(1, is_silent=False) is None and not first._lost.is_set()
    second._responder.left = first.epoch.number
    assert first._state_of(1, is_silent=False) is None and first._lost.is_set()
    assert not first._blamed, "it is no culprit"
    first.epoch = Epoch(1, (0, 1))
    first._fresh_loss()
    assert first._state_of(1, is_silent=False) is None and not first._lost.is_set(), "that was an epoch before"


def test_connections_that_are_made_while_a_loss_is_told_end_as_well(make: Make) -> None:
    one = make(0)
    with contextlib.ExitStack() as open_ones:
        server = open_ones.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect() -> socket.socket:
            return open_ones.enter_context(socket.create_connection(server.getsockname(), timeout=3.0))

        before = connect()
        one._lose("a rank is lost")
        after = connect()
        assert before.recv(1) == b"" and after.recv(1) == b""
        one._leave_epoch()
        later = connect()
        later.settimeout(1.5)
        with pytest.raises(TimeoutError):
            later.recv(1)


def test_a_store_that_is_late_is_tried_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that led itself instead would wait for the others, and they for it."""
    make(0)
    one, calls = make(1), list[int]()
    connect = place._connect_store

    def late(other: Member) -> Any:
        calls.append(other.number)
        if len(calls) < 3:
            raise RuntimeError("The client socket has timed out")
        return connect(other)

    monkeypatch.setattr(place, "_connect_store", late)
    leader, store = one._find_leader()
    assert leader == 0 and store.check(["anything"]) is False and calls == [0, 0, 0]


def test_a_leader_that_did_not_answer_once_is_found_later(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waited at the wrong one would be waited for by all others."""
    monkeypatch.setattr(place, "GRACE_S", 0.2)
    make(0)
    make(1)
    one = make(2)
    began_s = time.monotonic()
    assert one._follow(1, place._connect_store(one.book[1])) is None
    assert time.monotonic() - began_s < LIMIT_S / 2 and not one._blamed
    assert one._find_leader()[0] == 0


def test_those_that_are_dead_or_blamed_lead_nobody(make: Make) -> None:
    make(0)
    make(1)
    one = make(2)
    one._blamed.add(0)
    assert one._find_leader()[0] == 1 and not one._has_passed_over(1)
    one._dead.add(1)
    assert one._find_leader() == (2, None)


def test_a_process_that_ended_is_known_to_be_dead(make: Make) -> None:
    one = make(0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    one.book[1] = member(1, port, port)
    assert one._reach(1) is None and one._dead == {1}


def sign_in(leader: Members, number: int, epoch: Epoch, lost: Sequence[int] = ()) -> None:
    leader._server.set(f"present/{number}", json.dumps(asdict(Note(1, epoch, tuple(lost)))))


def halve(num_ranks: int) -> tuple[int, Mapping[str, Any]]:
    return num_ranks // 2, {"changes": {}}


def test_the_leader_leaves_out_whom_others_blame(make: Make) -> None:
    one = make(0)
    make(1)
    make(2)
    sign_in(one, 1, one.epoch, lost=[2])
    decided = one._lead(halve)
    assert isinstance(decided, Epoch)
    assert (decided.number, decided.members, decided.lost, decided.spares) == (1, (0,), (2,), (1,))


def test_the_leader_waits_for_spares(make: Make) -> None:
    """They take the places of the lost: without the wait the layout would change."""
    one = make(0)
    make(1)
    make(2)
    one.epoch = Epoch(1, (0, 1), layout={"name": "pair"}, spares=(2,))
    one._dead.add(1)
    sign_in(one, 2, one.epoch)
    decided = one._lead(halve)
    assert isinstance(decided, Epoch)
    assert (decided.members, decided.layout, decided.lost) == ((0, 2), {"name": "pair"}, (1,))


def test_spares_do_not_wait_for_machines_that_are_gone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says that they have ended: what does not answer for as long as a run may stand still is lost."""
    monkeypatch.setattr(place, "ANSWER_S", 0.1)
    make(0)
    spare = make(1)
    spare._limit_s, spare.epoch = 1.5, Epoch(1, (0,), spares=(1,))
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        port = server.getsockname()[1]
        spare.book[0] = member(0, port, port)
        began_s = time.monotonic()
        decided = spare._lead(halve)
    assert isinstance(decided, Epoch) and time.monotonic() - began_s > 1.5
    assert (decided.members, decided.lost) == ((1,), (0,))


def test_notes_from_before_an_epoch_do_not_count(make: Make) -> None:
    one = make(0)
    make(1)
    one.epoch = Epoch(2, (0, 1))
    sign_in(one, 1, Epoch(1, (0, 1)))
    assert [*dict(one._valid_notes())] == [0]
    sign_in(one, 1, one.epoch)
    assert [*dict(one._valid_notes())] == [0, 1]


def test_where_no_layout_fits_all_are_told(make: Make) -> None:
    one = make(0)
    other = make(1)
    other._attempt = 1
    sign_in(one, 1, one.epoch)

    def refuse(num_ranks: int) -> tuple[int, Mapping[str, Any]]:
        raise RunFailed(f"no layout of {num_ranks} ranks")

    one._dead.add(2)
    with pytest.raises(RunFailed, match="no layout of 2 ranks"):
        one._lead(refuse)
    with pytest.raises(RunFailed, match="no layout of 2 ranks"):
        other._follow(0, place._connect_store(other.book[0]))


def test_a_spare_ends_with_the_run(make: Make) -> None:
    one, spare = make(0), make(1)
    one.epoch = spare.epoch = Epoch(1, (0,), spares=(1,))
    one._server.set(place.ENDED, str(int(ExitCode.STOPPED)))
    assert spare._follow(0, place._connect_store(spare.book[0])) is ExitCode.STOPPED


def test_a_connection_that_breaks_while_a_group_is_made_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that sees it may be told of the loss later, and must not end meanwhile."""

    def breaks(*_: object, **options: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(dist, "new_group", breaks)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    with pytest.raises(dist.DistNetworkError) as found:
        ProcessGroups(Mesh((("data", 2), ("t", 2)), 0), [("t",)], [], None)
    assert lost_rank(found.value) == "Connection reset by peer"
