"""Closed forms of a mixture of experts on one rank, where the experts' load is balanced: FLOPs, bytes sent, and time.

forward     relayout to whole rows (all-to-all over features); and back (all-gather over copies, all-to-all)
backward    the same collectives in the reverse order

Tokens are on their way to the ranks of their experts during the shared experts' GEMMs, and their gradients during the
GEMMs of the shared experts' backward; what is longer than these is exposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron3d.experts.plan import (
    MICROBATCH,
    SEQUENCE,
    DispatchSizes,
    Experts,
    backward_traffic,
    balanced_exchange,
    forward_traffic,
    tokens_traffic,
)
from megatron3d.forecast.memory.activations import INDEX
from megatron3d.forecast.memory.local_sizes import LocalSizes
from megatron3d.forecast.time.breakdown import GEMMS, MEMORY, SLOWDOWN, TimeBreakdown, exposed_time
from megatron3d.forecast.time.layer import LayerTimes, Machine, layer_times
from megatron3d.model.linear_spec import SHARED_FC1, SHARED_FC2
from megatron3d.model.spec import counts_each_step, counts_shape
from megatron3d.parallel.matmul_plan import Traffic, ring
from megatron3d.parallel.modes.mode import ALLGATHER


def expert_flops(local: LocalSizes, experts: Experts) -> int:
    """Return the FLOPs of one pass through the GEMMs of router and experts; shared experts are linears of the layer."""
    matrices, hidden = 3 if local.is_gated else 2, local.arch.hidden_size
    router = local.home_tokens * (experts.num_experts + experts.has_shared_gate)
    return 2 * hidden * (router + local.expert_rows * matrices * local.expert_ffn)


def expert_traffic(local: LocalSizes, experts: Experts, forwards: int) -> Iterator[Traffic]:
    """Yield the collectives of one layer's mixture of experts, with `forwards` forward passes and a backward."""
    mesh, mode = local.mesh, local.mode
    features = mesh.nontrivial(mode.residual[1])
    collect = list(back_to_residual(local))
    spread = [call for call in collect if call.axes == features]
    yield from (forwards * (1 + experts.has_shared_gate) + 1) * spread
    yield from (forwards + 1 + experts.has_shared_gate) * collect
    yield from _exchange(local, experts, forwards)
    axes = mesh.nontrivial(axis for axis in mode.home if axis not in mode.batch_axes)
    if axes and local.arch.balance is not None and {SEQUENCE, MICROBATCH} & set(local.arch.balance.losses):
        counts = local.sequences_read * experts.num_experts * _COUNT_BYTES
        yield from forwards * [ring("all_reduce", axes, counts, mesh)]
    if axes and forwards and local.arch.balance is not None and local.arch.balance.capacity_factor is not None:
        ranks, slots = mesh.size(axes), local.home_tokens * experts.topk
        for each in (slots * INDEX, slots * local.wide, local.home_tokens * INDEX):
            yield ring("all_gather", axes, ranks * each, mesh)


def counts_of_routers(local: LocalSizes, is_logged: bool) -> list[Traffic]:
    """Return the all-reduce of what all routers counted in a step, which the metrics of a logged step need as well."""
    rows, columns = counts_shape(local.arch)
    if not rows or not (is_logged or counts_each_step(local.arch)):
        return []
    return [ring("all_reduce", local.mesh.nontrivial(local.mesh.names), 8 * rows * columns, local.mesh)]


def dispatch_sizes(local: LocalSizes, experts: Experts) -> DispatchSizes:
    """Return the sizes of the exchange of tokens with the ranks of their experts."""
    hidden, topk, num_experts = local.arch.hidden_size, experts.topk, experts.num_experts
    return DispatchSizes(local.gathered_tokens, hidden, topk, num_experts, local.itemsize, local.wide)


def _exchange(local: LocalSizes, experts: Experts, forwards: int) -> Iterator[Traffic]:
    """Yield the exchange of tokens with the ranks that split the same experts, and with the ranks of their experts."""
    mode, sizes = local.mode, dispatch_sizes(local, experts)
    outer = replace(sizes, tokens=local.home_tokens), mode.etensor, ALLGATHER
    for each, split, dispatcher in (outer, (sizes, mode.experts, mode.dispatcher)):
        axes = local.mesh.nontrivial(split)
        ranks = local.mesh.size(axes)
        if ranks == 1:
            continue
        rows = balanced_exchange(each, ranks, local.mesh.index(axes))
        for number in range(forwards):
            yield from forward_traffic(dispatcher, axes, each, ranks, rows, again=number > 0)
        yield from backward_traffic(dispatcher, axes, each, ranks, rows)


def back_to_residual(local: LocalSizes) -> Iterator[Traffic]:
    """Yield the collectives from whole rows to the residual stream, which are the last ones of a layer."""
    features, copies = (local.mesh.nontrivial(axes) for axes in (local.mode.residual[1], local.mode.copies))
    whole = local.home_tokens * local.arch.hidden_size * local.itemsize * local.mesh.size(copies)
    if copies:
        yield ring("all_gather", copies, whole, local.mesh)
    if features:
        yield ring("all_to_all", features, local.residual, local.mesh)


def not_recomputed(local: LocalSizes) -> list[Traffic]:
    """Return the collectives at the end of a layer that recomputation leaves out, if the layer is the last of a run.

    Recomputation stops at the last tensor that backward needs.
    """
    saves_later = local.arch.hidden_dropout > 0 or "mlp_output_norm" in local.arch.norm_sites
    if local.experts is None or saves_later:
        return []
    if local.experts.has_shared_gate:
        return list(back_to_residual(local))
    rows, calls = local.gathered_tokens * local.arch.hidden_size * local.itemsize, []
    if (axes := local.mesh.nontrivial(local.mode.experts)) and local.mode.dispatcher == ALLGATHER:
        calls.append(ring("reduce_scatter", axes, rows * local.mesh.size(axes), local.mesh))
    if axes := local.mesh.nontrivial(local.mode.etensor):
        calls.append(ring("reduce_scatter", axes, rows, local.mesh))
    return [*calls, *back_to_residual(local)]


# Counts of tokens of each sequence are reduced as fp32.
_COUNT_BYTES = 4


def _of_busiest(call: Traffic, local: LocalSizes) -> Traffic:
    """Return a collective with the bytes of the busiest rank, which `alltoall` waits for."""
    is_exchange = call.axes == local.mesh.nontrivial(local.mode.experts) and local.mode.dispatcher != ALLGATHER
    return call._replace(wire_bytes=call.wire_bytes * local.expert_load) if is_exchange else call


# Accesses of rows, in those of [R, H]: copied to the order of experts, weighted between the linears, and added.
_ROW_ACCESSES = 7


def times_of_layer(local: LocalSizes, machine: Machine) -> LayerTimes:
    """Return the times of a layer of the kind of `local.layer` for one microbatch, router and experts included."""
    rest, experts = layer_times(local, machine), local.experts
    if experts is None:
        return rest
    products, shared_s = _products(local, experts, machine), _shared_gemms_s(local, machine)
    forward = products.plus(_between(local, experts, machine, shared_s, backward=False))
    dgrad = products.plus(_between(local, experts, machine, shared_s, backward=True))
    whole = products.plus(_between(local, experts, machine, 2 * shared_s, backward=True))
    again = forward if local.recompute.granularity == "full" else TimeBreakdown()
    wgrad = products.plus(_accumulation(local, experts, machine))
    return LayerTimes(
        rest.forward.plus(forward),
        rest.input_grad.plus(dgrad, again),
        rest.weight_grad.plus(wgrad),
        rest.backward.plus(whole, again, wgrad),
    )


def _shared_gemms_s(local: LocalSizes, machine: Machine) -> float:
    """Return the seconds of the shared experts' GEMMs in one pass; 0 where they hide no transfer."""
    if not machine.profile.overlaps_shared_experts or SHARED_FC1 not in local.matmuls:
        return 0.0
    matmuls = (local.matmuls[path] for path in (SHARED_FC1, SHARED_FC2))
    return sum(machine.device.gemm_s(*matmul.multiplied(local.mesh)) for matmul in matmuls)


def _hidden_s(local: LocalSizes, experts: Experts, machine: Machine, seconds: float, backward: bool) -> float:
    """Return for how long tokens, or their gradients, are on their way during GEMMs of `seconds`."""
    axes = local.mesh.nontrivial(local.mode.experts)
    if not axes or not seconds:
        return 0.0
    sizes, ranks = dispatch_sizes(local, experts), local.mesh.size(axes)
    rows = balanced_exchange(sizes, ranks, local.mesh.index(axes))
    call = _of_busiest(tokens_traffic(local.mode.dispatcher, axes, sizes, ranks, rows, backward), local)
    return min(seconds, machine.network.seconds(call, local.mesh))


def _products(local: LocalSizes, experts: Experts, machine: Machine) -> TimeBreakdown:
    """Return the time of the grouped GEMMs of one pass, and of the router's GEMM."""
    hidden, ffn, parts = local.arch.hidden_size, local.expert_ffn, 2 if local.is_gated else 1
    count = experts.num_experts // local.mesh.size(local.mode.experts)
    rows = local.expert_rows / count
    seconds = machine.device.gemm_s(rows, parts * ffn, hidden, count) + machine.device.gemm_s(rows, hidden, ffn, count)
    return TimeBreakdown({GEMMS: seconds + machine.device.gemm_s(local.home_tokens, experts.num_experts, hidden)})


def _accumulation(local: LocalSizes, experts: Experts, machine: Machine) -> TimeBreakdown:
    """Return the time to add the experts' weight gradients to main_grad, where the GEMMs do not hide it."""
    count = experts.num_experts // local.mesh.size(local.mode.experts)
    weights = count * local.arch.hidden_size * (3 if local.is_gated else 2) * local.expert_ffn
    seconds = machine.accumulation_s(weights, _products(local, experts, machine).total)
    return TimeBreakdown({MEMORY: seconds})


def _between(local: LocalSizes, experts: Experts, machine: Machine, shared_s: float, backward: bool) -> TimeBreakdown:
    """Return the time of the kernels between the GEMMs, and of the collectives, of which `shared_s` hide tokens."""
    passes, rows, size = machine.profile.activation, local.expert_rows, machine.device.itemsize
    inner = rows * local.expert_ffn * (1.5 if local.is_gated else 1)
    accesses = inner * (passes.backward if backward else passes.forward)
    seconds = machine.device.memory_bound_s(accesses * size, passes.num_kernels)
    seconds += machine.device.memory_bound_s(_ROW_ACCESSES * rows * local.arch.hidden_size * size, _ROW_ACCESSES)
    both = (expert_traffic(local, experts, forwards) for forwards in (0, 1))
    calls = [[_of_busiest(call, local) for call in each] for each in both]
    sent = [sum(machine.network.seconds(call, local.mesh) for call in each) for each in calls]
    mode = local.mode
    axes = local.mesh.nontrivial({*mode.residual[1], *mode.copies, *mode.experts, *mode.etensor})
    hidden = _hidden_s(local, experts, machine, shared_s, backward)
    moved = exposed_time(axes, (sent[0] if backward else sent[1] - sent[0]) - hidden)
    slowed = TimeBreakdown({SLOWDOWN: hidden * machine.device.comm_tax} if hidden else {})
    return TimeBreakdown({MEMORY: seconds}).plus(moved, slowed)
