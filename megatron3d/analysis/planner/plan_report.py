"""Plans as text: a table of layouts, the breakdown of one layout, and a comparison of two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron3d.analysis.cost_model.breakdown import is_exposed
from megatron3d.analysis.cost_model.hardware import Cluster
from megatron3d.analysis.memory_model.table import align_columns
from megatron3d.analysis.planner.problem import PlanningProblem, PredictedLayout
from megatron3d.analysis.planner.search import SearchResult

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
                largest_part(plan),
                str(plan.layout),
            )
        )
    lines = align_columns(rows)
    if len({row[0] for row in rows}) < len(rows):
        lines.append("layouts with the same number are within 1 %, too close to call: take the simplest of them")
    if found.num_sure < len(found.plans):
        sure = f" but the first {found.num_sure}" * (found.num_sure > 0)
        lines.append(
            f"the search was cut: a layout that was not predicted may be faster than all{sure}; see --thorough"
        )
    lines += ["", f"of {found.num_layouts:,} layouts, refused:"]
    return lines + [f"  {number:>7,}  {reason}" for reason, number in found.rejected.most_common(8)]


def places(seconds: Sequence[float]) -> list[int]:
    """Return the place of each step time, in order; times within 1 % of the first with a place share it."""
    found: list[int] = []
    for index, step_s in enumerate(seconds):
        shared = index > 0 and step_s <= (1 + MATTERS) * seconds[found[-1] - 1]
        found.append(found[-1] if shared else index + 1)
    return found


def largest_part(plan: PredictedLayout) -> str:
    """Return the part of a step that takes most of its time."""
    return next(iter(plan.step.breakdown))


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
        f"MFU {100 * problem.mfu(plan):.1f} %",
        f"{num_tokens:,.0f} tokens: {num_tokens / tokens_per_s / DAY_S:,.1f} days",
        "time:",
    ]
    for kind, seconds in step.breakdown.items():
        if seconds > 0:
            lines.append(f"  {seconds:10.4f} s  {100 * seconds / step.step_s:5.1f} %  {part_label(kind)}")
    return [*lines, *memory_lines(plan, problem)]


def beyond(cluster: Cluster, num_ranks: int) -> Iterator[str]:
    """Yield what is assumed where a cluster has fewer ranks than a plan."""
    outermost = cluster.levels[-1]
    if num_ranks > outermost.ranks:
        yield (
            f"{cluster.name} has {outermost.ranks:,} ranks: predicted as if its level {outermost.name} "
            f"({outermost.gb_s:g} GB/s) went on to {num_ranks:,}"
        )


def memory_lines(plan: PredictedLayout, problem: PlanningProblem) -> Iterator[str]:
    """Yield the bytes by category of the rank that needs most."""
    room = problem.memory_bytes / 2**30
    yield f"memory of the rank that needs most, of {room:.1f} GiB that are there:"
    for kind, size in (plan.memory.categories | {"CUDA context and communicators": plan.library_bytes}).items():
        yield f"  {size / 2**30:10.2f} GiB  {kind}"
    yield f"  {plan.total_bytes / 2**30:10.2f} GiB  in all"


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


def layout_labels(plans: Sequence[PredictedLayout]) -> list[str]:
    """Return a short label of each layout."""
    return [str(plan.layout).replace(", ", "\n") for plan in plans]
