"""Time of a transformer layer on one rank: the sum over its tasks in each phase.

kernel        its seconds, less those of the GEMM that does its work
collective    what is longer than the kernels that it overlaps with; while it does, it takes multiprocessors from them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.time.breakdown import ATTENTION, GEMMS, MEMORY, SLOWDOWN, TimeBreakdown
from megatron3d.forecast.time.hardware import DeviceModel, Network
from megatron3d.forecast.time.practices import COMPILED, ExecutionProfile
from megatron3d.forecast.time.tasks import (
    AGAIN,
    FORWARD,
    PHASES,
    SCORES,
    GemmKind,
    Task,
    tasks_of,
)
from megatron3d.linear.overlap_plan import ExposedComm
from megatron3d.model.local_sizes import KERNELS, KernelMemory, LocalSizes
from megatron3d.model.operation import LocalGemm, Operation
from megatron3d.model.operations import layer_operations


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

    def kernels_of(self, spec: RunSpec) -> KernelMemory:
        """Return the kernels by which a run needs memory."""
        kernels = KERNELS["gpu" if self.on_gpu else "cpu"]
        if spec.fp8 is None:
            return kernels
        multiplies_fp8 = self.device.multiplies_fp8(spec.fp8.recipe_name, spec.config.train.precision)
        return replace(kernels, multiplies_fp8=multiplies_fp8)

    def compiled(self) -> Machine:
        """Return the machine with compiled kernels."""
        return replace(self, profile=self.profile.also(COMPILED))


class LayerTimes(NamedTuple):
    """Times of a layer's forward, dgrad, wgrad and unsplit backward; dgrad and backward include recomputation."""

    forward: TimeBreakdown
    input_grad: TimeBreakdown
    weight_grad: TimeBreakdown
    backward: TimeBreakdown


def layer_times(local: LocalSizes, machine: Machine) -> LayerTimes:
    """Return the times of a layer of the kind of `local.layer` for one microbatch."""
    return times_of(layer_operations(local), local, machine, is_recomputed=local.recompute.granularity == "full")


def recomputation_time(local: LocalSizes, machine: Machine) -> TimeBreakdown:
    """Return the time of what the backward of a layer recomputes."""
    if local.recompute.granularity == "none":
        return TimeBreakdown()
    timed = TimedTasks.of(layer_operations(local), local, machine, local.recompute.granularity == "full")
    return timed.sums(task for task in timed.tasks if task.phases == AGAIN).backward


def times_of(
    operations: Sequence[Operation], local: LocalSizes, machine: Machine, *, is_recomputed: bool = False
) -> LayerTimes:
    """Return the times of operations for one microbatch; `is_recomputed`: all of them are, in backward."""
    times = TimedTasks.of(operations, local, machine, is_recomputed)
    return times.sums(times.tasks)


@dataclass(frozen=True)
class TimedTasks:
    """The tasks of a layer, an end or a module that predicts ahead, for one microbatch on a machine.

    Attributes:
        during: seconds of the kernels that hide others, by their name.
        gemms: seconds of GEMMs, of which a layer has many alike.
    """

    tasks: Sequence[Task]
    local: LocalSizes
    machine: Machine
    during: dict[str, float] = field(default_factory=dict)
    gemms: dict[tuple[LocalGemm, GemmKind], float] = field(default_factory=dict)

    @staticmethod
    def of(
        operations: Sequence[Operation], local: LocalSizes, machine: Machine, is_recomputed: bool = False
    ) -> TimedTasks:
        """Return the tasks of operations; `is_recomputed`: all of these are, in backward."""
        tasks = machine.profile.rewritten(tasks_of(operations, local, is_recomputed), local)
        timed = TimedTasks(tasks, local, machine)
        hiding = {name for task in tasks for name in task.behind}
        for task in tasks:
            if task.hides in hiding:
                timed.during[task.hides] = timed.during.get(task.hides, 0.0) + task.repeats * timed._kernel_s(task)
        return timed

    def sums(self, tasks: Iterable[Task]) -> LayerTimes:
        """Return the times of some of the tasks next to the others."""
        found = {phase: TimeBreakdown() for phase in PHASES}
        for task in tasks:
            parts = self._transfers(task) if task.calls else self._kernels(task)
            for kind, seconds in parts:
                for phase in task.phases if seconds else ():
                    found[phase][kind] = found[phase].get(kind, 0.0) + seconds
        forward, half, late, whole, again = found.values()
        return LayerTimes(forward, half.plus(again), late, whole.plus(again))

    def _kernels(self, task: Task) -> Iterator[tuple[str, float]]:
        """Yield the seconds of kernels, less those of the GEMM that does their work; a CPU's accumulates apart."""
        kind = ATTENTION if task.what == SCORES else GEMMS if task.gemm else MEMORY
        is_done = task.behind and not self.machine.device.kernels.adds_launch
        yield kind, task.repeats * max(0.0, self._kernel_s(task) - (self._hiding_s(task) if is_done else 0.0))

    def _transfers(self, task: Task) -> Iterator[tuple[str, float]]:
        """Yield the exposed seconds of collectives by axes, and the slowdown of what they overlap with."""
        calls = task.calls
        if task.busiest != 1:
            calls = [call._replace(wire_bytes=task.busiest * call.wire_bytes) for call in calls]
        each = [self.machine.network.seconds(call, self.local.mesh) for call in calls]
        total = sum(each)
        hidden = min(task.most * total, task.share * self._hiding_s(task)) if task.behind else 0.0
        for call, seconds in zip(task.calls, each, strict=True):
            yield ExposedComm(call.axes), seconds * (1 - hidden / total) if seconds else 0.0
        yield SLOWDOWN, hidden * self.machine.device.comm_tax

    def _hiding_s(self, task: Task) -> float:
        return sum(self.during.get(name, 0.0) for name in task.behind)

    def _kernel_s(self, task: Task) -> float:
        """Return the seconds of a task's kernels when it runs once."""
        if task.gemm is not None:
            seconds = self._gemm_s(task.gemm, task.kind)
            if task.rounds is None:
                return seconds
            count, smaller = task.rounds
            return max(0.0, count * self._gemm_s(smaller, task.kind) - seconds)
        if task.scores is not None:
            batch, queries, keys, channels, share, _ = task.scores
            flops = 4 * batch * queries * keys * channels / 2 * share
            backward = task.phases not in (FORWARD, AGAIN)
            return self.machine.device.attention_s(flops * (2.5 if backward else 1), backward)
        return self.machine.device.memory_bound_s(task.size * task.accesses, task.num_kernels)

    def _gemm_s(self, gemm: LocalGemm, kind: GemmKind) -> float:
        if (gemm, kind) not in self.gemms:
            self.gemms[gemm, kind] = self.machine.device.as_kind(kind).gemm_s(*gemm)
        return self.gemms[gemm, kind]
