"""Live bytes of a rank over a step: one sweep over births and deaths of tensors, operation by operation.

    actions      0F0 | 0F1 | ... | 0B0 | ...                                       those of the rank's lowered list
    operations   embedding | layer 0: input_norm, attention.qkv, ... | ... | head  forward; backward in reverse order

In forward an operation bears what it keeps.  In backward its death follows the work of its backward, beside which
gradients and collectives need memory for a moment (`Operation.peaks`).  Modules and layers that are recomputed bear
again what they did not keep.  Buffers of gradients and gathered parameters come and go with the operations whose
gradients and parameters they are (`sharded_state.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from megatron3d.forecast.memory.activations import deferred_operands, input_bytes, modules_of, total_bytes
from megatron3d.forecast.memory.flat_buffers import FlatBufferSize, unit_of
from megatron3d.forecast.memory.homes import home_bytes
from megatron3d.forecast.memory.sharded_state import FsdpUnitSize, GradientBuffer, ShardedState
from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.model.fp8_workspaces import restored_itemsize, scaled_itemsize
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import Operation, kept_by
from megatron3d.model.operations import ahead_operations, embedding_operations, head_operations, layer_operations
from megatron3d.model.spec import OUTPUTS_ALONE
from megatron3d.model.stage_plan import Stage
from megatron3d.optim.rule_spec import UpdateRule
from megatron3d.parallel.mesh import DATA
from megatron3d.pipeline.actions import COMPUTATIONS, RECEIVES, SENDS, Action, ActionKind, stage_to_rank


class Event(NamedTuple):
    """Operation in one direction as memory sees it.

    Attributes:
        name: of its peak.
        births, work, deaths: bytes that come to be at its beginning, are there meanwhile, and are gone at its end.
        grads: path of the parameters whose gradients arrive; `params`: paths of others; `needs`: of those whose buffers
            must be there.
        kept_weight: bytes of its gathered weight, with which the first forward gathers it, and less those after the
            last dgrad, where it is kept.
        hook: what happens to an FSDP unit, and its place among those of the rank.
        reduction: bytes of a dW whose reduction has begun, and the path of its parameter; the one before is over then.
        sums_gradients: the gradient of the residual stream is another tensor from here on.
    """

    name: str
    births: int = 0
    work: int = 0
    deaths: int = 0
    grads: str | None = None
    params: Sequence[str] = ()
    needs: str | None = None
    kept_weight: int = 0
    hook: tuple[str, int] | None = None
    reduction: tuple[int, str | None] | None = None
    sums_gradients: bool = False


Events = Iterator[Event]


class Site(NamedTuple):
    """Operations of one part of a stage, the prefix of their paths, their sizes, and modules that are recomputed.

    Attributes:
        before, behind: bytes of the prefetched weight of the linear before the part, and of the one behind it.
    """

    prefix: str
    operations: Sequence[Operation]
    local: LocalSizes
    modules: Collection[str] = ()
    names: Mapping[str, str] = {}
    before: int = 0
    behind: int = 0

    def path_of(self, operation: Operation) -> str:
        """Return the path of an operation's parameters."""
        return self.prefix + self.names.get(operation.name, operation.name)

    @property
    def prefetched(self) -> Sequence[int]:
        """Bytes of the prefetched weights of its linears."""
        return [each.prefetched for each in self.operations if is_linear(each)]


def is_linear(operation: Operation) -> bool:
    """Return whether an operation is a linear whose backward is not a part of its forward."""
    return operation.matmul is not None and not operation.chunks


def forward_events(site: Site, keeps: bool = True, is_again: bool = False) -> Events:
    """Yield a forward, which keeps what backward needs, or only what is found once."""
    ahead, coming = 0, iter([*site.prefetched[1:], site.behind])  # bytes of weights that are prefetched
    seen = set[tuple[str, str]]()
    for each, kept in kept_by(site.operations, site.modules):
        births = total_bytes(kept if keeps else each.once)
        seen.update(stored[:2] for stored in kept)
        held = total_bytes(stored for stored in each.held if stored[:2] not in seen)
        peaks = each.peaks_again if is_again and each.peaks_again else each.forward_peaks
        grads = site.path_of(each) if each.chunks and not is_again else None
        if each.kept_weight and not is_again:
            yield Event(f"forward of {each.name}", births, each.gather_peak, births, kept_weight=each.kept_weight)
        if is_linear(each) and not is_again:
            ahead = next(coming)
        for left, (name, work) in zip(reversed(range(len(peaks))), peaks.items(), strict=True):
            needs = grads if each.accumulates and left == 1 else None
            yield Event(name, births, work + held + ahead, births, None if left else grads, needs=needs)
        yield Event(each.name, births, ahead)


def backward_events(site: Site, defers: bool = False) -> Events:
    """Yield a backward: what recomputed modules did not keep is born again, and everything dies in turn.

    A deferred wgrad keeps its operands.
    """
    listed, whole = kept_by(site.operations, site.modules), kept_by(site.operations)
    kept_before = {stored[:2] for _, kept in listed for stored in kept}
    again = {each.output[:2] for each in site.operations if each.module in OUTPUTS_ALONE.intersection(site.modules)}
    begun, dead = set[str | None](), set[tuple[str, str]]()
    ahead, coming = 0, iter([site.before, *site.prefetched[:-1]][::-1])
    for (each, kept), (_, everything) in zip(reversed(listed), reversed(whole), strict=True):
        inside, module = [(each, everything)], each.module_again(site.modules)
        if module is not None and module not in OUTPUTS_ALONE:
            alike = (pair for pair in whole if pair[0].module_again(site.modules) == module)
            inside = [] if module in begun else [*alike]
            begun.add(module)
        born = {stored[:2]: stored for _, found in inside for stored in found if stored[:2] not in again}
        # Of several that save such an output, the first one in backward needs it, and the last one frees it.
        born |= {stored[:2]: stored for other, _ in inside for stored in other.saves if stored[:2] in again}
        births = total_bytes(stored for key, stored in born.items() if key not in kept_before)
        again -= born.keys()
        mine = {stored[:2]: stored for stored in (*everything, *kept) if stored[:2] not in dead}
        dead |= mine.keys()
        (name, first), *others = list(each.peaks.items()) or [(f"backward of {each.name}", 0)]
        late = deferred_operands(site.local, each) if defers else 0
        path = site.path_of(each)
        is_apart = late or each.reduced_later
        if late and each.dgrad_peak:
            first, others = each.dgrad_peak, []
        if is_linear(each):
            ahead = next(coming)
        yield Event(name, births, first + ahead, kept_weight=-each.kept_weight)
        for other, work in others:
            yield Event(other, 0, work + ahead, needs=f"{path}.weight" if each.accumulates else None)
        yield Event(
            f"backward of {each.name}",
            deaths=total_bytes(mine.values()) - late,
            grads=None if each.chunks else f"{path}.bias" if is_apart else path,
            params=[site.prefix + name for name in each.params],
            reduction=None if late else _reduction(path, each),
            sums_gradients=each.sums_gradients,
        )


def wgrad_events(site: Site) -> Events:
    """Yield the deferred wgrads of a backward."""
    for each in reversed(site.operations):
        if late := deferred_operands(site.local, each):
            path = site.path_of(each)
            grads = None if each.reduced_later else f"{path}.weight"
            yield Event(f"wgrad of {each.name}", 0, each.wgrad_peak, late, grads, reduction=_reduction(path, each))


def _reduction(path: str, operation: Operation) -> tuple[int, str | None] | None:
    if not is_linear(operation):
        return None
    return operation.reduced_later, f"{path}.weight" if operation.reduced_later else None


def _with_reductions(events: Events) -> Events:
    """Yield backward's events, and those of the reductions of dW between them: each is over when the next one begins,
    or at the end."""
    size, grads = 0, None
    for event in events:
        yield event
        if event.reduction is not None:
            now, next_grads = event.reduction
            yield Event(event.name, now, 0, size, grads)
            size, grads = now, next_grads
    yield Event("reduction of dW", 0, 0, size, grads)


def _with_received(events: Events, num_bytes: int) -> Events:
    """Yield the events of a backward that is given the gradient of its output, which is counted with what is received.

    Until it is added to another one, it is the gradient of the residual stream.
    """
    left = num_bytes
    yield Event("gradient received", -num_bytes)
    for event in events:
        yield event
        if event.sums_gradients and left:
            yield Event("gradient received", left)
            left = 0
    yield Event("gradient received", left)


class Unit(NamedTuple):
    """FSDP unit of a stage: its path, whether backward needs its parameters, and its operations."""

    path: str
    in_backward: bool
    sites: Sequence[Site]


class StagePart(NamedTuple):
    """Units that are recomputed together, or not at all; `kept_input` are the bytes that recomputation starts from."""

    units: Sequence[Unit]
    is_recomputed: bool = False
    is_offloaded: bool = False
    kept_input: int = 0


def stage_parts(local: LocalSizes, stage: Stage, table: str, lm_head: str) -> list[StagePart]:
    """Return the parts of a stage; `table` and `lm_head` hold the matrices of embedding and head."""
    found, modules = list[StagePart](), modules_of(local)
    embedding, (norm, *head) = embedding_operations(local), head_operations(local)
    named = {"embedding": f"{table}.weight", "head": f"{lm_head}.weight"}
    rows = Unit(table, False, [Site("", embedding, local, names=named)])
    ends = Unit(lm_head, False, [Site("", head, local, names=named)])
    if stage.has_embedding:
        found.append(StagePart([rows]))
    for run in local.recompute.runs(stage.layers):
        sites = {f"layers.{layer}": _layer(local, layer, f"layers.{layer}.", modules) for layer in run.layers}
        units = [Unit(path, True, [site]) for path, site in sites.items()]
        if units:
            found.append(StagePart(units, run.is_recomputed, run.is_offloaded, local.residual))
    if stage.has_head:
        found.append(StagePart([Unit("final_norm", True, [Site("", [norm], local)]), ends]))
    for depth in range(local.arch.mtp_num_layers if stage.has_head else 0):
        path = f"mtp.{depth}"
        last = Site(f"{path}.layer.", layer_operations(local.layer_ahead), local.layer_ahead, modules)
        inputs = Site(f"{path}.", [*embedding[1:], *ahead_operations(local)], local)
        inside = [inputs, last, Site(f"{path}.", [norm], local)]
        again = local.recompute.recomputes_ahead
        found.append(StagePart([rows._replace(sites=[Site("", embedding[:1], local, names=named)])]))
        found.append(StagePart([Unit(path, True, inside)], again, False, 2 * local.residual))
        found.append(StagePart([ends]))
    return list(_with_neighbours(found))


def _with_neighbours(parts: Sequence[StagePart]) -> Iterator[StagePart]:
    """Yield the parts with the weights that are prefetched across the ends of each site."""
    sites = [site for part in parts for unit in part.units for site in unit.sites]
    linears = [weights for site in sites if (weights := site.prefetched)]
    before, behind = iter([0, *(each[-1] for each in linears)]), iter([*(each[0] for each in linears[1:]), 0])

    def linked(site: Site) -> Site:
        return site._replace(before=next(before), behind=next(behind)) if site.prefetched else site

    for part in parts:
        yield part._replace(units=[unit._replace(sites=[*map(linked, unit.sites)]) for unit in part.units])


def _layer(local: LocalSizes, layer: int, prefix: str, modules: Collection[str]) -> Site:
    sizes = local.by_kind([layer])[0][0]
    return Site(prefix, layer_operations(sizes), sizes, modules)


class Moment(NamedTuple):
    """Live bytes of an action, those between steps left out.

    Attributes:
        activations, shards: bytes that microbatches keep, and of residual shards in transfer, when the action begins.
        live: all bytes when it begins; `tops`: the most bytes of each operation beyond those; `top`: the largest.
    """

    activations: int
    shards: int
    live: int
    tops: Mapping[str, int]
    top: int


class _Result(NamedTuple):
    """What an action leaves behind, and the most bytes of each operation and of all beyond those at its beginning.

    Attributes:
        activations, weights: change of what microbatches keep, and of gathered weights that are kept.
        missing: change of the gradients that each flat buffer lacks.
    """

    activations: int
    weights: int
    missing: Sequence[int]
    state: ShardedState
    tops: Mapping[str, int]
    top: int


# Kind and stage of an action, microbatches that the stage keeps when it begins, up to two, and the number of the state.
_Key = tuple[ActionKind, int, int, int]


class Sweep:
    """The sweep over the step of the rank that it is seen from.

    Attributes:
        local: local sizes of a microbatch; `stages`: the rank's stages by index.
        behind: number of the state behind an action, by its result, where it follows from that alone.
    """

    def __init__(self, step: StepSpec, flats: Sequence[FlatBufferSize]) -> None:
        self._step, self._flats, self.local = step, flats, step.local
        paths = [path for flat in flats for path in flat.uses]
        table, head = (
            next(each for each in order if f"{each}.weight" in paths or each == order[-1]) for order in _TABLES
        )
        self.stages = {stage.index: stage for stage in step.stages}
        self._parts = {index: stage_parts(step.local, stage, table, head) for index, stage in self.stages.items()}
        units = [(index, unit) for index, parts in self._parts.items() for part in parts for unit in part.units]
        self._units = [
            FsdpUnitSize(unit.path, self._unit_bytes(unit.path), index, unit.in_backward) for index, unit in units
        ]
        self._flats_of = self._place_gradients()
        self._events: dict[tuple[ActionKind, int], Sequence[Event]] = {}
        self._results: dict[_Key, _Result] = {}
        self._numbers: dict[object, int] = {}
        self.behind: dict[int, int] = {}

    def _unit_bytes(self, path: str) -> int:
        step = self._step
        if not step.shards(3):
            return 0
        return sum(flat.whole * flat.itemsize for flat in self._flats if flat.block == path)

    def moments(self, actions: Sequence[Action]) -> Iterator[Moment]:
        """Yield the moment of each action of the rank's lowered list, and of the end of the step."""
        step, walk = self._step, _Walk(self, actions)
        each, part = step.local.residual, received_bytes(step)
        least = -sum(flat.shard for flat in self._flats) * step.local.wide * step.shards(2)
        transfers = {kind: {kind.value: 0} for kind in ActionKind}
        activations = weights = before = 0
        for action, count, waiting in zip(actions, residual_shards(step), waiting_shards(actions), strict=True):
            lacking = waiting * (each - part)
            live = activations + weights + least + walk.state.live - lacking
            if action.kind in COMPUTATIONS:
                found = walk.result(action.kind, action.stage)
                # A forward bears its input itself.
                others = before - (action.kind is ActionKind.F and not self.stages[action.stage].has_embedding)
                yield Moment(activations, before * each - lacking, live + others * each, found.tops, found.top)
                activations, weights = activations + found.activations, weights + found.weights
            else:
                yield Moment(
                    activations, count * each - lacking, live + max(count, before) * each, transfers[action.kind], 0
                )
            before = count
        state = walk.exact()
        top = state.live
        while state.reductions:
            top = max(top, state.advance())
        tops = {"reduction of gradients": top, "update": state.live + update_bytes(step, self._flats)}
        if step.local.stores_weights:
            tops["quantization of weights"] = state.live + quantization_bytes(step.local, self._flats)
        yield Moment(0, 0, least, tops, max(tops.values()))

    def start(self) -> ShardedState:
        """Return the state in which a step begins."""
        step, local, wide = self._step, self._step.local, self._step.local.wide
        mesh, sent = local.mesh, step.reduce_itemsize
        buffers = []
        for flat in self._flats:
            whole, is_sharded = flat.whole, flat.num_shards > 1
            rest = mesh.nontrivial(mesh.without(flat.reduce_axes, flat.zero_axes)) if flat.zero_axes else ()
            received = total = 0
            if is_sharded:
                received, total = (
                    (whole * sent, flat.shard * sent) if local.kernels.num_received else (flat.shard * sent, 0)
                )
            buffers.append(
                GradientBuffer(
                    whole * wide,
                    flat.shard * wide,
                    whole * sent if sent < wide or step.shards(2) else 0,
                    received,
                    total,
                    sum(flat.uses.values()),
                    bool(rest),
                )
            )
        is_grouped = bool(step.zero_axes) and mesh.sizes[DATA[0]] > 1
        is_sequential = step.shards(2) or sent < wide or is_grouped
        return ShardedState(
            buffers, self._units if step.shards(3) else (), step.num_microbatches, step.shards(2), is_sequential
        )

    def result(self, key: _Key, exact: Callable[[], ShardedState]) -> _Result:
        """Return the result of an action in a state, which `exact` returns where it is not known yet."""
        if key not in self._results:
            kind, index, num_kept, _ = key
            if (kind, index) not in self._events:
                self._events[kind, index] = list(self.events(kind, index))
            is_edge = num_kept == (0 if kind is ActionKind.F else 1)
            self._results[key] = self._run(self._events[kind, index], index, is_edge, exact())
        return self._results[key]

    def number_of(self, state: ShardedState) -> int:
        """Return the number of a state, the same for states that act alike during the next microbatch."""
        return self._numbers.setdefault(state.snapshot(), len(self._numbers))

    def _run(self, events: Sequence[Event], index: int, bears_weights: bool, state: ShardedState) -> _Result:
        """Return the result of events; gathered weights are kept from the first forward to the last backward."""
        tops = {"input": 0}
        start, missing, live, weights = state.live, [*state.missing], 0, 0
        for event in events:
            if event.kept_weight > 0 and not bears_weights:
                continue
            if event.hook is not None:
                if state.units:
                    getattr(state, event.hook[0])(event.hook[1])
                top = state.live
            else:
                live += event.births
                weights += max(event.kept_weight, 0)
                state.begin(self.buffers_at([event.needs] if event.needs else [], index))
                top = state.add(self.buffers_of(event, index))
            here = live + weights + top - start + event.work
            tops[event.name] = max(tops.get(event.name, here), here)
            live -= event.deaths
            weights += min(event.kept_weight, 0) * bears_weights
        change = [now - was for now, was in zip(state.missing, missing, strict=True)]
        return _Result(live, weights, change, state, tops, max(tops.values()))

    def events(self, kind: ActionKind, index: int) -> Events:
        """Return the events of an action of this kind."""
        found = self._events_of(kind, index)
        if kind in (ActionKind.B, ActionKind.I) and not self.stages[index].has_head:
            found = _with_received(found, self._step.local.residual)
        return found if kind is ActionKind.F else _with_reductions(found)

    def _events_of(self, kind: ActionKind, index: int) -> Events:
        parts, stage = self._parts[index], self.stages[index]
        first = next(place for place, unit in enumerate(self._units) if unit.stage == index) if parts else 0
        places = []
        for part in parts:
            places.append(range(first, first + len(part.units)))
            first += len(part.units)
        own = input_bytes(self._step.local, stage)
        if kind is ActionKind.F:
            yield Event("input", own)
            leaving = 0
            for part, where in zip(parts, places, strict=True):
                kept = 0
                for event in _forward_of(part, where):
                    kept += event.births - event.deaths
                    yield event
                if part.is_offloaded:
                    yield Event("offload", deaths=leaving)
                    leaving = kept
            yield Event("offload", deaths=leaving)
            return
        if kind is ActionKind.W:
            for part in parts[::-1]:
                for unit in part.units[::-1]:
                    for site in unit.sites[::-1]:
                        yield from wgrad_events(site)
            return
        arriving = None
        for place in reversed(range(len(parts))):
            part = parts[place]
            if part.is_offloaded:
                yield Event("offload", _offloaded_bytes(part) if arriving is None else 0)
                arriving = parts[place - 1] if place and parts[place - 1].is_offloaded else None
                yield Event("offload", _offloaded_bytes(arriving) if arriving else 0)
            yield from _backward_of(part, places[place], kind is ActionKind.I, self._units)
        yield Event("input", deaths=own)

    def buffers_of(self, event: Event, index: int) -> Sequence[int]:
        """Return the flat buffers to which gradients of an event of this stage go, one for each parameter."""
        grads = [event.grads + suffix for suffix in PARTS] if event.grads else []
        return self.buffers_at([*event.params, *grads], index)

    def buffers_at(self, names: Iterable[str], index: int) -> Sequence[int]:
        """Return the flat buffers of the parameters at these paths of a stage."""
        return [place for name in names for place in self._flats_of.get((index, name), ())]

    def _place_gradients(self) -> Mapping[tuple[int, str | None], Sequence[int]]:
        """Return the flat buffers to which the gradients of each event's parameters go, one for each parameter."""
        flat_of = {path: place for place, flat in enumerate(self._flats) for path in flat.uses}
        found: dict[tuple[int, str | None], list[int]] = {}
        for index in self.stages:
            known = self._paths(index)
            last_of = {unit_of(path): path for path in known}
            for path, place in flat_of.items():
                at: str | None = path
                while at and at not in known:
                    at = at.rpartition(".")[0]
                if not at and (path.startswith(("layers.", "mtp.")) or self.stages[index].has_embedding):
                    at = last_of.get(unit_of(path))
                if at:
                    found.setdefault((index, at), []).append(place)
        return found

    def _paths(self, index: int) -> Mapping[str, None]:
        """Return the paths at which gradients of a stage arrive, in the order of backward."""
        sites = [site for part in self._parts[index] for unit in part.units for site in unit.sites]
        found: dict[str, None] = {}
        for site in reversed(sites):
            for each in reversed(site.operations):
                path = site.path_of(each)
                is_apart = each.reduced_later or deferred_operands(site.local, each)
                found |= dict.fromkeys(site.prefix + name for name in each.params)
                found |= dict.fromkeys(path + suffix for suffix in (PARTS if is_apart else PARTS[:1]))
        return found


class _Walk:
    """The way of a sweep through a rank's actions.

    Most states repeat: what is behind an action follows from what it did, `behind`, as long as each stage has two
    backwards ahead; then gradients are reduced that no microbatch lacks any more.

    Attributes:
        state: gradients and FSDP units when the next action begins; `exact` tells how many gradients are missing.
    """

    def __init__(self, sweep: Sweep, actions: Sequence[Action]) -> None:
        self._sweep, self.state = sweep, sweep.start()
        self._missing, self._changes = self.state.missing, list[Sequence[int]]()
        self._number, self._kept = sweep.number_of(self.state), dict.fromkeys(sweep.stages, 0)
        # The last stage's forward computes the gradient of the head.
        kinds = {
            (kind, index)
            for index, stage in sweep.stages.items()
            for kind in (*BACKWARD, *[ActionKind.F] * stage.has_head)
        }
        self._left = Counter(action[:2] for action in actions if action[:2] in kinds)
        self._keeps_weights = sweep.local.overlap.keep_gathered_weights

    def result(self, kind: ActionKind, index: int) -> _Result:
        """Return the result of the next action, and go on behind it."""
        kept = min(self._kept[index], 2) if self._keeps_weights else 2  # the first and the last keep the weights
        found = self._sweep.result((kind, index, kept, self._number), self.exact)
        self._kept[index] += {ActionKind.F: 1, ActionKind.W: 0}.get(kind, -1)
        self.state = found.state
        if (kind, index) in self._left:
            self._left[kind, index] -= 1
            self._changes.append(found.missing)
        behind = self._sweep.behind if self.state.shards_grads or min(self._left.values()) > 1 else dict[int, int]()
        if id(found) not in behind:
            behind[id(found)] = self._sweep.number_of(self.exact())
        self._number = behind[id(found)]
        return found

    def exact(self) -> ShardedState:
        """Return the state with the gradients that its buffers lack."""
        self._missing, self._changes = [*map(sum, zip(self._missing, *self._changes, strict=True))], []
        return self.state.copied(self._missing)


# A linear, and its parameters, whose gradients may arrive apart.
PARTS = ("", ".weight", ".bias")
_INPUT_OF = {ActionKind.F: ActionKind.RECV_F, ActionKind.B: ActionKind.RECV_B, ActionKind.I: ActionKind.RECV_B}
BACKWARD = (ActionKind.B, ActionKind.I, ActionKind.W)
_TABLES = ("embedding", "head"), ("head", "embedding")


def _forward_of(part: StagePart, places: Sequence[int], is_again: bool = False) -> Events:
    keeps = is_again or not part.is_recomputed
    if part.is_recomputed and not is_again:
        yield Event("input", part.kept_input)
    for unit, place in zip(part.units, places, strict=True):
        yield Event(unit.path, hook=("before_forward", place))
        for site in unit.sites:
            yield from forward_events(site._replace(modules=()) if is_again else site, keeps, is_again)
        yield Event(unit.path, hook=("after_forward", place))


def _backward_of(part: StagePart, places: Sequence[int], defers: bool, units: Sequence[FsdpUnitSize]) -> Events:
    for order, (unit, place) in reversed(list(enumerate(zip(part.units, places, strict=True)))):
        if unit.in_backward:
            yield Event(unit.path, hook=("before_backward", place))
        if part.is_recomputed and order == len(part.units) - 1:
            grad = unit.sites[-1].local.residual  # of the output
            yield Event("input", grad, deaths=part.kept_input)  # the recomputed units keep it themselves
            yield from _forward_of(part, places, is_again=True)
            yield Event("input", deaths=grad)
        for site in unit.sites[::-1]:
            yield from backward_events(site._replace(modules=()) if part.is_recomputed else site, defers)
        if unit.in_backward and not (
            place and units[place - 1].in_backward and units[place - 1].stage == units[place].stage
        ):
            yield Event(unit.path, hook=("after_backward", place))
    if part.is_recomputed:
        once = sum(total_bytes(each.once) for unit in part.units for site in unit.sites for each in site.operations)
        yield Event("input", deaths=once)


def _offloaded_bytes(part: StagePart) -> int:
    return sum(event.births - event.deaths for event in _forward_of(part, range(len(part.units))))


def update_bytes(step: StepSpec, flats: Sequence[FlatBufferSize]) -> int:
    """Return the bytes that the update allocates: pieces that it computes, and matrices on their way home."""
    return max(max(_pieces_bytes(step, rule, flats) for rule in step.rule.all), home_bytes(step, flats))


def quantization_bytes(local: LocalSizes, flats: Sequence[FlatBufferSize]) -> int:
    """Return the bytes by which weights that are stored in fp8 are quantized behind the update, one after another.

    They are the values in the network's dtype, then scaled, in fp32 unless bf16 is exact, and in fp8.
    """
    assert local.fp8 is not None, "weights are stored in fp8"
    piece = max((min(flat.blocks.piece, flat.shard) for flat in flats if flat.blocks), default=0)
    value = local.itemsize
    return (value + scaled_itemsize(value, restored_itemsize(local, local.fp8.recipe)) + 1) * piece


def _pieces_bytes(step: StepSpec, rule: UpdateRule, flats: Sequence[FlatBufferSize]) -> int:
    narrow = min(rule.state_itemsizes(step.optimizer, step.local.wide), default=step.local.wide) < step.local.wide
    numbers = rule.piece_numbers_narrow if narrow else rule.piece_numbers
    held = (flat.held(step.local.mesh) for flat in flats) if numbers else ()
    mine = (numel for each in held for group, numel in each.items() if group.rule is rule)
    return numbers * step.local.wide * min(max(mine, default=0), step.local.kernels.update_piece)


def residual_shards(step: StepSpec) -> list[int]:
    """Return the number of residual shards after each action: received, passed to the next stage, or in send.

    A stage of nothing sends what it keeps itself.
    """
    where, most = stage_to_rank(step.pipeline.schedule), step.local.kernels.num_leaving
    passes = {stage.index for stage in step.stages if not (stage.layers or stage.has_embedding or stage.has_head)}
    listed = list(map(itemgetter(0, 1), step.actions))
    kinds = [Action(*kind) for kind in set(listed)]
    changes = {(each.kind, each.stage): _shards_added(each, where) for each in kinds}
    lying = accumulate(map(changes.__getitem__, listed))
    sends = [(kind, stage) for kind, stage in listed if kind in SENDS]
    own = [0, *accumulate(kind is not ActionKind.SEND_F or stage not in passes for kind, stage in sends)]
    sent = accumulate(kind in SENDS for kind, _ in listed)
    return [count + own[number] - own[max(number - most, 0)] for count, number in zip(lying, sent, strict=True)]


def waiting_shards(actions: Sequence[Action]) -> list[int]:
    """Return the number of shards that are received and not used yet, after each action's use of its own."""
    received, found = set[Action](), list[int]()
    for action in actions:
        if action.kind in RECEIVES:
            received.add(action)
        elif action.kind in _INPUT_OF:
            received.discard(action._replace(kind=_INPUT_OF[action.kind]))
        found.append(len(received))
    return found


def received_bytes(step: StepSpec) -> int:
    """Return the bytes of a residual shard that are received: ranks that hold it as copies receive a part each."""
    local = step.local
    numel, ranks = local.tokens * local.hidden, local.mesh.size(local.mesh.nontrivial(local.mode.copies))
    return -(-numel // ranks) * local.itemsize


def _shards_added(action: Action, where: Mapping[int, int]) -> int:
    """Return how many residual shards an action adds on this rank, less those that it consumes."""
    if action.kind in RECEIVES:
        return 1
    if action.kind not in (ActionKind.F, ActionKind.B, ActionKind.I):
        return 0
    step, first = (1, 0) if action.kind is ActionKind.F else (-1, len(where) - 1)
    return (where.get(action.stage + step) == where[action.stage]) - (action.stage != first)
