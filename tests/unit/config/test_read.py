"""Fact: a file and overrides give a frozen configuration whose every value has an origin, or every problem at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.config.read import SECTIONS, Resolved, nearest_key, read_config, read_values
from megatron3d.config.report import render, write_resolved
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.yaml_origins import parse_value
from megatron3d.errors import UserError, is_one_line
from megatron3d.linear.overlap_plan import OVERLAP_ALL, TPOverlap


def problems_of(path: Path, text: str | bytes, *overrides: str) -> tuple[str, ...]:
    """Return the messages with which this text is refused."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UserError) as caught:
        read_config(path, overrides)
    return caught.value.problems


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Path to which a test writes its configuration."""
    return tmp_path / "run.yaml"


def test_every_value_has_its_origin(file: Path) -> None:
    file.write_text("model:\n  num_layers: 3\n  hidden_size: 8\n\ntrain: {seed: 7}\nlogging:\n")
    resolved = read_config(file, ["train.seed=5", "model.num_attention_heads=4", "train.seed=9"])
    assert resolved.config.model.num_layers == 3
    assert resolved.config.train.seed == 9
    assert resolved.origins["model.hidden_size"] == f"{file}:3"
    assert resolved.origins["train.seed"] == "command line"
    assert resolved.origins["optimizer.lr"] == "default"
    assert set(resolved.origins) == {f"{section}.{name}" for section, names in SECTIONS.items() for name in names}


def test_numbers_and_lists_are_parsed(file: Path) -> None:
    file.write_text(
        "optimizer: {lr: 1e-3, min_lr: 0, weight_decay: .5, clip_grad: 1}\n"
        "parallel: {tensor_parallel_shape: [2, 1, 4], tensor_parallel_mode: 2.5d}\n"
        "train: {train_iters: 600_000}\nlogging: {wandb_name: on, wandb_project: '1e-3'}\n"
    )
    config = read_config(file).config
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (0.001, 0.5)
    assert isinstance(config.optimizer.clip_grad, float)
    assert config.parallel.tensor_parallel_shape == (2, 1, 4)
    assert config.train.train_iters == 600000
    assert (config.logging.wandb_name, config.logging.wandb_project) == ("on", "1e-3")


def test_both_limits_of_a_number_are_named(file: Path) -> None:
    (told,) = problems_of(file, "logging:\n", "optimizer.qk_clip_alpha=2")
    assert told.endswith("not allowed; use a number of at least 0 and at most 1")


def test_groups_of_parameters_are_written_and_read_back(file: Path, tmp_path: Path) -> None:
    file.write_text(
        "optimizer:\n  param_groups:\n    - {params: '*.bias', lr_mult: 2}\n    - {params: [a, b], wd_mult: 0}\n"
    )
    resolved = read_config(file)
    first, second = resolved.config.optimizer.param_groups
    assert (first.patterns, first.lr_mult, first.wd_mult) == (("*.bias",), 2.0, None)
    assert (second.patterns, second.lr_mult, second.wd_mult) == (("a", "b"), 1.0, 0.0)
    again = tmp_path / "again.yaml"
    again.write_text(render(resolved))
    assert read_config(again).config == resolved.config


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[{params: a, lr_mlt: 1}]", "lr_mlt of entry 1: Extra inputs are not permitted; use a list of mappings such"),
        ("[{params: a}, {lr_mult: 0}]", "lr_mult of entry 2: Input should be greater than 0; use a list of mappings"),
        ("[{params: a, optimizer: muon}]", "optimizer of entry 1: Input should be 'adam'; use a list of mappings such"),
        ("[{wd_mult: 1}]", "params of entry 1: Field required; use a list of mappings such as [{params: embedding.*,"),
        ("{params: a}", "a mapping is not allowed; use a list of mappings such as"),
        ("3", "a whole number is not allowed; use a list of mappings such as"),
    ],
)
def test_a_wrong_group_is_named(file: Path, text: str, problem: str) -> None:
    (told,) = problems_of(file, "logging:\n", f"optimizer.param_groups={text}")
    assert problem in told


def test_all_problems_are_reported_with_key_value_origin_and_rule(file: Path) -> None:
    text = """model:
  num_layer: 4
  hidden_size: "256"
  family: gpt3
  num_layers: 3
  num_layers: 4
  tie_embeddings: yes
  moe_router_load_balancing_type: sinkhorn
train:
  lr: 1e-3
  seed: 1.5
  train_iters: 0
optimiser: {eps: 1e-9}
optimizer: 3
parallel: {tensor_parallel_mode: 4d, tensor_parallel_shape: [2, 0]}
data: {split: 100}
block_size: 64
"""
    expected = [
        f"model.num_layers ({file}:6): already given at {file}:5; keep one of the two",
        "lr (command line): not of the form section.key=value; use for example train.train_iters=100",
        f"model.num_layer=4 ({file}:2): unknown key; use model.num_layers",
        f"train.lr=0.001 ({file}:10): unknown key; use optimizer.lr",
        f"optimiser.eps=1e-09 ({file}:13): unknown section optimiser; use optimizer.adam_eps",
        f"optimizer=3 ({file}:14): a section, not a value; write its keys below it, such as lr",
        f"block_size=64 ({file}:17): a key without its section; use model.seq_length",
        "tp=4 (command line): a key without its section; use parallel.tensor_model_parallel_size",
        f"model.family=gpt3 ({file}:4): not allowed; use gpt2 or llama",
        f'model.hidden_size="256" ({file}:3): text is not allowed; use a whole number of at least 1',
        f"model.tie_embeddings=yes ({file}:7): text is not allowed; use true or false or null",
        f"model.moe_router_load_balancing_type=sinkhorn ({file}:8): not allowed; use none, seq_aux_loss, "
        "global_aux_loss or aux_loss or a list of seq_aux_loss, global_aux_loss or aux_loss, such as [seq_aux_loss]",
        f"parallel.tensor_parallel_mode=4d ({file}:15): not allowed; use 1d, 2d, 2.5d, 3d or grid",
        f"parallel.tensor_parallel_shape=[2,0] ({file}:15): not allowed; "
        "use a list of whole numbers of at least 1, such as [2,2,2] or null",
        "model.window_size=[-1,0] (command line): not allowed; "
        "use a list of 2 whole numbers of at least 0, such as [127,0] or null",
        f"train.train_iters=0 ({file}:12): not allowed; use a whole number of at least 1 or null",
        f"train.seed=1.5 ({file}:11): a number is not allowed; use a whole number of at least 0",
        f"data.split=100 ({file}:16): a whole number is not allowed; use text such as 969,30,1",
        "optimizer.adam_beta1=1 (command line): not allowed; use a number of at least 0 and below 1",
    ]
    assert sorted(
        problems_of(file, text, "lr", "tp=4", "optimizer.adam_beta1=1", "model.window_size=[-1,0]")
    ) == sorted(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty, not a mapping"),
        ("- a\n", "the file is a list, not a mapping"),
        ("words\n", "the file is plain text, not a mapping"),
        ("model:\n  num_layers: [1\ntrain:\n", "run.yaml:3: not YAML"),
        ("model: {}\n---\ntrain: {}\n", "not YAML (but found another document)"),
        ("model: {seed: !!python/name:os.system }\n", "run.yaml:1: not YAML"),
        ("model: {[1]: 2}\n", "a key must be a word"),
        (b"\xff\xfe\x00", "byte 0 is not UTF-8 text"),
        ("train: {seed: " + "9" * 5000 + "}\n", "not YAML"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_one_message(file: Path, text: str | bytes, message: str) -> None:
    problems = problems_of(file, text)
    assert len(problems) == 1
    assert message in problems[0]


@pytest.mark.parametrize("text", ["", "a\0b", "a\n> iteration 5/5", "\x1b[2J", "\u202egnp.exe"])
def test_text_is_printable_and_not_empty(file: Path, text: str) -> None:
    """Such a folder can be made or shown nowhere, or forges what a log or a job script says."""
    for override in (f"checkpoint.save={json.dumps(text)}", f"data.data_path=[{json.dumps(text)}]"):
        (problem,) = problems_of(file, "train: {seed: 5}\n", override)
        assert "not allowed; use printable text or " in problem and problem.isprintable()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "absent.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=reason) as caught:
            read_config(path)
        assert str(path) in str(caught.value)


@settings(deadline=None)
@given(st.text(max_size=60), st.lists(st.text(max_size=20), max_size=3))
def test_any_text_is_a_configuration_or_a_user_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, overrides: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode(errors="replace"))
    try:
        assert isinstance(read_config(path, overrides), Resolved)
    except UserError as error:
        assert all(error.problems)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_suggested_from_every_section_and_for_a_missing_letter(section: str) -> None:
    for name in SECTIONS[section]:
        assert nearest_key("nowhere", name) == f"{section}.{name}"
        if len(name) > 4:
            assert nearest_key(section, name[1:]) == f"{section}.{name}"


def test_one_panel_is_still_accepted_and_more_are_one_message(file: Path) -> None:
    """Configurations of old runs name the removed key."""
    file.write_text("parallel: {tp_num_panels: 1, zero_stage: 2}\n")
    assert read_config(file).config == Config.model_validate({"parallel": {"zero_stage": 2}})
    assert read_values({"parallel.tp_num_panels": 1}, "config") == Config()
    assert "tp_num_panels" not in render(read_config(file))
    reason = "panels were removed, since they were slower in nearly every measurement; remove the key"
    expected = f"parallel.tp_num_panels=4 ({file}:1): {reason}"
    assert problems_of(file, "parallel: {tp_num_panels: 4, tp_comm_overlap: true}\n") == (expected,)
    typed = f"parallel.tp_num_panels=8 (command line): {reason}"
    assert problems_of(file, "parallel: {tp_num_panels: 4}\n", "parallel.tp_num_panels=8") == (typed,)
    with pytest.raises(UserError) as caught:
        read_values({"parallel.tp_num_panels": 2}, "config")
    assert caught.value.problems == (f"parallel.tp_num_panels=2 (config): {reason}",)


def test_overlaps_follow_the_configuration() -> None:
    assert RunSpec(Config()).overlap == OVERLAP_ALL
    switches = [f"tp_comm_overlap_{what}" for what in ("input_grad", "weight_grad", "weight_gather")]
    config = Config.model_validate({"parallel": dict.fromkeys(switches, False) | {"tp_keep_gathered_weights": True}})
    assert RunSpec(config).overlap == TPOverlap(False, False, False, True)


def test_names_of_other_frameworks_are_understood() -> None:
    theirs = {
        "tp": "parallel.tensor_model_parallel_size",
        "n_layer": "model.num_layers",
        "n_embd": "model.hidden_size",
        "batch_size": "train.micro_batch_size",
        "learning_rate": "optimizer.lr",
        "max-iters": "train.train_iters",
        "block_size": "model.seq_length",
    }
    assert {name: nearest_key("train", name) for name in theirs} == theirs
    assert nearest_key("train", "xyzzy") is None


CONFIGS = st.builds(
    lambda lr, name, shape, seed, vocab, tie: Config.model_validate(
        {
            "model": {"vocab_size": vocab, "tie_embeddings": tie},
            "parallel": {"tensor_parallel_mode": "3d", "tensor_parallel_shape": shape},
            "optimizer": {"lr": lr},
            "logging": {"wandb_name": name},
            "train": {"seed": seed},
        }
    ),
    st.floats(min_value=0, exclude_min=True, max_value=1e12),
    st.none()
    | st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(is_one_line)
    | st.sampled_from(["1e-3", "null", "yes", "3", "a: b", "#", ","]),
    st.none() | st.tuples(*[st.integers(1, 9)] * 3),
    st.integers(0, 2**62),
    st.none() | st.integers(1, 10**6),
    st.none() | st.booleans(),
)


@settings(deadline=None)
@given(CONFIGS)
def test_the_resolved_file_reads_back_as_an_equal_configuration(
    tmp_path_factory: pytest.TempPathFactory, config: Config
) -> None:
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    origins = {f"{section}.{name}": "here" for section, names in SECTIONS.items() for name in names}
    write_resolved(Resolved(config, origins), path)
    assert read_config(path).config == config


def test_the_resolved_file_of_an_oddly_named_one_reads_back(tmp_path: Path) -> None:
    odd = tmp_path / "a\x1b[31m\nb.yaml"
    odd.write_text("train: {seed: 5}\n")
    write_resolved(read_config(odd), tmp_path / "resolved.yaml")
    assert read_config(tmp_path / "resolved.yaml").config.train.seed == 5


def test_the_resolved_file_shows_where_values_came_from(file: Path) -> None:
    file.write_text("model:\n  num_layers: 3\n")
    lines = [" ".join(line.split()) for line in render(read_config(file, ["train.seed=5"])).splitlines()]
    assert f"num_layers: 3 # {file}:2" in lines
    assert "seed: 5 # command line" in lines
    assert "hidden_size: 768 # default" in lines
    assert "ffn_hidden_size: null # derived: 3072" in lines


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**20), 10**20) | st.booleans() | st.none())
def test_a_number_as_json_writes_it_is_read_back(value: object) -> None:
    assert parse_value(json.dumps(value)) == value
