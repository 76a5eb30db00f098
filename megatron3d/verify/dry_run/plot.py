"""Plot the memory of ranks over a dry run: bytes by kind, and the peak during each action.

weights | main weights | gradients | optimizer | activations           ___ most during an action
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron3d.analysis.memory_model.table import BYTES, unit_for
from megatron3d.verify.dry_run.run import RankDryRun
from megatron3d.verify.dry_run.totals import StepTotals

# Of more ranks than that some are drawn, the first and the last among them.
MAX_PANELS = 8


def figure(runs: Sequence[RankDryRun], sums: Sequence[StepTotals]) -> Figure:
    """Return a figure with a panel per rank, all on one scale of bytes."""
    count = min(len(runs), MAX_PANELS)
    shown = [round(place * (len(runs) - 1) / max(1, count - 1)) for place in range(count)]
    picture = Figure(figsize=(10, 1 + 2 * len(shown)), layout="constrained")
    unit, size = unit_for(max(each.peak for each in sums), BYTES)
    panels: list[Axes] = list(picture.subplots(len(shown), 1, squeeze=False, sharey=True)[:, 0])
    for axes, place in zip(panels, shown, strict=True):
        _draw(axes, runs[place], sums[place], size)
        axes.set_title(f"rank {runs[place].rank}: most {sums[place].peak / size:,.1f} {unit}, at {sums[place].peak_at}")
        axes.set_ylabel(unit)
    panels[-1].set_xlabel("actions of the step, the update last")
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    return picture


def _draw(axes: Axes, run: RankDryRun, sums: StepTotals, size: float) -> None:
    """Draw the bytes after each action, stacked by kind, and the peak during it."""
    kept = sum(run.between.values())
    kinds = {kind: len(sums.peaks) * [held] for kind, held in run.between.items()}
    kinds["activations"] = [max(0, held - kept) for held in (*sums.timeline, kept)]
    places = range(len(sums.peaks))
    heights = [[held / size for held in series] for series in kinds.values()]
    axes.stackplot(places, heights, labels=list(kinds), step="mid")
    axes.step(places, [peak / size for peak in sums.peaks], where="mid", color="black", label="most during it")
    axes.margins(x=0.005)
