"""Fact: the tables print the closed forms, a line per stage and per rank, next to measured values."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.rank import rank_memory
from megatron3d.forecast.memory.step_spec import StepSpec, make_step_spec
from megatron3d.forecast.memory.table import (
    BYTES,
    align_columns,
    describe,
    memory_table,
    process_growth,
    stage_num_parameters,
    stage_table,
    unit_for,
)
from megatron3d.model.linear_spec import flops_per_token, num_parameters
from megatron3d.model.stage_plan import make_stages

MODEL = {"num_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "family": "llama"}


def step(num_ranks: int = 8, **parallel: Any) -> StepSpec:
    train = {"micro_batch_size": 2, "global_batch_size": 32}
    config = Config.model_validate({"model": MODEL, "parallel": parallel, "train": train})
    return make_step_spec(RunSpec(config, num_ranks, 500))


PIPELINES: dict[str, dict[str, Any]] = {
    "none": {},
    "1f1b": {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2},
    "zb-v": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"},
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_line_per_stage_that_adds_up(name: str) -> None:
    mine = step(**PIPELINES[name])
    header, *rows = (line.split() for line in stage_table(mine))
    assert [int(row[0]) for row in rows] == [stage.index for stage in mine.pipeline.stages]
    assert [int(row[1]) for row in rows] == list(mine.pipeline.owners)
    assert sum(int(row[2]) for row in rows) == mine.local.arch.num_layers
    assert sum(int(row[3].replace(",", "")) for row in rows) == num_parameters(mine.local.arch)
    operations = sum(float(row[4].replace(",", "")) for row in rows) * 1e6
    assert header[4] == "MFLOP/microbatch"
    assert operations == pytest.approx(flops_per_token(mine.local.arch) * mine.local.num_tokens, rel=1e-2)
    for row in rows:
        in_flight, each, all_of_them = (float(cell.replace(",", "")) for cell in row[5:8])
        assert all_of_them == pytest.approx(in_flight * each, rel=1e-2)
    assert rows[0][8].startswith("embedding") and rows[-1][-1] == "head"


def test_a_tied_matrix_is_counted_where_it_is_held() -> None:
    """The first and the last pipeline rank hold it; if one rank is both, its first stage does."""
    apart, together = step(**PIPELINES["1f1b"]), step(**PIPELINES["zb-v"])
    for mine, copies in ((apart, 2), (together, 1)):
        tied = replace(mine, local=replace(mine.local, arch=replace(mine.local.arch, tie_embeddings=True)))
        ranks = [tied.on_pipeline_rank(coord) for coord in tied.pipeline.owners]
        held = sum(stage_num_parameters(rank, stage) for rank, stage in zip(ranks, tied.pipeline.stages, strict=True))
        assert held - num_parameters(tied.local.arch) == (copies - 1) * 500 * 64


def test_stages_are_described() -> None:
    first, middle, empty, last = make_stages([1, 3, 0, 2])
    assert describe(first) == "embedding, layer 0"
    assert describe(middle) == "layers 1 to 3"
    assert describe(empty) == ""
    assert describe(last) == "layers 4 to 5, head"


@pytest.mark.parametrize("name", PIPELINES)
def test_a_line_per_pipeline_rank_next_to_the_measurement(name: str) -> None:
    mine = step(**PIPELINES[name])
    ranks = mine.pipeline.num_ranks
    before, after = memory_table(mine), memory_table(mine, [2**10 * (coord + 1) for coord in range(ranks)])
    assert len(before) == len(after) == 1 + ranks
    assert before[0].split()[-2:] == ["largest", "moment"] and "measured" in before[0]
    unit = BYTES[before[0].split("total ")[1][:3]]
    for coord, (unknown, known) in enumerate(zip(before[1:], after[1:], strict=True)):
        memory = rank_memory(mine.on_pipeline_rank(coord))
        total = unknown.split()[8]
        assert float(total.replace(",", "")) == pytest.approx(memory.total / unit, abs=0.051)
        assert (unknown.split()[9], known.split()[9]) == ("-", f"{2**10 * (coord + 1) / unit:.1f}")
        assert " ".join(known.split()[10:]) == max(
            memory.transient_peaks, key=lambda moment: memory.transient_peaks[moment]
        )


@pytest.mark.parametrize(
    ("largest", "unit"), [(5, "KiB"), (9.9 * 2**20, "KiB"), (10 * 2**20, "MiB"), (11 * 2**30, "GiB"), (2**60, "GiB")]
)
def test_units_show_two_digits_before_the_point(largest: float, unit: str) -> None:
    assert unit_for(largest, BYTES)[0] == unit


@pytest.mark.parametrize(("grown", "code", "words"), [(3.0, 0.5, 3), (1.0, 0.5, 2)])
def test_what_a_process_has_grown_by_adds_up(grown: float, code: float, words: int) -> None:
    """A process that had memory of its own before the model grows by less than the estimate."""
    mine = step()
    estimated = rank_memory(mine).total
    line = process_growth(mine, round(grown * estimated), round(code * estimated))
    total, *parts = (float(number.replace(",", "")) for number in re.findall(r"(?<= )[\d,]+\.\d", line))
    assert line.startswith("rank 0's process grew by ") and len(parts) == words
    assert sum(parts) == pytest.approx(total, abs=0.2)
    assert (parts[0] == pytest.approx(code / grown * total, abs=0.2)) == (grown < 1 + code)


def test_columns_are_aligned() -> None:
    assert align_columns([("a", "bb", ""), ("ccc", "d", "e f")]) == ["  a  bb", "ccc   d  e f"]
