"""Every rule is checked before a run: what passes is cut into equal boxes, what fails says which value would work."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron3d.config.architecture import architecture
from megatron3d.config.check import check
from megatron3d.config.derive import make_mesh, num_microbatches, tensor_mode, vocab_multiple
from megatron3d.config.schema import Config
from megatron3d.layout import box, box_shape
from megatron3d.model.params import param_specs
from megatron3d.modes import MODES


def config_of(**sections: Any) -> Config:
    """A configuration from the values of some sections."""
    return Config.model_validate(sections)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Config, int]:
    """Any mode, form and shape over a small model, and a number of ranks."""
    mode = draw(st.sampled_from(list(MODES)))
    entry = MODES[mode]
    shape = draw(st.tuples(*[st.sampled_from([1, 1, 2, 3, 4])] * len(entry.axis_names)))
    heads = draw(st.sampled_from([2, 4, 6, 12, 24]))
    channels = draw(st.sampled_from([2, 4, 6, 8]))
    config = config_of(
        model={
            "family": draw(st.sampled_from(["gpt2", "llama"])),
            "num_layers": 1,
            "hidden_size": heads * draw(st.sampled_from([2, 4, 8, 12])),
            "ffn_hidden_size": draw(st.sampled_from([48, 96, 100, None])),
            "num_attention_heads": heads,
            "num_query_groups": draw(st.sampled_from([1, 2, heads])),
            "kv_channels": channels,
            "seq_length": draw(st.sampled_from([5, 8, 12])),
        },
        parallel={
            "tensor_parallel_mode": mode,
            "tensor_parallel_form": draw(st.sampled_from(list(entry.forms))),
            "tensor_parallel_shape": shape,
        },
        train={"micro_batch_size": draw(st.sampled_from([1, 2, 4, 12])), "global_batch_size": 24},
    )
    size = 1
    for axis in shape:
        size *= axis
    return config, size * draw(st.sampled_from([1, 2]))


@settings(deadline=None)
@given(layouts())
def test_what_passes_is_cut_into_equal_boxes_with_whole_heads(case: tuple[Config, int]) -> None:
    config, world_size = case
    assume(not check(config, world_size))
    mode = tensor_mode(config.parallel)
    arch = architecture(config.model, 61, vocab_multiple(mode))
    meshes = [make_mesh(config.parallel, world_size, rank) for rank in range(world_size)]
    for name, spec in param_specs(arch, mode).items():
        for index in range(len(spec.parts)):
            shapes = {box_shape(spec.part_boxes(mesh)[index]) for mesh in meshes}
            assert len(shapes) == 1, f"{name} is cut into {shapes}"
    rows, length = config.train.micro_batch_size, config.model.seq_length
    residual = {box_shape(box((rows * length, arch.hidden_size), mode.residual, mesh)) for mesh in meshes}
    inner = {box_shape(box((rows, arch.num_attention_heads), mode.inner, mesh)) for mesh in meshes}
    assert len(residual) == len(inner) == 1, f"streams are cut into {residual} and {inner}"
    mesh = meshes[0]
    assert num_microbatches(config, mesh) * rows * mesh.sizes["data"] == config.train.global_batch_size


@settings(deadline=None)
@given(layouts())
def test_suggested_sizes_end_the_complaint(case: tuple[Config, int]) -> None:
    config, world_size = case
    for problem in check(config, world_size):
        key = problem.partition("=")[0]
        if key not in ("train.micro_batch_size", "train.global_batch_size", "model.seq_length"):
            continue
        section, name = key.split(".")
        for value in re.findall(r"\d+", problem.rpartition("use ")[2]):
            values = config.model_dump()
            values[section][name] = int(value)
            again = check(Config.model_validate(values), world_size)
            assert not any(line.startswith(f"{key}=") for line in again), f"{problem}: {value} does not work"


VALID: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 16, "seq_length": 8, "kv_channels": 4},
    "train": {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 10},
}
BROKEN = [
    (
        {
            "parallel": {"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 4},
            "model": {"num_query_groups": 1, "kv_channels": 6},
        },
        4,
        "parallel.tensor_model_parallel_size=4: y*z = 4 does not divide 6, model.num_query_groups=1 x kv_channels 6; "
        "use a parallel.tensor_parallel_shape with y*z = 1, 2, 3 or 6",
    ),
    (
        {
            "parallel": {"tensor_parallel_mode": "3d", "tensor_parallel_shape": [1, 3, 2]},
            "model": {"kv_channels": 6, "ffn_hidden_size": 192, "seq_length": 9},
        },
        6,
        "parallel.tensor_parallel_shape=[1,3,2]: y = 3 does not divide model.num_attention_heads=16; "
        "use 1, 2, 4, 8 or 16",
    ),
    (
        {"parallel": {"tensor_parallel_mode": "3d", "tensor_parallel_shape": [2, 2]}},
        4,
        "parallel.tensor_parallel_shape=[2,2]: mode 3d has 3 axes (x, y, z), not 2; use such as [1,2,2]",
    ),
    (
        {
            "parallel": {
                "tensor_parallel_mode": "2d",
                "tensor_parallel_shape": [2, 2],
                "tensor_model_parallel_size": 8,
            }
        },
        8,
        "parallel.tensor_parallel_shape=[2,2]: 2 x 2 = 4 is not parallel.tensor_model_parallel_size=8; use [2,4], "
        "or tensor_model_parallel_size 4 or none",
    ),
    (
        {"parallel": {"tensor_parallel_form": "cube"}},
        1,
        "parallel.tensor_parallel_form=cube: mode 1d has no such form; use replicated or sequence_parallel",
    ),
    (
        {"parallel": {"tensor_parallel_mode": "2d", "sequence_parallel": True}},
        1,
        "parallel.sequence_parallel=true: mode 2d splits its tokens by itself; use false, or tensor_parallel_mode 1d",
    ),
    (
        {"parallel": {"sequence_parallel": True, "tensor_parallel_form": "replicated"}},
        1,
        "parallel.sequence_parallel=true: contradicts parallel.tensor_parallel_form=replicated; "
        "give only one of the two",
    ),
    (
        {"parallel": {"tensor_parallel_mode": "2d", "tensor_parallel_shape": [2, 2]}},
        6,
        "world_size 6: not a multiple of TP 4 (2d: r 2 x c 2) x PP 1 = 4; use 4 or 8 processes (--world-size), "
        "or another parallel.tensor_parallel_shape",
    ),
    (
        {"parallel": {"tensor_model_parallel_size": 4}},
        1,
        "world_size 1: fewer than TP 4 (1d: t 4) x PP 1 = 4; use 4 processes (--world-size), "
        "or another parallel.tensor_model_parallel_size",
    ),
    (
        {"train": {"global_batch_size": 10}},
        2,
        "train.global_batch_size=10: not micro_batch_size 4 x data parallel 2 x a whole number of microbatches "
        "(10 / 8 = 1.25); use 8 or 16",
    ),
    (
        {
            "parallel": {
                "tensor_parallel_mode": "3d",
                "tensor_parallel_form": "tokens",
                "tensor_parallel_shape": [2, 1, 4],
            }
        },
        8,
        "train.micro_batch_size=4: not a multiple of x*z = 8, over which 3d: x 2 x y 1 x z 4 splits whole sequences; "
        "use 8",
    ),
    (
        {
            "parallel": {"sequence_parallel": True, "tensor_model_parallel_size": 8},
            "model": {"seq_length": 3},
            "train": {"micro_batch_size": 2},
        },
        8,
        "model.seq_length=3: micro_batch_size 2 x 3 = 6 tokens are not a multiple of t = 8, over which 1d: t 8 splits "
        "them; use 4",
    ),
    (
        {"model": {"kv_channels": None, "hidden_size": 40}},
        1,
        "model.num_attention_heads=16: 16 does not divide model.hidden_size=40; use 4, 5, 8, 10 or 20, "
        "or set model.kv_channels",
    ),
    (
        {"model": {"num_query_groups": 3}},
        1,
        "model.num_query_groups=3: 3 does not divide model.num_attention_heads=16; use 1, 2, 4, 8 or 16",
    ),
    (
        {"model": {"num_query_groups": 1, "kv_channels": 3}, "parallel": {"tensor_model_parallel_size": 4}},
        4,
        "parallel.tensor_model_parallel_size=4: t = 4 does not divide 3, model.num_query_groups=1 x kv_channels 3; "
        "use 1 or 3",
    ),
    (
        {"model": {"kv_channels": 5, "position_embedding_type": "rope"}},
        1,
        "model.kv_channels=5: rotary positions turn pairs of channels, and a head has 5; use model.kv_channels 4 or 6",
    ),
    (
        {"model": {"max_position_embeddings": 7}},
        1,
        "model.max_position_embeddings=7: less than model.seq_length=8; use 8 or more, or leave it out",
    ),
    (
        {"model": {"vocab_size": 60}},
        1,
        "model.vocab_size=60: less than the tokenizer's 61 tokens; use 61 or more, or leave it out",
    ),
    (
        {"optimizer": {"lr_warmup_iters": 11}},
        1,
        "optimizer.lr_warmup_iters=11: more than train.train_iters=10; use 0 to 10",
    ),
    (
        {"optimizer": {"lr_decay_style": "WSD", "lr_warmup_iters": 4, "lr_wsd_decay_iters": 7}},
        1,
        "optimizer.lr_wsd_decay_iters=7: more than the 6 iterations that train.train_iters=10 leaves after "
        "lr_warmup_iters 4; use 1 or 6",
    ),
    (
        {"optimizer": {"lr_wsd_decay_iters": 7}},
        1,
        "optimizer.lr_wsd_decay_iters=7: not read with optimizer.lr_decay_style=cosine; use WSD, or leave it out",
    ),
    ({"optimizer": {"lr": 0.1, "min_lr": 0.2}}, 1, "optimizer.min_lr=0.2: more than optimizer.lr=0.1; use 0 to 0.1"),
    (
        {"data": {"split": "90,10"}},
        1,
        "data.split=90,10: not three weights of at least 0 for train, valid and test; use 969,30,1",
    ),
    (
        {"data": {"split": "1,0,0"}, "train": {"eval_interval": 5}},
        1,
        "data.split=1,0,0: no valid part for train.eval_interval=5; use such as 90,10,0, or eval_interval null",
    ),
    (
        {"data": {"split": "0,1,0"}},
        1,
        "data.split=0,1,0: nothing is left to train on; use such as 969,30,1",
    ),
    (
        {"data": {"data_path": (1, "a", -1, "b")}},
        1,
        "data.data_path=[1.0,a,-1.0,b]: weights must be 0 or more, and one above 0; use such as [7, data/a, 3, data/b]",
    ),
    (
        {"data": {"data_path": "a", "train_data_path": "b"}},
        1,
        "data.data_path=a: not read beside data.train_data_path; leave one of them out",
    ),
    (
        {"data": {"train_data_path": "b"}, "train": {"eval_interval": 5}},
        1,
        "data.train_data_path=b: nothing for train.eval_interval=5; give data.valid_data_path too, or null",
    ),
    (
        {"data": {"valid_data_path": "b"}},
        1,
        "data.valid_data_path=b: not read without data.train_data_path; give that in place of data_path, or leave "
        "valid_data_path out",
    ),
    (
        {"data": {"data_path": "hf:a"}},
        1,
        'data.data_path="hf:a": a dataset that is streamed is not split; use data.train_data_path and '
        "data.valid_data_path",
    ),
    (
        {"data": {"train_data_path": (1, "hf:a", 1, "b")}},
        1,
        'data.train_data_path=[1.0,"hf:a",1.0,b]: a dataset is read alone; name it alone, or make token files of it',
    ),
    (
        {"data": {"stream_lanes": 4}},
        1,
        "data.stream_lanes=4: not read without a path that begins with hf:; give one, or leave stream_lanes out",
    ),
    (
        {"data": {"goldfish_h": 4}},
        1,
        "data.goldfish_h=4: not read without data.goldfish_k; give that, or leave goldfish_h out",
    ),
    (
        {"data": {"reset_position_ids": True}, "model": {"position_embedding_type": "none"}},
        1,
        "data.reset_position_ids=true: the model has no positions; use false",
    ),
    (
        {"data": {"tokenizer_type": "ByteTokenizer", "tokenizer_model": "x"}},
        1,
        "data.tokenizer_model=x: ByteTokenizer has no model file; leave it out",
    ),
    (
        {"parallel": {"tensor_model_parallel_size": 2, "tp_keep_gathered_weights": True}},
        2,
        "parallel.tp_keep_gathered_weights=true: 1d: t 2 gathers no weights; use false, or mode 2d, 2.5d, 3d or grid",
    ),
    (
        {"parallel": {"tp_num_panels": 4}},
        1,
        "parallel.tp_num_panels=4: one rank multiplies without any other; use 1, or tensor_model_parallel_size 2 or "
        "more",
    ),
    (
        {"parallel": {"num_distributed_optimizer_instances": 4}, "train": {"global_batch_size": 24}},
        6,
        "parallel.num_distributed_optimizer_instances=4: 4 does not divide the data parallel size 6; use 1, 2, 3 or 6",
    ),
    (
        {"train": {"precision": "fp64", "grad_reduce_in_bf16": True}},
        1,
        "train.grad_reduce_in_bf16=true: would undo train.precision=fp64, which is for verification; use false",
    ),
    (
        {"train": {"precision": "fp64", "norm_implementation": "apex"}},
        1,
        "train.norm_implementation=apex: its kernels take statistics in fp32, less than train.precision=fp64; use "
        "torch",
    ),
    (
        {"train": {"recompute_modules": ["mlp_act"]}},
        1,
        "train.recompute_modules=[mlp_act]: not read with train.recompute_granularity=null; use selective, or leave "
        "recompute_modules out",
    ),
    (
        {"train": {"recompute_granularity": "selective", "recompute_num_layers": 2}},
        1,
        "train.recompute_num_layers=2: not read with train.recompute_granularity=selective; use full, or leave "
        "recompute_num_layers out",
    ),
    (
        {"checkpoint": {"save_interval": 5}},
        1,
        "checkpoint.save_interval=5: nowhere to save; set checkpoint.save, or leave it out",
    ),
    (
        {"logging": {"wandb_mode": "offline"}},
        1,
        "logging.wandb_mode=offline: no logging.wandb_project; name one, or leave wandb_mode out",
    ),
]


@pytest.mark.parametrize(("changes", "world_size", "message"), BROKEN, ids=[message[:50] for _, _, message in BROKEN])
def test_a_broken_rule_is_one_message_with_numbers(changes: Any, world_size: int, message: str) -> None:
    sections = {section: VALID.get(section, {}) | changes.get(section, {}) for section in (*VALID, *changes)}
    assert check(config_of(**sections), world_size, vocab_size=61) == [message]


def test_a_valid_configuration_has_no_problem() -> None:
    assert check(config_of(**VALID), 2, vocab_size=61) == []
