"""Backends of torch.distributed: the one of each kind of device, and their timeout."""

from __future__ import annotations

from datetime import timedelta

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
