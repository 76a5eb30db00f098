"""Backends of torch.distributed: the one of each kind of device."""

from __future__ import annotations

CPU_BACKEND, GPU_BACKEND = "gloo", "nccl"
# No communication: one process stands for a rank of a world whose other ranks do not exist.
FAKE_BACKEND = "fake"


def backend_of(device_type: str) -> str:
    """Return the backend for tensors on a `torch.device` of this type."""
    return CPU_BACKEND if device_type == "cpu" else GPU_BACKEND
