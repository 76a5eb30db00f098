"""A run as one page that needs nothing else: what it is, how it goes, and what was predicted of it.

All of it is read from what the run has written into its folder: `metrics.jsonl`, `config.yaml` and `traces`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from html import escape
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from megatron3d.analysis.memory_model.table import BYTES, unit_for
from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.errors import UserError
from megatron3d.model.architecture import Architecture
from megatron3d.parallel.mesh import ranges
from megatron3d.pipeline.plot import figure
from megatron3d.pipeline.simulate import simulate_durations
from megatron3d.pipeline.spec import stage_flops
from megatron3d.train.monitor.prediction_check import parts_of
from megatron3d.viz.curves import Rows, draw, read_run
from megatron3d.viz.html import details, note, page, section, svg, svg_element, table

RECENT, MAX_SPANS = 50, 4000
_SECTION, _KEY = re.compile(r"(\w+):\s*"), re.compile(r"  (\w+): (.*\S)\s+# (.*)")
Start = Mapping[str, Any]


def report(folder: Path, refresh_s: int | None = None) -> str:
    """The page of a run; raises UserError where there is none, or it has not logged a step."""
    rows = read_run(folder)
    starts = [row for row in rows if "start" in row]
    start: Start = starts[-1]["start"] if starts else {}
    steps = [row for row in rows if "lm_loss" in row]
    name = folder.resolve().name
    body = [f"<h1>{escape(name)}</h1>", *_summary(start, steps), *_events(rows, steps)]
    body.append(section("Curves", svg(draw({name: rows}))))
    body += _time(start, steps)
    if start:
        body += [*_layout(start), *_memory(start, rows), *_timeline(start, folder)]
    body += _configuration(folder / "config.yaml")
    return page(f"{name}: iteration {steps[-1]['iteration']}", body, refresh_s)


def is_finished(rows: Rows) -> bool:
    """Whether the last step that the newest start wanted has been logged."""
    wanted = [row["start"]["train_iters"] for row in rows if "start" in row]
    return bool(wanted) and any(row["iteration"] >= wanted[-1] for row in rows if "lm_loss" in row)


def _summary(start: Start, steps: Rows) -> Iterator[str]:
    last, recent = steps[-1], steps[-RECENT:]
    if start:
        model, peak = start["model"], start["peak"]
        yield note(
            f"{model['num_parameters']:,} parameters, {model['num_layers']} layers, hidden {model['hidden_size']}, on "
            f"{start['world_size']} rank(s); started {start['time']} with torch {start['versions']['torch']}"
        )
        where = f"{peak['flops'] / 1e12:.4g} TFLOP/s per device ({peak['source']})" if peak else "not known"
        yield note(f"peak, of which MFU and HFU are parts: {where}")
    of = f" of {start['train_iters']}" if start else ""
    facts = {"iteration": f"{last['iteration']}{of}", "loss": f"{last['lm_loss']:.6g}"}
    for title, key, form in (
        ("tokens/s", "tokens_per_s", "{:,.0f}"),
        ("TFLOP/s per rank", "tflops_per_s_per_rank", "{:.4g}"),
        ("MFU", "mfu", "{:.1%}"),
        ("HFU", "hfu", "{:.1%}"),
        ("pipeline bubble", "pipeline_bubble", "{:.1%}"),
    ):
        values = [row[key] for row in recent if row.get(key) is not None]
        if values:
            facts[title] = form.format(median(values))
    yield table(list(facts), [list(facts.values())])
    yield note(f"rates: medians of the last {len(recent)} logged steps")


def _events(rows: Rows, steps: Rows) -> Iterator[str]:
    """What a person should know of: starts, steps without a number, rollbacks, slow ranks."""
    found = [(row["iteration"], "start", row["start"]["time"]) for row in rows if "start" in row]
    bad = [row for row in steps if not (math.isfinite(row["lm_loss"]) and math.isfinite(row.get("grad_norm", 0.0)))]
    found += [
        (row["iteration"], "not finite", f"loss {row['lm_loss']}, norm {row.get('grad_norm')}") for row in bad[:20]
    ]
    found += [(row["iteration"], kind, row[kind]) for row in rows for kind in ("rollback", "straggler") if kind in row]
    if bad:
        yield note(f"{len(bad)} logged step(s) have a loss or a gradient norm that is not finite", "bad")
    if found:
        yield section("Events", table(("iteration", "what", ""), sorted(found)))


def _time(start: Start, steps: Rows) -> Iterator[str]:
    """Phases of recent steps, and the step beside its prediction."""
    recent = [row["timers"] for row in steps[-RECENT:] if "timers" in row]
    seen = {name: [timers[name] for timers in recent if name in timers] for name in dict.fromkeys(chain(*recent))}
    lines, mean_s = [], {}
    for name, spreads in seen.items():
        slowest = [each["max_rank"] for each in spreads]
        least, mean, most = (median(each[key] for each in spreads) for key in ("min", "mean", "max"))
        lines.append((name, f"{least:,.3f}", f"{mean:,.3f}", f"{most:,.3f}", max(set(slowest), key=slowest.count)))
        mean_s[name] = 1e-3 * mean
    parts = [table(("phase", "min ms", "mean ms", "max ms", "mostly slowest rank"), lines)] if lines else []
    parts.append(
        note(
            "Minimum, mean and maximum over ranks, medians over the last logged steps. What waits `along` axes is "
            "within the other phases: communication that nothing hides."
        )
    )
    step_s = median(row["elapsed_ms"] for row in steps[-RECENT:]) / 1e3
    yield section("Time of a step", *parts, *_beside(start.get("step_s", {}), step_s, mean_s))


def _beside(expected: Mapping[str, Any], step_s: float, phases_s: Mapping[str, float]) -> Iterator[str]:
    """The parts of a step that were predicted, and what was measured of them."""
    if "total" in expected:
        found, told = parts_of(phases_s), expected["parts"]
        kinds = [kind for kind in dict.fromkeys((*told, *found)) if kind in found or told[kind]]
        rows = [(kind, f"{told.get(kind, 0.0):.4g}", f"{found.get(kind, 0.0):.4g}") for kind in kinds]
        total = expected["total"]
        rows.append(("the step", f"{total:.4g}", f"{step_s:.4g}, {step_s / total - 1:+.0%}"))
        yield table((f"on {expected['cluster']}", "predicted s", "measured s"), rows)
    elif expected:
        yield note(f"step measured: {step_s:.4g} s; {expected['unknown']}")


def _layout(start: Start) -> Iterator[str]:
    mesh = start["mesh"]
    yield section(
        "Mesh",
        table(("axis", "ranks"), mesh.items()),
        table(("machine", "ranks", ""), ((name, len(at), ranges(at)) for name, at in start["ranks"].items())),
    )
    name, size = unit_for(max(s["in_flight"] * s["activation_bytes"] for s in start["stages"]), BYTES)
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
    header = ("stage", "pipeline rank", "layers", "parameters", "GFLOP/microbatch", "in flight", f"keeps {name}", "")
    yield section("Stages", table(header, rows))


def _memory(start: Start, rows: Rows) -> Iterator[str]:
    """Predicted by category, measured in the first step, and the most so far."""
    firsts = [row["first_step"]["memory_bytes"] for row in rows if "first_step" in row]
    predicted = start["memory_bytes"]
    name, size = unit_for(max(sum(each.values()) for each in predicted), BYTES)
    lines = []
    for coord, categories in enumerate(predicted):
        cells = [f"{value / size:,.2f}" for value in (*categories.values(), sum(categories.values()))]
        lines.append((coord, *cells, f"{firsts[-1][coord] / size:,.2f}" if firsts else "-"))
    peaks = [row["memory"]["peak"] for row in rows if "memory" in row]
    most = (
        f" Most of any rank so far: {peaks[-1]['max'] / 2**30:.3g} GiB, rank {peaks[-1]['max_rank']}." if peaks else ""
    )
    yield section(
        "Memory",
        table(("pipeline rank", *predicted[0], f"predicted {name}", f"first step {name}"), lines),
        note(f"On a CPU the measured number is what the whole process has grown by.{most}"),
    )


def _timeline(start: Start, folder: Path) -> Iterator[str]:
    """What was traced last, or what the schedule would be with the stages' operations for times."""
    traces = sorted(folder.glob("traces/iter_*.svg"))
    if traces:
        yield section("Pipeline", svg_element(traces[-1].read_text(encoding="utf-8")), note(traces[-1].name))
        return
    if start["mesh"]["pipeline"] == 1:
        return
    try:
        config = read_config(folder / "config.yaml").config
        arch = Architecture(**{name: start["model"][name] for name in Architecture.__annotations__})
        pipeline = RunSpec(config, math.prod(start["mesh"].values()), arch.vocab_size).pipeline
    except UserError as error:
        yield section("Pipeline", note(f"cannot be drawn here: {error}"))
        return
    flops = [stage_flops(arch, stage) for stage in pipeline.stages]
    line = simulate_durations(pipeline.schedule, lambda action: flops[action.stage][action.kind])
    if len(line.spans) > MAX_SPANS:
        yield section("Pipeline", note(f"{len(line.spans):,} computations, more than {MAX_SPANS:,} are not drawn"))
        return
    title = "predicted, computations taking their operations, transfers nothing"
    yield section("Pipeline", svg(figure({title: line}, time="operations per token")))


def _configuration(path: Path) -> Iterator[str]:
    """Every value with its origin, those that were given first."""
    if not path.is_file():
        return
    values, current = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := _SECTION.fullmatch(line):
            current = match[1]
        elif match := _KEY.fullmatch(line):
            values.append((f"{current}.{match[1]}", match[2], match[3]))
    header, given = ("key", "value", "origin"), [each for each in values if each[2] != "default"]
    yield section("Configuration", table(header, given))
    rest = [each for each in values if each[2] == "default"]
    yield details(f"{len(rest)} values that nobody gave", table(header, rest))
