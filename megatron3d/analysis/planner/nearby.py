"""Numbers of ranks and global batch sizes near those asked for, and how fast the best layout is there.

A number with few divisors leaves few layouts: 1,000 ranks have 16 divisors, 1,008 have 30.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron3d.analysis.memory_model.table import align_columns
from megatron3d.analysis.planner.fixed_keys import FixedKeys
from megatron3d.analysis.planner.options import divisors
from megatron3d.analysis.planner.plan_report import MATTERS
from megatron3d.analysis.planner.problem import PlanningProblem, PredictedLayout
from megatron3d.analysis.planner.search import search
from megatron3d.errors import UserError

# Numbers are nearby up to this relative distance; at most MOST are tried on each side.
DISTANCE, MOST = 0.25, 2


@dataclass(frozen=True)
class Nearby:
    """The best layout of a nearby problem."""

    problem: PlanningProblem
    plan: PredictedLayout

    @property
    def tokens_per_s_per_rank(self) -> float:
        """Predicted speed of each rank."""
        return self.problem.tokens_per_s(self.plan) / self.problem.num_ranks


def nearby_problems(problem: PlanningProblem) -> Iterator[PlanningProblem]:
    """Yield the problem with nearby numbers of whole nodes, and with nearby global batch sizes."""
    node = problem.machine.network.cluster.node_ranks
    step = node if problem.num_ranks > node else 1
    for num_ranks in _round_numbers(problem.num_ranks, step):
        if num_ranks <= node or num_ranks % node == 0:
            yield replace(problem, num_ranks=num_ranks)
    train = problem.config.train
    for size in _round_numbers(train.global_batch_size, 1):
        changed = train.model_copy(update={"global_batch_size": size})
        yield replace(problem, config=problem.config.model_copy(update={"train": changed}))


def search_nearby(problem: PlanningProblem, best: PredictedLayout) -> list[Nearby]:
    """Return the best layouts of nearby problems, with the tensor mode and size of the best layout here.

    Problems that no layout fits are left out.
    """
    tensor = best.layout.tensor
    keys = {"tensor_parallel_mode": tensor.mode, "tensor_model_parallel_size": tensor.size}
    wanted = tuple((f"parallel.{key}", value) for key, value in keys.items() if tensor.size > 1 or "size" in key)
    fixed = FixedKeys((*problem.fixed.values, *wanted))
    found = []
    for other in nearby_problems(problem):
        try:
            (plan,) = search(replace(other, fixed=fixed), 1, [tensor.mode]).plans
        except UserError:
            continue
        found.append(Nearby(other, plan))
    return found


def nearby_table(problem: PlanningProblem, best: PredictedLayout, found: Sequence[Nearby]) -> list[str]:
    """Return the nearby numbers with which each rank is faster, the best first."""
    here = Nearby(problem, best).tokens_per_s_per_rank
    faster = [each for each in found if each.tokens_per_s_per_rank > (1 + MATTERS) * here]
    tried = ", ".join(_numbers(each.problem) for each in found) or "no other number has a layout that fits"
    if not faster:
        return [f"nearby numbers of ranks and batches: none is more than 1 % faster per rank ({tried})"]
    rows: list[tuple[str, ...]] = [("", "ranks", "batch", "step s", "tokens/s", "per rank", "layout")]
    for each in sorted(faster, key=lambda each: -each.tokens_per_s_per_rank):
        rows.append(
            (
                "",
                f"{each.problem.num_ranks:,}",
                f"{each.problem.config.train.global_batch_size:,}",
                f"{each.plan.step.step_s:.3f}",
                f"{each.problem.tokens_per_s(each.plan):,.0f}",
                f"{100 * (each.tokens_per_s_per_rank / here - 1):+.1f} %",
                str(each.plan.layout),
            )
        )
    return ["nearby numbers of ranks and batches with which each rank is faster:", *align_columns(rows)]


def _numbers(problem: PlanningProblem) -> str:
    return f"{problem.num_ranks:,} with batch {problem.config.train.global_batch_size:,}"


def _round_numbers(number: int, step: int) -> list[int]:
    """Return the multiples of `step` with most divisors near a number, at most `MOST` below and above it."""
    reach = int(DISTANCE * number) // step
    below = [n for k in range(1, reach + 1) if (n := (number // step - k + (number % step > 0)) * step) >= step]
    above = [(number // step + k) * step for k in range(1, reach + 1)]
    by_divisors = (sorted(side, key=lambda n: (-len(divisors(n)), abs(n - number)))[:MOST] for side in (below, above))
    return sorted(n for side in by_divisors for n in side)
