"""Detection of the triton package, which CUDA builds of torch bring."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Return whether the triton package is installed."""
    return find_spec("triton") is not None
