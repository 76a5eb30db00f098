"""Health check of a node, run on every node of a job before any rank starts.

An unfit node would otherwise stall all others in their first collective, minutes later and unnamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Fraction of a GPU's memory that must be free.
MIN_FREE = 0.9
# Rows and columns of the test GEMM.
SIZE = 1024


@dataclass(frozen=True)
class Gpu:
    """GPU that torch can see; `fault` is what is wrong with its results, None if they are right."""

    name: str
    free_bytes: int
    total_bytes: int
    fault: str | None = None


def node_problems(expected: int, found: Sequence[Gpu]) -> Iterator[str]:
    """Yield what is wrong with a node on which the job has `expected` GPUs."""
    if len(found) < expected:
        yield (
            f"torch sees {len(found)} of the {expected} GPUs that SLURM gave: one is lost, or torch is a CPU build or "
            "does not fit the driver; compare nvidia-smi"
        )
    for index, gpu in enumerate(found):
        if gpu.fault:
            yield f"GPU {index} ({gpu.name}) computes wrongly or not at all: {gpu.fault}"
        if gpu.free_bytes < MIN_FREE * gpu.total_bytes:
            held = (gpu.total_bytes - gpu.free_bytes) / 2**30
            yield (
                f"GPU {index} ({gpu.name}): another process holds {held:.1f} of {gpu.total_bytes / 2**30:.1f} GiB; "
                "end it (nvidia-smi names it)"
            )


def find_gpus(expected: int) -> list[Gpu]:
    """Test and return every GPU of this node; torch is not imported if none is expected."""
    if expected == 0:
        return []
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    return [probe(torch.device(kind.type, index)) for index in range(torch.accelerator.device_count())] if kind else []


def probe(device: torch.device) -> Gpu:
    """Return a device's memory, read before anything is allocated, and whether its GEMM is right."""
    import torch

    module = torch.get_device_module(device)
    name, (free, total) = module.get_device_name(device), module.mem_get_info(device)
    return Gpu(name, free, total, fault_of(device))


def fault_of(device: torch.device) -> str | None:
    """Return what is wrong with a GEMM of integers, which is exact in every precision that a device may choose.

    Entries are 0 to 6, and sums of `SIZE` products of them are below 2^24.
    """
    import torch

    numbers = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE)
    a_MK, b_KN = ((numbers * step % 7).float() for step in (3, 5))
    try:
        c_MN = (a_MK.to(device) @ b_KN.to(device)).cpu()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    wrong = int((c_MN != a_MK @ b_KN).sum())
    return f"{wrong} of {c_MN.numel()} entries of a matrix product" if wrong else None
