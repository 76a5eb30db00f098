"""Binding of a rank to the CPUs next to its GPU: copies to it, and launches of kernels, do not cross the sockets' link.

Only the CPUs that the launcher has left are used, so that a binding of numactl or srun is narrowed and never widened.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

SYS, TASKS = Path("/sys"), Path("/proc/self/task")
# A rank has five busy threads: step, backward, NCCL's, loader, save.
MIN_CPUS = 4
MAX_THREADS = 8


def bind_to_gpu(
    address: str,
    allowed: Collection[int],
    sys: Path = SYS,
    set_affinity: Callable[[int, Collection[int]], None] | None = None,
) -> str:
    """Bind all threads of this process to the CPUs of the NUMA node of a GPU; return in words what was done.

    Args:
        address: the GPU's on the PCI bus, such as 0000:3b:00.0.
        allowed: CPUs that this process may use.
    """
    set_affinity = set_affinity or getattr(os, "sched_setaffinity", None)
    node = node_of(address, sys)
    if node is None or set_affinity is None:
        return f"not bound: the system names no NUMA node of GPU {address}"
    near = sorted({*cpus_of(node, sys)} & {*allowed})
    if len(near) < min(MIN_CPUS, len(allowed)):
        return f"not bound: {len(near)} of {len(allowed)} CPUs of this rank are on NUMA node {node} of GPU {address}"
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            set_affinity(thread, near)
    return f"{len(near)} of {len(allowed)} CPUs, on NUMA node {node} of GPU {address}"


def node_of(address: str, sys: Path = SYS) -> int | None:
    """Return the NUMA node that a PCI device is attached to; None where the system does not know."""
    try:
        node = int((sys / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def cpus_of(node: int, sys: Path = SYS) -> tuple[int, ...]:
    """Return the CPUs of a NUMA node; empty where the system does not list them."""
    try:
        text = (sys / f"devices/system/node/node{node}/cpulist").read_text()
    except OSError:
        return ()
    runs = [(int(low), int(high or low)) for low, high in re.findall(r"(\d+)(?:-(\d+))?", text)]
    return tuple(cpu for low, high in runs for cpu in range(low, high + 1))


def num_threads(num_cpus: int, local_ranks: int) -> int:
    """Return the threads of one CPU operator next to a GPU: half of the rank's CPUs, since its other threads need some.

    More than `MAX_THREADS` gain nothing, since the operators that run there are short.
    """
    return max(1, min(MAX_THREADS, num_cpus // local_ranks // 2))


def _threads() -> list[int]:
    """Return the threads of this process; those that start later inherit the binding."""
    return [int(path.name) for path in TASKS.iterdir()] if TASKS.is_dir() else [0]
