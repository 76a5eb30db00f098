"""Memory of a GPU that libraries hold outside torch's allocator: the CUDA context, and NCCL's communicators.

    context + communicators x bytes of one         (a communicator per process group and per link of the pipeline)

A link has two communicators, one per direction, but with a quarter of the channels they hold less than one of a group.
The bytes of one of each stand in `hardware/*.yaml`; no tensor can use them, and no count of tensors shows them.
"""

from __future__ import annotations

from megatron3d.analysis.cost_model.hardware import KernelRates
from megatron3d.parallel.parallel_state import ParallelState


def num_communicators(state: ParallelState) -> int:
    """Return the communicators of a rank: its groups of more than one rank, and two for each link, one a direction.

    None is of all ranks unless training needs one: numbers of all ranks are reduced over the others.
    """
    return len({axes for axes in state.group_axes if state.mesh.size(axes) > 1}) + 2 * len(state.my_links)


def library_bytes(state: ParallelState, rates: KernelRates) -> int:
    """Return the bytes of device memory that this rank's libraries hold outside torch's allocator."""
    return round((rates.context_gib + num_communicators(state) * rates.communicator_gib) * 2**30)
