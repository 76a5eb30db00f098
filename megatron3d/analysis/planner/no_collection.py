"""Python's cyclic garbage collector, off while a search runs.

A search keeps millions of small tuples in caches and makes hardly any cycles; the collector would read them all again
and again, for a quarter of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """While entered, collect no cycles; afterwards do as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
