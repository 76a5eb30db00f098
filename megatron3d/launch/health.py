"""Whether a machine is fit to hold ranks, asked on every one of a job before any rank starts.

One that is not would stop all others in their first collective, minutes later and without a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Of a device's memory, that nobody else may hold.
MIN_FREE = 0.9
SIZE = 1024


@dataclass(frozen=True)
class Gpu:
    """One that torch can see; `fault` is what is wrong with its results, None where they are right."""

    name: str
    free_bytes: int
    total_bytes: int
    fault: str | None = None


def node_problems(expected: int, found: Sequence[Gpu]) -> Iterator[str]:
    """What is wrong with a machine on which the job has `expected` GPUs."""
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
    """Every GPU of this machine, tried; torch is not even imported where none is expected."""
    if expected == 0:
        return []
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    return [probe(torch.device(kind.type, index)) for index in range(torch.accelerator.device_count())] if kind else []


def probe(device: torch.device) -> Gpu:
    """A device's memory before anything is put there, and whether it multiplies rightly."""
    import torch

    module = torch.get_device_module(device)
    name, (free, total) = module.get_device_name(device), module.mem_get_info(device)
    return Gpu(name, free, total, fault_of(device))


def fault_of(device: torch.device) -> str | None:
    """What is wrong with a product of whole numbers, which is exact in every precision that a device may choose.

    Entries are 0 to 6, sums of `SIZE` products of them below 2^24.
    """
    import torch

    numbers = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE)
    a_MK, b_KN = ((numbers * step % 7).float() for step in (3, 5))
    try:
        c_MN = (a_MK.to(device) @ b_KN.to(device)).cpu()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    wrong = int((c_MN != a_MK @ b_KN).sum())
    return f"{wrong} of {c_MN.numel()} entries of a product" if wrong else None
