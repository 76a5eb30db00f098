"""Numbers of ranks and global batch sizes near those asked for, and how fast the best layout is there.

A number with few divisors leaves few layouts: 1,000 ranks have 16 divisors, 1,008 have 30.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron3d.errors import UserError
from megatron3d.forecast.memory.table import align_columns
from megatron3d.forecast.search.options import divisors
from megatron3d.forecast.search.problem import FixedKeys, PlanningProblem, PredictedLayout
from megatron3d.forecast.search.search import SearchResult, search
from megatron3d.forecast.time.breakdown import is_exposed
from megatron3d.forecast.time.hardware import Cluster

DAY_S = 86400.0
# Step times that differ less are within the prediction's error.
MATTERS = 0.01


def result_table(found: SearchResult, problem: PlanningProblem) -> list[str]:
    """Return a table of the best layouts, and why others were refused."""
    rows: list[tuple[str, ...]] = [
        ("", "step s", "MFU %", "tokens/s", "GiB", "compute", "waits", "bubble", "update", "limited by", "layout")
    ]
    for place, plan in zip(places([plan.step.step_s for plan in found.plans]), found.plans, strict=True):
        step = plan.step
        waits = sum(step.exposed.values())
        cells = [
            f"{100 * part / step.step_s:.1f} %" for part in (step.compute_s, waits, step.bubble_s, step.optimizer_s)
        ]
        rows.append(
            (
                str(place),
                f"{step.step_s:.3f}",
                f"{100 * problem.mfu(plan):.1f}",
                f"{problem.tokens_per_s(plan):,.0f}",
                f"{plan.total_bytes / 2**30:.1f}",
                *cells,
                next(iter(step.breakdown)),  # the largest part
                str(plan.layout),
            )
        )
    lines = align_columns(rows)
    if len({row[0] for row in rows}) < len(rows):
        lines.append("layouts with the same number are within 1 %, too close to call: take the simplest of them")
    if found.num_sure < len(found.plans):
        sure = f" but the first {found.num_sure}" * (found.num_sure > 0)
        end = "incomplete, the search was stopped" if found.is_stopped else "the search was cut"
        lines.append(f"{end}: a layout that was not predicted may be faster than all{sure}; see --thorough")
    lines += ["", f"of {found.num_layouts:,} layouts, refused:"]
    return lines + [f"  {number:>7,}  {reason}" for reason, number in found.rejected.most_common(8)]


def places(seconds: Sequence[float]) -> list[int]:
    """Return the place of each step time, in order; times within 1 % of the first with a place share it."""
    found: list[int] = []
    for index, step_s in enumerate(seconds):
        shared = index > 0 and step_s <= (1 + MATTERS) * seconds[found[-1] - 1]
        found.append(found[-1] if shared else index + 1)
    return found


def explain_plan(plan: PredictedLayout, problem: PlanningProblem, num_tokens: float) -> list[str]:
    """Return the time and the memory of one layout by kind."""
    step = plan.step
    cluster = problem.machine.network.cluster
    batch = problem.config.train.global_batch_size
    tokens_per_s = problem.tokens_per_s(plan)
    lines = [
        f"{plan.layout}, on {problem.num_ranks} ranks of {cluster.name}",
        *beyond(cluster, problem.num_ranks),
        f"step of {batch} sequences: {step.step_s:.3f} s, {tokens_per_s:,.0f} tokens/s, "
        f"MFU {100 * problem.mfu(plan):.1f} %{_of_peak(problem)}",
        f"{num_tokens:,.0f} tokens: {num_tokens / tokens_per_s / DAY_S:,.1f} days",
        "time:",
    ]
    for kind, seconds in step.breakdown.items():
        if seconds > 0:
            lines.append(f"  {seconds:10.4f} s  {100 * seconds / step.step_s:5.1f} %  {part_label(kind)}")
    lines.append(f"memory of the rank that needs most, of {problem.memory_bytes / 2**30:.1f} GiB that are there:")
    held = plan.memory.categories | {"CUDA context and communicators": plan.library_bytes, "in all": plan.total_bytes}
    return lines + [f"  {size / 2**30:10.2f} GiB  {kind}" for kind, size in held.items()]


def _of_peak(problem: PlanningProblem) -> str:
    """Return of which peak MFU is a part where GEMMs are in fp8, which may have another one."""
    train, device = problem.config.train, problem.machine.device
    if train.fp8 is None:
        return ""
    has_kernel = device.multiplies_fp8(train.fp8_recipe, train.precision)
    how = "" if has_kernel else f"; there is no kernel for fp8 {train.fp8_recipe}, whose operands are restored"
    return f" of the peak in {train.precision}{how}"


def beyond(cluster: Cluster, num_ranks: int) -> Iterator[str]:
    """Yield what is assumed where a cluster has fewer ranks than a plan."""
    outermost = cluster.levels[-1]
    if num_ranks > outermost.ranks:
        yield (
            f"{cluster.name} has {outermost.ranks:,} ranks: predicted as if its level {outermost.name} "
            f"({outermost.gb_s:g} GB/s) went on to {num_ranks:,}"
        )


def part_label(kind: str) -> str:
    """Return a part's name, exposed communication marked as such."""
    return f"waiting for communication {kind}" if is_exposed(kind) else kind


def compare_plans(one: PredictedLayout, other: PredictedLayout) -> list[str]:
    """Return the comparison of two plans, part by part."""
    rows = [("", "first s", "second s", "difference s", "")]
    totals = [{**plan.step.breakdown, "step": plan.step.step_s} for plan in (one, other)]
    for kind in dict.fromkeys((*totals[0], *totals[1])):
        first, second = (each.get(kind, 0.0) for each in totals)
        rows.append(("", f"{first:.4f}", f"{second:.4f}", f"{second - first:+.4f}", part_label(kind)))
    sizes = [plan.total_bytes / 2**30 for plan in (one, other)]
    faster = one.step.step_s / other.step.step_s
    told = f"the second is {faster:.2f} times as fast as the first; memory {sizes[0]:.1f} and {sizes[1]:.1f} GiB"
    return [*align_columns(rows), told]


def scaling_table(speeds: Mapping[int, float]) -> list[str]:
    """Return tokens per second over the number of ranks, and each rank's relative to the first number."""
    rows: list[tuple[str, ...]] = [("", "ranks", "tokens/s", "per rank %")]
    each = {num_ranks: speed / num_ranks for num_ranks, speed in speeds.items()}
    first = next(iter(each.values()))
    rows += [("", str(n), f"{speed:,.0f}", f"{100 * each[n] / first:.1f}") for n, speed in speeds.items()]
    return align_columns(rows)


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
    sizes = [(each.problem.num_ranks, each.problem.config.train.global_batch_size) for each in found]
    tried = (
        ", ".join(f"{ranks:,} with batch {batch:,}" for ranks, batch in sizes)
        or "no other number has a layout that fits"
    )
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


def _round_numbers(number: int, step: int) -> list[int]:
    """Return the multiples of `step` with most divisors near a number, at most `MOST` below and above it."""
    reach = int(DISTANCE * number) // step
    below = [n for k in range(1, reach + 1) if (n := (number // step - k + (number % step > 0)) * step) >= step]
    above = [(number // step + k) * step for k in range(1, reach + 1)]
    by_divisors = (sorted(side, key=lambda n: (-len(divisors(n)), abs(n - number)))[:MOST] for side in (below, above))
    return sorted(n for side in by_divisors for n in side)
