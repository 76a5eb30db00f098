"""Picture of the four ways that data takes through the code: the files in order, and the value that each one makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
    """Draw the boxes of one way, with an arrow from each to the next."""
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
