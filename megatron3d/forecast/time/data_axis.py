"""Time of the data axis: gradient reductions and weight all-gathers, per step or, with ZeRO 2 and 3, per microbatch.

stage 0   all-reduce                          stage 1   reduce-scatter, all-gather of the updated weights
stage 2   reduce-scatter per microbatch       stage 3   also all-gathers for every forward and backward
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from megatron3d.forecast.time.breakdown import SLOWDOWN, TimeBreakdown, exposed_time
from megatron3d.forecast.time.layer import Machine
from megatron3d.linear.fp8_plan import Fp8
from megatron3d.model.linear_spec import linear_of
from megatron3d.model.param_spec import EMBEDDING, param_specs
from megatron3d.model.spec import Architecture, pattern_length
from megatron3d.model.stage_plan import Stage
from megatron3d.parallel.matmul_plan import Traffic, ring
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes.mode import Mode

Counts = Mapping[Axes, int]


class ParamCounts(NamedTuple):
    """A rank's parameters by the axes that reduce their gradients: of a layer (mean of a pattern), of the
    embedding, and of the head with multi-token prediction."""

    layer: Counts
    embedding: Counts
    head: Counts

    @staticmethod
    def of(arch: Architecture, mode: Mode, mesh: Mesh, stored: Fp8 | None = None) -> ParamCounts:
        """Count the parameters of a model on a mesh, all of them or those that are `stored` in fp8."""
        tables: dict[str, Counter[Axes]] = {"layers": Counter(), "embedding": Counter(), "head": Counter()}
        num_layers = 1 if arch.experts is None else pattern_length(arch)
        for path, spec in param_specs(replace(arch, num_layers=num_layers), mode).items():
            part = path.partition(".")[0]
            size = math.prod(spec.local_shape(mesh))
            if stored is not None:
                size = round(size * _stored_share(path, stored, arch.num_layers, num_layers))
            tables[part if part in tables else "head"][spec.reduce_axes(mesh)] += size
            if path == EMBEDDING and arch.tie_embeddings:
                tables["head"][spec.reduce_axes(mesh)] += size
        layer = {axes: count // num_layers for axes, count in tables["layers"].items()}
        return ParamCounts(layer, tables["embedding"], tables["head"])

    def on_rank(self, arch: Architecture, stages: Sequence[Stage]) -> Counts:
        """Return the counts of a rank that has these stages; a tied matrix that is embedding and head counts once."""
        total: Counter[Axes] = Counter()
        for axes, count in self.layer.items():
            total[axes] += count * sum(len(stage.layers) for stage in stages)
        first, last = any(stage.has_embedding for stage in stages), any(stage.has_head for stage in stages)
        if last:
            total.update(self.head)
        if (first or (last and arch.mtp_num_layers)) and not (last and arch.tie_embeddings):
            total.update(self.embedding)
        return total


def _stored_share(path: str, fp8: Fp8, num_layers: int, length: int) -> float:
    """Return in which part of the layers that a layer of a pattern stands for a parameter is stored in fp8."""
    owner, index, *rest = path.split(".")
    if linear_of(path) is None:
        return 0.0
    places = range(int(index), num_layers, length) if owner == "layers" else (index,)
    name = ".".join(rest).removesuffix(".weight")
    return sum(fp8.takes(f"{owner}.{place}.{name}") for place in places) / len(places)


class DataAxisTime(NamedTuple):
    """Seconds per step of gradient reductions and of weight all-gathers, and of the last bucket's reduction."""

    sums: TimeBreakdown
    gathers: TimeBreakdown
    tail_s: float


def collectives_per_step(zero_stage: int, num_microbatches: int) -> tuple[int, int]:
    """Return how often a step reduces gradients and all-gathers weights."""
    return num_microbatches if zero_stage >= 2 else 1, 2 * num_microbatches if zero_stage == 3 else 1


def data_axis_time(
    counts: Counts,
    mesh: Mesh,
    machine: Machine,
    zero_stage: int,
    times: tuple[int, int],
    bucket_bytes: float,
    *,
    stored: Counts = MappingProxyType({}),
) -> DataAxisTime:
    """Return the time of a rank's parameters.

    Args:
        times: result of `collectives_per_step`.
        stored: those that are all-gathered as one byte each, since they are stored in fp8.
    """
    wide = max(machine.device.itemsize, 4)
    itemsize, sums = machine.profile.reduce_itemsize or wide, TimeBreakdown()
    tail = 0.0
    shared = mesh.zero if zero_stage else ()
    gathered, narrower = Counter[Axes](), Counter[Axes]()
    for axes, count in counts.items():
        rest = mesh.without(axes, shared)
        shards = mesh.without(shared, mesh.without(shared, axes))  # experts may be distributed over some of them
        gathered[shards] += count
        narrower[shards] += stored.get(axes, 0)
        pieces, whole = _reduction_calls(shards, rest, count * itemsize, mesh), TimeBreakdown()
        num_buckets = max(1.0, count * wide / bucket_bytes)
        num_calls = num_buckets if machine.profile.reduces_buckets else 1.0
        for call in pieces:
            whole = whole.plus(exposed_time(call.axes, _in_pieces_s(call, num_calls, mesh, machine)))
        sums = sums.plus(whole.scaled(times[0]))
        tail += whole.total / num_buckets
    gathers = TimeBreakdown()
    for shards, count in gathered.items():
        num_bytes = count * machine.device.itemsize - narrower[shards] * (machine.device.itemsize - 1)
        gather = ring("all_gather", shards, num_bytes, mesh)
        num_calls = max(1.0, count * wide / bucket_bytes) if machine.profile.reduces_buckets else 1.0
        gather_s = times[1] * _in_pieces_s(gather, num_calls, mesh, machine) if shards else 0.0
        gathers = gathers.plus(exposed_time(shards, gather_s))
    return DataAxisTime(sums, gathers, tail)


def _in_pieces_s(call: Traffic, num: float, mesh: Mesh, machine: Machine) -> float:
    """Return the seconds of a collective whose bytes are sent in `num` collectives."""
    return num * machine.network.seconds(call._replace(wire_bytes=call.wire_bytes / num), mesh)


def _reduction_calls(shared: Axes, rest: Axes, num_bytes: float, mesh: Mesh) -> list[Traffic]:
    """Return the collectives that reduce gradients of `num_bytes`."""
    calls = []
    if shared:
        calls.append(ring("reduce_scatter", shared, num_bytes, mesh))
        num_bytes /= mesh.size(shared)
    if rest:
        calls.append(ring("all_reduce", rest, num_bytes, mesh))
    return calls


def partly_exposed(times: TimeBreakdown, waits_s: float, tax: float) -> TimeBreakdown:
    """Return `waits_s` seconds of `times` as exposed, and the slowdown of the computation that hides the rest."""
    if not times:
        return times
    share = min(waits_s / times.total, 1.0)
    return times.scaled(share).plus(TimeBreakdown({SLOWDOWN: (1 - share) * times.total * tax}))


class Interval(NamedTuple):
    """Start and end of a computation, in seconds."""

    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimes:
    """Times at which the stages of a schedule start and end.

    Attributes:
        total_s: seconds from the first start to the last end on any rank, for all microbatches.
        simulated_s: the same for the simulated microbatches.
        firsts, lasts: start and end of the first forward, and of the last backward, of each stage.
    """

    total_s: float
    simulated_s: float
    firsts: Mapping[int, Interval]
    lasts: Mapping[int, Interval]


def _part_left(times: Iterable[TimeBreakdown], hidden_s: float) -> float:
    """Return the part of the collectives of a rank that `hidden_s` seconds of its computation do not hide."""
    total_s = sum(each.total for each in times)
    return max(0.0, 1 - hidden_s / total_s) if total_s else 0.0


def exposed_reduction_s(each: Mapping[int, DataAxisTime], line: ScheduleTimes, hidden_s: float) -> float:
    """Return how long reductions outlast the schedule; those of a stage start, in order, with its last backward.

    Args:
        hidden_s: seconds of computation behind which those of all stages run before.
    """
    end, left = 0.0, _part_left((one.sums for one in each.values()), hidden_s)
    for stage in sorted(each, key=lambda stage: line.lasts[stage].start):
        last, found = line.lasts[stage], each[stage]
        rest = left * found.sums.total
        end = max(max(end, last.start) + rest, last.end + min(found.tail_s, rest))
    return max(0.0, end - line.simulated_s)


def exposed_gather_s(each: Mapping[int, DataAxisTime], line: ScheduleTimes, hidden_s: float) -> float:
    """Return how long stages wait for their weights, which are all-gathered in order as layers need them."""
    end, late, left = 0.0, 0.0, _part_left((one.gathers for one in each.values()), hidden_s)
    for stage in sorted(each, key=lambda stage: line.firsts[stage].start):
        end += left * each[stage].gathers.total
        late = max(late, end - line.firsts[stage].end)
    return late
