"""Search for the fastest layouts that fit: each gets a lower bound, and the most promising are predicted in full.

    bound = microbatches x (layers / pipeline ranks) x (forward + backward of a layer) x (1 + bubble of equal stages)
            + least slowdown of computation by communication over the data axis, even if that is fully overlapped

In the order of their bounds the step time of layouts is simulated, and the memory of those among the best is predicted,
until no bound is below the slowest of the layouts to return.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts
from megatron3d.config.validate.rules import check, value_problems
from megatron3d.config.yaml_origins import show
from megatron3d.errors import UserError
from megatron3d.forecast.search.bounds import in_order, layout_groups, reason_of
from megatron3d.forecast.search.options import LayoutChoice, LayoutFields, TensorChoice
from megatron3d.forecast.search.problem import NOTHING, VALUES, PlanningProblem, PredictedLayout
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
# Part of the memory that recomputation must save.
WORTH = 0.01


@dataclass(frozen=True)
class SearchResult:
    """Fastest layouts in order, the number of layouts considered, and the reasons why others were refused.

    Attributes:
        num_sure: plans of which it is sure that no layout is faster and absent; all of them, unless the search was cut.
    """

    plans: Sequence[PredictedLayout]
    num_layouts: int
    rejected: Counter[str]
    num_sure: int


@without_garbage_collection()
def search(
    problem: PlanningProblem, count: int = 10, modes: Sequence[str] = tuple(MODES), is_thorough: bool = False
) -> SearchResult:
    """Return the `count` fastest layouts of these modes that fit.

    Without `is_thorough` the search is cut after `MOST` predictions; the result says how far it is sure.

    Raises UserError where there is none, with the commonest reasons, or for values that every layout is refused for.
    For fixed values that no layout has together, it names the values that each may have next to the others.
    """
    mode, entry = next(iter(MODES.items()))
    simplest = LayoutChoice(TensorChoice(mode, next(iter(entry.forms)), (1,))).apply_to(problem.config)
    UserError.collect(list(value_problems(Facts(simplest, problem.num_ranks, problem.vocab_size))))
    rejected: Counter[str] = Counter()
    wanted = dict(problem.fixed.values).get("parallel.tensor_parallel_mode")
    modes = [mode for mode in modes if wanted in (None, mode)]
    groups = list(layout_groups(problem, rejected, modes))
    if problem.fixed.values and not groups:
        _refuse_fixed(problem, modes)
    plans: list[PredictedLayout] = []
    tried, least_s = 0, math.inf
    most = math.inf if is_thorough else MOST
    for bound in in_order(groups):
        worst = plans[count - 1].step.step_s if len(plans) == count else math.inf
        if tried >= most or bound.seconds > worst:
            least_s = bound.seconds
            break
        layout = bound.layout
        config = layout.apply_to(problem.config)
        if broken := check(config, problem.num_ranks, problem.vocab_size):
            rejected[reason_of(broken[0])] += 1
            continue
        spec = problem.spec(config)
        step = problem.step(spec)
        if step.step_s >= worst:
            tried += 1
            continue
        memory = problem.fitting_memory(spec)
        if memory is None or memory.total + (libraries := problem.library_bytes(spec)) > problem.memory_bytes:
            rejected["needs more memory than a rank has"] += 1
            continue
        tried += 1
        plans = worth_showing([*plans, PredictedLayout(layout, config, step, memory, libraries)])[:count]
    if not plans:
        reasons = "; ".join(f"{reason} ({number} layouts)" for reason, number in rejected.most_common(3))
        raise UserError(
            f"--num-gpus {problem.num_ranks}: no layout of this model fits; use more GPUs, another "
            f"train.global_batch_size or a smaller model ({reasons})"
        )
    num_sure = sum(plan.step.step_s <= least_s for plan in plans)
    return SearchResult(plans, sum(len(group.shapes) for group in groups) + rejected.total(), rejected, num_sure)


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
