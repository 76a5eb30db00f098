"""Picture of all pipeline schedules: the simulated timeline of each, one below the other on one scale of time."""

from __future__ import annotations

from megatron3d.pipeline.actions import UNIT_COSTS, ActionKind, Costs
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.simulate import Timeline, num_virtual_stages, peak_activations, simulate
from megatron3d.viz.svg import GREY, INK, PAPER, Canvas, Rect

# Forward, backward, dgrad and wgrad; paler for the second stage of a rank.
COLOURS = {
    ActionKind.F: ("#1f5fa8", "#8fb4de"),
    ActionKind.B: ("#c2600a", "#eeb27f"),
    ActionKind.I: ("#c2600a", "#eeb27f"),
    ActionKind.W: ("#3f8f5f", "#9fcdb0"),
}
MEANINGS = {ActionKind.F: "forward", ActionKind.B: "backward, or dgrad", ActionKind.W: "wgrad"}
UNIT_PX, BAR = 22.0, 19
HEAD, LEFT = 24, 82
TOP, GAP = 88, 16


def schedules_picture(num_ranks: int = 4, num_microbatches: int = 8, costs: Costs = UNIT_COSTS) -> str:
    """Return the timelines of every schedule in the table, as an SVG file."""
    made = {name: build_schedule(name, num_ranks, num_microbatches, None, costs) for name in SCHEDULES}
    lines = {name: simulate(schedule, costs) for name, schedule in made.items()}
    longest = max(line.makespan for line in lines.values())
    panel = HEAD + num_ranks * (BAR + 2) + GAP
    title = f"{num_microbatches} microbatches through {num_ranks} ranks, one scale of time"
    below = "Forward, dgrad and wgrad take the same time. White is the bubble."
    canvas = Canvas(LEFT + UNIT_PX * longest + 24, TOP + panel * len(made), title, below)
    canvas.legend((24, 74), [(COLOURS[kind][0], COLOURS[kind][0], words) for kind, words in MEANINGS.items()])
    for number, (name, schedule) in enumerate(made.items()):
        held = " ".join(f"{peak / num_virtual_stages(schedule):g}" for peak in peak_activations(schedule))
        bubble, ranks = f"bubble {100 * lines[name].idle_rate:.0f} %", f"ranks 0 to {num_ranks - 1}"
        summary = f"{bubble}, at most {held} microbatches in flight on {ranks}"
        top = TOP + number * panel
        canvas.text((24, top + 15), name, 14, INK, "bold")
        canvas.text((LEFT + 54, top + 15), summary, 12, GREY)
        _timeline(canvas, top + HEAD, lines[name])
    return canvas.document()


def _timeline(canvas: Canvas, top: float, line: Timeline) -> None:
    """Draw a bar per rank."""
    for rank, spans in enumerate(line.rank_spans):
        y = top + rank * (BAR + 2)
        canvas.text((24, y + 14), f"rank {rank}", 12, GREY)
        stages = sorted({span.action.stage for span in spans})
        for span in spans:
            depth = stages.index(span.action.stage)
            place = Rect(LEFT + UNIT_PX * span.start, y, UNIT_PX * (span.end - span.start), BAR)
            canvas.rect(place, COLOURS[span.action.kind][min(depth, 1)], PAPER)
            x, middle = place.middle
            canvas.text((x, middle + 3.5), str(span.action.mb), 10, INK if depth else PAPER, "middle")
