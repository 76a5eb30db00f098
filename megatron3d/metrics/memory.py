"""Memory of a rank in bytes: currently allocated, reserved, and peak."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PAGES = Path("/proc/self/statm")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes of tensors on an accelerator; on the CPU the peak resident size of the process."""
    if device.type != "cpu":
        import torch

        return int(torch.accelerator.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated by tensors, reserved by the allocator, and at the peak.

    On a CPU, allocated is the resident size of the process (on Linux only), and reserved is missing.
    """
    peak = {"peak": peak_memory_bytes(device)}
    if device.type != "cpu":
        import torch

        held = torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
        return {"allocated": held[0], "reserved": held[1]} | peak
    if not _PAGES.exists():
        return peak
    return {"allocated": int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")} | peak
