"""All-gather and GEMM, and GEMM and reduce-scatter, as torch's kernels over symmetric memory: GPUs of one node.

A GPU copies a shard out of another one's memory on a second stream while it multiplies the shard before, without NCCL
and its multiprocessors.  Terms of a sum are added in the order of the ranks and rounded once.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from uuid import UUID

import torch
import torch.distributed as dist
from torch import Tensor

from megatron3d.comm.interface import GatheredProduct

# One value for all containers of a node.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def votes(device: torch.device) -> list[int]:
    """Return what `is_shared` needs of every rank of a group, to be reduced by max."""
    node = UUID(BOOT_ID.read_text(encoding="utf-8").strip()).int >> 66 if BOOT_ID.exists() else 0
    return [node, -node, int(not _can_read_peers(device))]


def is_shared(highest: list[int]) -> bool:
    """Return whether all ranks of a group are on one node whose GPUs read each other's memory."""
    node, lowest, someone_cannot = highest
    return node == -lowest and node > 0 and not someone_cannot


def _can_read_peers(device: torch.device) -> bool:
    if device.type == "cpu" or torch.version.hip:
        return False
    visible = range(torch.cuda.device_count())
    return all(torch.cuda.can_device_access_peer(device, other) for other in visible if other != device.index)


def all_gather_matmul(a_MK: Tensor, b_NK: Tensor, group: dist.ProcessGroup) -> GatheredProduct:
    """Return the gathered rows of `a` and their product with b^T."""
    rows, (product,) = _operators().fused_all_gather_matmul(a_MK.contiguous(), [b_NK.T], 0, group.group_name)
    return GatheredProduct(rows, product)


def matmul_reduce_scatter(a_MK: Tensor, b_NK: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum of a b^T; the terms are added in the order of the ranks."""
    part: Tensor = _operators().fused_matmul_reduce_scatter(a_MK, b_NK.T, "sum", dim, group.group_name)
    whole = [len(a_MK), len(b_NK)]
    whole[dim] //= group.size()
    assert list(part.shape) == whole, f"torch scatters {tuple(part.shape)} where {tuple(whole)} was due"
    return part.contiguous()


def _operators() -> torch._ops._OpNamespace:
    importlib.import_module("torch.distributed._symmetric_memory")  # registers them
    return torch.ops.symm_mem
