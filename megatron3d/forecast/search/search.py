"""Search for the fastest layouts that fit: each gets a lower bound, and the most promising are predicted in full.

    bound = microbatches x (layers / pipeline ranks) x (forward + backward of a layer) x (1 + bubble of equal stages)
            + least slowdown of computation by communication over the data axis, even if that is fully overlapped

In the order of their bounds the step time of layouts is simulated, and the memory of those among the best is predicted,
until no bound is below the slowest of the layouts to return.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NoReturn

from megatron3d.config.read import one_of
from megatron3d.config.validate.facts import Facts
from megatron3d.config.validate.rules import check, value_problems
from megatron3d.config.yaml_origins import show
from megatron3d.errors import UserError
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.search.bounds import LayoutGroup, in_order, layout_groups, reason_of
from megatron3d.forecast.search.options import LayoutChoice, LayoutFields, TensorChoice
from megatron3d.forecast.search.problem import NOTHING, VALUES, FixedKeys, PlanningProblem, PredictedLayout
from megatron3d.model.linear_spec import num_parameters
from megatron3d.parallel.modes import MODES


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """While entered, collect no cycles; afterwards do as before.

    A search keeps millions of small tuples in caches, which the collector would read again for a quarter of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Layouts that fit or are slower, and are predicted, at most.
MOST = 400
# CPU seconds for the bounds, and for bounds and predictions together, unless the search is thorough.
BOUNDS_S, SEARCH_S = 35.0, 52.0
# Seconds between two lines of progress.
PROGRESS_S = 5.0
# Part of the memory that recomputation must save.
WORTH = 0.01


@dataclass(frozen=True)
class SearchResult:
    """Fastest layouts in order, the number of layouts considered, and the reasons why others were refused.

    Attributes:
        num_sure: plans of which it is sure that no layout is faster and absent; all of them, unless the search was cut.
        is_stopped: Ctrl-C ended the search.
    """

    plans: Sequence[PredictedLayout]
    num_layouts: int
    rejected: Counter[str]
    num_sure: int
    is_stopped: bool = False


class Progress:
    """Lines about a search, some seconds apart, and the CPU time that it has taken."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._told_s, self._start_s = tell, time.monotonic(), time.process_time()

    @property
    def cpu_s(self) -> float:
        """CPU seconds since the start."""
        return time.process_time() - self._start_s

    def update(self, what: str, number: int, best: PredictedLayout | None = None) -> None:
        """Tell how many layouts were looked at, and the best so far."""
        if time.monotonic() < self._told_s + PROGRESS_S:
            return
        self._told_s = time.monotonic()
        found = f"{best.step.step_s:.3f} s with {best.layout}" if best else "none"
        self._tell(f"{number:,} layouts {what}; best so far: {found}")


def _silent(line: str) -> None:
    """Tell nothing."""


@without_garbage_collection()
def search(
    problem: PlanningProblem,
    count: int = 10,
    modes: Sequence[str] = tuple(MODES),
    is_thorough: bool = False,
    tell: Callable[[str], None] = _silent,
) -> SearchResult:
    """Return the `count` fastest layouts of these modes that fit.

    Without `is_thorough` the search is cut after `MOST` predictions, or after `SEARCH_S` once a layout fits, and bounds
    after `BOUNDS_S`, those of few tensor-parallel ranks first; the result says how far it is sure.  Ctrl-C ends it with
    what it has found.

    Args:
        tell: is called with a line of progress every `PROGRESS_S`.

    Raises UserError where there is none, with the commonest reasons, or for values that every layout is refused for.
    For fixed values that no layout has together, it names the values that each may have next to the others.
    """
    _refuse_values(problem)
    rejected: Counter[str] = Counter()
    wanted = dict(problem.fixed.values).get("parallel.tensor_parallel_mode")
    modes = [mode for mode in modes if wanted in (None, mode)]
    progress = Progress(tell)
    groups, is_cut = _groups(problem, rejected, modes, math.inf if is_thorough else BOUNDS_S, progress)
    if problem.fixed.values and not groups:
        _refuse_fixed(problem, modes)
    num_layouts = sum(len(group.shapes) for group in groups) + rejected.total()
    plans: list[PredictedLayout] = []
    tried, least_s, is_stopped = 0, -math.inf if is_cut else math.inf, False
    most, most_s = (math.inf, math.inf) if is_thorough else (MOST, SEARCH_S)
    try:
        for number, bound in enumerate(in_order(groups)):
            progress.update("predicted", number, plans[0] if plans else None)
            worst = plans[count - 1].step.step_s if len(plans) == count else math.inf
            if tried >= most or bound.seconds > worst or (plans and progress.cpu_s > most_s):
                least_s = min(least_s, bound.seconds)
                break
            found = _predict(problem, bound.layout, worst)
            if isinstance(found, str):
                rejected[found] += 1
                continue
            tried += 1
            if found is not None:
                plans = worth_showing([*plans, found])[:count]
    except KeyboardInterrupt:
        if not plans:
            raise
        least_s, is_stopped = -math.inf, True
    if not plans:
        _refuse_all(problem, rejected, modes)
    num_sure = sum(plan.step.step_s <= least_s for plan in plans)
    return SearchResult(plans, num_layouts, rejected, num_sure, is_stopped)


def _predict(problem: PlanningProblem, layout: LayoutChoice, worst_s: float) -> PredictedLayout | str | None:
    """Return a layout with its prediction, the reason why it is refused, or None where its step takes `worst_s`."""
    config = layout.apply_to(problem.config)
    if broken := check(config, problem.num_ranks, problem.vocab_size):
        return reason_of(broken[0])
    spec = problem.spec(config)
    step = problem.step(spec)
    if step.step_s >= worst_s:
        return None
    memory = problem.fitting_memory(spec)
    if memory is None or memory.total + (libraries := problem.library_bytes(spec)) > problem.memory_bytes:
        return "needs more memory than a rank has"
    return PredictedLayout(layout, config, step, memory, libraries)


def _refuse_values(problem: PlanningProblem) -> None:
    """Raise UserError for values that every layout is refused for."""
    config = LayoutChoice(_alone()).apply_to(problem.config)
    UserError.collect(list(value_problems(Facts(config, problem.num_ranks, problem.vocab_size))))


def _alone() -> TensorChoice:
    """Return the choice of a single tensor-parallel rank."""
    mode, entry = next(iter(MODES.items()))
    return TensorChoice(mode, next(iter(entry.forms)), (1,))


def _groups(
    problem: PlanningProblem, rejected: Counter[str], modes: Sequence[str], most_s: float, progress: Progress
) -> tuple[list[LayoutGroup], bool]:
    """Return the groups that are found within `most_s` CPU seconds, and whether there may be more."""
    groups, number = list[LayoutGroup](), 0
    for group in layout_groups(problem, rejected, modes):
        groups.append(group)
        number += len(group.shapes)
        progress.update("bounded", number)
        if progress.cpu_s > most_s:
            return groups, True
    return groups, False


def _refuse_all(problem: PlanningProblem, rejected: Counter[str], modes: Sequence[str]) -> NoReturn:
    """Raise UserError where no layout fits, with the reasons, the least number of ranks that the state needs, and a
    number of ranks on which a layout fits."""
    reasons = "; ".join(f"{reason} ({number} layouts)" for reason, number in rejected.most_common(3))
    state = least_state_bytes(problem)
    least = math.ceil(state / problem.memory_bytes)
    told = f"weights, gradients and optimizer alone, {state / 2**30:,.0f} GiB, need {least:,} GPUs or more"
    if found := fewest_doubled(problem, modes, least):
        told += f"; on {found[0]:,} GPUs fits {found[1]}"
    raise UserError(
        f"--world-size {problem.num_ranks}: no layout of this model fits; use more GPUs, another "
        f"train.global_batch_size or a smaller model ({told}; {reasons})"
    )


# Values with which a layout needs least memory, how often ranks are doubled, and layouts that are looked at each time.
THRIFTY = {"parallel.zero_stage": 3, "train.micro_batch_size": 1, "train.recompute_granularity": "full"}
DOUBLINGS, LOOKED_AT = 4, 40


def fewest_doubled(problem: PlanningProblem, modes: Sequence[str], least: int) -> tuple[int, LayoutChoice] | None:
    """Return the first number of ranks, by doubling, on which a layout that needs little memory fits, and the layout.

    Args:
        least: ranks that the state needs at least.
    """
    fixed = FixedKeys(tuple((THRIFTY | dict(problem.fixed.values)).items()))
    first = max(math.ceil(math.log2(least / problem.num_ranks)), 1)
    for num_ranks in (problem.num_ranks * 2**times for times in range(first, first + DOUBLINGS)):
        here = replace(problem, num_ranks=num_ranks, fixed=fixed)
        groups = layout_groups(here, Counter(), modes[:1])
        shares = sorted(((group.cost.least_bytes(group.share), group) for group in groups), key=itemgetter(0))
        for _, group in shares[:LOOKED_AT]:
            fields: LayoutFields = (group.tensor, *group.shapes[0], *group.others)
            layout = LayoutChoice(*fields)
            config = layout.apply_to(here.config)
            if not check(config, num_ranks, here.vocab_size) and here.fitting_memory(here.spec(config)) is not None:
                return num_ranks, layout
    return None


def least_state_bytes(problem: PlanningProblem) -> float:
    """Return the bytes of weights, gradients and optimizer of the whole model, of which no rank holds a copy."""
    step = make_step_spec(
        problem.spec(LayoutChoice(_alone()).apply_to(problem.config)),
        problem.machine.kernels_of(problem.spec(problem.config)),
    )
    params = num_parameters(step.local.arch)
    return float(params * (2 * step.local.wide + min(map(step.state_bytes, step.rule.all))))


def worth_showing(plans: Sequence[PredictedLayout]) -> list[PredictedLayout]:
    """Return plans from the fastest, without those that differ from a faster one to no purpose.

    These are the same order of work under another schedule's name (ZB-H2 and ZB-2P on two ranks), and recomputation
    that is slower and saves less than `WORTH` of the memory.
    """
    kept: list[PredictedLayout] = []
    for plan in sorted(plans, key=lambda each: each.step.step_s):
        if not any(_is_pointless(plan, other) for other in kept):
            kept.append(plan)
    return kept


def _is_pointless(plan: PredictedLayout, faster: PredictedLayout) -> bool:
    mine, other = plan.layout, faster.layout
    if replace(mine, schedule=other.schedule, recompute=other.recompute) != other:
        return False
    if mine.schedule == other.schedule:
        return plan.total_bytes > (1 - WORTH) * faster.total_bytes
    same = plan.step.step_s == faster.step.step_s and plan.total_bytes == faster.total_bytes
    return same and mine.recompute == other.recompute


def _refuse_fixed(problem: PlanningProblem, modes: Sequence[str]) -> None:
    """Raise UserError if fixed values rule out every layout; without them, too, there may be none."""
    fixed = dict(problem.fixed.values)
    free = list(layout_groups(replace(problem, fixed=NOTHING), Counter(), modes))
    possible: dict[str, set[object]] = {key: set() for key in fixed}
    for group in free:
        for shape in group.shapes:
            fields: LayoutFields = (group.tensor, *shape, *group.others)
            layout = LayoutChoice(*fields)
            wrong = [key for key, value in fixed.items() if VALUES[key](layout) != value]
            if len(wrong) == 1:
                possible[wrong[0]].add(VALUES[wrong[0]](layout))
    rest = " next to the other fixed values" * (len(fixed) > 1)
    told = [_told(key, fixed[key], values, rest) for key, values in possible.items() if values]
    if free:
        UserError.collect(told or ["--fix: every layout that may fit has other values of two keys or more; fix fewer"])


def _told(key: str, value: object, possible: set[object], rest: str) -> str:
    numbers = sorted(each for each in possible if isinstance(each, int))
    words = sorted(show(each) for each in possible if not isinstance(each, int))
    use = one_of([*map(str, numbers), *words])
    return f"--fix {key.partition('.')[2]}={show(value)}: no layout that may fit has it{rest}; use {use}"
