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
    "From the configuration to the matmul": (
        Step("config/read.py", "YAML, overrides", "Config"),
        Step("config/run_spec.py", "derive once", "RunSpec"),
        Step("parallel/mesh.py", "rank to coordinates", "Mesh"),
        Step("parallel/modes/three_d.py", "the mode's table", "Mode"),
        Step("parallel/matmul_plan.py", "layouts of X, W, Y", "MatmulPlan"),
        Step("model/layers.py", "four linears a layer", "Matmul"),
        Step("linear/matmul.py", "gather, GEMM, reduce", "Y"),
        Step("linear/gemm.py", "the line that multiplies", "Tensor"),
    ),
    "From the schedule to the timeline": (
        Step("pipeline/schedules.py", "order of a rank", "Schedule"),
        Step("pipeline/validate.py", "refuse deadlocks", "Schedule"),
        Step("pipeline/lower.py", "insert send, receive", "Program"),
        Step("pipeline/engine.py", "run the rank's list", "loss, gradients"),
        Step("pipeline/simulate.py", "time every action", "Timeline"),
        Step("pipeline/plot.py", "draw it", "text, SVG, trace"),
    ),
    "From the batch to the update": (
        Step("data/loader.py", "rows of this rank", "Microbatch"),
        Step("model/gpt.py", "forward", "hidden states"),
        Step("ops/cross_entropy.py", "head and loss", "loss, dlogits"),
        Step("linear/main_grad.py", "accumulate in fp32", "main_grad"),
        Step("zero/buffers.py", "reduce-scatter", "gradient shard"),
        Step("optim/optimizer.py", "clip, AdamW", "master weights"),
        Step("zero/buffers.py", "all-gather", "parameters"),
    ),
    "From the state to another layout": (
        Step("train/checkpointing.py", "name every tensor", "state, metadata"),
        Step("checkpoint/pieces.py", "box of each rank", "pieces"),
        Step("checkpoint/store.py", "one file per rank", "safetensors"),
        Step("checkpoint/index.py", "which box is where", "index.json"),
        Step("checkpoint/publish.py", "atomic rename", "iter_0000100"),
        Step("checkpoint/read.py", "boxes that overlap", "any layout"),
    ),
}


def data_flows_picture() -> str:
    """Return one lane of boxes per way through the code, as an SVG file."""
    title = "Four ways through the code"
    longest = max(map(len, FLOWS.values()))
    canvas = Canvas(2 * LEFT + longest * (BOX_WIDTH + ARROW) - ARROW, TOP + LANE * len(FLOWS), title)
    canvas.text((LEFT, 30), title, 17, INK, "bold")
    canvas.text((LEFT, 50), "Files below megatron3d/, in order, with the value that each one makes", 12, GREY)
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
