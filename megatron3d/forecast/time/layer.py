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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron3d.forecast.memory.activations import modules_of
from megatron3d.forecast.time.breakdown import ATTENTION, GEMMS, MEMORY, SLOWDOWN, TimeBreakdown, combine, exposed_time
from megatron3d.forecast.time.hardware import DeviceModel, Network
from megatron3d.forecast.time.practices import TWO_COPIES, ExecutionProfile, MemoryAccesses
from megatron3d.linear.overlap_plan import IN_ROUNDS, async_plan, in_rounds
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import Operation, Scores
from megatron3d.model.operations import layer_operations
from megatron3d.parallel.matmul_plan import Flows, MatmulPlan, Move, Traffic, flows, moves, whole_bytes
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
    has_bias: bool
    excess: RoundsExcess = RoundsExcess()

    @staticmethod
    def of(operation: Operation, local: LocalSizes, machine: Machine) -> LinearTime:
        """Return the time of a linear with the sizes that this rank multiplies."""
        matmul = operation.matmul
        assert matmul is not None, f"{operation.name} is a linear"
        plan, mesh, itemsize = matmul.plan, local.mesh, machine.device.itemsize
        sizes = matmul.m, matmul.n, matmul.k
        m, n, k = matmul.multiplied(mesh)
        sent = flows(plan, mesh, *sizes, itemsize, wgrad_itemsize=max(itemsize, machine.profile.wgrad_itemsize))
        seconds = machine.device.gemm_s(m, n, k)
        copied = concat_copies(plan, mesh, *sizes, itemsize) if machine.profile.copies_concats else ConcatCopies()
        weight, output = n * k / mesh.size(plan.w), m * n / mesh.size(plan.dy)
        found = LinearTime(seconds, sent, sent, weight, output, copied, operation.has_bias)
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
    def of(operations: Iterable[Operation], local: LocalSizes, machine: Machine) -> Linears:
        """Return the linears among operations."""
        times = {each.name: LinearTime.of(each, local, machine) for each in operations if each.matmul is not None}
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
        for each in self.times.values():
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
            bias = machine.profile.bias_grad * each.output * each.has_bias * machine.device.itemsize
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
    """Return the times of a layer of the kind of `local.layer` for one microbatch."""
    return times_of(layer_operations(local), local, machine, is_recomputed=local.recompute.granularity == "full")


def times_of(
    operations: Sequence[Operation], local: LocalSizes, machine: Machine, *, is_recomputed: bool
) -> LayerTimes:
    """Return the times of operations for one microbatch; `is_recomputed`: all of them are, in backward."""
    linears = Linears.of(operations, local, machine)
    others = OtherTimes(operations, linears)
    forward = linears.forward().plus(*others.all(False))
    half, late, whole = linears.backward()
    grouped = combine(others.weight_grad(each) for each in operations)
    again = combine(_whole_again(linears, others, forward) if is_recomputed else _modules_again(linears, others))
    return LayerTimes(
        forward,
        half.plus(*others.all(True), again),
        late.plus(grouped),
        whole.plus(*others.all(True, 2), grouped, again),
    )


@dataclass(frozen=True)
class OtherTimes:
    """Times of the operations of a layer besides its linears."""

    operations: Sequence[Operation]
    linears: Linears

    def all(self, backward: bool, num_gemms: int = 1) -> Iterator[TimeBreakdown]:
        """Yield the time of each operation.

        Args:
            num_gemms: GEMMs of a linear's backward that hide collectives: that of dgrad, or that of wgrad as well.
        """
        for each in self.operations:
            yield self.compute(each, backward)
            yield self.sent(each, each.sent_back if backward else each.sent, backward, num_gemms)

    def compute(self, operation: Operation, backward: bool) -> TimeBreakdown:
        """Return the time of its kernels, of its own GEMMs (backward: of dgrad), and of attention."""
        device, found = self.linears.machine.device, list[TimeBreakdown]()
        for kind, elements in operation.kernels:
            accesses: MemoryAccesses = getattr(self.linears.machine.profile, kind)
            num = accesses.backward if backward else accesses.forward
            seconds = device.memory_bound_s(elements * num * device.itemsize, accesses.num_kernels)
            found.append(TimeBreakdown({MEMORY: seconds}))
        if operation.gemms:
            found.append(TimeBreakdown({GEMMS: sum(device.gemm_s(*gemm) for gemm in operation.gemms)}))
        if operation.scores is not None:
            found.append(TimeBreakdown({ATTENTION: self._attention_s(operation.scores, backward)}))
        return combine(found)

    def weight_grad(self, operation: Operation) -> TimeBreakdown:
        """Return the time of the wgrad of its own GEMMs, which accumulate into main_grad."""
        machine, found = self.linears.machine, list[TimeBreakdown]()
        for gemm in operation.gemms:
            seconds = machine.device.gemm_s(*gemm)
            summed = machine.accumulation_s(gemm.batch * gemm.n * gemm.k, seconds)
            found.append(TimeBreakdown({GEMMS: seconds, MEMORY: summed}))
        return combine(found)

    def _attention_s(self, scores: Scores, backward: bool) -> float:
        """Return the seconds of fused attention over what queries see, or of unfused GEMMs and elementwise kernels."""
        device, profile = self.linears.machine.device, self.linears.machine.profile
        batch, queries, keys, channels = scores[:4]
        if (accesses := profile.unfused_scores(scores.is_plain)) is None:
            flops = 4 * batch * queries * keys * channels / 2 * scores.share
            return device.attention_s(flops * (2.5 if backward else 1), backward)
        products = device.gemm_s(queries, keys, channels, batch) + device.gemm_s(queries, channels, keys, batch)
        num_bytes = batch * queries * keys * (accesses.backward if backward else accesses.forward) * device.itemsize
        return (1 + backward) * products + device.memory_bound_s(num_bytes, accesses.num_kernels)

    def sent(self, operation: Operation, calls: Sequence[Traffic], backward: bool, num_gemms: int = 1) -> TimeBreakdown:
        """Return the exposed time of collectives of an operation: all but what other operations hide of them."""
        machine, mesh = self.linears.machine, self.linears.local.mesh

        def seconds(calls: Iterable[Traffic]) -> float:
            more = operation.busiest
            each = (call._replace(wire_bytes=call.wire_bytes * more) for call in calls) if more != 1 else calls
            return sum(machine.network.seconds(call, mesh) for call in each)

        if not calls:
            return TimeBreakdown()
        hidden = operation.hidden_back if backward else operation.hidden
        if not hidden or (operation.hides_if and not getattr(machine.profile, operation.hides_if)):
            return combine(exposed_time(call.axes, seconds([call])) for call in calls)
        behind = (each for each in self.operations if each.name in operation.behind)
        during = sum(self._computes_s(each, backward, num_gemms) for each in behind)
        covered = min(seconds(call for call in calls if call in hidden), during)
        slowed = TimeBreakdown({SLOWDOWN: covered * machine.device.comm_tax} if covered else {})
        return exposed_time(calls[0].axes, seconds(calls) - covered).plus(slowed)

    def _computes_s(self, operation: Operation, backward: bool, num_gemms: int) -> float:
        linear = self.linears.times.get(operation.name)
        return num_gemms * linear.gemm_s if linear else self.compute(operation, backward).total


def _whole_again(linears: Linears, others: OtherTimes, forward: TimeBreakdown) -> Iterator[TimeBreakdown]:
    """Yield the times of a forward in backward; weights are not prefetched for it."""
    exposed = linears.times.values() if linears.local.overlap.weight_gather else ()
    yield forward.plus(*(linears.over.exposed(each.sent.gather_w) for each in exposed))
    last = others.operations[-2].name
    if linears.machine.profile.stops_recomputation and last in linears.times:
        yield TimeBreakdown({GEMMS: -linears.times[last].gemm_s})


def _modules_again(linears: Linears, others: OtherTimes) -> Iterator[TimeBreakdown]:
    """Yield the times of modules that are recomputed on their own; nothing overlaps with their collectives."""
    local, modules = linears.local, modules_of(linears.local)
    for each in others.operations if modules else ():
        if each.is_again(modules):
            yield others.compute(each, backward=False)
            yield others.sent(each, each.sent_again(modules), backward=False)
            if (linear := linears.times.get(each.name)) is not None:
                gathers = [] if local.overlap.keep_gathered_weights else linear.sent.gather_w
                yield TimeBreakdown({GEMMS: linear.gemm_s})
                yield linears.over.exposed(linear.rounds.gather_x + linear.rounds.reduce_y + gathers)


def selective_recomputation(local: LocalSizes, machine: Machine) -> TimeBreakdown:
    """Return the time of modules that are recomputed in a layer's backward."""
    operations = layer_operations(local) if modules_of(local) else []
    linears = Linears.of(operations, local, machine)
    return combine(_modules_again(linears, OtherTimes(operations, linears)))
