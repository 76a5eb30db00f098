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

    def accesses(self, kind: str) -> MemoryAccesses:
        """Return the accesses per element of a kind of memory-bound kernel."""
        return self._loss if kind == "loss" else getattr(self.profile, kind)

    @property
    def _loss(self) -> MemoryAccesses:
        """Accesses per logit of the loss and its gradient, the GEMMs not included.

        This framework's, where the profile gives none: on GPUs two fused kernels read the fp32 logits, read them again
        and write the gradient (`ops/triton_kernels.py`).  Otherwise maximum (1 access), difference and exponential (4),
        sum (1) and scale (2) of `ops/cross_entropy.py`, and casts of narrower logits and gradients.
        """
        size = self.device.itemsize
        wide = max(size, 4)
        if self.profile.logit_bytes is not None:
            return MemoryAccesses(self.profile.logit_bytes / size, 0, 10)
        if self.on_gpu and wide == 4:
            return MemoryAccesses((2 * wide + size) / size, 0, 2)
        casts = 2 * (size + wide) if size < wide else 0
        return MemoryAccesses((8 * wide + casts) / size, 0, 10)

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


def layer_times(local: LocalSizes, machine: Machine) -> LayerTimes:
    """Return the times of a layer of the kind of `local.layer` for one microbatch."""
    return times_of(layer_operations(local), local, machine, is_recomputed=local.recompute.granularity == "full")


def times_of(
    operations: Sequence[Operation], local: LocalSizes, machine: Machine, *, is_recomputed: bool = False
) -> LayerTimes:
    """Return the times of operations for one microbatch; `is_recomputed`: all of them are, in backward."""
    each = OperationTimes.of(operations, local, machine)
    forward, half, late, whole = (combine(times) for times in zip(*map(each.times, operations), strict=True))
    again = combine(each.all_again() if is_recomputed else each.modules_again())
    return LayerTimes(forward, half.plus(again), late, whole.plus(again))


def selective_recomputation(local: LocalSizes, machine: Machine) -> TimeBreakdown:
    """Return the time of modules that are recomputed in a layer's backward."""
    operations = layer_operations(local) if modules_of(local) else []
    return combine(OperationTimes.of(operations, local, machine).modules_again())


@dataclass(frozen=True)
class OperationTimes:
    """Times of each operation of a layer, an end or a module that predicts ahead, for one microbatch on a machine.

    Attributes:
        linears: the linears among them, in the order of forward.
        before: seconds of the GEMM of the linear before each, during which its weight is prefetched; that of the first
            is prefetched during the last linear of the layer before.
    """

    operations: Sequence[Operation]
    local: LocalSizes
    machine: Machine
    linears: Mapping[str, LinearTime]
    before: Mapping[str, float]
    over: OverlapModel

    @staticmethod
    def of(operations: Sequence[Operation], local: LocalSizes, machine: Machine) -> OperationTimes:
        """Return the times of operations."""
        linears = {
            each.name: LinearTime.of(each, local, machine)
            for each in operations
            if each.matmul is not None and not each.chunks
        }
        seconds = [linear.gemm_s for linear in linears.values()]
        before = dict(zip(linears, seconds[-1:] + seconds[:-1], strict=True))
        return OperationTimes(operations, local, machine, linears, before, OverlapModel(machine, local.mesh))

    def times(self, operation: Operation) -> LayerTimes:
        """Return the times of one operation next to the others, without recomputation."""
        forward = self.forward(operation)
        dgrad, wgrad = self._compute(operation, True), self._weight_grad(operation)
        half, late, whole = (dgrad.plus(self._sent(operation, operation.sent_back, True)), wgrad, dgrad.plus(wgrad))
        whole = whole.plus(self._sent(operation, operation.sent_back, True, 2))
        if (linear := self.linears.get(operation.name)) is None:
            return LayerTimes(forward, half, late, whole)
        backward = self._backward(linear)
        return LayerTimes(
            forward,
            *(one.plus(other) for one, other in zip((half, late, whole), backward, strict=True)),
        )

    def forward(self, operation: Operation) -> TimeBreakdown:
        """Return the time of the forward of one operation next to the others."""
        found = self._compute(operation, False).plus(self._sent(operation, operation.sent, False))
        linear = self.linears.get(operation.name)
        return found if linear is None else found.plus(self._forward(linear, self.before[operation.name]))

    def wire_bytes(self, operation: Operation) -> tuple[float, float]:
        """Return the bytes that forward and backward send, without recomputation."""
        sent, back = list(operation.sent), list(operation.sent_back)
        if (linear := self.linears.get(operation.name)) is not None:
            x, w, y, dy, dx, dw = linear.sent
            sent += x + w + y
            back += dy + x + dx + dw + ([] if self.local.overlap.keep_gathered_weights else w)
        return sum(call.wire_bytes for call in sent), sum(call.wire_bytes for call in back)

    def _forward(self, linear: LinearTime, before_s: float) -> TimeBreakdown:
        """Return the time of a linear's forward."""
        seconds, device = linear.gemm_s + linear.excess.forward, self.machine.device
        own = TimeBreakdown({GEMMS: seconds, MEMORY: device.memory_bound_s(linear.joins.forward)})
        return own.plus(
            self.over.with_own_gemm(linear.rounds.gather_x + linear.rounds.reduce_y, seconds),
            self.over.overlapped(linear.sent.gather_w, before_s, self.local.overlap.weight_gather),
        )

    def _backward(self, linear: LinearTime) -> tuple[TimeBreakdown, TimeBreakdown, TimeBreakdown]:
        """Return the times of a linear's dgrad, of its wgrad, and of its unsplit backward."""
        over, device, overlap = self.over, self.machine.device, self.local.overlap
        sent, seconds, copied = linear.sent, linear.gemm_s, linear.joins
        gathers_w = [] if overlap.keep_gathered_weights else sent.gather_w
        bias = self.machine.profile.bias_grad * linear.output * linear.has_bias * device.itemsize
        moved = copied.dy + copied.dx + copied.w * bool(gathers_w)
        dgrad = TimeBreakdown({GEMMS: seconds + linear.excess.gather_dy}).plus(
            over.with_own_gemm(linear.rounds.gather_dy, seconds),
            over.overlapped(gathers_w, 2 * seconds, overlap.weight_gather),
            *(TimeBreakdown({MEMORY: device.memory_bound_s(num)}) for num in (bias, moved)),
        )
        adding = self.machine.accumulation_s(linear.weight, 0.0 if sent.reduce_dw else seconds)
        adding += device.memory_bound_s(copied.x + copied.w)
        wgrad = TimeBreakdown({GEMMS: seconds, MEMORY: adding}).plus(
            over.overlapped(sent.reduce_dw, 2 * seconds, overlap.weight_grad)
        )
        alone = over.with_own_gemm(linear.rounds.reduce_dx, seconds)
        alone = alone.plus(TimeBreakdown({GEMMS: linear.excess.reduce_dx}))
        hides = overlap.input_grad and self.machine.profile.overlaps_input_grad
        hidden = alone if overlap.in_rounds and not hides else over.overlapped(sent.reduce_dx, seconds, hides)
        return (
            dgrad.plus(alone),
            wgrad.plus(over.exposed(sent.gather_x)),
            dgrad.plus(wgrad, over.overlapped(sent.gather_x, seconds), hidden),
        )

    def _compute(self, operation: Operation, backward: bool) -> TimeBreakdown:
        """Return the time of its kernels, of its own GEMMs (backward: of dgrad), and of attention."""
        device, found = self.machine.device, list[TimeBreakdown]()
        for kind, elements, launches in operation.kernels:
            accesses = self.machine.accesses(kind)
            num = accesses.backward if backward else accesses.forward
            seconds = device.memory_bound_s(elements * num * device.itemsize, accesses.num_kernels * launches)
            found.append(TimeBreakdown({MEMORY: seconds}))
        for move in operation.moves:
            there, back = (move.forward, move.num_forward), (move.backward, move.num_backward)
            found.append(TimeBreakdown({MEMORY: device.memory_bound_s(*(back if backward else there))}))
        if operation.gemms:
            found.append(TimeBreakdown({GEMMS: sum(device.gemm_s(*gemm) for gemm in operation.gemms)}))
        if operation.scores is not None:
            found.append(TimeBreakdown({ATTENTION: self._attention_s(operation.scores, backward)}))
        if operation.chunks and not backward:
            found.append(self._in_chunks(operation))
        return combine(found)

    def _in_chunks(self, operation: Operation) -> TimeBreakdown:
        """Return the time of a linear whose forward has three GEMMs for each chunk of tokens.

        dW is added to main_grad, or to a buffer that is reduced.
        """
        linear = LinearTime.of(operation, self.local, self.machine)
        assert operation.matmul is not None, f"{operation.name} is a linear"
        (m, n, k), is_reduced = operation.matmul.multiplied(self.local.mesh), bool(linear.sent.reduce_dw)
        product = self.machine.device.gemm_s(m / operation.chunks, n, k)
        adding = self.machine.accumulation_s(n * k, 0.0 if is_reduced else product)
        adding *= 1 if is_reduced else operation.chunks
        copied = self.machine.device.memory_bound_s(sum(linear.joins))
        return TimeBreakdown({GEMMS: 3 * operation.chunks * product, MEMORY: adding + copied})

    def _weight_grad(self, operation: Operation) -> TimeBreakdown:
        """Return the time of the wgrad of its own GEMMs, which accumulate into main_grad."""
        found = list[TimeBreakdown]()
        for gemm in operation.gemms:
            seconds = self.machine.device.gemm_s(*gemm)
            summed = self.machine.accumulation_s(gemm.batch * gemm.n * gemm.k, seconds)
            found.append(TimeBreakdown({GEMMS: seconds, MEMORY: summed}))
        return combine(found)

    def _attention_s(self, scores: Scores, backward: bool) -> float:
        """Return the seconds of fused attention over what queries see, or of unfused GEMMs and elementwise kernels."""
        device, profile = self.machine.device, self.machine.profile
        batch, queries, keys, channels = scores[:4]
        if (accesses := profile.unfused_scores(scores.is_plain)) is None:
            flops = 4 * batch * queries * keys * channels / 2 * scores.share
            return device.attention_s(flops * (2.5 if backward else 1), backward)
        products = device.gemm_s(queries, keys, channels, batch) + device.gemm_s(queries, channels, keys, batch)
        num_bytes = batch * queries * keys * (accesses.backward if backward else accesses.forward) * device.itemsize
        return (1 + backward) * products + device.memory_bound_s(num_bytes, accesses.num_kernels)

    def _sent(
        self, operation: Operation, calls: Sequence[Traffic], backward: bool, num_gemms: int = 1
    ) -> TimeBreakdown:
        """Return the exposed time of collectives of an operation: all but what other operations hide of them.

        Args:
            num_gemms: GEMMs of a linear's backward that hide collectives: that of dgrad, or that of wgrad as well.
        """
        machine, mesh = self.machine, self.local.mesh

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
        linear = self.linears.get(operation.name)
        return num_gemms * linear.gemm_s if linear else self._compute(operation, backward).total

    def all_again(self) -> Iterator[TimeBreakdown]:
        """Yield the times of a forward in backward; weights are not prefetched for it."""
        yield from (self.forward(each) for each in self.operations)
        exposed = self.linears.values() if self.local.overlap.weight_gather else ()
        yield from (self.over.exposed(each.sent.gather_w) for each in exposed)
        last = self.operations[-2].name
        if self.machine.profile.stops_recomputation and last in self.linears:
            yield TimeBreakdown({GEMMS: -self.linears[last].gemm_s})

    def modules_again(self) -> Iterator[TimeBreakdown]:
        """Yield the times of modules that are recomputed on their own; nothing overlaps with their collectives."""
        modules = modules_of(self.local)
        for each in self.operations if modules else ():
            if each.is_again(modules):
                yield self._compute(each, backward=False)
                yield self._sent(each, each.sent_again(modules), backward=False)
                if (linear := self.linears.get(each.name)) is not None:
                    gathers = [] if self.local.overlap.keep_gathered_weights else linear.sent.gather_w
                    yield TimeBreakdown({GEMMS: linear.gemm_s})
                    yield self.over.exposed(linear.rounds.gather_x + linear.rounds.reduce_y + gathers)
