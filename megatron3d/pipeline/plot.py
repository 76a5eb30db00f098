"""Plots of simulated or measured timelines: text, figures, and traces for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron3d.pipeline.actions import ActionKind
from megatron3d.pipeline.simulate import Timeline

COLOURS = {ActionKind.F: "#4e79a7", ActionKind.B: "#59a14f", ActionKind.I: "#76b7b2", ActionKind.W: "#edc948"}
MEANINGS = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradient",
}
MAX_COLUMNS = 300
LABELLED_SPANS = 1500


def text_picture(timeline: Timeline) -> str:
    """Return a line per rank, a column per unit of time: microbatch 3 is `F3`, or `4F3` with several stages per rank.

    The unit is the shortest computation, or a 300th of the makespan where that is longer; shorter computations may then
    be missing.
    """
    begin = min(span.start for span in timeline.spans)
    shortest = min(span.end - span.start for span in timeline.spans)
    unit = max(shortest, timeline.makespan / MAX_COLUMNS)
    single = all(len({span.action.stage for span in spans}) <= 1 for spans in timeline.rank_spans)
    actions = {span: span.action for span in timeline.spans}
    labels = {span: f"{each.kind.value}{each.mb}" if single else str(each) for span, each in actions.items()}
    width = 1 + max(map(len, labels.values()))
    prefix = len(f"rank {len(timeline.rank_spans) - 1}  ")
    lines = []
    for rank, spans in enumerate(timeline.rank_spans):
        line = f"rank {rank}".ljust(prefix)
        for span in spans:
            # Columns are independent of floating-point rounding.
            columns = (math.floor(round((time - begin) / unit, 6)) for time in (span.start, span.end))
            start, end = (prefix + width * column for column in columns)
            if len(line) < end:
                line = line.ljust(start) + labels[span].ljust(end - max(start, len(line)) - 1, "-") + " "
        lines.append(line.rstrip())
    return "\n".join(lines)


def figure(timelines: Mapping[str, Timeline], time: str = "time") -> Figure:
    """Draw one panel per timeline on a common time axis, with the bubble (the white area) in its title."""
    ranks = max(len(timeline.rank_spans) for timeline in timelines.values())
    picture = Figure(figsize=(14, len(timelines) * (1.2 + 0.35 * ranks)), layout="constrained")
    panels: list[Axes] = list(picture.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0])
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _draw(axes, timeline)
        axes.set_title(f"{title}: bubble {100 * timeline.idle_rate:.1f} %")
    panels[-1].set_xlabel(time)
    kinds = {span.action.kind for timeline in timelines.values() for span in timeline.spans}
    handles = [Patch(color=COLOURS[kind], label=MEANINGS[kind]) for kind in COLOURS if kind in kinds]
    picture.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize="small")
    return picture


def _draw(axes: Axes, timeline: Timeline) -> None:
    """Draw the bars of each rank; later stages of a rank are paler."""
    begin = min(span.start for span in timeline.spans)
    for rank, spans in enumerate(timeline.rank_spans):
        stages = sorted({span.action.stage for span in spans})
        for depth, stage in enumerate(stages):
            for kind, colour in COLOURS.items():
                mine = [s for s in spans if s.action.stage == stage and s.action.kind is kind]
                bars = [(span.start - begin, span.end - span.start) for span in mine]
                alpha = 1 - 0.5 * depth / len(stages)
                axes.broken_barh(bars, (rank - 0.4, 0.8), color=colour, alpha=alpha, edgecolor="white", linewidth=0.5)
        for span in spans if len(timeline.spans) <= LABELLED_SPANS else ():
            middle = (span.start + span.end) / 2 - begin
            axes.text(middle, rank, str(span.action.mb), ha="center", va="center", fontsize=6, clip_on=True)
    axes.set_yticks(range(len(timeline.rank_spans)), [f"rank {rank}" for rank in range(len(timeline.rank_spans))])
    axes.invert_yaxis()
    axes.margins(x=0.005)


def trace(timelines: Mapping[str, Timeline], unit_us: float) -> dict[str, Any]:
    """Return a Chrome trace: a process per timeline, a thread per rank; one unit of time is `unit_us` microseconds."""
    events = [event for number, item in enumerate(timelines.items()) for event in _events(number, *item, unit_us)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(process: int, title: str, timeline: Timeline, unit_us: float) -> Iterator[dict[str, Any]]:
    begin = min(span.start for span in timeline.spans)
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}
    for rank in range(len(timeline.rank_spans)):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
    for span in timeline.spans:
        kind, stage, mb = span.action
        yield {
            "ph": "X",
            "name": str(span.action),
            "cat": MEANINGS[kind],
            "pid": process,
            "tid": span.rank,
            "ts": (span.start - begin) * unit_us,
            "dur": (span.end - span.start) * unit_us,
            "args": {"stage": stage, "microbatch": mb},
        }
