"""HTML report of a run: its configuration, its progress, and its predictions next to its measurements.

All of it is read from what the run wrote into its folder: `metrics.jsonl`, `config.yaml` and `traces`.  The page's
layout and words are in templates/report.html; the page loads nothing, so it can be sent as one file.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.errors import UserError, escaped
from megatron3d.forecast.memory.table import BYTES, unit_for
from megatron3d.linear.overlap_plan import ExposedComm
from megatron3d.metrics.journal import FILE_NAME
from megatron3d.parallel.mesh import PIPELINE, ranges
from megatron3d.pipeline.plot import figure
from megatron3d.pipeline.schedules import stage_flops
from megatron3d.pipeline.simulate import simulate_durations
from megatron3d.train.monitor.monitor import parts_of
from megatron3d.viz.curves import Rows, draw, draw_load, read_run

RECENT, MAX_SPANS = 50, 4000
MAX_BAD_STEPS = 20
# Folder of a run that configs/ save to.
CHECKPOINTS = "checkpoints"
# Keys of the `start` of a launch that the page shows.
START_KEYS = ("time", "versions", "world_size", "mesh", "ranks", "model", "peak", "stages", "memory_bytes")
RATES = (
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("TFLOP/s per rank", "tflops_per_s_per_rank", "{:.4g}"),
    ("MFU", "mfu", "{:.1%}"),
    ("HFU", "hfu", "{:.1%}"),
    ("pipeline bubble", "pipeline_bubble", "{:.1%}"),
)
_SECTION, _KEY = re.compile(r"(\w+):\s*"), re.compile(r"  (\w+): (.*\S)\s+# (.*)")
DERIVED = "derived: "
Start = Mapping[str, Any]
Cells = tuple[Any, ...]


class Prediction(NamedTuple):
    """Parts of a step, predicted and measured; without rows only a sentence."""

    title: str = ""
    rows: tuple[Cells, ...] = ()


class Picture(NamedTuple):
    """SVG element of a picture, and a note below it."""

    svg: str = ""
    note: str = ""


def report(folder: Path, refresh_s: int | None = None) -> str:
    """Return the page of a run; raise UserError if the folder holds none, or none that has logged a step.

    A browser reads the page again every `refresh_s` seconds.
    """
    rows = read_run(folder)
    starts = [row for row in rows if "start" in row]
    start: Start = starts[-1]["start"] if starts else {}
    if missing := [key for key in START_KEYS if start and key not in start]:
        raise UserError(f"{folder / FILE_NAME}: the last start has no {', '.join(missing)}; draw curves, as a .png")
    steps = [row for row in rows if "lm_loss" in row]
    bad = [row for row in steps if not all(map(math.isfinite, (row["lm_loss"], row.get("grad_norm", 0.0))))]
    phases = _phases(steps)
    name = run_name(folder)
    values: dict[str, Any] = {
        "name": name,
        "iteration": steps[-1]["iteration"],
        "refresh_s": refresh_s,
        "start": start,
        "facts": _facts(start, steps),
        "num_recent": len(steps[-RECENT:]),
        "num_bad": len(bad),
        "events": _events(rows, bad),
        "curves": figure_svg(draw({name: rows})),
        "expert_load": None if (load := draw_load(steps)) is None else figure_svg(load),
        "phases": [cells for cells, _ in phases.values()],
        "prediction": _prediction(start.get("step_s", {}), steps, {name: s for name, (_, s) in phases.items()}),
        "configuration": _configuration(folder / "config.yaml"),
    }
    if start:
        values["machines"] = [(name, len(ranks), ranges(ranks)) for name, ranks in start["ranks"].items()]
        experts = start.get("expert_mesh", {})
        values["expert_mesh"] = [(name, axis["ranks"], " x ".join(axis["over"])) for name, axis in experts.items()]
        values.update(stages=_stages(start), memory=_memory(start, rows), pipeline=_pipeline(start, folder))
    environment = Environment(
        loader=PackageLoader("megatron3d.viz"), autoescape=True, undefined=StrictUndefined, finalize=_shown
    )
    return environment.get_template("report.html").render(values)


def _shown(value: Any) -> Any:
    """Return a value of the template, foreign text without control characters, half characters and reversals."""
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def run_name(folder: Path) -> str:
    """Return the name of the run that saves to this folder, which is its parent's for `runs/mine/checkpoints`."""
    whole = folder.resolve()
    return whole.parent.name if whole.name == CHECKPOINTS else whole.name


def is_finished(rows: Rows) -> bool:
    """Return whether the last step that the newest launch wanted has been logged."""
    wanted = [row["start"]["train_iters"] for row in rows if "start" in row]
    return bool(wanted) and any(row["iteration"] >= wanted[-1] for row in rows if "lm_loss" in row)


def figure_svg(picture: Figure) -> Markup:
    """Return a figure as an SVG element, with its words as text."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        picture.savefig(buffer, format="svg")
    return svg_element(buffer.getvalue())


def svg_element(document: str) -> Markup:
    """Return the element of an SVG file that this package has written."""
    return Markup(escaped(document[document.index("<svg") :]))


def _facts(start: Start, steps: Rows) -> dict[str, str]:
    of = f" of {start['train_iters']}" if start else ""
    facts = {"iteration": f"{steps[-1]['iteration']}{of}", "loss": f"{steps[-1]['lm_loss']:.6g}"}
    for title, key, form in RATES:
        values = [row[key] for row in steps[-RECENT:] if row.get(key) is not None]
        if values:
            facts[title] = form.format(median(values))
    return facts


def _events(rows: Rows, bad: Rows) -> list[Cells]:
    """Return launches, stops, non-finite steps, rollbacks and stragglers as (iteration, kind, words), in order."""
    shown = list(map(id, bad[:MAX_BAD_STEPS]))
    events = list[Cells]()
    for row in rows:
        told: dict[str, str] = {kind: row[kind] for kind in ("rollback", "replan", "straggler", "stop") if kind in row}
        if "start" in row:
            told["start"] = row["start"]["time"]
        if id(row) in shown:
            told["not finite"] = f"loss {row['lm_loss']}, norm {row.get('grad_norm')}"
        events += [(row["iteration"], kind, words) for kind, words in told.items()]
    return events


def _phases(steps: Rows) -> dict[str, tuple[Cells, float]]:
    """Return each phase of the recent steps by name: its cells, and its mean in seconds."""
    recent = [row["timers"] for row in steps[-RECENT:] if "timers" in row]
    phases: dict[str, tuple[Cells, float]] = {}
    for name in dict.fromkeys(chain(*recent)):
        spreads = [timers[name] for timers in recent if name in timers]
        slowest = [spread["max_rank"] for spread in spreads]
        times = [median(spread[key] for spread in spreads) for key in ("min", "mean", "max")]
        cells = (name, *(f"{ms:,.3f}" for ms in times), max(set(slowest), key=slowest.count))
        phases[ExposedComm.from_log(name)] = cells, 1e-3 * times[1]
    return phases


def _prediction(expected: Mapping[str, Any], steps: Rows, phases_s: Mapping[str, float]) -> Prediction:
    """Return the predicted parts of a step next to the measured ones."""
    times_ms = [row["elapsed_ms"] for row in steps[-RECENT:] if "elapsed_ms" in row]
    if not expected or not times_ms:
        return Prediction()
    step_s = median(times_ms) / 1e3
    if "total" not in expected:
        return Prediction(f"step measured: {step_s:.4g} s; {expected['unknown']}")
    measured, predicted = parts_of(phases_s), expected["parts"]
    total = expected["total"]
    kinds = [kind for kind in dict.fromkeys((*predicted, *measured)) if kind in measured or predicted[kind]]
    rows = [(kind, f"{predicted.get(kind, 0.0):.4g}", f"{measured.get(kind, 0.0):.4g}") for kind in kinds]
    rows.append(("the step", f"{total:.4g}", f"{step_s:.4g}, {step_s / total - 1:+.0%}"))
    return Prediction(f"on {expected['cluster']}", tuple(rows))


def _stages(start: Start) -> dict[str, Any]:
    """Return the rows of the stages, and the unit of their activations."""
    unit, size = unit_for(max(stage["in_flight"] * stage["activation_bytes"] for stage in start["stages"]), BYTES)
    rows = [
        (
            stage["index"],
            stage["rank"],
            stage["num_layers"],
            f"{stage['num_parameters']:,}",
            f"{stage['flops'] / 1e9:,.3f}",
            f"{stage['in_flight']:.3g}",
            f"{stage['in_flight'] * stage['activation_bytes'] / size:,.2f}",
            stage["what"],
        )
        for stage in start["stages"]
    ]
    return {"unit": unit, "rows": rows}


def _memory(start: Start, rows: Rows) -> dict[str, Any]:
    """Return memory per pipeline rank: predicted by category, measured in the first step, and the peak so far."""
    measured = [row["first_step"]["memory_bytes"] for row in rows if "first_step" in row]
    predicted = start["memory_bytes"]
    unit, size = unit_for(max(sum(categories.values()) for categories in predicted), BYTES)
    lines = []
    for coord, categories in enumerate(predicted):
        cells = [f"{value / size:,.2f}" for value in (*categories.values(), sum(categories.values()))]
        first_step = measured[-1][coord : coord + 1] if measured else []
        lines.append((coord, *cells, f"{first_step[0] / size:,.2f}" if first_step else "-"))
    peaks = [row["memory"]["peak"] for row in rows if "memory" in row]
    most = f" Peak so far: {peaks[-1]['max'] / 2**30:.3g} GiB, rank {peaks[-1]['max_rank']}." if peaks else ""
    header = ("pipeline rank", *predicted[0], f"predicted {unit}", f"first step {unit}")
    return {"header": header, "rows": lines, "most": most}


def _pipeline(start: Start, folder: Path) -> Picture:
    """Return the newest measured timeline, or the schedule simulated with the stages' FLOPs as times."""
    traces = sorted(folder.glob("traces/iter_*.svg"))
    if traces:
        document = traces[-1].read_text(encoding="utf-8", errors="replace")
        if "<svg" not in document:
            raise UserError(f"{traces[-1]}: no SVG picture; move it away")
        return Picture(svg_element(document), traces[-1].name)
    if start["mesh"][PIPELINE] == 1:
        return Picture()
    try:
        config = read_config(folder / "config.yaml").config
        spec = RunSpec(config, start["world_size"], start["model"]["vocab_size"])
        flops = [stage_flops(spec.arch, stage) for stage in spec.pipeline.stages]
    except UserError as error:
        return Picture(note=f"cannot be drawn here: {error}")
    timeline = simulate_durations(spec.pipeline.schedule, lambda action: flops[action.stage][action.kind])
    if len(timeline.spans) > MAX_SPANS:
        return Picture(note=f"{len(timeline.spans):,} computations, more than {MAX_SPANS:,} are not drawn")
    title = "predicted, with FLOPs as times and transfers that take no time"
    return Picture(figure_svg(figure({title: timeline}, time="FLOPs per token")))


def _configuration(path: Path) -> list[Cells]:
    """Return every key with its value and origin, as the run's config.yaml has them; nothing without that file.

    The file has null where a value is derived, and what it is derived to in the comment; null to which nothing is
    derived is the default.
    """
    if not path.is_file():
        return []
    values, section = list[Cells](), ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if match := _SECTION.fullmatch(line):
            section = match[1]
        elif match := _KEY.fullmatch(line):
            value, origin = match[2], match[3]
            if value == "null" and origin.startswith(DERIVED):
                value = origin.removeprefix(DERIVED)
                origin = "default" if value == "null" else DERIVED.rstrip(": ")
            values.append((f"{section}.{match[1]}", value, origin))
    return values
