"""Memory of a GPU that libraries hold outside torch's allocator: the CUDA context, and NCCL's communicators.

    context + communicators x bytes of one         (a communicator per process group and per link of the pipeline)

The bytes of one of each stand in `hardware/*.yaml`; no tensor can use them, and no count of tensors shows them.
"""

from __future__ import annotations

from megatron3d.analysis.cost_model.hardware import KernelRates
from megatron3d.parallel.parallel_state import ParallelState


def num_communicators(state: ParallelState) -> int:
    """Return the communicators of a rank: its groups of more than one rank, the world, and its links."""
    groups = {axes for axes in state.group_axes if state.mesh.size(axes) > 1}
    is_alone = state.world_size == 1
    return 0 if is_alone else len({*groups, state.mesh.nontrivial(state.mesh.names)}) + len(state.my_links)


def library_bytes(state: ParallelState, rates: KernelRates) -> int:
    """Return the bytes of device memory that this rank's libraries hold outside torch's allocator."""
    return round((rates.context_gib + num_communicators(state) * rates.communicator_gib) * 2**30)
