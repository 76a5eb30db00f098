"""Times of what only latent attention has between its GEMMs: the norms of its latents, the rotary key of all heads."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.analysis.cost_model.breakdown import MEMORY, TimeBreakdown, exposed_time
from megatron3d.analysis.cost_model.execution_profile import MemoryAccesses
from megatron3d.analysis.cost_model.kernels import DeviceModel
from megatron3d.analysis.cost_model.network import Network
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.parallel.latent import latent_traffic


def latent_times(
    local: LocalSizes, device: DeviceModel, network: Network, norm: MemoryAccesses, backward: bool
) -> Iterator[TimeBreakdown]:
    """Yield the times of the norms without their statistics' reductions, and of the rotary key's collectives."""
    if not local.arch.is_latent:
        return
    for size in local.arch.latent_sizes:
        elements = local.tokens * local.part(size, local.mode.residual[1])
        num_bytes = elements * (norm.backward if backward else norm.forward) * device.itemsize
        yield TimeBreakdown({MEMORY: device.memory_bound_s(num_bytes, norm.num_kernels)})
    sizes = local.num_tokens, local.arch.qk_pos_emb_head_dim, device.itemsize
    for call in latent_traffic(local.mode.expand, local.mesh, *sizes, backward):
        yield exposed_time(call.axes, network.seconds(call, local.mesh))
