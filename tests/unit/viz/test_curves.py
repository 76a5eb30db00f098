"""Fact: axes have whole iterations, memory begins at 0, and every word of a figure lies in it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from megatron3d.viz.curves import PANELS, draw, draw_load

GIGABYTE = 10**9


def run(num: int, every: int = 1, layers: int = 3) -> list[dict[str, Any]]:
    """Return the logged steps of a run with experts, whose memory hardly grows and whose loads reach `num`."""
    return [
        {
            "iteration": step * every,
            "lm_loss": 5.0 / step,
            "tokens_per_s": 1e3,
            "elapsed_ms": 5.0,
            "peak_memory_bytes": int(0.5 * GIGABYTE) + 100_000 * step,
            "experts": {f"layers.{layer}": {"max_load": float(step)} for layer in range(layers)},
        }
        for step in range(1, num + 1)
    ]


def words(figure: Figure) -> set[Text]:
    """Return the words of a figure that are drawn, of which ticks outside of their axes are not."""
    drawn = set[Text]()

    def draw_text(text: Text, _: object) -> None:
        if text.get_visible() and text.get_text():
            drawn.add(text)

    with mock.patch.object(Text, "draw", draw_text):
        figure.draw_without_rendering()
    return drawn


@pytest.mark.parametrize(("num", "every", "layers"), [(1, 1, 1), (3, 10, 2), (7, 5, 4), (40, 25, 61)])
def test_every_word_lies_in_its_figure(num: int, every: int, layers: int) -> None:
    steps = run(num, every, layers)
    load = draw_load(steps)
    assert load is not None
    for figure in (draw({"run": steps}), load):
        width, height = figure.bbox.size
        for text in words(figure):
            box = text.get_window_extent()
            assert min(box.x0, box.y0) >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, text


@pytest.mark.parametrize(("num", "every"), [(1, 1), (2, 1), (3, 5), (6, 10), (11, 25)])
def test_ticks_are_whole_iterations(num: int, every: int) -> None:
    for axes in draw({"run": run(num, every)}).axes:
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks and all(tick == round(tick) for tick in ticks)


def test_memory_begins_at_zero() -> None:
    figure = draw({"run": run(5)})
    (memory,) = (axes for axes, panel in zip(figure.axes, PANELS, strict=True) if "memory" in panel.title)
    low, high = memory.get_ylim()
    figure.draw_without_rendering()
    shown = [label.get_text() for label in memory.get_yticklabels()]
    assert low == 0 and 0.53 < high < 0.6 and len(set(shown)) == len(shown) > 3
    assert memory.yaxis.get_offset_text().get_text() == ""


@pytest.mark.parametrize("num", [1, 3, 7, 40])
def test_loads_have_plain_ticks(num: int) -> None:
    figure = draw_load(run(num))
    assert figure is not None
    figure.draw_without_rendering()
    _, bar = figure.axes
    shown = [label.get_text() for label in bar.get_yticklabels(which="both") if label.get_text()]
    assert len(shown) >= 3 and [f"{float(each):g}" for each in shown] == shown and float(shown[0]) == 1
