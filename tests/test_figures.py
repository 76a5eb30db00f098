"""Fact: counts and figures on the pages are those of the code and of the results, and cells of tables are short."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from statistics import mean, median
from typing import Any

import pytest
import tables

from megatron3d.convert.family_table import MODEL_TYPES, family_table
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.schedules import SCHEDULES
from megatron3d.runtime.heartbeat import GroupStatus, Heartbeat, diagnose
from tests.support.tiny_run import ROOT
from tests.unit.forecast.time.held_out import ROWS, beside

PAGES = sorted(("README.md", "benchmarks/README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))))
MAX_CELL = 100
# Generated from descriptions of keys, or a list of places in the code.
LONG_CELLS = ("docs/configuration.md", "docs/architecture.md")


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads(text(f"benchmarks/results/{name}.json"))


@cache
def held_out_errors() -> tuple[float, ...]:
    return tuple(100 * abs(beside(row).error) for row in ROWS)


def layout_errors() -> list[float]:
    return sorted(row["error_percent"] for row in result("plan_vs_real")["rows"])


def expert_ms(experts: int, contestant: str) -> str:
    rows = result("moe")["rows"]
    (row,) = (row for row in rows if row.get("experts") == experts and row["contestant"] == contestant)
    return f"{row['step_ms']:,.0f}"


def seconds_of_nanogpt(contestant: str) -> str:
    (row,) = (row for row in result("zen4/nanogpt")["summary"] if row["contestant"] == contestant)
    return f"{row['seconds']:.0f}"


def num_with_experts() -> int:
    return sum("`num_moe_experts`" in row for row in family_table())


# Page, a pattern with one group, and what the group says.
FIGURES: list[tuple[str, str, Callable[[], object]]] = [
    ("README.md", r"(\d+) modes in", lambda: len(MODES)),
    ("README.md", r"modes in (\d+) forms", lambda: sum(len(mode.forms) for mode in MODES.values())),
    ("README.md", r"(\d+) schedules", lambda: len(SCHEDULES)),
    ("README.md", r"(\d+) model types", lambda: len(MODEL_TYPES)),
    ("README.md", r"model types, (\d+) with experts", num_with_experts),
    ("README.md", r"(\d+) published shapes", lambda: len(list((ROOT / "configs/models").glob("*.yaml")))),
    ("README.md", r"of (\d+)\s+held-out", lambda: len(ROWS)),
    ("README.md", r"mean error of ([\d.]+) %", lambda: f"{mean(held_out_errors()):.1f}"),
    ("docs/README.md", r"of (\d+) model types", lambda: len(MODEL_TYPES)),
    ("docs/planner.md", r"mean error ([\d.]+) % over", lambda: f"{mean(held_out_errors()):.1f}"),
    ("docs/planner.md", r"% over (\d+) held-out rows", lambda: len(ROWS)),
    (
        "docs/planner.md",
        r"orders (\d+) % of the pairs",
        lambda: f"{100 * result('plan_vs_real')['pairs_in_order']:.0f}",
    ),
    ("docs/planner.md", r"between (-\d+) and", lambda: f"{layout_errors()[0]:.0f}"),
    ("docs/planner.md", r"and \+(\d+) % for all", lambda: f"{layout_errors()[-1]:.0f}"),
    ("docs/survival.md", r"In all (\d+) cases", lambda: result("elastic")["survived"]),
    ("docs/survival.md", r"\| worst .* ([\d.]+) \|", lambda: f"{result('elastic')['seconds']['total']['worst']:.2f}"),
    ("docs/validation.md", r"Over all (\d+) rows", lambda: len(ROWS)),
    ("docs/validation.md", r"rows the mean error is ([\d.]+) %", lambda: f"{mean(held_out_errors()):.1f}"),
    ("docs/validation.md", r"rows the mean.*the median ([\d.]+) %", lambda: f"{median(held_out_errors()):.1f}"),
    ("docs/moe.md", r"takes ([\d,]+) ms with EP 2", lambda: expert_ms(16, "ours, EP 2, alltoall")),
    ("docs/moe.md", r"Mixtral ([\d,]+) ms under DDP", lambda: expert_ms(16, "Mixtral, DDP")),
    ("docs/moe.md", r"and ([\d,]+) ms under FSDP2", lambda: expert_ms(16, "Mixtral, FSDP2")),
    ("benchmarks/README.md", r"in fp32, takes (\d+) s", lambda: seconds_of_nanogpt("nanoGPT")),
    ("benchmarks/README.md", r"ours (\d+) s in fp32", lambda: seconds_of_nanogpt("megatron3d fp32")),
    ("benchmarks/README.md", r"and (\d+) s in\s+bf16", lambda: seconds_of_nanogpt("megatron3d bf16")),
]


@pytest.mark.parametrize(("page", "pattern", "value"), FIGURES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_figure_is_that_of_the_code(page: str, pattern: str, value: Callable[[], object]) -> None:
    assert re.findall(pattern, text(page)) == [str(value())]


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md", "docs/gpu.md"])
def test_tables_of_speed_are_those_of_the_results(page: str) -> None:
    assert text(page) == tables.written(text(page)), "python benchmarks/tables.py --write"


def test_every_table_of_speed_is_on_a_page() -> None:
    pages = text("README.md") + text("benchmarks/README.md") + text("docs/gpu.md")
    assert [name for name in tables.TABLES if f"<!-- {name} -->\n| " not in pages] == []


def test_the_page_on_gpus_repeats_the_comments_of_the_presets() -> None:
    """tests/integration/test_gpu_presets.py compares the comments with the models of time and memory."""
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+ of \d+) \| (\d+) \|$", text("docs/gpu.md"), re.M)
    assert [name for name, *_ in rows] == sorted(path.stem for path in (ROOT / "configs/gpus").glob("*.yaml"))
    for name, memory, mfu in rows:
        comment = re.sub(r"\n# ", " ", text(f"configs/gpus/{name}.yaml"))
        assert f"are {memory} GiB and {mfu} % MFU" in comment, name


def test_the_watchdogs_lines_are_those_of_the_diagnosis() -> None:
    """docs/survival.md shows what the watchdog says where rank 5 is in the loader and the others wait."""
    status = GroupStatus(3600, "all_reduce", 3600, "all_reduce")
    waits = GroupStatus(3601, "all_gather", 3601, "all_gather")
    loading, waiting = (
        ("train/loop.py:… train", "data/loader.py:… step"),
        ("train/loop.py:… train", "comm/process_comm.py:… finish"),
    )
    at: Mapping[int, Heartbeat] = {
        rank: Heartbeat(
            sequence=0,
            host="node2",
            pid=4711,
            iteration=1200,
            num_collectives=14402 if rank == 5 else 14403,
            last_collective=f"all_{'reduce over data, the 14402' if rank == 5 else 'gather over data, the 14403'}th",
            stack=loading if rank == 5 else waiting,
            idle_s=600.0,
            groups={"data@1": status if rank == 5 else waits} if rank % 2 else {},
        )
        for rank in range(8)
    }
    later = {rank: Heartbeat(**{**vars(beat), "sequence": 1}) for rank, beat in at.items()}
    page = re.sub(r"\n {6}", " ", text("docs/survival.md"))
    shown = re.findall(r"^    > watchdog: (.*)$", page, re.M)
    assert shown[1:-1] == list(diagnose(at, later))
    for name, function in {place for stack in (loading, waiting) for place in (tuple(f.split(":… ")) for f in stack)}:
        assert f"def {function}(" in text(f"megatron3d/{name}")


def cells(line: str) -> list[str]:
    """Return the cells of a row as they are shown: links by their text."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.strip())
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", shown)[1:-1]]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in LONG_CELLS])
def test_cells_of_tables_are_short(page: str) -> None:
    rows = [line for line in text(page).splitlines() if line.startswith("|") and line not in family_table()]
    assert [cell for row in rows for cell in cells(row) if len(cell) >= MAX_CELL] == []


def test_the_front_page_is_short() -> None:
    assert len(text("README.md").splitlines()) <= 110
