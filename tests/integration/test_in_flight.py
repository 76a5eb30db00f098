"""Fact: a wait that is left out, memory that is reused too early and a receive posted too late are always found.

Each seeded bug (tests/support/in_flight_bugs.py) must be refused by the communicator of the ranks that take turns, or
change the numbers, though every CPU run over gloo might pass.
"""

from __future__ import annotations

import pytest

from megatron3d.pipeline import engine
from tests.support.equality import run_trace, wrong
from tests.support.in_flight_bugs import BUGS, LAYOUTS, NUMBERS, InFlightBug, Layout
from tests.support.turn_ranks import run_turns

NUM_STEPS = 2


def problems(layout: Layout) -> str:
    """Return how two steps of a layout differ from those of one process, "" where they do not."""
    config = layout.config()
    (got, *_) = run_turns(run_trace, layout.num_ranks, config, NUM_STEPS)
    assert got is not None, "rank 0 has the trace"
    return wrong([(layout.model, config)], [got], NUM_STEPS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_without_a_bug_equals_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends that wait until they are received leave no room for a receive that is posted too late."""
    monkeypatch.setattr(engine, "MAX_SENDS_IN_FLIGHT", 0)
    assert problems(LAYOUTS[name]) == ""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_seeded_bug_is_found(bug: InFlightBug, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []
    bug.seed(monkeypatch, met)
    if bug.found_by == NUMBERS:
        assert problems(LAYOUTS[bug.layout]) != ""
    else:
        with pytest.raises(AssertionError, match=bug.found_by):
            problems(LAYOUTS[bug.layout])
    assert met, "the step did not come to the place of the bug"
