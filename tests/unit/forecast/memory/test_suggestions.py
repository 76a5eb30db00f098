"""Fact: every suggestion for a step that does not fit can be set as written and saves what it claims.

Suggestions are listed cheapest first.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.forecast.memory import suggestions
from megatron3d.forecast.memory.rank import rank_memory
from megatron3d.forecast.memory.step_spec import StepSpec, make_step_spec
from megatron3d.forecast.memory.suggestions import fits, makespan, suggest
from megatron3d.parallel.modes import MODES, build_mode

NUM_RANKS, VOCAB_SIZE = 8, 500
SECTIONS = {
    "model": {"num_layers": 12, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 128},
    "train": {"micro_batch_size": 4, "global_batch_size": 64, "precision": "bf16"},
}
CONFIGS: dict[str, list[str]] = {
    "data parallel": [],
    "tensor parallel": ["parallel.tensor_model_parallel_size=4"],
    "a grid": ["parallel.tensor_parallel_mode=grid", "parallel.tensor_model_parallel_size=8"],
    "a pipeline": ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"],
    "a pipeline that was divided": [
        "parallel.pipeline_model_parallel_size=2",
        "parallel.pipeline_schedule=interleaved",
        "parallel.virtual_pipeline_model_parallel_size=3",
        "parallel.pipeline_model_parallel_layout=[1,2,3,2,2,2]",
    ],
    "recomputed partly": [
        "train.recompute_granularity=selective",
        "train.recompute_modules=[mlp_act]",
        "parallel.zero_stage=1",
    ],
    "rows in fp8": ["train.fp8=e4m3", "train.fp8_recipe=rowwise", "train.recompute_granularity=selective"],
    "blocks in fp8": [
        *("model.hidden_size=512", "model.num_attention_heads=4", "parallel.tensor_model_parallel_size=4"),
        *("train.fp8=e4m3", "train.micro_batch_size=2"),
    ],
    "some layers recomputed": ["train.recompute_granularity=full", "train.recompute_method=block"],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("configs") / "config.yaml"
    path.write_text(yaml.safe_dump(SECTIONS))
    return path


def step_of(config: Config) -> StepSpec:
    assert check(config, NUM_RANKS, VOCAB_SIZE) == []
    return make_step_spec(RunSpec(config, NUM_RANKS, VOCAB_SIZE))


@pytest.mark.parametrize("name", CONFIGS)
def test_each_change_is_the_closed_form_of_the_changed_configuration(name: str, path: Path) -> None:
    step = step_of(read_config(path, CONFIGS[name]).config)
    now, changes = rank_memory(step).total, suggest(step, count=10)
    assert len(changes) >= 2
    for change in changes:
        changed = rank_memory(step_of(read_config(path, [*CONFIGS[name], *change.settings.split()]).config)).total
        assert (change.total, change.saves) == (changed, now - changed), change.settings


def test_changes_that_are_refused_with_fp8_are_not_suggested(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a change that saves nothing were worth naming, as recomputing an activation before a linear."""
    monkeypatch.setattr(suggestions, "_WORTH", -1.0)
    changes = suggest(step_of(read_config(path, CONFIGS["rows in fp8"]).config), count=10)
    again = [change.settings for change in changes if "recompute" in change.settings]
    assert len(again) == 1
    step_of(read_config(path, [*CONFIGS["rows in fp8"], *again[0].split()]).config)


@pytest.mark.parametrize("name", CONFIGS)
def test_suggestions_are_ordered_by_price(name: str, path: Path) -> None:
    step = step_of(read_config(path, CONFIGS[name]).config)
    assert len(suggest(step)) <= 3
    prices = [change.price for change in suggest(step, count=10)]
    assert prices == sorted(prices)


def test_every_kind_of_change_is_suggested_somewhere(path: Path) -> None:
    keys = {
        setting.partition("=")[0]
        for overrides in CONFIGS.values()
        for change in suggest(step_of(read_config(path, overrides).config), count=10)
        for setting in change.settings.split()
    }
    assert keys >= {
        "parallel.zero_stage",
        "parallel.tensor_parallel_form",
        "parallel.pipeline_schedule",
        "train.micro_batch_size",
        "train.recompute_granularity",
    }


def test_the_text_of_a_suggestion(path: Path) -> None:
    (first, *_) = suggest(step_of(read_config(path, CONFIGS["tensor parallel"]).config))
    assert str(first).startswith("parallel.tensor_parallel_form=sequence_parallel: ")
    assert str(first).endswith(" MiB on this rank") and " MiB less, " in str(first)


def test_sizes_that_do_not_divide_are_not_suggested(path: Path) -> None:
    """Three sequences of 7 tokens cannot be split over 4 ranks, nor in half."""
    step = step_of(read_config(path, CONFIGS["tensor parallel"]).config)
    odd = replace(step.local, micro_batch_size=3, arch=replace(step.local.arch, seq_length=7))
    settings = " ".join(change.settings for change in suggest(replace(step, local=odd), count=10))
    assert "zero_stage" in settings and "form" not in settings and "micro_batch" not in settings


@pytest.mark.parametrize("mode", MODES)
def test_fits_is_the_rule_of_the_check(mode: str, path: Path) -> None:
    for form, micro_batch_size, hidden_size in (
        (f, b, h) for f in MODES[mode].forms for b in (1, 2, 8) for h in (64, 72)
    ):
        overrides = [
            f"parallel.tensor_parallel_mode={mode}",
            f"parallel.tensor_parallel_form={form}",
            "parallel.tensor_model_parallel_size=8",
            f"train.micro_batch_size={micro_batch_size}",
            f"model.hidden_size={hidden_size}",
            "model.kv_channels=8",
        ]
        config = read_config(path, overrides).config
        local = make_step_spec(RunSpec(config, NUM_RANKS, VOCAB_SIZE)).local
        assert local.mode == build_mode(mode, form, MODES[mode].default_shape(8))
        assert fits(local) == (check(config, NUM_RANKS, VOCAB_SIZE) == [])


def test_a_bubble_counts_as_a_price(path: Path) -> None:
    """GPipe takes as long as 1F1B; interleaving with two stages per rank halves the bubble."""
    times = {}
    for name in ("gpipe", "1f1b", "interleaved"):
        overrides = [f"parallel.pipeline_schedule={name}", "parallel.pipeline_model_parallel_size=4"]
        step = step_of(read_config(path, overrides).config)
        times[name] = makespan(step.pipeline, replace(step.local.arch, vocab_size=0))
    assert times["gpipe"] == pytest.approx(times["1f1b"])
    assert times["interleaved"] < times["1f1b"]
