"""Picture of ZeRO: the shard of weights, gradients and optimizer state that each data-parallel rank keeps.

Bars are the bytes between steps of the memory model, collectives those of the cost model over the data axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.rank import rank_memory
from megatron3d.forecast.memory.step_spec import StepSpec, make_step_spec
from megatron3d.forecast.time.traffic import step_traffic
from megatron3d.parallel.mesh import DATA
from megatron3d.viz.svg import EMPTY, GREY, INK, PAPER, Canvas, Rect

RANKS, MICROBATCHES = 4, 2
VOCABULARY = 64
# Pixels: of a byte per parameter, of a rank's bar, and of a panel.
BYTE, BAR = 19.0, 20
PANEL, LEFT = 126, 92
TOP = 96
# Categories of the memory model: their words, and their colours.
KINDS: Mapping[str, tuple[str, str]] = {
    "weights": ("weights", "#1f5fa8"),
    "main weights": ("master weights", "#5b8fd0"),
    "gradients": ("gradients", "#c2600a"),
    "optimizer": ("Adam moments", "#3f8f5f"),
}


class ZeroCase(NamedTuple):
    """A ZeRO stage, and the number of replicas of HSDP."""

    title: str
    zero_stage: int
    num_replicas: int = 1

    def job(self) -> StepSpec:
        """Return the specification of a small bf16 GPT on data-parallel ranks; its shards need no padding."""
        config = Config.model_validate(
            {
                "model": {"num_layers": 2, "hidden_size": 512, "num_attention_heads": 4, "seq_length": 64},
                "parallel": {"zero_stage": self.zero_stage, "num_distributed_optimizer_instances": self.num_replicas},
                "train": {"global_batch_size": RANKS * MICROBATCHES, "micro_batch_size": 1, "precision": "bf16"},
            }
        )
        return make_step_spec(RunSpec(config, RANKS, VOCABULARY))


CASES = (
    ZeroCase("ZeRO 0: nothing is sharded", 0),
    ZeroCase("ZeRO 1: optimizer state and master weights are sharded", 1),
    ZeroCase("ZeRO 2: gradients too", 2),
    ZeroCase("ZeRO 3 (FSDP): weights too", 3),
    ZeroCase("ZeRO 3 with two replicas (HSDP): sharded within each", 3, 2),
)


def zero_memory_picture() -> str:
    """Return the ZeRO stages one below the other, a bar per rank, as an SVG file."""
    title = f"What each of {RANKS} data-parallel ranks keeps between steps, in bf16"
    below = "Length: bytes per parameter. Coloured: what the rank holds."
    canvas = Canvas(820, TOP + len(CASES) * PANEL, title, below)
    full = rank_memory(CASES[0].job()).categories
    per_byte = sum(full[kind] for kind in KINDS) / 18
    entries = [
        (colour, colour, f"{words}, {full[kind] / per_byte:.0f} bytes") for kind, (words, colour) in KINDS.items()
    ]
    canvas.legend((24, 78), entries)
    for number, case in enumerate(CASES):
        _panel(canvas, TOP + number * PANEL, case, full, per_byte)
    return canvas.document()


def _panel(canvas: Canvas, top: float, case: ZeroCase, full: Mapping[str, int], per_byte: float) -> None:
    job = case.job()
    held = rank_memory(job).categories
    canvas.text((24, top + 16), case.title, 14, INK, "bold")
    for rank in range(RANKS):
        y = top + 26 + rank * (BAR + 3)
        canvas.text((24, y + 14), f"rank {rank}", 12, GREY)
        x = float(LEFT)
        position = job.local.mesh.at(rank).index(("data",))
        for kind, (_, colour) in KINDS.items():
            place = Rect(x, y, BYTE * full[kind] / per_byte, BAR)
            _bar(canvas, place, Fraction(held[kind], full[kind]), position, colour)
            x += place.width + 6
    x = LEFT + 18 * BYTE + 34
    total = sum(held[kind] for kind in KINDS) / per_byte
    canvas.text((x, top + 40), f"{total:g} bytes per parameter", 12, INK, "bold")
    for line, words in enumerate(captions(job)):
        canvas.text((x, top + 58 + 16 * line), words, 12, GREY)


def _bar(canvas: Canvas, place: Rect, share: Fraction, position: int, colour: str) -> None:
    """Draw a rank's shard of one kind of bytes, at its place among the other ranks' shards."""
    canvas.rect(place, EMPTY, EMPTY)
    if not share:
        return
    width = place.width * float(share)
    left = place.x + (width * position if share < 1 else 0.0)
    canvas.rect(place._replace(x=left, width=width), colour, colour)
    for part in range(1, int(1 / share)):
        canvas.rect(Rect(place.x + part * width - 0.5, place.y, 1, place.height), PAPER, "none")


def captions(job: StepSpec) -> Iterator[str]:
    """Yield a line per collective over the data axes, and one for FSDP units that exist only for a while.

    A line says what a rank sends in a step, as a fraction of all gradients or weights.
    """
    full, has_replicas = rank_memory(CASES[0].job()), job.local.mesh.sizes["replica"] > 1
    for (collective, axes), sent in step_traffic(job).sent.items():
        if not axes or not set(axes) <= set(DATA) or sent < full.weights / 100:
            continue
        what, whole = ("weights", full.weights) if collective == "all_gather" else ("gradients", full.gradients)
        where = " between replicas" if "data" not in axes else " within a replica" if has_replicas else ""
        part = Fraction(sent / whole).limit_denominator(100)
        yield f"{collective.replace('_', '-')}{where} sends {part} of the {what}"
    if job.shards(3):
        yield "while computing, also the weights of two FSDP units"
