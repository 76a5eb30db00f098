"""Memory of a GPU that libraries hold outside torch's allocator: the CUDA context, and NCCL's communicators.

    context + communicators x bytes of one         (a communicator per process group and per link of the pipeline)

A link has two communicators, one per direction, but with a quarter of the channels they hold less than one of a group.
The bytes of one of each stand in `hardware/*.yaml`; no tensor can use them, and no count of tensors shows them.
"""

from __future__ import annotations

from megatron3d.analysis.cost_model.hardware import KernelRates
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.parallel.async_plan import async_plan
from megatron3d.parallel.mesh import Axes
from megatron3d.parallel.parallel_state import ParallelState


def num_communicators(state: ParallelState) -> int:
    """Return the communicators of a rank: its groups of more than one rank, and two for each link, one a direction.

    None is of all ranks unless training needs one: numbers of all ranks are reduced over the others.
    """
    return len({axes for axes in state.group_axes if state.mesh.size(axes) > 1}) + 2 * len(state.my_links)


def library_bytes(state: ParallelState, rates: KernelRates) -> int:
    """Return the bytes of device memory that this rank's libraries hold outside torch's allocator."""
    return round((rates.context_gib + num_communicators(state) * rates.communicator_gib) * 2**30)


def symmetric_bytes(local: LocalSizes) -> int:
    """Return the bytes of symmetric memory through which GPUs of a node run collectives in rounds with a GEMM.

    Each group has one buffer, of its largest use: a shard that others read, or two parts of a product, of which one is
    computed while the other is read.
    """
    largest: dict[Axes, int] = {}
    for matmul in local.matmuls.values() if local.kernels.on_gpu and local.overlap.in_rounds else ():
        whole_x = matmul.x * local.mesh.size(matmul.plan.x)
        whole_y = matmul.y * local.mesh.size(matmul.plan.dy)
        rounds = async_plan(matmul.plan)
        uses = (rounds.x, whole_x), (rounds.dy, whole_y), (rounds.y, 2 * whole_y), (rounds.dx, 2 * whole_x)
        for move, size in uses:
            if move:
                part = size // local.mesh.size(move.axes) * local.itemsize
                largest[move.axes] = max(largest.get(move.axes, 0), part)
    return sum(largest.values())
