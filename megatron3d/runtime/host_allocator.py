"""Host memory of a process that computes on processors: tensors find what those of the step before have freed.

What the C library gives back to the system it asks for again, page by page ("Switch Memory allocator" in PyTorch's
performance tuning guide).  And what torch's flight recorder keeps of every collective lies between the holes, in which
glibc then finds no room for tensors of the size that they had; `TORCH_FR_BUFFER_SIZE=0` turns it off.  GPUs' memory has
an allocator of torch's own.
"""

from __future__ import annotations

import ctypes

# Of glibc's mallopt: M_TRIM_THRESHOLD without a bound, M_MMAP_MAX, M_ARENA_MAX.
KEEPING = ((-1, -1), (-4, 0), (-8, 1))


def keep_freed_memory() -> None:
    """For this process; nothing where there is no glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        for option, value in KEEPING:
            library.mallopt(option, value)
