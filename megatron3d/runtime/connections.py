"""TCP connections of this process, shut down so that no thread waits for another rank any longer.

A thread that waits inside gloo, or for a key of a store, can neither be interrupted nor told to give up: torch's abort
of a process group does nothing with gloo.  When its connections end, all it waits for fails at once, as where the
process at the other end has died.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Collection
from enum import Enum
from pathlib import Path

_OPEN = Path("/proc/self/fd")
# Connections to a process that must break until it is taken for one that has ended.
ATTEMPTS = 3


def open_sockets() -> dict[str, int]:
    """Return the sockets of this process, each with a file descriptor; nothing where the system does not list them."""
    found: dict[str, int] = {}
    for path in _OPEN.iterdir() if _OPEN.is_dir() else ():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            name = _name(int(path.name))
            if name.startswith("socket:"):
                found[name] = int(path.name)
    return found


def _name(descriptor: int) -> str:
    """Return the name of an open file of this process, which no other one of a system has."""
    return str((_OPEN / str(descriptor)).readlink())


def shut_down(names: Collection[str], kept_ports: Collection[int]) -> int:
    """Shut down connections, and return how many; those that end at one of this process's `kept_ports` stay.

    Args:
        names: of `open_sockets`; those that were closed meanwhile are left out.
    """
    count = 0
    for name, descriptor in open_sockets().items():
        if name not in names:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if _name(connection.fileno()) != name:
                continue  # another thread has closed it, and opened another one under its number
            if _is_internet(connection) and connection.getsockname()[1] not in kept_ports:
                connection.getpeername()  # raises where it is not connected, as a server's that listens
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def stop_polling(names: Collection[str], kept_ports: Collection[int]) -> None:
    """Let no thread of this process poll connections that `shut_down` has ended; the arguments are its own.

    Of a process group that stays gloo does not close all of them, and its thread that polls one spins: it is told of
    the end again and again.
    """
    for path in _OPEN.iterdir() if _OPEN.is_dir() else ():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if str(path.readlink()) == "anon_inode:[eventpoll]":
                with select.epoll.fromfd(os.dup(int(path.name))) as poll:
                    for descriptor in _polled(path.name):
                        _remove(poll, descriptor, names, kept_ports)


def _polled(name: str) -> list[int]:
    """Return the file descriptors that an epoll instance of this process watches."""
    lines = Path("/proc/self/fdinfo", name).read_text(encoding="utf-8").splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


def _remove(poll: select.epoll, descriptor: int, names: Collection[str], kept_ports: Collection[int]) -> None:
    with contextlib.suppress(OSError):  # it was closed, or is polled no longer
        if _name(descriptor) not in names:
            return
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if _is_internet(connection) and connection.getsockname()[1] not in kept_ports:
                poll.unregister(descriptor)


def _is_internet(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def can_shut_down() -> bool:
    """Return whether the system lists the connections of a process."""
    return _OPEN.is_dir()


class Responder:
    """Port of this process that answers whoever connects, in a thread: other processes see that it runs.

    A store's server answers no sooner, and a client of it waits permanently where its process is stopped.

    Attributes:
        left: the last epoch of an elastic run that this process has left since ranks were lost, which it answers.
    """

    def __init__(self) -> None:
        self.left = -1
        self._socket = socket.create_server(("", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, name="responder", daemon=True).start()

    def _answer(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = self._socket.accept()
                with connection:
                    connection.sendall(str(self.left).encode())


class Liveness(Enum):
    """What is known of a process: it answers, it has ended, or it is stopped or its machine gone."""

    YES = "answers"
    ENDED = "has ended"
    NONE = "does not answer"


def ask(host: str, port: int, limit_s: float) -> tuple[Liveness, int]:
    """Return what is known of a process by its `Responder` within a limit, and the epoch that it has left.

    A connection that only breaks says little of the other process, which is then asked again, `ATTEMPTS` times in all.
    """
    for _ in range(ATTEMPTS):
        try:
            with socket.create_connection((host, port), limit_s) as connection:
                return Liveness.YES, int(connection.recv(32))
        except ConnectionRefusedError:
            break
        except (ConnectionError, ValueError):  # nothing was said, or the port is another program's by now
            continue
        except OSError:
            return Liveness.NONE, -1
    return Liveness.ENDED, -1


def local_address(host: str, port: int) -> str:
    """Return the address of this machine by which `host` reaches it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
