"""Where ranks leave short notes for each other while none of them needs to answer: the store that they met at."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

GIVE_UP = timedelta(seconds=10)


class Board(Protocol):
    """Notes by name, seen by all ranks; every call raises OSError where the board cannot be reached."""

    def post(self, name: str, text: str) -> None:
        """Leave a note, in the place of an earlier one of that name."""
        ...

    def read(self, name: str) -> str | None:
        """The note of a name, if there is one."""
        ...

    def claim(self, name: str) -> bool:
        """Whether I am the first to claim a name."""
        ...


class StoreBoard:
    """A board on the rendezvous' TCP store, over a connection of its own.

    Args:
        attempt: of the launcher to start these ranks; notes of an earlier one are not seen.
    """

    def __init__(self, address: str, port: int, attempt: int) -> None:
        import torch.distributed as dist

        server = dist.TCPStore(address, port, is_master=False, timeout=GIVE_UP)  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"board/{attempt}", server)  # type: ignore[attr-defined]

    def post(self, name: str, text: str) -> None:
        try:
            self._store.set(name, text)
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from error

    def read(self, name: str) -> str | None:
        try:
            return self._store.get(name).decode() if self._store.check([name]) else None
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from error

    def claim(self, name: str) -> bool:
        try:
            return self._store.add(name, 1) == 1
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from error
