"""Tables of a dry run: FLOPs, communication and memory of each rank, and every collective of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from megatron3d.analysis.memory_model.table import BYTES, align_columns, unit_for
from megatron3d.verify.dry_run.run import RankDryRun
from megatron3d.verify.dry_run.totals import StepTotals

OPERATIONS = {"GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15}


def report(runs: Sequence[RankDryRun], sums: Sequence[StepTotals]) -> str:
    """Return all tables."""
    busiest = max(range(len(runs)), key=lambda index: sums[index].flops)
    lines = [*rank_table(runs, sums), "", f"collectives of rank {runs[busiest].rank} in a step, sent over rings:"]
    return "\n".join(f"> {line}".rstrip() for line in [*lines, *call_table(sums[busiest])])


def rank_table(runs: Sequence[RankDryRun], sums: Sequence[StepTotals]) -> list[str]:
    """Return a line per rank."""
    unit, size = unit_for(max(each.peak for each in sums), BYTES)
    operations, one = unit_for(max(each.flops for each in sums), OPERATIONS)
    kinds = list(runs[0].between)
    header = ("rank", "stage rank", "parameters", operations, "calls", f"sent {unit}", *kinds, "activations")
    rows = [
        (
            str(run.rank),
            str(run.coord),
            f"{run.parameters:,}",
            f"{each.flops / one:,.1f}",
            f"{sum(each.calls.values()):,}",
            f"{sum(each.sent.values()) / size:,.1f}",
            *(f"{run.between[kind] / size:,.1f}" for kind in kinds),
            f"{each.activations / size:,.1f}",
            f"{each.moment / size:,.1f}",
            f"{each.peak / size:,.1f}",
            each.peak_at,
        )
        for run, each in zip(runs, sums, strict=True)
    ]
    return align_columns([(*header, "moment", f"peak {unit}", "at"), *rows])


def call_table(sums: StepTotals) -> list[str]:
    """Return a line per collective and axes."""
    unit, size = unit_for(max(sums.sent.values(), default=0), BYTES)
    rows = [
        (what, "·".join(axes), f"{count:,}", f"{sums.sent[what, axes] / size:,.3f}", "")
        for (what, axes), count in sorted(sums.calls.items())
    ]
    return align_columns([("collective", "axes", "calls", unit, ""), *rows]) if rows else ["none"]
