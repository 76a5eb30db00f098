"""Pipeline schedules as data: per rank, the order of its computations, as pure functions of (p, m, v).

The `Pipeline` of a run is its schedule with its stages and the rank that owns each.

p ranks, m microbatches, v virtual stages per rank.  A rank's order is a pattern of (kind, stage): the n-th occurrence
of a pair is for microbatch n.  A valid schedule stays valid without its last microbatches, so that small m are served
by a pattern for more.

  gpipe        Huang et al. 2019, arXiv:1811.06965            1f1b     Narayanan et al. 2021, arXiv:2006.09503, flush
  interleaved  Narayanan et al. 2021, arXiv:2104.04473, 2.2   zb-*     Qi et al. 2023, arXiv:2401.10241
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from operator import itemgetter
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.model.linear_spec import head_flops_per_token, layer_weights, mtp_linears, weights_of_layer
from megatron3d.model.spec import Architecture, keys_seen, layer_counts, mean_keys
from megatron3d.model.stage_plan import Stage, StageAssignment
from megatron3d.pipeline.actions import (
    UNIT_COSTS,
    Action,
    ActionKind,
    Costs,
    RankOfStage,
    Schedule,
    rank_in_loop,
    rank_in_v,
)
from megatron3d.pipeline.validate import read_schedule
from megatron3d.runtime.arguments import MAX_SCHEDULE_SIZE

F, B = ActionKind.F, ActionKind.B
I, W = ActionKind.I, ActionKind.W  # noqa: E741
Step = tuple[ActionKind, int]


def number_microbatches(pattern: Iterable[Step], m: int) -> tuple[Action, ...]:
    """Return the actions of a pattern of (kind, stage), without those of microbatches from m on."""
    numbers: defaultdict[Step, Iterator[int]] = defaultdict(count)
    numbered = ((step, next(numbers[step])) for step in pattern)
    return tuple(Action(*step, mb) for step, mb in numbered if mb < m)


def gpipe(p: int, m: int) -> Schedule:
    """Return all forwards, then all backwards: bubble (p-1)(TF+TB), m microbatches in flight."""
    return tuple(number_microbatches([(F, r)] * m + [(B, r)] * m, m) for r in range(p))


def one_f_one_b(p: int, m: int) -> Schedule:
    """Return alternating forwards and backwards: GPipe's bubble, but only p - r microbatches in flight on rank r."""

    def rank(r: int) -> tuple[Action, ...]:
        warmup = min(p - r - 1, m)
        return number_microbatches([(F, r)] * warmup + [(F, r), (B, r)] * (m - warmup) + [(B, r)] * warmup, m)

    return tuple(map(rank, range(p)))


def interleave_group_size(p: int, m: int) -> int:
    """Return how many microbatches a rank runs through one virtual stage before it switches to the next.

    Megatron's rule for its microbatch_group_size_per_vp_stage: at least p, and the last group is complete or at least
    p; the smallest such number holds the fewest activations.  Fewer than p microbatches are one group.
    """
    return next((n for n in range(p, m + 1) if m % n == 0 or m % n >= p), m)


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Return 1F1B over v smaller stages per rank, p apart: 1/v of the bubble, v times the transfers, more in flight."""
    group = interleave_group_size(p, m)
    units = [(i, c) for g in range(0, m, group) for c in range(v) for i in range(g, min(g + group, m))]

    def rank(r: int) -> tuple[Action, ...]:
        forward = [Action(F, c * p + r, i) for i, c in units]
        backward = [Action(B, (v - 1 - c) * p + r, i) for i, c in units]
        warmup = min(2 * (p - r - 1) + (v - 1) * group, m * v)
        steady = [action for pair in zip(forward[warmup:], backward, strict=False) for action in pair]
        return (*forward[:warmup], *steady, *backward[m * v - warmup :])

    return tuple(map(rank, range(p)))


def _split_backward(r: int, m: int, warmup: int, delay: int) -> tuple[Action, ...]:
    """Return rank r's order with `warmup` forwards first, and each wgrad deferred by `delay` microbatches."""
    n = max(m, warmup + delay)
    steady = [(F, r), (I, r)] * delay + [(F, r), (I, r), (W, r)] * (n - warmup - delay)
    return number_microbatches([(F, r)] * warmup + steady + [(I, r), (W, r)] * warmup + [(W, r)] * delay, m)


def zb_h1(p: int, m: int) -> Schedule:
    """Return 1F1B with deferred weight gradients: bubble (p-1)(TF+TB-TW), never more than p microbatches in flight."""
    return tuple(_split_backward(r, m, warmup=p - r - 1, delay=r) for r in range(p))


def zb_2p(p: int, m: int, costs: Costs) -> Schedule:
    """Return ZB-H2 for given costs: forwards fill the warm-up, deferred weight gradients the cool-down.

    ZB-H2, its form for equal costs, is ZB-H1 with more forwards: bubble (p-1)(TF+TB-2TW), up to 2p - 1 in flight.

    Rank r waits p-1-r round trips, each TF+TB and two hops, for its first gradient, and has r left after its last one.
    At most 2p microbatches wait for their backward; the operands of deferred weight gradients are kept in addition.
    """
    round_trip = costs.F + costs.I + 2 * costs.comm

    def rank(r: int) -> tuple[Action, ...]:
        warmup = min(round((p - 1 - r) * round_trip / costs.F), 2 * p - 1)
        return _split_backward(r, m, warmup=warmup, delay=round(min(r * round_trip / costs.W, m)))

    return tuple(map(rank, range(p)))


def zb_v(p: int, m: int) -> Schedule:
    """Return two stages per rank in a V: no bubble when TF=TB=TW, and 1F1B's p microbatches in flight."""
    n = max(m, 2 * p - 1)

    def rank(r: int) -> tuple[Action, ...]:
        down, up = r, 2 * p - 1 - r
        f, i = (F, down), (I, down)
        w = (W, down)
        F_, I_ = (F, up), (I, up)
        W_ = (W, up)
        warmup = [f] * (2 * (p - r) - 1) + [F_, f] * r + [F_, I_, W_] * (p - r)
        steady = [f, i, w, F_, I_, W_] * (n - 2 * p + r + 1) + [i, w, F_, I_, W_] * (p - r - 1)
        return number_microbatches(warmup + steady + [i, I_] * r + [i, w] * (p - r) + [W_] * r + [w] * r, m)

    return tuple(map(rank, range(p)))


@dataclass(frozen=True)
class ScheduleEntry:
    """Entry of a named schedule: its generator of (p, m, v, costs), the rank of its stages, and the v it supports."""

    generate: Callable[[int, int, int, Costs], Schedule]
    rank_of_stage: RankOfStage
    min_virtual: int = 1
    max_virtual: int | None = 1

    def supports(self, virtual: int) -> bool:
        """Return whether the schedule can have `virtual` stages per rank."""
        return self.min_virtual <= virtual and (self.max_virtual is None or virtual <= self.max_virtual)


ONE_F_ONE_B, INTERLEAVED = "1f1b", "interleaved"
SCHEDULES: Mapping[str, ScheduleEntry] = {
    "gpipe": ScheduleEntry(lambda p, m, v, costs: gpipe(p, m), rank_in_loop),
    ONE_F_ONE_B: ScheduleEntry(lambda p, m, v, costs: one_f_one_b(p, m), rank_in_loop),
    INTERLEAVED: ScheduleEntry(lambda p, m, v, costs: interleaved(p, m, v), rank_in_loop, 2, None),
    "zb-h1": ScheduleEntry(lambda p, m, v, costs: zb_h1(p, m), rank_in_loop),
    "zb-h2": ScheduleEntry(lambda p, m, v, costs: zb_2p(p, m, UNIT_COSTS), rank_in_loop),
    "zb-2p": ScheduleEntry(lambda p, m, v, costs: zb_2p(p, m, costs), rank_in_loop),
    "zb-v": ScheduleEntry(lambda p, m, v, costs: zb_v(p, m), rank_in_v, 2, 2),
}
FROM_FILE = "file"


def schedules_with(virtual: int) -> list[str]:
    """Return the names of the schedules that support `virtual` stages per rank."""
    return [name for name, entry in SCHEDULES.items() if entry.supports(virtual)]


def schedule_problems(name: str, p: int, m: int, v: int | None = None) -> list[str]:
    """Return why a schedule does not exist for p ranks, m microbatches and v virtual stages per rank, with a fix."""
    if name not in (*SCHEDULES, FROM_FILE):
        return [f"schedule {name}: there is none of this name; use {', '.join((*SCHEDULES, FROM_FILE))}"]
    counts = (("ranks p", p), ("microbatches m", m), ("virtual stages per rank v", 1 if v is None else v))
    found = [f"schedule {name}: the number of {what}={n} must be at least 1; use 1" for what, n in counts if n < 1]
    if found or name == FROM_FILE:
        return found
    entry, low = SCHEDULES[name], SCHEDULES[name].min_virtual
    virtual = low if v is None else v
    if entry.supports(virtual):
        return list(size_problems(name, p, m, virtual))
    assert v is not None, "a schedule supports its own minimum"
    takes = f"v={low}" if entry.max_virtual == low else f"v={low} or more"
    others = " or ".join(schedules_with(v))
    return [f"schedule {name}: takes {takes} virtual stages per rank, not v={v}; use v={low}, or {others}"]


def size_problems(name: str, p: int, m: int, v: int) -> Iterator[str]:
    """Yield a message if a schedule has more than `MAX_SCHEDULE_SIZE` forwards; warm-ups are for up to 2p of them."""
    if p * v * max(m, 2 * p) > MAX_SCHEDULE_SIZE:
        yield (
            f"schedule {name}: {p} ranks x {v} stages x max({m} microbatches, 2 x {p} ranks) are more than "
            f"{MAX_SCHEDULE_SIZE} actions; use fewer microbatches or ranks"
        )


def build_schedule(name: str, p: int, m: int, v: int | None = None, costs: Costs = UNIT_COSTS) -> Schedule:
    """Return the schedule `name` for p ranks, m microbatches, v virtual stages per rank (None: the fewest possible).

    Raises UserError with the numbers and the nearest ones that work.
    """
    UserError.collect(schedule_problems(name, p, m, v))
    return _generated(name, p, m, SCHEDULES[name].min_virtual if v is None else v, costs)


class _HashedOnce(tuple[tuple[Action, ...], ...]):
    """A schedule that knows its hash, which takes as long as a simulation: many caches ask for it."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=256)
def _generated(name: str, p: int, m: int, v: int, costs: Costs) -> Schedule:
    """Return a schedule that exists; a planner asks for the same ones again and again."""
    return _HashedOnce(SCHEDULES[name].generate(p, m, v, costs))


def load_schedule(path: Path, p: int | None = None, m: int | None = None) -> Schedule:
    """Read a schedule from a CSV file; raise UserError where it is not for the given p ranks and m microbatches."""
    schedule = read_schedule(path)
    sizes = (("ranks p", len(schedule), p), ("microbatches m", num_microbatches(schedule), m))
    UserError.collect(
        f"{path}: has {n} {what}, not {wanted}; use {n}, or a file for {wanted}"
        for what, n, wanted in sizes
        if wanted is not None and wanted != n
    )
    return schedule


def num_microbatches(schedule: Schedule) -> int:
    """Return the number of microbatches of a valid schedule."""
    return len(set[object]().union(*(map(itemgetter(2), actions) for actions in schedule)))


@dataclass(frozen=True)
class Pipeline(StageAssignment):
    """Stages and their owners, and `schedule[rank]`: the computations of a pipeline rank in the order it runs them."""

    schedule: Schedule

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into an input gradient and a deferred weight gradient."""
        return any(action.kind is ActionKind.I for actions in self.schedule for action in actions)


def layer_flops(arch: Architecture, layer: int | None = None) -> Mapping[ActionKind, int]:
    """Return the FLOPs of one layer per token, by kind of computation.

    Forward, input gradient and weight gradient of a linear layer cost the same; the attention core has no weights and
    costs twice as much backward as forward.

    Args:
        layer: the layer, with its window and experts; default: the mean over all layers.
    """
    seen = mean_keys(arch) if layer is None else keys_seen(arch, layer)
    linear = 2 * (layer_weights(arch) if layer is None else weights_of_layer(arch, layer))
    core = round(4 * arch.num_attention_heads * arch.kv_channels * seen)
    return {ActionKind.F: linear + core, ActionKind.I: linear + 2 * core, ActionKind.W: linear}


def stage_flops(arch: Architecture, stage: Stage) -> Mapping[ActionKind, int]:
    """Return the FLOPs of a stage per token, by kind; the head computes its gradients in the forward, with the loss."""
    ahead = arch.mtp_num_layers if stage.has_head else 0
    linears = 2 * ahead * sum(linear.num_weights for linear in mtp_linears(arch).values())
    flops = dict.fromkeys((ActionKind.F, ActionKind.I, ActionKind.W), linears)
    for place, number in layer_counts(arch, [*stage.layers, *ahead * [arch.num_layers - 1]]).items():
        for kind, each in layer_flops(arch, place).items():
            flops[kind] += number * each
    head = (1 + ahead) * head_flops_per_token(arch) if stage.has_head else 0
    return {**flops, ActionKind.F: flops[ActionKind.F] + head, ActionKind.B: flops[ActionKind.I] + flops[ActionKind.W]}
