"""Key-value store in which every rank publishes its status, readable while the other ranks are busy or hung."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

CONNECT_TIMEOUT = timedelta(seconds=10)


class StatusStore(Protocol):
    """Texts by key, shared by all ranks; every method raises OSError if the store cannot be reached."""

    def set(self, key: str, text: str) -> None:
        """Store `text` under `key`, replacing an earlier value."""
        ...

    def get(self, key: str) -> str | None:
        """Return the text stored under `key`, or None."""
        ...

    def claim(self, key: str) -> bool:
        """Return whether this rank is the first to claim `key`."""
        ...


class TcpStatusStore:
    """`StatusStore` on the TCP store of the rendezvous, over a connection of its own.

    Args:
        attempt: how often the launcher has restarted the ranks; values of earlier attempts are not seen.
    """

    def __init__(self, address: str, port: int, attempt: int) -> None:
        import torch.distributed as dist

        server = dist.TCPStore(address, port, is_master=False, timeout=CONNECT_TIMEOUT)  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"status/{attempt}", server)  # type: ignore[attr-defined]

    def set(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from error

    def get(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from error

    def claim(self, key: str) -> bool:
        try:
            return self._store.add(key, 1) == 1
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from error
