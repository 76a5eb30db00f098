"""Host memory of a process that computes on the CPU: freed memory is kept for the tensors of the next step.

Memory that the C library returns to the system is faulted in again page by page ("Switch Memory allocator" in PyTorch's
performance tuning guide).  Records that torch's flight recorder keeps of every collective fragment the heap, so that
tensors no longer fit where earlier ones were freed; `TORCH_FR_BUFFER_SIZE=0` turns it off.  GPU memory has torch's own
allocator.
"""

from __future__ import annotations

import ctypes

# Options of glibc's mallopt: M_TRIM_THRESHOLD unlimited, M_MMAP_MAX 0, M_ARENA_MAX 1.
MALLOC_OPTIONS = ((-1, -1), (-4, 0), (-8, 1))


def keep_freed_memory() -> None:
    """Make this process keep freed memory; does nothing without glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        for option, value in MALLOC_OPTIONS:
            library.mallopt(option, value)
