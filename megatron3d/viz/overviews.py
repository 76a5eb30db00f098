"""Overviews: the four ways that data takes through the code, and the simulated timelines of all pipeline schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron3d.pipeline.actions import ActionKind
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.simulate import Timeline, num_virtual_stages, peak_activations, simulate
from megatron3d.viz.svg import EMPTY, GREY, INK, PAPER, Canvas, Rect

# Pixels: of a file's box, of the arrow behind it, of a way, and of the margins.
BOX_WIDTH, BOX_HEIGHT = 132, 76
ARROW, LANE = 20, 130
LEFT, TOP = 24, 66
BLUE = "#1f5fa8"


class Step(NamedTuple):
    """Step of a data flow: a file below megatron3d/, its task, and the value that it returns."""

    file: str
    does: str
    makes: str


FLOWS: Mapping[str, tuple[Step, ...]] = {
    "From the batch to the loss": (
        Step("data/loader.py", "rows of this rank", "Microbatch"),
        Step("train/step.py", "one step", "Pass"),
        Step("pipeline/engine.py", "run the rank's list", "stage, microbatch"),
        Step("model/gpt.py", "one stage", "residual stream"),
        Step("model/layers.py", "attention and MLP", "residual stream"),
        Step("linear/matmul.py", "gather, GEMM, reduce", "Y"),
        Step("attention/attention.py", "this rank's heads", "values of heads"),
        Step("ops/cross_entropy.py", "head and loss", "loss, dlogits"),
    ),
    "From the gradient to the optimizer": (
        Step("pipeline/engine.py", "backward of a stage", "dY"),
        Step("linear/matmul.py", "dgrad and wgrad", "dX, dW"),
        Step("linear/main_grad.py", "accumulate in fp32", "main_grad"),
        Step("zero/buffers.py", "count, then reduce", "complete buffers"),
        Step("zero/flat_buffer.py", "reduce-scatter", "gradient shard"),
        Step("train/step.py", "sum the squares", "gradient norm"),
        Step("optim/optimizer.py", "clip, group", "ParamGroup"),
        Step("optim/adamw.py", "AdamW", "master weights"),
    ),
    "From queries and keys to context ranks and back": (
        Step("model/layers.py", "this rank's positions", "q, k, v"),
        Step("attention/context/attention.py", "table of exchanges", "Exchange"),
        Step("attention/context/plan.py", "who sees what", "RingPlan, parts"),
        Step("attention/context/order.py", "order of positions", "PositionOrder"),
        Step("attention/context/exchanges.py", "send and receive", "Operands"),
        Step("comm/process_comm.py", "collectives", "Pending"),
        Step("attention/pairs.py", "kernel of a pair", "output, lse"),
    ),
    "From tools/plan.py to its table": (
        Step("forecast/search/problem.py", "what to plan for", "PlanningProblem"),
        Step("forecast/search/bounds.py", "lower bounds", "LayoutGroup"),
        Step("forecast/search/search.py", "fastest first", "RunSpec"),
        Step("forecast/time/step.py", "time of a step", "TimePrediction"),
        Step("model/operations.py", "what a layer does", "Operation"),
        Step("forecast/time/layer.py", "time of a layer", "LayerTimes"),
        Step("forecast/memory/rank.py", "memory of a rank", "RankMemory"),
        Step("forecast/search/report.py", "rows of the table", "text"),
    ),
}


def data_flows_picture() -> str:
    """Return one lane of boxes per way through the code, as an SVG file."""
    title = "Four ways through the code"
    longest = max(map(len, FLOWS.values()))
    below = "Files below megatron3d/, in order, with the value that each one makes"
    canvas = Canvas(2 * LEFT + longest * (BOX_WIDTH + ARROW) - ARROW, TOP + LANE * len(FLOWS), title, below)
    for number, (name, steps) in enumerate(FLOWS.items()):
        _lane(canvas, TOP + number * LANE, name, steps)
    return canvas.document()


def _lane(canvas: Canvas, top: float, name: str, steps: tuple[Step, ...]) -> None:
    canvas.text((LEFT, top + 16), name, 14, INK, "bold")
    for number, step in enumerate(steps):
        box = Rect(LEFT + number * (BOX_WIDTH + ARROW), top + 28, BOX_WIDTH, BOX_HEIGHT)
        canvas.rect(box, EMPTY, PAPER)
        folder, _, file = step.file.rpartition("/")
        lines = ((f"{folder}/", GREY, ""), (file, INK, "bold"), (step.does, GREY, ""), (step.makes, BLUE, ""))
        for line, (words, colour, style) in enumerate(lines):
            canvas.text((box.x + 8, box.y + 17 + 16 * line), words, 10.5, colour, style)
        if number + 1 < len(steps):
            canvas.text((box.x + BOX_WIDTH + ARROW / 2, box.y + BOX_HEIGHT / 2 + 4), "→", 14, GREY, "middle")


# Forward, backward, dgrad and wgrad; paler for the second stage of a rank.
COLOURS = {
    ActionKind.F: ("#1f5fa8", "#8fb4de"),
    ActionKind.B: ("#c2600a", "#eeb27f"),
    ActionKind.I: ("#c2600a", "#eeb27f"),
    ActionKind.W: ("#3f8f5f", "#9fcdb0"),
}
MEANINGS = {ActionKind.F: "forward", ActionKind.B: "backward, or dgrad", ActionKind.W: "wgrad"}
NUM_RANKS, NUM_MICROBATCHES = 4, 8
# Pixels: of a unit of time, of a rank's bar, of a schedule, of the text to the left, and above the first schedule.
UNIT, BAR = 22.0, 19
PANEL = 24 + NUM_RANKS * (BAR + 2) + 16
BARS_LEFT, BARS_TOP = 82, 88


def schedules_picture() -> str:
    """Return the timelines of every schedule in the table, one below the other on one scale of time, as an SVG file."""
    made = {name: build_schedule(name, NUM_RANKS, NUM_MICROBATCHES) for name in SCHEDULES}
    lines = {name: simulate(schedule) for name, schedule in made.items()}
    longest = max(line.makespan for line in lines.values())
    title = f"{NUM_MICROBATCHES} microbatches through {NUM_RANKS} ranks, one scale of time"
    below = "Forward, dgrad and wgrad take the same time. White is the bubble."
    canvas = Canvas(BARS_LEFT + UNIT * longest + 24, BARS_TOP + PANEL * len(made), title, below)
    canvas.legend((24, 74), [(COLOURS[kind][0], COLOURS[kind][0], words) for kind, words in MEANINGS.items()])
    for number, (name, schedule) in enumerate(made.items()):
        held = " ".join(f"{peak / num_virtual_stages(schedule):g}" for peak in peak_activations(schedule))
        bubble, ranks = f"bubble {100 * lines[name].idle_rate:.0f} %", f"ranks 0 to {NUM_RANKS - 1}"
        summary = f"{bubble}, at most {held} microbatches in flight on {ranks}"
        top = BARS_TOP + number * PANEL
        canvas.text((24, top + 15), name, 14, INK, "bold")
        canvas.text((BARS_LEFT + 54, top + 15), summary, 12, GREY)
        _timeline(canvas, top + 24, lines[name])
    return canvas.document()


def _timeline(canvas: Canvas, top: float, line: Timeline) -> None:
    for rank, spans in enumerate(line.rank_spans):
        y = top + rank * (BAR + 2)
        canvas.text((24, y + 14), f"rank {rank}", 12, GREY)
        stages = sorted({span.action.stage for span in spans})
        for span in spans:
            depth = stages.index(span.action.stage)
            place = Rect(BARS_LEFT + UNIT * span.start, y, UNIT * (span.end - span.start), BAR)
            canvas.rect(place, COLOURS[span.action.kind][min(depth, 1)], PAPER)
            x, middle = place.middle
            canvas.text((x, middle + 3.5), str(span.action.mb), 10, INK if depth else PAPER, "middle")
