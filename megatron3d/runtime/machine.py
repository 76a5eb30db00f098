"""Settings of a process for its machine: backend, environment of GPUs, determinism, CPUs, host memory, open files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megatron3d.errors import UserError

CPU_BACKEND, GPU_BACKEND = "gloo", "nccl"
# No communication: one process stands for a rank of a world whose other ranks do not exist.
FAKE_BACKEND = "fake"


def backend_of(device_type: str) -> str:
    """Return the backend for tensors on a `torch.device` of this type."""
    return CPU_BACKEND if device_type == "cpu" else GPU_BACKEND


# How much longer torch waits than the watchdog, whose message says more.
GRACE_S = 30.0


def group_timeout(timeout_s: float) -> timedelta:
    """Return the timeout of every process group of a run whose watchdog waits for `timeout_s`."""
    return timedelta(seconds=timeout_s + GRACE_S)


@cache
def has_triton() -> bool:
    """Return whether the triton package is installed."""
    return find_spec("triton") is not None


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# The two with which cuBLAS gives the same bits in every run; the first is the larger and faster one.
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


def set_up_determinism(environ: MutableMapping[str, str], is_deterministic: bool) -> dict[str, str]:
    """Choose deterministic kernels before CUDA starts, or not; return the setting for the startup report.

    With them torch raises where an operation has none.  Raises UserError where the user has set a cuBLAS workspace that
    contradicts `train.deterministic_mode`.
    """
    import torch

    if is_deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports torch._inductor: a second
        torch.use_deterministic_algorithms(is_deterministic)
    torch._C._set_deterministic_fill_uninitialized_memory(not is_deterministic)  # no result depends on it
    if not is_deterministic:
        return {"deterministic": "no (train.deterministic_mode=false)"}
    given = environ.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACES[0])
    if given not in DETERMINISTIC_WORKSPACES:
        allowed = " or ".join(DETERMINISTIC_WORKSPACES)
        raise UserError(
            f"train.deterministic_mode=true: {WORKSPACE}={given} lets cuBLAS choose among kernels; unset it, or use "
            f"{allowed}"
        )
    return {"deterministic": f"yes ({WORKSPACE}={given})"}


def sum_gemms_in_fp32() -> None:
    """Let GEMMs in bf16 and fp16 add partial sums (split-K) in fp32, which torch does not by default."""
    import torch

    for dtype in ("bf16", "fp16"):
        setattr(torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction", False)


# NCCL's own monitor would end a process without a verdict before the watchdog speaks.
MONITOR_GRACE_S = 60.0


@dataclass(frozen=True)
class Variable:
    """Environment variable with its value in a run; `others` are further names under which a user may set it.

    Attributes:
        fact: its name in the startup report; None where it is not worth a line.
    """

    name: str
    value: str
    others: tuple[str, ...] = ()
    fact: str | None = None

    def chosen(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the name and value that the user has set."""
        return next(((name, environ[name]) for name in (self.name, *self.others) if name in environ), None)


def variables(timeout_s: float) -> tuple[Variable, ...]:
    """Return the variables of a run whose watchdog waits for `timeout_s`."""
    return (
        # Segments of fixed sizes leave holes when sizes change (evaluation, ramps, offload); expandable ones are mapped
        # page by page.
        Variable("PYTORCH_ALLOC_CONF", "expandable_segments:True", ("PYTORCH_CUDA_ALLOC_CONF",), "GPU allocator"),
        # Every process group has a stream.  Streams that share one of the 8 queues of the default wait for each other.
        Variable("CUDA_DEVICE_MAX_CONNECTIONS", "32", fact="GPU hardware queues"),
        Variable("TORCH_FR_BUFFER_SIZE", "2000", ("TORCH_NCCL_TRACE_BUFFER_SIZE",), "collectives in flight recorder"),
        Variable("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{timeout_s + MONITOR_GRACE_S:.0f}"),
    )


def set_up(environ: MutableMapping[str, str], timeout_s: float) -> dict[str, str]:
    """Set what the user has not set, and return the settings for the startup report by name."""
    report: dict[str, str] = {}
    for variable in variables(timeout_s):
        set_by_user = variable.chosen(environ)
        if set_by_user is None:
            environ[variable.name] = variable.value
        if variable.fact:
            report[variable.fact] = variable.value if set_by_user is None else f"{set_by_user[1]} ({set_by_user[0]})"
    return report


# Options of glibc's mallopt: M_TRIM_THRESHOLD unlimited, M_MMAP_MAX 0, M_ARENA_MAX 1.
MALLOC_OPTIONS = ((-1, -1), (-4, 0), (-8, 1))


def keep_freed_memory() -> None:
    """Make this process keep freed memory for the tensors of the next step; does nothing without glibc.

    Memory that the C library returns to the system is faulted in again page by page ("Switch Memory allocator" in
    PyTorch's performance tuning guide).  Records that torch's flight recorder keeps of every collective fragment the
    heap, so that tensors no longer fit where earlier ones were freed; `TORCH_FR_BUFFER_SIZE=0` turns it off.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        for option, value in MALLOC_OPTIONS:
            library.mallopt(option, value)


# Place of the number of tries among the first integers of glibc's `struct __res_state`, which each thread has.
RES_RETRY = 1


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """While entered, what this thread would ask a name server fails at once; does nothing without glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "__res_state"):
        yield
        return
    library["__res_init"]()
    numbers = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_int))(("__res_state", library))()
    tries, numbers[RES_RETRY] = numbers[RES_RETRY], 0
    try:
        yield
    finally:
        numbers[RES_RETRY] = tries


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

    Copies to the GPU, and launches of kernels, then do not cross the sockets' link.  Only the CPUs that the launcher
    has left are used, so that a binding of numactl or srun is narrowed and never widened.

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
    # Threads that start later inherit the binding.
    for thread in [int(path.name) for path in TASKS.iterdir()] if TASKS.is_dir() else [0]:
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


def raise_open_file_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard limit; return the soft limits before and after.

    The usual soft limit is 1024.  Rank 0's store has two to three connections from every rank, and each rank opens
    sockets for every communicator, so that a few hundred ranks exceed it.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before == hard:
        return before, before
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # some systems refuse an unlimited number
        return before, before
    return before, hard
