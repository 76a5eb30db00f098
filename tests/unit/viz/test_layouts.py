"""Fact: the documentation's pictures are drawn from the code's layouts, plans and schedules, with true numbers."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from fractions import Fraction
from math import prod
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron3d.parallel.layout import box
from megatron3d.parallel.matmul_plan import flows, traffic
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.viz.layouts import INPUT, OUTPUT, holders, layout_picture, operands
from megatron3d.viz.positions import (
    PANELS,
    POSITIONS,
    RANKS,
    AttentionPanel,
    held_positions,
    multiplied_pairs,
    positions_picture,
)
from megatron3d.viz.zero_memory import CASES, captions
from tests.support.tiny_run import ROOT
from tools import draw_layouts

PICTURES, PAGE = ROOT / "docs" / "pictures", ROOT / "docs" / "tensor_parallel.md"
FORMS = [(name, form) for name, entry in MODES.items() for form in entry.forms]
SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_pictures_are_current(tmp_path: Path) -> None:
    """To redraw after a change: python tools/draw_layouts.py --output docs/pictures --overwrite."""
    assert draw_layouts.main(["--output", str(tmp_path)]) == 0
    drawn, committed = ({path.name: path.read_text() for path in folder.iterdir()} for folder in (tmp_path, PICTURES))
    assert drawn == committed


def test_every_picture_is_shown() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    shown = set(re.findall(r"!\[[^\]]*\]\(pictures/(\S+)\)", pages))
    assert shown == {path.name for path in PICTURES.iterdir()}


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("rank", [0, 7])
def test_blocks_are_those_of_the_layout(name: str, form: str, rank: int) -> None:
    """Every block is drawn once with its ranks, and the rank's own three per matmul have its colour."""
    mode = build_mode(name, form, MODES[name].default_shape(8))
    root = ElementTree.fromstring(layout_picture(mode, form, rank))
    mesh = Mesh(mode.axes, rank)
    blocks = [
        ranks
        for plan in (mode.expand, mode.contract)
        for operand in operands(plan, mesh)
        for ranks in holders((64, 64), operand.stored, mesh).values()
    ]
    rects = [rect for rect in root.iter(f"{SVG}rect") if rect.get("stroke-width") == "1.5" and rect.get("rx") == "2"]
    legend = 4
    assert len(rects) == len(blocks) + legend
    own = [rect for rect in rects if rect.get("fill") in (INPUT, OUTPUT)]
    assert len(own) == 6 + 2
    words = [text.text or "" for text in root.iter(f"{SVG}text") if text.get("font-size") == "11"]
    assert sorted(map(numbers, words)) == sorted(blocks)


def numbers(words: str) -> list[int]:
    """Parse `0-3 8` as numbers."""
    found: list[int] = []
    for part in words.split():
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_captions_are_those_of_the_plans(name: str, form: str) -> None:
    mode = build_mode(name, form, (2, 3, 4)[-len(MODES[name].axis_names) :])
    mesh = Mesh(mode.axes)
    for plan in (mode.expand, mode.contract):
        x, w, y = operands(plan, mesh)
        sent = sum(part.sent * prod(sizes) for part, sizes in ((x, (12, 48)), (w, (48, 24)), (y, (12, 24))))
        assert float(sent) == pytest.approx(sum(each.wire_bytes for each in traffic(plan, mesh, 12, 24, 48, 1)))
        assert (x.stored, y.stored) == (plan.on(mesh).x_layout, plan.on(mesh).y_layout)
        (low, high), (left, right) = box((48, 24), w.stored, mesh)
        (first, last), (top, bottom) = box((24, 48), plan.w_layout, mesh)
        assert ((low, high), (left, right)) == ((top, bottom), (first, last))


def test_the_closed_forms_of_the_page_are_the_plans() -> None:
    """The table's cells are evaluated for random sizes of the axes."""
    part = PAGE.read_text().partition("## Closed forms")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `([\w.]+)` ([\w, ]+) \| (.+) \|$", part, re.M)
    told_forms = [(name, form.strip()) for name, forms, _ in lines for form in forms.split(",")]
    assert sorted(told_forms) == sorted(FORMS)
    for name, forms, cells in lines:
        for form in map(str.strip, forms.split(",")):
            sizes = dict(
                zip(MODES[name].axis_names, random.Random(name + form).choices((2, 3, 4, 5), k=3), strict=False)
            )
            mode = build_mode(name, form, tuple(sizes.values()))
            written = [evaluated(cell, sizes) for cell in cells.split("|")]
            parts = [part for plan in (mode.expand, mode.contract) for part in operands(plan, Mesh(mode.axes))]
            assert written == pytest.approx([float(part.sent) for part in parts])
            assert all(
                Mesh(mode.axes).size((*plan.m, *plan.k, *plan.n)) == prod(sizes.values())
                for plan in (mode.expand, mode.contract)
            ), "each rank multiplies an equal part"


def evaluated(cell: str, sizes: Mapping[str, int]) -> float:
    """Evaluate `3 (c-1) / (r·c)`: numbers, letters and signs only."""
    text = cell.strip()
    assert re.fullmatch(r"[0-9a-z()+\-/· ]+", text), text
    python = re.sub(r"(?<=[\w)]) (?=\()", "*", text).replace("·", "*")
    return float(eval(python, {"__builtins__": {}}, dict(sizes)))


def test_captions_of_zero_equal_the_closed_forms_of_the_page() -> None:
    """Compare the closed forms of docs/data_parallel.md for 4 ranks and 2 microbatches."""
    d, m = 4, 2
    once = Fraction(d - 1, d)
    assert [list(captions(case.job())) for case in CASES[:4]] == [
        [f"all-reduce sends {2 * once} of the gradients"],
        [f"reduce-scatter sends {once} of the gradients", f"all-gather sends {once} of the weights"],
        [f"reduce-scatter sends {m * once} of the gradients", f"all-gather sends {once} of the weights"],
        [
            f"reduce-scatter sends {m * once} of the gradients",
            f"all-gather sends {2 * m * once} of the weights",
            "while computing, also the weights of two FSDP units",
        ],
    ]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_the_picture_of_positions_is_the_dense_mask(panel: AttentionPanel) -> None:
    """Each query sees the keys of its document and window, once; the rank that holds it multiplies them."""
    owner = {position: rank for rank in range(RANKS) for position in held_positions(rank)}
    documents = [sum(start <= position for start in panel.starts) for position in range(POSITIONS)]
    expected = {
        (query, key): (owner[query], owner[key])
        for query in range(POSITIONS)
        for key in range(query + 1)
        if documents[query] == documents[key] and query - key < (panel.window or POSITIONS)
    }
    assert multiplied_pairs(panel) == expected
    words = [text.text for text in ElementTree.fromstring(positions_picture()).iter(f"{SVG}text")]
    work = [sum(rank == each for rank, _ in expected.values()) for each in range(RANKS)]
    assert f"pairs of each rank: {', '.join(map(str, work))}" in words


def test_one_picture_of_any_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "mine.svg"
    asked = ["--mode", "3d", "--form", "tokens", "--shape", "2", "3", "4", "--output", str(output)]
    assert draw_layouts.main([*asked, "--rank", "7"]) == 0
    words = "".join(ElementTree.parse(output).getroot().itertext())
    assert "24 ranks: x 2 · y 3 · z 4" in words and "rank 7 (x 0, y 1, z 3)" in words
    output.unlink()
    capsys.readouterr()
    for typed, said in (
        (["--rank", "24"], "--rank 24: the shape has ranks 0 to 23"),
        (["--shape", "8"], "--shape 8: 3d has the axes x, y, z; give 3 numbers"),
        (["--shape", "5", "5", "5"], "--shape: 125 ranks are too many to draw"),
        (["--form", "summa"], "--form summa: 3d has heads, tokens"),
    ):
        assert draw_layouts.main([*asked, *typed]) == 2
        assert said in capsys.readouterr().err and not output.exists()


def test_flows_are_linear_in_the_matrices() -> None:
    """Fractions computed for 1 x 1 matrices therefore hold for all sizes."""
    mode, mesh = build_mode("3d", "heads", (2, 3, 4)), Mesh((("x", 2), ("y", 3), ("z", 4)))
    one, many = flows(mode.expand, mesh, 1, 1, 1, 1), flows(mode.expand, mesh, 24, 48, 96, 2)
    assert many.gather_x[0].wire_bytes == pytest.approx(one.gather_x[0].wire_bytes * 24 * 96 * 2)
