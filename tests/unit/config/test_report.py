"""The report before a run gives the factors of ranks and batch, and the pipeline with its expected bubble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron3d.config.read import DEFAULT, SECTIONS, Resolved, read_config
from megatron3d.config.report import batch_arithmetic, join_runs, render
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.model.linear_spec import flops_per_token
from megatron3d.pipeline.actions import ActionKind
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule, stage_flops
from megatron3d.pipeline.validate import write_schedule

LAYER = 104  # vocabulary size whose head costs as much as a layer


def config_of(vocab_size: int | None, batch: int = 24, **parallel: Any) -> Config:
    """Return a configuration of twelve layers."""
    model = {"num_layers": 12, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "vocab_size": vocab_size}
    return Config.model_validate({"model": model, "train": {"global_batch_size": batch}, "parallel": parallel})


def pipeline_line(config: Config, world_size: int, vocab_size: int | None = None) -> str:
    ranks, batch, pipeline = batch_arithmetic(RunSpec(config, world_size, vocab_size or 0)).splitlines()
    assert ranks.startswith("world_size ") and batch.startswith("global_batch_size ")
    return pipeline


def test_one_rank_has_no_pipeline() -> None:
    assert len(batch_arithmetic(RunSpec(config_of(LAYER))).splitlines()) == 2


def test_an_even_pipeline_has_the_bubble_of_the_books() -> None:
    """The bubble is (p-1) / (m+p-1) of the time with 1F1B and (p-1) / (mv+p-1) with interleaving."""
    without = ", without the head, whose vocabulary is not known yet"
    plain, interleaved = (
        pipeline_line(config_of(None, pipeline_model_parallel_size=4, pipeline_schedule=name), 4)
        for name in ("1f1b", "interleaved")
    )
    assert plain == f"pipeline: 1f1b, 4 stages on 4 ranks, layers 3+3+3+3, expected bubble {300 / 27:.1f} %{without}"
    layers = "1+1+1+1+2+2+2+2"
    assert f"interleaved, 8 stages on 4 ranks, layers {layers}, expected bubble" in interleaved


@pytest.mark.parametrize("given", [True, False])
def test_the_head_is_counted_in_the_bubble(given: bool) -> None:
    """1F1B with stages of 3 units and a last one of 4: the step takes 3 x 3 of warm-up and cool-down, and 24 x 4."""
    config = config_of(LAYER if given else None, pipeline_model_parallel_size=4)
    bubble = 1 - 24 * 13 / 4 / (9 + 24 * 4)
    line = pipeline_line(config, 4, None if given else LAYER)
    assert line == f"pipeline: 1f1b, 4 stages on 4 ranks, layers 3+3+3+3, expected bubble {100 * bubble:.1f} %"


def test_a_division_that_is_given_is_shown() -> None:
    config = config_of(LAYER, pipeline_model_parallel_size=4, pipeline_model_parallel_layout=[4, 4, 4, 0])
    assert "layers 4+4+4+0, expected bubble" in pipeline_line(config, 4)
    assert join_runs([3, 3, 3, 3, 3, 2, 2]) == "5x3+2+2"


def test_a_missing_schedule_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    parallel = {"pipeline_schedule": "file", "pipeline_schedule_file": str(file), "pipeline_model_parallel_size": 4}
    config = config_of(LAYER, **parallel)
    assert pipeline_line(config, 4) == f"pipeline: file {file}, 4 ranks; stages and bubble are not known here"
    write_schedule(build_schedule("1f1b", 4, 24), file)
    assert pipeline_line(config, 4).startswith(f"pipeline: file {file}, 4 stages on 4 ranks, layers 3+3+3+3")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_flops_of_the_stages_are_those_of_the_model(name: str) -> None:
    config = config_of(LAYER, pipeline_model_parallel_size=2, pipeline_schedule=name)
    spec = RunSpec(config, 2)
    arch, pipeline = spec.arch, spec.pipeline
    flops = [stage_flops(arch, stage) for stage in pipeline.stages]
    assert sum(part[ActionKind.F] + part[ActionKind.B] for part in flops) == flops_per_token(arch)
    assert all(part[ActionKind.B] == part[ActionKind.I] + part[ActionKind.W] for part in flops)


def test_the_resolved_file_shows_derived_values() -> None:
    origins = {f"{section}.{name}": DEFAULT for section, names in SECTIONS.items() for name in names}
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved"}

    def lines(vocab_size: int | None, later: int | None = None) -> list[str]:
        text = render(Resolved(config_of(vocab_size, **parallel), origins), later)
        return [" ".join(line.split()) for line in text.splitlines()]

    for shown in (lines(LAYER), lines(None, LAYER)):
        assert "virtual_pipeline_model_parallel_size: null # derived: 2" in shown
        assert "softmax_scale: null # derived: null" in shown and "kv_channels: null # derived: 4" in shown
        assert "pipeline_model_parallel_layout: null # derived: [3,3,3,3]" in shown
    assert "pipeline_model_parallel_layout: null # default" in lines(None)


def test_a_schedule_that_was_not_typed_is_derived(tmp_path: Path) -> None:
    """1F1B with several stages per rank is interleaved: of the two only the number of stages was typed."""
    path = tmp_path / "run.yaml"
    for written, typed in (("", "1f1b"), ("parallel: {pipeline_schedule: 1f1b}", "1f1b"), ("", "interleaved")):
        path.write_text(written or "model: {num_layers: 4}")
        given = ["parallel.virtual_pipeline_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"]
        given += ["parallel.pipeline_schedule=interleaved"] * (typed == "interleaved")
        shown = " ".join(render(read_config(path, given)).split())
        origin = "command line" if typed == "interleaved" else "derived: 1f1b with 2 stages per rank"
        assert f"pipeline_schedule: interleaved # {origin} virtual" in shown
        assert "virtual_pipeline_model_parallel_size: 2 # command line" in shown
