"""All-gather and GEMM, and GEMM and reduce-scatter, in as many rounds as ranks: transfers overlap with GEMMs.

    GEMMs of rank r of p, round by round
    all-gather and GEMM        rows of r        rows of r - 1    ...   rows of r + 1     while the next arrive
    GEMM and reduce-scatter    part of r + 1    part of r + 2    ...   part of r         while the last one is sent

Each rank adds the terms of its part in the order of the ranks, in fp32 or wider, and rounds once (Wang et al. 2023,
ASPLOS, decompose collectives and GEMMs in this way).  On GPUs of one node torch's fused kernels do the same: a GPU
copies a shard out of another one's symmetric memory on a second stream while it multiplies the shard before, without
NCCL.  Letters: M rows, K summed, N columns; of what this rank has.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from uuid import UUID

import torch
import torch.distributed as dist
from torch import Tensor

from megatron3d.comm.interface import Comm, GatheredProduct, Pending, PutProduct
from megatron3d.parallel.mesh import Axes

# One value for all containers of a node.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Parts of a product that are being sent while the next is computed; a part's memory is kept until it has been sent.
MAX_IN_FLIGHT = 2


def all_gather_matmul(comm: Comm, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
    """Return the gathered rows of `a` and their product with b^T; the rows of each rank are multiplied on arrival."""
    ranks, mine, a_MK = comm.mesh.size(axes), comm.mesh.index(axes), a_MK.contiguous()
    rows, product = (a_MK.new_empty((ranks, len(a_MK), width)) for width in (a_MK.shape[1], len(b_NK)))
    arriving = [comm.shift(a_MK, rows[(mine - by) % ranks], axes, by) for by in range(1, ranks)]
    put(product[mine], a_MK, b_NK)
    rows[mine].copy_(a_MK)
    for by, pending in enumerate(arriving, 1):
        put(product[(mine - by) % ranks], pending.wait(), b_NK)
    return GatheredProduct(rows.flatten(0, 1), product.flatten(0, 1))


def matmul_reduce_scatter(comm: Comm, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
    """Return this rank's part along `dim` of the sum over `axes` of a b^T; a part is sent when it is computed."""
    ranks, mine = comm.mesh.size(axes), comm.mesh.index(axes)
    size = (len(a_MK), len(b_NK))[dim]
    assert size % ranks == 0, f"{len(a_MK)} x {len(b_NK)} along {dim} does not divide by {axes}={ranks} ranks"
    a_parts = a_MK.chunk(ranks) if dim == 0 else [a_MK] * ranks
    b_parts = b_NK.chunk(ranks) if dim == 1 else [b_NK] * ranks
    terms = a_MK.new_empty((ranks, len(a_parts[0]), len(b_parts[0])))
    in_flight: list[Pending] = []
    for by in range(1, ranks):
        if len(in_flight) == MAX_IN_FLIGHT:
            in_flight.pop(0).wait()
        to = (mine + by) % ranks
        part = torch.empty_like(terms[0])
        put(part, a_parts[to], b_parts[to])
        in_flight.append(comm.shift(part, terms[(mine - by) % ranks], axes, by))
        del part
    put(terms[mine], a_parts[mine], b_parts[mine])

    def finish() -> Tensor:
        for pending in in_flight:
            pending.wait()
        return terms.sum(0)

    return Pending(finish)


def votes(device: torch.device) -> list[int]:
    """Return what `is_shared` needs of every rank of a group, to be reduced by max."""
    node = UUID(BOOT_ID.read_text(encoding="utf-8").strip()).int >> 66 if BOOT_ID.exists() else 0
    return [node, -node, int(not _can_read_peers(device))]


def is_shared(highest: list[int]) -> bool:
    """Return whether all ranks of a group are on one node whose GPUs read each other's memory."""
    node, lowest, someone_cannot = highest
    return node == -lowest and node > 0 and not someone_cannot


def _can_read_peers(device: torch.device) -> bool:
    """Return whether a GPU reads the memory of all others that this process sees.

    A process that sees one GPU, as a launcher may bind it, cannot know.
    """
    if device.type == "cpu" or torch.version.hip:
        return False
    others = [other for other in range(torch.cuda.device_count()) if other != device.index]
    return bool(others) and all(torch.cuda.can_device_access_peer(device, other) for other in others)


def fused_all_gather_matmul(a_MK: Tensor, b_NK: Tensor, group: dist.ProcessGroup) -> GatheredProduct:
    """Return the gathered rows of `a` and their product with b^T."""
    rows, (product,) = _operators().fused_all_gather_matmul(a_MK.contiguous(), [b_NK.T], 0, group.group_name)
    return GatheredProduct(rows, product)


def fused_matmul_reduce_scatter(a_MK: Tensor, b_NK: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum of a b^T; the terms are added in the order of the ranks."""
    part: Tensor = _operators().fused_matmul_reduce_scatter(a_MK, b_NK.T, "sum", dim, group.group_name)
    whole = [len(a_MK), len(b_NK)]
    whole[dim] //= group.size()
    assert list(part.shape) == whole, f"torch scatters {tuple(part.shape)} where {tuple(whole)} was due"
    return part.contiguous()


def _operators() -> torch._ops._OpNamespace:
    importlib.import_module("torch.distributed._symmetric_memory")  # registers them
    return torch.ops.symm_mem
