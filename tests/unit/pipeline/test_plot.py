"""Fact: pictures show every computation at its time, for any unit and any start time."""

from __future__ import annotations

import json
from io import BytesIO

from hypothesis import given
from hypothesis import strategies as st

from megatron3d.pipeline.actions import Action, ActionKind, Costs
from megatron3d.pipeline.plot import MAX_COLUMNS, figure, text_picture, trace
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.simulate import Span, Timeline, simulate

NAMES = st.sampled_from(list(SCHEDULES))


@given(name=NAMES, p=st.integers(1, 4), m=st.integers(1, 12), begin=st.floats(0, 1e3), unit=st.floats(1e-3, 1e3))
def test_text_shows_every_action_in_order(name: str, p: int, m: int, begin: float, unit: float) -> None:
    schedule = build_schedule(name, p, m)
    spans = simulate(schedule, Costs(F=1.5, I=2, W=1)).spans
    moved = Timeline(
        tuple(span._replace(start=begin + unit * span.start, end=begin + unit * span.end) for span in spans)
    )
    lines = text_picture(moved).splitlines()
    several = SCHEDULES[name].min_virtual > 1
    for rank, (line, actions) in enumerate(zip(lines, schedule, strict=True)):
        words = [word.rstrip("-") for word in line.split()]
        assert words == ["rank", str(rank), *(str(a) if several else f"{a.kind.value}{a.mb}" for a in actions)]


def test_text_is_to_scale() -> None:
    assert text_picture(simulate(build_schedule("1f1b", 2, 2))) == (
        "rank 0  F0 F1       B0---    B1---\nrank 1     F0 B0--- F1 B1---"
    )


def test_text_does_not_depend_on_rounding() -> None:
    schedule = build_schedule("zb-h1", 3, 9)
    assert text_picture(simulate(schedule, Costs(0.1, 0.1, 0.1))) == text_picture(simulate(schedule))


def test_a_short_span_among_long_ones_keeps_the_text_short() -> None:
    spans = (Span(0, Action(ActionKind.F, 0, 0), 0, 1e-6), Span(0, Action(ActionKind.B, 0, 0), 1, 2))
    assert len(text_picture(Timeline(spans))) <= 4 * MAX_COLUMNS


def test_a_figure_has_a_panel_per_timeline_and_the_bubble_in_its_title() -> None:
    schedule = build_schedule("zb-v", 3, 4)
    picture = figure({"predicted": simulate(schedule), "measured": simulate(schedule, Costs(F=2))})
    predicted, measured = picture.axes
    assert predicted.get_title() == f"predicted: bubble {100 * simulate(schedule).idle_rate:.1f} %"
    assert measured.get_title().startswith("measured: bubble ")
    assert len(predicted.texts) == 3 * 2 * 3 * 4
    for kind in ("png", "svg"):
        picture.savefig(file := BytesIO(), format=kind)
        assert file.getvalue()


def test_a_trace_has_every_span() -> None:
    schedule = build_schedule("1f1b", 2, 3)
    timeline = simulate(schedule, Costs(B=3))
    events = json.loads(json.dumps(trace({"one": timeline, "two": timeline}, unit_us=1000)))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * len(timeline.spans)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"one", "two", "rank 0", "rank 1"}
    first = next(event for event in spans if event["pid"] == 1 and event["name"] == "1B0")
    assert (first["tid"], first["ts"], first["dur"]) == (1, 2000, 3000)
    assert first["args"] == {"stage": 1, "microbatch": 0}
