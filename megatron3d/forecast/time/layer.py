"""Time of a transformer layer on one rank: forward, dgrad and wgrad.

    forward     all-gather X (W was prefetched during the linear before), GEMM, reduce Y
    backward    all-gather dY; dgrad GEMM overlaps with the all-gather of X, wgrad GEMM with the reduction of dX;
                W is prefetched during the GEMMs before, dW is reduced during those that follow

With `tp_comm_overlap`, X, Y and dY move in rounds with the GEMM of their matmul where the plan allows.  Communication
that overlaps with a GEMM takes multiprocessors from it; what is longer than the GEMM is exposed.  Rounds also cost p
GEMMs of 1/p of the rows or columns, which fill the device less well than one, and a kernel that adds p terms.

A collective delivers shards one after another: concatenating along the first dimension needs no copy, along the second
each element is read and written once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron3d.attention.context.plan import exchange_traffic
from megatron3d.attention.plan import latent_traffic
from megatron3d.forecast.memory.local_sizes import LocalMatmul, LocalSizes
from megatron3d.forecast.time.breakdown import ATTENTION, GEMMS, MEMORY, SLOWDOWN, TimeBreakdown, combine, exposed_time
from megatron3d.forecast.time.hardware import DeviceModel, Network
from megatron3d.forecast.time.practices import TWO_COPIES, ExecutionProfile, MemoryAccesses
from megatron3d.linear.overlap_plan import IN_ROUNDS, async_plan, in_rounds
from megatron3d.model.linear_spec import FC2, KV_UP, Q_UP, mtp_linears
from megatron3d.model.spec import CORE_ATTN, MLA_UP_PROJ, MLP_ACT
from megatron3d.parallel.matmul_plan import Flows, MatmulPlan, Move, Traffic, flows, moves, ring, whole_bytes
from megatron3d.parallel.mesh import Mesh


class ConcatCopies(NamedTuple):
    """Copied bytes by operand of Y[m, n] = X[m, k] W[n, k]^T and of its gradients; those of dW are W's."""

    x: float = 0
    w: float = 0
    y: float = 0
    dy: float = 0
    dx: float = 0

    @property
    def forward(self) -> float:
        """Bytes copied by the forward matmul."""
        return self.x + self.w + self.y


def concat_copies(plan: MatmulPlan, mesh: Mesh, m: int, n: int, k: int, itemsize: int) -> ConcatCopies:
    """Return the copies of one matmul with global sizes m, n, k."""
    plan = plan.on(mesh)
    x, w, y = whole_bytes(plan, mesh, m, n, k, itemsize)
    return ConcatCopies(
        _copied(moves(plan.x), "K", x, mesh),
        _copied(moves(plan.w), "K", w, mesh),
        _copied(moves(plan.y), "N", y, mesh),
        _copied(moves(plan.dy), "N", y, mesh),
        _copied(plan.dx_moves, "K", x, mesh),
    )


def _copied(steps: Iterable[Move], second: str, whole_bytes: float, mesh: Mesh) -> float:
    total = 0.0
    for axes, dim in steps:
        total += 2 * whole_bytes * (dim == second)
        whole_bytes /= mesh.size(axes) if dim else 1
    return total


class RoundsExcess(NamedTuple):
    """Seconds that rounds add to a linear: in forward, in a dgrad that gathers dY, and in one that scatters dX."""

    forward: float = 0.0
    gather_dy: float = 0.0
    reduce_dx: float = 0.0


def rounds_excess(plan: MatmulPlan, mesh: Mesh, m: float, n: float, k: float, device: DeviceModel) -> RoundsExcess:
    """Return what rounds add, for the sizes m, n and k that this rank multiplies."""
    rounds = async_plan(plan)
    forward, dgrad = {"M": m, "N": n, "K": k}, {"M": m, "K": k, "N": n}
    return RoundsExcess(
        _smaller_gemms(rounds.x or rounds.y, mesh, forward, device) + _sum_s(rounds.y, mesh, m * n, device),
        _smaller_gemms(rounds.dy, mesh, dgrad, device),
        _smaller_gemms(rounds.dx, mesh, dgrad, device) + _sum_s(rounds.dx, mesh, m * k, device),
    )


def _smaller_gemms(move: Move | None, mesh: Mesh, sizes: Mapping[str, float], device: DeviceModel) -> float:
    """Return the seconds by which as many GEMMs as ranks take longer than one."""
    if move is None:
        return 0.0
    ranks, dim = mesh.size(move.axes), str(move.dim)
    part = {**sizes, dim: sizes[dim] / ranks}
    return max(0.0, ranks * device.gemm_s(*part.values()) - device.gemm_s(*sizes.values()))


def _sum_s(move: Move | None, mesh: Mesh, num_elements: float, device: DeviceModel) -> float:
    """Return the seconds to read all terms of this rank's part and to write their sum."""
    if move is None:
        return 0.0
    return device.memory_bound_s(num_elements * (1 + 1 / mesh.size(move.axes)) * device.itemsize)


def _latent_times(local: LocalSizes, machine: Machine, backward: bool) -> Iterator[TimeBreakdown]:
    """Yield the times of the norms without their statistics' reductions, and of the rotary key's collectives."""
    if not local.arch.is_latent:
        return
    device, norm = machine.device, machine.profile.norm
    for size in local.arch.latent_sizes:
        elements = local.tokens * local.part(size, local.mode.residual[1])
        num_bytes = elements * (norm.backward if backward else norm.forward) * device.itemsize
        yield TimeBreakdown({MEMORY: device.memory_bound_s(num_bytes, norm.num_kernels)})
    sizes = local.num_tokens, local.arch.qk_pos_emb_head_dim, device.itemsize
    for call in latent_traffic(local.mode.expand, local.mesh, *sizes, backward):
        yield exposed_time(call.axes, machine.network.seconds(call, local.mesh))


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


@dataclass(frozen=True)
class Machine:
    """The device model, the network and the execution profile that times are predicted for."""

    device: DeviceModel
    network: Network
    profile: ExecutionProfile

    @property
    def on_gpu(self) -> bool:
        """Whether ranks are GPUs; ranks of a cluster of CPUs share cores."""
        return self.network.cluster.cores is None

    def accumulation_s(self, num_weights: float, gemm_s: float) -> float:
        """Return the seconds to accumulate a gradient into main_grad, less what the wgrad GEMM of `gemm_s` hides."""
        seconds = self.device.memory_bound_s(num_weights * self.profile.grad_bytes)
        is_hidden = self.profile.fuses_grad_sum and not self.device.kernels.adds_launch
        return max(0.0, seconds - gemm_s) if is_hidden else seconds

    def compiled(self) -> Machine:
        """Return the machine with compiled kernels, which fuse the rotary embedding."""
        return replace(self, profile=replace(self.profile, rotary=TWO_COPIES))


class LayerTimes(NamedTuple):
    """Times of a layer's forward, dgrad, wgrad and unsplit backward; dgrad and backward include recomputation."""

    forward: TimeBreakdown
    input_grad: TimeBreakdown
    weight_grad: TimeBreakdown
    backward: TimeBreakdown


class LinearTime(NamedTuple):
    """Time of a linear's GEMM, its collectives, and the sizes of its weight and output.

    `rounds` are the collectives with those under their names that run in rounds with the GEMM; `excess` is their cost.
    """

    gemm_s: float
    sent: Flows
    rounds: Flows
    weight: float
    output: float
    joins: ConcatCopies
    excess: RoundsExcess = RoundsExcess()

    @staticmethod
    def of(matmul: LocalMatmul, local: LocalSizes, machine: Machine) -> LinearTime:
        """Return the time of a linear with the sizes that this rank multiplies."""
        plan, mesh, itemsize = matmul.plan, local.mesh, machine.device.itemsize
        sizes = matmul.m, matmul.n, matmul.k
        m, n, k = matmul.multiplied(mesh)
        sent = flows(plan, mesh, *sizes, itemsize, wgrad_itemsize=max(itemsize, machine.profile.wgrad_itemsize))
        seconds = machine.device.gemm_s(m, n, k)
        copied = concat_copies(plan, mesh, *sizes, itemsize) if machine.profile.copies_concats else ConcatCopies()
        found = LinearTime(seconds, sent, sent, n * k / mesh.size(plan.w), m * n / mesh.size(plan.dy), copied)
        if not local.overlap.in_rounds:
            return found
        excess = rounds_excess(plan, mesh, m, n, k, machine.device)
        return found._replace(rounds=in_rounds(sent, plan), excess=excess)


class OverlapModel:
    """Communication time, exposed or overlapped with computation."""

    def __init__(self, machine: Machine, mesh: Mesh) -> None:
        self._machine, self._mesh = machine, mesh

    def exposed(self, calls: list[Traffic]) -> TimeBreakdown:
        """Return the time of collectives that nothing overlaps with."""
        return combine(exposed_time(call.axes, self._machine.network.seconds(call, self._mesh)) for call in calls)

    def overlapped(self, calls: list[Traffic], seconds: float, hides: bool = True) -> TimeBreakdown:
        """Return the exposed rest of collectives that overlap with `seconds` of computation, and its slowdown."""
        times = self.exposed(calls)
        if not hides or not times:
            return times
        hidden = min(times.total, seconds)
        tax = TimeBreakdown({SLOWDOWN: hidden * self._machine.device.comm_tax})
        return times.scaled(1 - hidden / times.total).plus(tax)

    def with_own_gemm(self, calls: list[Traffic], seconds: float) -> TimeBreakdown:
        """Return the exposed rest of collectives of a GEMM's own operands, in rounds or in chunks."""
        if rounds := [call for call in calls if call.collective in IN_ROUNDS]:
            others = [call for call in calls if call.collective not in IN_ROUNDS]
            # Rounds overlap with all rounds of their GEMM but one.
            parts = [self.overlapped([call], seconds * (1 - 1 / self._mesh.size(call.axes))) for call in rounds]
            return combine((*parts, self.with_own_gemm(others, seconds)))
        if not calls:
            return TimeBreakdown()
        times, ranks = self.exposed(calls), self._mesh.size(calls[0].axes)
        if not self._machine.profile.chunks_operands or ranks == 1:
            return times
        share = (ranks - 1) / ranks
        hidden = min(times.total * share, seconds * share)
        tax = TimeBreakdown({SLOWDOWN: hidden * self._machine.device.comm_tax})
        return times.scaled(1 - hidden / times.total).plus(tax)


@dataclass(frozen=True)
class Linears:
    """Linears of a layer, or of a module that predicts ahead, in the order of the forward, on a machine."""

    local: LocalSizes
    machine: Machine
    times: Mapping[str, LinearTime]
    over: OverlapModel

    @staticmethod
    def of(matmuls: Mapping[str, LocalMatmul], local: LocalSizes, machine: Machine) -> Linears:
        """Return the linears with these matmuls."""
        times = {path: LinearTime.of(matmul, local, machine) for path, matmul in matmuls.items()}
        return Linears(local, machine, times, OverlapModel(machine, local.mesh))

    def forward(self) -> TimeBreakdown:
        """Return the time of the forward of all linears in their order."""
        over, machine, overlap, parts = self.over, self.machine, self.local.overlap, list[TimeBreakdown]()
        before = 0.0
        for each in self.times.values():
            seconds = each.gemm_s + each.excess.forward
            parts.append(TimeBreakdown({GEMMS: seconds, MEMORY: machine.device.memory_bound_s(each.joins.forward)}))
            parts.append(over.with_own_gemm(each.rounds.gather_x + each.rounds.reduce_y, seconds))
            parts.append(over.overlapped(each.sent.gather_w, before, overlap.weight_gather))
            before = each.gemm_s
        # The first linear's weight, counted as exposed, is prefetched during the last linear of the layer before.
        first = next(iter(self.times.values())).sent.gather_w
        covered, bare = over.overlapped(first, before, overlap.weight_gather), over.exposed(first)
        parts.append(TimeBreakdown({kind: covered.get(kind, 0.0) - bare.get(kind, 0.0) for kind in {*covered, *bare}}))
        return combine(parts)

    def backward(self) -> tuple[TimeBreakdown, TimeBreakdown, TimeBreakdown]:
        """Return the times of dgrad, of wgrad, and of the unsplit backward."""
        over, machine, overlap = self.over, self.machine, self.local.overlap
        half, late, whole = (list[TimeBreakdown]() for _ in range(3))
        hides = overlap.input_grad and machine.profile.overlaps_input_grad
        linears = {**self.local.linears, **mtp_linears(self.local.arch)}
        for name, each in self.times.items():
            sent, seconds, copied = each.sent, each.gemm_s, each.joins
            product = TimeBreakdown({GEMMS: seconds})
            gathers_w = [] if overlap.keep_gathered_weights else sent.gather_w
            common = [
                TimeBreakdown({GEMMS: seconds + each.excess.gather_dy}),
                over.with_own_gemm(each.rounds.gather_dy, seconds),
                over.overlapped(gathers_w, 2 * seconds, overlap.weight_gather),
            ]
            sums = over.overlapped(sent.reduce_dw, 2 * seconds, overlap.weight_grad)
            add_up = TimeBreakdown({MEMORY: machine.accumulation_s(each.weight, 0.0 if sent.reduce_dw else seconds)})
            add_up = add_up.plus(TimeBreakdown({MEMORY: machine.device.memory_bound_s(copied.x + copied.w)}))
            bias = machine.profile.bias_grad * each.output * linears[name].has_bias * machine.device.itemsize
            moved = copied.dy + copied.dx + copied.w * bool(gathers_w)
            common += [TimeBreakdown({MEMORY: machine.device.memory_bound_s(num)}) for num in (bias, moved)]
            alone = over.with_own_gemm(each.rounds.reduce_dx, seconds).plus(
                TimeBreakdown({GEMMS: each.excess.reduce_dx})
            )
            half += [*common, alone]
            late += [product, over.exposed(sent.gather_x), sums, add_up]
            whole += [*common, over.overlapped(sent.gather_x, seconds), product, sums, add_up]
            whole.append(alone if overlap.in_rounds and not hides else over.overlapped(sent.reduce_dx, seconds, hides))
        return combine(half), combine(late), combine(whole)


def layer_times(local: LocalSizes, machine: Machine) -> LayerTimes:
    """Return the times of a layer of the kind of `local.layer` for one microbatch, without router and experts."""
    linears = Linears.of(local.matmuls, local, machine)
    forward = [linears.forward(), *_memory_bound(local, machine, backward=False)]
    back_i, back_w, whole = linears.backward()
    between = combine(_memory_bound(local, machine, backward=True))
    again = combine(_recomputation(linears, combine(forward)))
    return LayerTimes(combine(forward), combine((back_i, between, again)), back_w, combine((whole, between, again)))


def _memory_bound(local: LocalSizes, machine: Machine, backward: bool) -> Iterator[TimeBreakdown]:
    """Yield the times of the memory-bound kernels between the GEMMs."""
    profile, arch = machine.profile, local.arch
    size = machine.device.itemsize
    residual, inner = local.tokens * local.hidden, local.inner_tokens
    heads = local.num_queries * arch.kv_channels
    keys = 2 * local.num_groups * arch.kv_channels

    def passes(elements: float, passes: MemoryAccesses, count: int = 1) -> TimeBreakdown:
        num = passes.backward if backward else passes.forward
        return TimeBreakdown({MEMORY: count * machine.device.memory_bound_s(elements * num * size, passes.num_kernels)})

    yield passes(residual, profile.norm, len(arch.norm_sites))
    yield passes(residual, profile.add, 2)
    yield passes(residual, profile.dropout, 2 * (arch.hidden_dropout > 0))
    yield passes(inner * local.ffn * (1.5 if local.is_gated else 1), profile.activation)
    yield passes(inner * (2 * heads + keys), profile.layout)
    if share := local.rotated_share:
        yield passes(inner * (heads + keys / 2) * share, profile.rotary)
    if arch.qk_layernorm:
        yield passes(inner * (heads + keys / 2), profile.norm)
    yield _attention(local, machine, backward)
    if axes := local.heads.gather_axes:
        whole = inner * local.keys_width * local.mesh.size(axes) * size
        call = ring("reduce_scatter" if backward else "all_gather", axes, whole, local.mesh)
        yield exposed_time(axes, 2 * machine.network.seconds(call, local.mesh))
    yield _exchange(local, machine, backward)
    yield from _latent_times(local, machine, backward)
    if features := local.mesh.nontrivial(local.mode.residual[1]):
        call = ring("all_reduce", features, 2 * local.tokens * 4, local.mesh)
        num_norms = len(arch.norm_sites) + len(arch.latent_sizes)
        yield exposed_time(features, num_norms * machine.network.seconds(call, local.mesh))


def _exchange(local: LocalSizes, machine: Machine, backward: bool, again: bool = False) -> TimeBreakdown:
    """Return the exposed time of one exchange between context ranks: all but what attention hides."""
    mode, mesh = local.mode, local.mesh
    if not mode.context:
        return TimeBreakdown()
    sizes = replace(local.exchange, itemsize=machine.device.itemsize)
    sent = exchange_traffic(mode.exchange, mode.context, sizes, mesh, backward, again)
    every, bare = (sum(machine.network.seconds(call, mesh) for call in calls) for calls in sent)
    return exposed_time(mode.context, every - min(every - bare, _attention(local, machine, backward).total))


def _attention(local: LocalSizes, machine: Machine, backward: bool) -> TimeBreakdown:
    """Return the time of fused attention over what queries see, or of its unfused GEMMs and elementwise kernels."""
    arch, device, rows, seq = local.arch, machine.device, local.positions, local.arch.seq_length
    heads = local.sequences * local.num_queries
    if (scores := machine.profile.unfused_scores(arch.attention_softcap is not None)) is None:
        flops = 4 * heads * rows * seq * arch.kv_channels / 2 * local.seen_share
        return TimeBreakdown({ATTENTION: device.attention_s(flops * (2.5 if backward else 1), backward)})
    keys = seq if arch.attention_softcap is None else local.keys_seen
    first = device.gemm_s(rows, keys, arch.kv_channels, heads)
    second = device.gemm_s(rows, arch.kv_channels, keys, heads)
    seconds = device.memory_bound_s(
        heads * rows * keys * (scores.backward if backward else scores.forward) * device.itemsize, scores.num_kernels
    )
    return TimeBreakdown({ATTENTION: (1 + backward) * (first + second) + seconds})


def _recomputation(linears: Linears, forward: TimeBreakdown) -> Iterator[TimeBreakdown]:
    """Yield the times of recomputation in backward; weights are not prefetched for it."""
    local, machine, times = linears.local, linears.machine, linears.times
    if local.recompute.granularity == "full":
        exposed = times.values() if local.overlap.weight_gather else ()
        yield forward.plus(*(linears.over.exposed(each.sent.gather_w) for each in exposed))
        if machine.profile.stops_recomputation and FC2 in times:
            yield TimeBreakdown({GEMMS: -times[FC2].gemm_s})
    yield from selective_recomputation(local, machine)


def selective_recomputation(local: LocalSizes, machine: Machine) -> Iterator[TimeBreakdown]:
    """Yield the times of modules that are recomputed in a layer's backward."""
    recompute, accesses = local.recompute, machine.profile.activation.forward * machine.device.itemsize
    if recompute.recomputes(CORE_ATTN):
        yield TimeBreakdown() if local.keeps_result else _attention(local, machine, backward=False)
        yield _exchange(local, machine, backward=False, again=local.keeps_result)
    # Up projections; nothing overlaps with their collectives.
    for matmul in linears_from_latents(local):
        yield TimeBreakdown({GEMMS: machine.device.gemm_s(*matmul.multiplied(local.mesh))})
    for call in traffic_from_latents(local):
        yield exposed_time(call.axes, machine.network.seconds(call, local.mesh))
    if recompute.recomputes(MLP_ACT):
        elements = local.inner_tokens * local.ffn * (1.5 if local.is_gated else 1)
        yield TimeBreakdown({MEMORY: machine.device.memory_bound_s(elements * accesses)})
