"""Plans as text: a line per layout, and one layout in all its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron3d.analysis.cost_model.breakdown import is_wait
from megatron3d.analysis.memory_model.rank import Memory
from megatron3d.analysis.memory_model.table import lines_of
from megatron3d.analysis.planner.search import Found, Plan, Problem

DAY_S = 86400.0


def found_table(found: Found, problem: Problem) -> list[str]:
    """The best layouts, and why the others are not there."""
    rows: list[tuple[str, ...]] = [
        ("", "step s", "MFU %", "tokens/s", "GiB", "compute", "waits", "bubble", "update", "limited by", "layout")
    ]
    for place, plan in enumerate(found.plans, 1):
        step = plan.step
        waits = sum(step.waits.values())
        cells = [
            f"{100 * part / step.step_s:.1f} %" for part in (step.compute_s, waits, step.bubble_s, step.optimizer_s)
        ]
        rows.append(
            (
                str(place),
                f"{step.step_s:.3f}",
                f"{100 * problem.mfu(plan):.1f}",
                f"{problem.tokens_per_s(plan):,.0f}",
                f"{plan.memory.total / 2**30:.1f}",
                *cells,
                limit(plan),
                str(plan.layout),
            )
        )
    lines = [*lines_of(rows), "", f"of {found.num_layouts:,} layouts, refused:"]
    return lines + [f"  {number:>7,}  {reason}" for reason, number in found.rejected.most_common(8)]


def limit(plan: Plan) -> str:
    """What takes most of the step's time."""
    return next(iter(plan.step.all_parts))


def explained(plan: Plan, problem: Problem, num_tokens: float) -> list[str]:
    """Memory by kind and time by kind of one layout."""
    step, memory, batch = plan.step, plan.memory, problem.config.train.global_batch_size
    tokens_per_s = problem.tokens_per_s(plan)
    lines = [
        f"{plan.layout}, on {problem.num_ranks} ranks of {problem.machine.network.cluster.name}",
        f"step of {batch} sequences: {step.step_s:.3f} s, {tokens_per_s:,.0f} tokens/s, "
        f"MFU {100 * problem.mfu(plan):.1f} %",
        f"{num_tokens:,.0f} tokens: {num_tokens / tokens_per_s / DAY_S:,.1f} days",
        "time:",
    ]
    for kind, seconds in step.all_parts.items():
        if seconds > 0:
            lines.append(f"  {seconds:10.4f} s  {100 * seconds / step.step_s:5.1f} %  {named(kind)}")
    return [*lines, *memory_lines(memory, problem)]


def memory_lines(memory: Memory, problem: Problem) -> Iterator[str]:
    """Bytes by category of the rank that needs most."""
    room = problem.memory_bytes / 2**30
    yield f"memory of the rank that needs most, of {room:.1f} GiB that are there:"
    for kind, size in memory.categories.items():
        yield f"  {size / 2**30:10.2f} GiB  {kind}"
    yield f"  {memory.total / 2**30:10.2f} GiB  in all"


def named(kind: str) -> str:
    """What waits, in words."""
    return f"waiting for communication {kind}" if is_wait(kind) else kind


def compared(one: Plan, other: Plan) -> list[str]:
    """Two plans part by part."""
    rows = [("", "first s", "second s", "difference s", "")]
    totals = [{**plan.step.all_parts, "step": plan.step.step_s} for plan in (one, other)]
    for kind in dict.fromkeys((*totals[0], *totals[1])):
        first, second = (each.get(kind, 0.0) for each in totals)
        rows.append(("", f"{first:.4f}", f"{second:.4f}", f"{second - first:+.4f}", named(kind)))
    sizes = [plan.memory.total / 2**30 for plan in (one, other)]
    faster = one.step.step_s / other.step.step_s
    told = f"the second is {faster:.2f} times as fast as the first; memory {sizes[0]:.1f} and {sizes[1]:.1f} GiB"
    return [*lines_of(rows), told]


def scaling_table(speeds: Mapping[int, float]) -> list[str]:
    """Tokens per second over numbers of ranks, and what of that each rank does, relative to the first number."""
    rows: list[tuple[str, ...]] = [("", "ranks", "tokens/s", "per rank %")]
    each = {num_ranks: speed / num_ranks for num_ranks, speed in speeds.items()}
    first = next(iter(each.values()))
    rows += [("", str(n), f"{speed:,.0f}", f"{100 * each[n] / first:.1f}") for n, speed in speeds.items()]
    return lines_of(rows)


def shown_layout(plans: Sequence[Plan]) -> list[str]:
    """A short label for each."""
    return [str(plan.layout).replace(", ", "\n") for plan in plans]
