"""Times of what only latent attention has: the norms of its latents, the rotary key of all heads, and up projections
that are recomputed from the latents."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.analysis.cost_model.breakdown import GEMMS, MEMORY, TimeBreakdown, exposed_time
from megatron3d.analysis.cost_model.execution_profile import MemoryAccesses
from megatron3d.analysis.cost_model.kernels import DeviceModel
from megatron3d.analysis.cost_model.network import Network
from megatron3d.analysis.memory_model.local_matmul import LocalMatmul
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.model.linears import KV_UP, Q_UP
from megatron3d.model.recompute_spec import MLA_UP_PROJ
from megatron3d.parallel.async_plan import in_rounds
from megatron3d.parallel.latent import latent_traffic
from megatron3d.parallel.matmul_plan import Traffic, flows


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


def linears_from_latents(local: LocalSizes) -> list[LocalMatmul]:
    """Return the matmuls of a layer that project latents up and are recomputed in backward."""
    is_recomputed = local.arch.is_latent and local.recompute.recomputes(MLA_UP_PROJ)
    return [local.matmuls[name] for name in ((Q_UP, KV_UP) if is_recomputed else ())]


def traffic_from_latents(local: LocalSizes) -> Iterator[Traffic]:
    """Yield the collectives of up projections that are recomputed in backward."""
    for plan, m, n, k, *_ in linears_from_latents(local):
        sent = flows(plan, local.mesh, m, n, k, local.itemsize)
        named = in_rounds(sent, plan) if local.overlap.in_rounds else sent
        yield from (*named.gather_x, *named.reduce_y)
        yield from () if local.overlap.keep_gathered_weights else sent.gather_w


def times_from_latents(local: LocalSizes, device: DeviceModel, network: Network) -> Iterator[TimeBreakdown]:
    """Yield the times of up projections that are recomputed in backward; nothing overlaps with their collectives."""
    size = local.mesh.size
    for plan, m, n, k, *_ in linears_from_latents(local):
        yield TimeBreakdown({GEMMS: device.gemm_s(m / size(plan.m), n / size(plan.n), k / size(plan.k))})
    for call in traffic_from_latents(local):
        yield exposed_time(call.axes, network.seconds(call, local.mesh))
