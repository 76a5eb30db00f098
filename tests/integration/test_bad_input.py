"""Fact: wrong user input ends in exit code 2 and one message per problem that names the key, its value and a remedy.

There is no traceback, and no byte is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pretrain_gpt
from megatron3d.errors import UserError
from megatron3d.parallel.modes import MODES
from tests.support.tiny_run import Words, assert_refused, refuse, run, tree, write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


CONFIGURATION: dict[str, tuple[list[str], list[Words]]] = {
    "misspelt key": (["model.hidden_sise=64"], [("model.hidden_sise=64 (command line)", "unknown key", "hidden_size")]),
    "misspelt section": (["modle.num_layers=3"], [("modle.num_layers=3", "unknown section", "model.num_layers")]),
    "unknown key": (["train.frobnicate=1"], [("train.frobnicate=1", "unknown key", "micro_batch_size")]),
    "no section": (["train_iters=5"], [("train_iters=5", "section", "train.train_iters")]),
    "no value": (["train.train_iters"], [("train.train_iters", "section.key=value")]),
    "wrong type": (["train.train_iters=many"], [("train.train_iters=many", "text is not allowed", "whole number")]),
    "a fraction": (["train.train_iters=2.5"], [("train.train_iters=2.5", "a number is not allowed", "whole number")]),
    "a list": (["optimizer.lr=[1,2]"], [("optimizer.lr=[1,2]", "a list is not allowed", "a number above 0")]),
    "out of range": (["train.micro_batch_size=0"], [("train.micro_batch_size=0", "at least 1")]),
    "not a number": (["optimizer.lr=.nan"], [("optimizer.lr=nan", "a number above 0")]),
    "not a choice": (["parallel.tensor_parallel_mode=4d"], [("tensor_parallel_mode=4d", "1d", "2.5d", "grid")]),
    "several at once": (
        ["train.train_iters=many", "model.seq_lenth=64", "train.global_batch_size=10"],
        [("model.seq_lenth=64",), ("train.train_iters=many",), ("train.global_batch_size=10",)],
    ),
    "too few ranks": (
        ["parallel.tensor_model_parallel_size=2"],
        [("world_size 1: fewer than TP 2", "use 2 processes (scripts/launch_local.sh N", "parallel.tensor_model_")],
    ),
    "ranks that do not factor": (
        ["--check", "--world-size", "6", "parallel.tensor_model_parallel_size=4"],
        [("world_size 6: not a multiple of TP 4", "use 4 or 8 processes (--world-size)")],
    ),
    "batch arithmetic": (
        ["train.global_batch_size=10"],
        [("train.global_batch_size=10", "micro_batch_size 4", "10 / 4 = 2.5", "use 8 or 12")],
    ),
    "misspelt schedule": (
        ["parallel.pipeline_schedule=interleave"],
        [("parallel.pipeline_schedule=interleave (command line)", "not allowed", "use interleaved, gpipe", "or file")],
    ),
    "virtual stages that a schedule does not take": (
        ["parallel.pipeline_schedule=gpipe", "parallel.virtual_pipeline_model_parallel_size=2"],
        [("virtual_pipeline_model_parallel_size=2 (command line)", "gpipe takes 1", "interleaved or zb-v")],
    ),
    "more stages than layers": (
        ["--check", "--world-size", "4", "parallel.pipeline_model_parallel_size=4"],
        [("pipeline_model_parallel_size=4 (command line)", "4 stages are more than model.num_layers=2", "use 2")],
    ),
    "a layout for another number of stages": (
        ["parallel.pipeline_model_parallel_layout=[1,1]"],
        [("pipeline_model_parallel_layout=[1,1]", "2 numbers for 1 stage", "use for example [2]")],
    ),
    "a layout of other layers": (
        ["parallel.pipeline_schedule=zb-v", "parallel.pipeline_model_parallel_layout=[2,1]"],
        [("pipeline_model_parallel_layout=[2,1]", "2+1 = 3 is not model.num_layers=2", "use for example [1,1]")],
    ),
    "fewer layers than none": (
        ["parallel.pipeline_model_parallel_layout=[3,-1]"],
        [("pipeline_model_parallel_layout=[3,-1]", "a list of whole numbers of at least 0")],
    ),
    "a schedule's file without a name": (
        ["parallel.pipeline_schedule=file"],
        [("pipeline_schedule=file", "pipeline_schedule_file", "tools/plot_schedule.py")],
    ),
    "a schedule's file and a schedule": (
        ["parallel.pipeline_schedule_file=mine.csv"],
        [("pipeline_schedule_file=mine.csv", "not used with", "pipeline_schedule=1f1b", "leave it out")],
    ),
    "pipeline ranks that do not factor": (
        ["--check", "--world-size", "5", "parallel.pipeline_model_parallel_size=2"],
        [("world_size 5: not a multiple of TP 1 x PP 2 = 2", "use 4 or 6", "pipeline_model_parallel_size")],
    ),
    "a trace without a place": (
        ["logging.trace_iterations=[2]", "checkpoint.save=null", "checkpoint.load=null"],
        [("logging.trace_iterations=[2]", "set checkpoint.save")],
    ),
    "a whole pipeline wrong": (
        [
            "parallel.pipeline_schedule=zb-h2",
            "parallel.virtual_pipeline_model_parallel_size=3",
            "parallel.pipeline_schedule_file=mine.csv",
            "parallel.pipeline_model_parallel_size=2",
        ],
        [
            ("pipeline_schedule_file=mine.csv",),
            ("virtual_pipeline_model_parallel_size=3", "zb-h2 takes 1"),
            ("world_size 1: fewer than TP 1 x PP 2",),
        ],
    ),
    "heads": (["model.num_attention_heads=5"], [("model.num_attention_heads=5", "hidden_size=32", "use 1, 2, 4, 8")]),
    "nothing to train on": (["data.split=0,1,0"], [("data.split=0,1,0", "969,30,1")]),
}


@pytest.mark.parametrize("name", CONFIGURATION)
def test_bad_configurations_are_refused(config: Path, name: str) -> None:
    overrides, problems = CONFIGURATION[name]
    refuse(config, overrides, *problems)


FILES: dict[str, tuple[bytes | None, Words]] = {
    "absent": (None, ("tiny.yaml", "No such file")),
    "empty": (b"", ("tiny.yaml", "mapping")),
    "a list": (b"- model\n- train\n", ("tiny.yaml", "mapping")),
    "text": (b"just words", ("tiny.yaml", "mapping")),
    "not YAML": (b"model: {num_layers: [}\n", ("tiny.yaml:1", "not YAML", "correct this line")),
    "not text": (b"\xff\xfe\x00\x80", ("tiny.yaml",)),
    "section without keys": (b"model: 5\n", ("model=5", "tiny.yaml:1", "section")),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_configuration_files_are_refused(config: Path, name: str) -> None:
    content, words = FILES[name]
    data = [f"data.data_path={config.parent}/corpus", "data.tokenizer_type=ByteTokenizer"]
    config.unlink()
    if content is not None:
        config.write_bytes(content)
    refuse(config, data, words)


def impossible_layouts() -> Iterator[tuple[list[str], Words]]:
    """Return, for every mode and form, an axis of 3 that divides nothing, a surplus axis, and a form of no mode."""
    for mode, entry in MODES.items():
        named = [f"parallel.tensor_parallel_mode={mode}"]
        axes = len(entry.axis_names)
        for form in entry.forms:
            for axis in range(axes):
                shape = [3 if other == axis else 1 for other in range(axes)]
                typed = [*named, f"parallel.tensor_parallel_form={form}", f"parallel.tensor_parallel_shape={shape}"]
                yield typed, (entry.axis_names[axis], " 3", "; use ")
        shape = [1] * (axes + 1)
        yield [*named, f"parallel.tensor_parallel_shape={shape}"], ("tensor_parallel_shape", f"has {axes} axes")
        yield [*named, "parallel.tensor_parallel_form=round"], ("tensor_parallel_form=round", *entry.forms)


@pytest.mark.parametrize(("overrides", "words"), list(impossible_layouts()))
def test_every_mode_refuses_sizes_that_it_cannot_split(config: Path, overrides: list[str], words: Words) -> None:
    before = tree(config.parent)
    outcome = run(config, "--check", "--world-size", "3", "train.global_batch_size=12", *overrides)
    assert tree(config.parent) == before
    lines = outcome.err.splitlines()
    assert len(set(lines)) == len(lines) > 0
    assert_refused(outcome, config.parent, *[words] * len(lines))


@pytest.mark.parametrize("launcher", ["the launcher's first argument", "torchrun --nnodes and --nproc-per-node"])
def test_a_wrong_number_of_ranks_is_said_by_what_was_typed(
    config: Path, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["--config", str(config), "parallel.tensor_model_parallel_size=2"]
    if "torchrun" in launcher:
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        for name, value in ranks.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *typed])
    with pytest.raises(UserError, match=re.escape(f"use 2 or 4 processes ({launcher}), or another")):
        pretrain_gpt.main() if "torchrun" in launcher else pretrain_gpt.preload(typed, 3)
