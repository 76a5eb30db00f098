"""Fact: a valid layout shards into equal boxes with whole heads; the message for an invalid one gives valid sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.model.param_spec import param_specs
from megatron3d.parallel.layout import box, box_shape
from megatron3d.parallel.modes import MODES
from tests.support.valid_config import with_changes


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Config, int]:
    """Draw a mode, form and shape over a small model, and a number of ranks."""
    mode = draw(st.sampled_from(list(MODES)))
    entry = MODES[mode]
    shape = draw(st.tuples(*[st.sampled_from([1, 1, 2, 3, 4])] * len(entry.axis_names)))
    heads = draw(st.sampled_from([2, 4, 6, 12, 24]))
    channels = draw(st.sampled_from([2, 4, 6, 8]))
    config = Config.model_validate(
        {
            "model": {
                "family": draw(st.sampled_from(["gpt2", "llama"])),
                "num_layers": 1,
                "hidden_size": heads * draw(st.sampled_from([2, 4, 8, 12])),
                "ffn_hidden_size": draw(st.sampled_from([48, 96, 100, None])),
                "num_attention_heads": heads,
                "num_query_groups": draw(st.sampled_from([1, 2, heads])),
                "kv_channels": channels,
                "seq_length": draw(st.sampled_from([5, 8, 12])),
            },
            "parallel": {
                "tensor_parallel_mode": mode,
                "tensor_parallel_form": draw(st.sampled_from(list(entry.forms))),
                "tensor_parallel_shape": shape,
            },
            "train": {"micro_batch_size": draw(st.sampled_from([1, 2, 4, 12])), "global_batch_size": 24},
        }
    )
    size = 1
    for axis in shape:
        size *= axis
    return config, size * draw(st.sampled_from([1, 2]))


@settings(deadline=None)
@given(layouts())
def test_valid_configurations_have_equal_boxes_with_whole_heads(case: tuple[Config, int]) -> None:
    config, world_size = case
    assume(not check(config, world_size))
    run = RunSpec(config, world_size, 61)
    mode, arch = run.mode, run.arch
    meshes = [run.on_rank(rank).mesh for rank in range(world_size)]
    for name, spec in param_specs(arch, mode).items():
        for index in range(len(spec.parts)):
            shapes = {box_shape(spec.part_boxes(mesh)[index]) for mesh in meshes}
            assert len(shapes) == 1, f"{name} is cut into {shapes}"
    rows, length = config.train.micro_batch_size, config.model.seq_length
    residual = {box_shape(box((rows * length, arch.hidden_size), mode.residual, mesh)) for mesh in meshes}
    inner = {box_shape(box((rows, arch.num_attention_heads), mode.inner, mesh)) for mesh in meshes}
    assert len(residual) == len(inner) == 1, f"streams are cut into {residual} and {inner}"
    mesh = meshes[0]
    assert run.num_microbatches * rows * mesh.sizes["data"] == config.train.global_batch_size


@settings(deadline=None)
@given(layouts())
def test_suggested_sizes_are_valid(case: tuple[Config, int]) -> None:
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
        "parallel.tensor_parallel_shape=[2,2]: mode 3d has 3 axes (x, y, z), not 2; use for example [1,2,2]",
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
        "parallel.sequence_parallel=true: mode 2d already splits the tokens; use false, or tensor_parallel_mode 1d",
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
        {"model": {"num_query_groups": 1, "kv_channels": 3}, "parallel": {"tensor_model_parallel_size": 4}},
        4,
        "parallel.tensor_model_parallel_size=4: t = 4 does not divide 3, model.num_query_groups=1 x kv_channels 3; "
        "use 1 or 3",
    ),
    (
        {"parallel": {"tensor_model_parallel_size": 2, "tp_keep_gathered_weights": True}},
        2,
        "parallel.tp_keep_gathered_weights=true: 1d: t 2 all-gathers no weights; use false, or mode 2d, 2.5d, 3d or "
        "grid",
    ),
    (
        {"parallel": {"tp_comm_overlap": True, "tensor_model_parallel_size": 2}},
        2,
        "parallel.tp_comm_overlap=true: 1d: t 2 neither all-gathers tokens before a GEMM nor reduce-scatters after one"
        "; use false, or 1d sequence_parallel, 2d weight_stationary, 2.5d weight_stationary, 3d heads, 3d tokens or "
        "grid scatter",
    ),
    (
        {"parallel": {"num_distributed_optimizer_instances": 4}, "train": {"global_batch_size": 24}},
        6,
        "parallel.num_distributed_optimizer_instances=4: 4 does not divide the data parallel size 6; use 1, 2, 3 or 6",
    ),
]


@pytest.mark.parametrize(("changes", "world_size", "message"), BROKEN, ids=[message[:50] for _, _, message in BROKEN])
def test_a_broken_rule_is_one_message_with_numbers(changes: Any, world_size: int, message: str) -> None:
    assert check(with_changes(changes), world_size, vocab_size=61) == [message]
