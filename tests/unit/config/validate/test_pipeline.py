"""Fact: each broken pipeline rule gives one message with its numbers, and each suggested value works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.facts import Facts
from megatron3d.config.validate.layout import file_problems
from megatron3d.config.validate.rules import check
from megatron3d.pipeline.actions import Schedule
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule, schedule_problems
from megatron3d.pipeline.validate import write_schedule

P, V = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
SCHEDULE, LAYOUT, FILE = "pipeline_schedule", "pipeline_model_parallel_layout", "pipeline_schedule_file"
MAKE_ONE = "a CSV with a row of actions per rank, as tools/plot_schedule.py writes"


def config_of(parallel: dict[str, Any], **sections: Any) -> Config:
    """Return a configuration of six layers with a global batch of 8 microbatches of one sequence."""
    model = {"num_layers": 6, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}
    given = {"model": model, "train": {"global_batch_size": 8}, "parallel": parallel, **sections}
    return Config.model_validate(given)


BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {P: 8},
        "parallel.pipeline_model_parallel_size=8: 8 stages are more than model.num_layers=6; use 4, or "
        "model.num_layers 8 or more",
    ),
    (
        {P: 4, SCHEDULE: "interleaved"},
        "parallel.pipeline_model_parallel_size=4: 4 ranks x 2 stages = 8 are more than model.num_layers=6; use 2, or "
        "pipeline_schedule gpipe, 1f1b, zb-h1, zb-h2 or zb-2p, or model.num_layers 8 or more",
    ),
    (
        {P: 2, SCHEDULE: "interleaved", V: 4},
        "parallel.pipeline_model_parallel_size=2: 2 ranks x 4 stages = 8 are more than model.num_layers=6; use 1, or "
        "virtual_pipeline_model_parallel_size 3, or model.num_layers 8 or more",
    ),
    (
        {P: 2, SCHEDULE: "interleaved", V: 8},
        "parallel.pipeline_model_parallel_size=2: 2 ranks x 8 stages = 16 are more than model.num_layers=6; use "
        "virtual_pipeline_model_parallel_size 3, or model.num_layers 16 or more",
    ),
    (
        {P: 2, SCHEDULE: "gpipe", V: 2},
        "parallel.virtual_pipeline_model_parallel_size=2: parallel.pipeline_schedule=gpipe takes 1 on each rank; use "
        "1, or pipeline_schedule interleaved or zb-v",
    ),
    (
        {P: 2, SCHEDULE: "zb-v", V: 3},
        "parallel.virtual_pipeline_model_parallel_size=3: parallel.pipeline_schedule=zb-v takes 2 on each rank; use "
        "2, or pipeline_schedule interleaved",
    ),
    (
        {P: 2, SCHEDULE: "interleaved", V: 1},
        "parallel.virtual_pipeline_model_parallel_size=1: parallel.pipeline_schedule=interleaved takes 2 or more on "
        "each rank; use 2, or pipeline_schedule gpipe, 1f1b, zb-h1, zb-h2 or zb-2p",
    ),
    (
        {P: 4, LAYOUT: [3, 3]},
        "parallel.pipeline_model_parallel_layout=[3,3]: 2 numbers for 4 stages that hold model.num_layers=6; use for "
        "example [1,1,2,2], or leave it out",
    ),
    (
        {P: 8, LAYOUT: [6]},
        "parallel.pipeline_model_parallel_layout=[6]: 1 number for 8 stages that hold model.num_layers=6; use for "
        "example [0,1,1,1,1,1,1,0]",
    ),
    (
        {P: 4, LAYOUT: [3, 0, 0, 3]},
        "parallel.pipeline_model_parallel_layout=[3,0,0,3]: ranks 1, 2 of the pipeline would hold no parameter; use "
        "for example [1,1,2,2]",
    ),
    (
        {P: 3, SCHEDULE: "interleaved", LAYOUT: [2, 0, 2, 0, 0, 2]},
        "parallel.pipeline_model_parallel_layout=[2,0,2,0,0,2]: rank 1 of the pipeline would hold no parameter; use "
        "for example [1,1,1,1,1,1]",
    ),
    (
        {P: 9, LAYOUT: [0, 1, 1, 1, 1, 1, 1, 0, 0]},
        "parallel.pipeline_model_parallel_size=9: 7 ranks have neither the first nor the last stage, more than "
        "model.num_layers=6; use at most 8, or model.num_layers 7 or more",
    ),
    (
        {P: 2, LAYOUT: [3, 4]},
        "parallel.pipeline_model_parallel_layout=[3,4]: 3+4 = 7 is not model.num_layers=6; use for example [3,3]",
    ),
    (
        {LAYOUT: [5]},
        "parallel.pipeline_model_parallel_layout=[5]: 5 is not model.num_layers=6; use for example [6]",
    ),
    (
        {P: 2, SCHEDULE: "file"},
        f"parallel.pipeline_schedule=file: no parallel.pipeline_schedule_file; name {MAKE_ONE}",
    ),
    (
        {P: 2, FILE: "x.csv"},
        "parallel.pipeline_schedule_file=x.csv: not used with parallel.pipeline_schedule=1f1b; use file, or leave it "
        "out",
    ),
    (
        {P: 2, SCHEDULE: "file", FILE: "x.csv", V: 2},
        "parallel.virtual_pipeline_model_parallel_size=2: not used with parallel.pipeline_schedule=file, whose file "
        "determines it; leave it out",
    ),
]


@pytest.mark.parametrize(("parallel", "message"), BROKEN, ids=[message[:60] for _, message in BROKEN])
def test_a_broken_rule_is_one_message_with_numbers(parallel: dict[str, Any], message: str) -> None:
    assert check(config_of(parallel), parallel.get(P, 1)) == [message]


def test_one_rank_with_two_stages_needs_two_layers() -> None:
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}
    assert check(config_of({SCHEDULE: "zb-v"}, model=model), 1) == [
        "parallel.pipeline_model_parallel_size=1: 1 rank x 2 stages = 2 are more than model.num_layers=1; use "
        "pipeline_schedule gpipe, 1f1b, zb-h1, zb-h2 or zb-2p, or model.num_layers 2 or more"
    ]


def test_ranks_are_tensor_x_pipeline_x_data() -> None:
    parallel = {P: 3, "tensor_model_parallel_size": 2}
    assert check(config_of(parallel), 6) == []
    assert check(config_of(parallel), 8) == [
        "world_size 8: not a multiple of TP 2 (1d: t 2) x PP 3 = 6; use 6 or 12 processes (--world-size), or another "
        "parallel.tensor_model_parallel_size or parallel.pipeline_model_parallel_size"
    ]
    assert check(config_of({P: 4}), 2) == [
        "world_size 2: fewer than TP 1 x PP 4 = 4; use 4 processes (--world-size), or another "
        "parallel.pipeline_model_parallel_size"
    ]


def test_traces_need_a_folder() -> None:
    config = config_of({}, train={"global_batch_size": 8, "train_iters": 10}, logging={"trace_iterations": [3, 12]})
    assert check(config, 1) == [
        "logging.trace_iterations=[3,12]: no folder to write traces to; set checkpoint.save, or leave it out",
    ]
    assert check(config_of({}, logging={"trace_iterations": [3]}, checkpoint={"save": "x"}), 1) == []


@settings(deadline=None)
@given(
    name=st.sampled_from(list(SCHEDULES)),
    ranks=st.integers(1, 9),
    virtual=st.none() | st.integers(1, 4),
    layers=st.integers(1, 20),
    data=st.integers(1, 2),
)
def test_valid_configurations_can_be_built_and_suggestions_are_valid(
    name: str, ranks: int, virtual: int | None, layers: int, data: int
) -> None:
    model = {"num_layers": layers, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}
    given_ = {P: ranks, V: virtual, SCHEDULE: name}
    config = config_of(given_, model=model)
    problems = check(config, ranks * data)
    if not problems:
        pipeline = RunSpec(config, ranks * data, 61).pipeline
        assert sum(len(stage.layers) for stage in pipeline.stages) == layers
        return
    (problem,) = problems
    key, remedies = problem.partition("=")[0], problem.rpartition("; use ")[2]
    for remedy in remedies.split(", or "):
        words = re.findall(r"[\w.-]+", remedy.removesuffix(" or more"))
        named = words.pop(0) if "_" in words[0] else key
        for value in (word for word in words if word != "or"):
            again = change(config, named, value)
            size = again.parallel.pipeline_model_parallel_size
            left = check(again, ranks * data if ranks * data % size == 0 else size)
            assert not any(line.startswith(f"{key}=") for line in left), f"{problem}: {value}"


def change(config: Config, key: str, value: str) -> Config:
    """Return the configuration with another value for a key; its section defaults to `parallel`."""
    section, _, name = key.rpartition(".")
    values = config.model_dump()
    values[section or "parallel"][name] = int(value) if value.isdigit() else value
    return Config.model_validate(values)


def text(schedule: Schedule) -> str:
    return "\n".join(",".join(map(str, actions)) for actions in schedule)


GOOD = text(build_schedule("1f1b", 2, 4))
FILES: list[tuple[Callable[[Path], object], int, dict[str, Any], tuple[str, ...]]] = [
    (lambda path: None, 4, {}, ("{path} does not exist; use " + MAKE_ONE,)),
    (lambda path: path.mkdir(), 4, {}, ("{path} is not a file; use " + MAKE_ONE,)),
    (lambda path: path.write_bytes(b"\xff\xfe"), 4, {}, ("cannot be read: ",)),
    (lambda path: path.touch(), 4, {}, ("there are no actions; give a row of actions per rank, such as 0F0,0B0",)),
    (
        lambda path: path.write_text("0F0,0X0,zero\n1F0,1SEND_F0,1B0"),
        4,
        {},
        ("rank 0, cell 2: '0X0' is no action", "rank 0, cell 3: 'zero' is no action", "rank 1, cell 2: 1SEND_F0"),
    ),
    (lambda path: path.write_text(GOOD.replace(",0B3", "")), 4, {}, ("rank 0: 0I3 or 0B3 is missing", "0W3 or 0B3")),
    (
        lambda path: path.write_text(GOOD + ",1B3"),
        4,
        {},
        ("rank 1: 1B3 repeats an earlier action", "rank 1: 1B3 repeats an earlier action"),
    ),
    (
        lambda path: path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"),
        2,
        {},
        ("rank 0: 0B0, action 2 of 4, waits for 1B0", "rank 1: 1F1, action 1 of 4, waits for 0F1"),
    ),
    (
        lambda path: path.write_text(GOOD),
        8,
        {},
        (
            "is for 4 microbatches, and train.global_batch_size=8 / (micro_batch_size 1 x data parallel 1) is 8; "
            "use global_batch_size 4, or a file for 8",
        ),
    ),
    (
        lambda path: path.write_text(text(build_schedule("1f1b", 3, 4))),
        4,
        {},
        ("is for 3 ranks, not parallel.pipeline_model_parallel_size=2; use 3, or a file for 2",),
    ),
    (
        lambda path: path.write_text(text(build_schedule("interleaved", 2, 4, 4))),
        4,
        {},
        ("has 8 stages, more than model.num_layers=6; use num_layers 8 or more, or a file of at most 6 stages",),
    ),
]


@pytest.mark.parametrize(("write", "batch", "parallel", "words"), FILES, ids=[words[0][-60:] for *_, words in FILES])
def test_the_schedules_file_is_checked(
    tmp_path: Path,
    write: Callable[[Path], object],
    batch: int,
    parallel: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    path = tmp_path / "mine.csv"
    write(path)
    config = config_of({P: 2, SCHEDULE: "file", FILE: str(path), **parallel}, train={"global_batch_size": batch})
    assert check(config, 2) == []
    problems = list(file_problems(Facts(config, 2)))
    assert len(problems) == len(words), problems
    for problem, part in zip(problems, words, strict=True):
        assert problem.startswith(f"parallel.pipeline_schedule_file={path}: ") and part.format(path=path) in problem


def test_a_schedule_file_determines_the_number_of_stages(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    write_schedule(build_schedule("interleaved", 2, 4, 2), path)

    def problems(**parallel: Any) -> list[str]:
        config = config_of({P: 2, SCHEDULE: "file", FILE: str(path), **parallel})
        return list(file_problems(Facts(config, 4)))

    assert problems() == problems(**{LAYOUT: [0, 3, 3, 0]}) == []
    assert problems(**{LAYOUT: [3, 3]}) == [
        "parallel.pipeline_model_parallel_layout=[3,3]: 2 numbers for 4 stages that hold model.num_layers=6; use for "
        "example [1,1,2,2], or leave it out"
    ]


def test_several_stages_per_rank_of_1f1b_are_interleaved() -> None:
    """Megatron-LM has one schedule for both, and ports of its scripts name none."""
    for named in ({}, {SCHEDULE: "1f1b"}):
        config = config_of({P: 2, V: 2, **named})
        assert config.parallel.pipeline_schedule == "interleaved"
    assert config_of({P: 2, V: 1}).parallel.pipeline_schedule == "1f1b"


def test_schedules_of_large_runs_are_not_refused() -> None:
    assert schedule_problems("interleaved", 16, 1024, 6) == []
