"""Fact: training refuses to start if any layout builds a model other than the configured one."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
from torch import nn

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ModelConfig, ParallelConfig
from megatron3d.experts import grouped_matmul
from megatron3d.hardware.devices import Peak
from megatron3d.model.linear_spec import num_parameters
from megatron3d.parallel.modes import MODES
from megatron3d.train.monitor import reports
from megatron3d.train.monitor.reports import (
    check_built,
    describe_buckets,
    describe_communicators,
    describe_connections,
    describe_context,
    describe_fp8_linears,
    describe_fp8_packages,
    startup_report,
)
from megatron3d.train.state import TrainState, build_state
from tests.support.turn_ranks import connect, run_turns

MODEL = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 8, "seq_length": 8}
VOCAB_SIZE = 61
CPU = torch.device("cpu")


CONFIG = Config.model_validate({"model": MODEL, "train": {"micro_batch_size": 8, "global_batch_size": 16}})


def build(rank: int, world_size: int, parallel: dict[str, Any], **model: Any) -> TrainState:
    keys = {"parallel": ParallelConfig.model_validate(parallel), "model": ModelConfig.model_validate(MODEL | model)}
    config = CONFIG.model_copy(update=keys)
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    return build_state(spec, connect(spec), torch.device("cpu"))


def count_everywhere(rank: int, world_size: int, modes: list[str]) -> None:
    for mode in modes:
        check_built(build(rank, world_size, {"tensor_parallel_mode": mode, "tensor_parallel_shape": None} | size(mode)))


def size(mode: str) -> dict[str, int]:
    return {"tensor_model_parallel_size": 4 if mode == "2d" else 8}


def test_every_mode_builds_the_configured_model() -> None:
    """Padding and replicas are not counted; one of the meshes has two data-parallel ranks."""
    run_turns(count_everywhere, 8, list(MODES))


def describe_last_stage(rank: int, world_size: int) -> tuple[torch.dtype, str | None]:
    sizes = {"num_layers": 3, "hidden_size": 256, "ffn_hidden_size": 512, "seq_length": 128, "norm_placement": "post"}
    train = {"precision": "bf16", "global_batch_size": 2, "fp8": "e4m3", "fp8_param_gather": True, "bucket_mb": 0.001}
    sections = {"model": {**MODEL, **sizes}, "train": train, "parallel": {"pipeline_model_parallel_size": world_size}}
    spec = RunSpec(Config.model_validate(sections), world_size, VOCAB_SIZE, rank)
    state = build_state(spec, connect(spec), CPU)
    return state.buffers.flat_buffers[0].params.dtype, describe_fp8_linears(state)


def test_fp8_is_described_by_the_dtype_of_the_network() -> None:
    """The first buffer of a stage may be one of weights that are stored in fp8."""
    found = run_turns(describe_last_stage, 2)
    assert torch.float8_e4m3fn in [dtype for dtype, _ in found], found
    assert all("bf16" in str(line) or "bfloat16" in str(line) for _, line in found), found
    assert len({line for _, line in found}) == 1, found


def test_a_dropped_layer_is_refused() -> None:
    state = build(0, 1, {})
    state.model.layers = nn.ModuleDict({"0": state.model.layers["0"]})
    with pytest.raises(RuntimeError, match=r"in 1 layers, the configuration has .* in 2"):
        check_built(state)


def test_parameters_too_many_or_too_few_are_refused() -> None:
    for wrong in ({"ffn_hidden_size": 200}, {"tie_embeddings": False}, {"vocab_size": VOCAB_SIZE + 1}):
        state = build(0, 1, {})
        built = num_parameters(state.model.arch)
        state.model.arch = replace(state.model.arch, **wrong)
        with pytest.raises(RuntimeError, match=f"has {built:,} parameters .* has {num_parameters(state.model.arch):,}"):
            check_built(state)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_experts_that_no_kernel_multiplies_together_are_named(zero_stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = build(0, 1, {"zero_stage": zero_stage}, num_moe_experts=4)
    line = "> experts: a loop over experts (the grouped kernel needs bf16"
    assert line in startup_report(state, None, {})
    monkeypatch.setattr(grouped_matmul, "has_grouped_kernel", lambda x_RK, w_ENK: True)
    assert "> experts: one kernel for all experts of a rank" in startup_report(state, None, {})
    assert "> experts:" not in startup_report(build(0, 1, {}), None, {})


def test_the_report_adds_up() -> None:
    state = build(0, 1, {})
    text = startup_report(state, Peak(2e12, "a data sheet"), {"allocator": "the usual one"})
    values = sum(flat.main.numel() for flat in state.buffers.flat_buffers)
    assert f"{num_parameters(state.model.arch):,} in the model" in text
    assert f"{16 * values / 2**20:,.1f} MiB = weights" in text
    assert "2 TFLOP/s per device (a data sheet)" in text
    assert "set logging.peak_tflops" in startup_report(state, None, {})
    assert "> attention: " in text and "> loss: torch's operations, in chunks of" in text
    assert "> allocator: the usual one" in text and "> communicators" not in text


def test_the_report_names_what_multiplies_in_fp8() -> None:
    fp8 = {"fp8": "hybrid", "fp8_recipe": "rowwise", "fp8_exclude": ["*.attention.proj"]}
    train = {"micro_batch_size": 8, "global_batch_size": 16, "num_layers_at_start_in_bf16": 1, **fp8}
    spec = RunSpec(Config.model_validate({"model": MODEL, "train": train}), 1, VOCAB_SIZE)
    text = startup_report(build_state(spec, connect(spec), CPU), Peak(2e12, "a data sheet"), {})
    (line,) = (line for line in text.splitlines() if line.startswith("> fp8 "))
    assert line.startswith("> fp8 rowwise, hybrid: restored to float32 and multiplied; there is no scaled GEMM")
    assert line.endswith("; layers 0 and *.attention.proj stay in fp32")
    assert "2 TFLOP/s in fp32, fp8 or not, per device" in text
    assert "> fp8" not in startup_report(build(0, 1, {}), None, {})


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, None),
        ({"torchao": "0.18.0"}, "installed and not used: torchao 0.18.0"),
        (
            {"torchao": "0.18.0", "transformer-engine": "2.9"},
            "installed and not used: torchao 0.18.0, Transformer Engine 2.9",
        ),
    ],
)
def test_the_report_names_packages_of_fp8(
    versions: dict[str, str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked up in a run with fp8 alone."""

    def version(distribution: str) -> str:
        if distribution not in versions:
            raise PackageNotFoundError(distribution)
        return versions[distribution]

    monkeypatch.setattr(reports, "version", version)
    train = {"micro_batch_size": 8, "global_batch_size": 16, "fp8": "e4m3", "fp8_recipe": "rowwise"}
    spec = RunSpec(Config.model_validate({"model": MODEL, "train": train}), 1, VOCAB_SIZE)
    assert describe_fp8_packages(build_state(spec, connect(spec), CPU)) == said
    assert describe_fp8_packages(build(0, 1, {})) is None


def describe_everywhere(rank: int, world_size: int) -> None:
    """Bug that this finds: the report names a group of one rank, or the links of other pipeline ranks."""
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": False}
    line = describe_communicators(build(rank, world_size, sizes))
    assert line is not None and line.startswith(f"communicators of rank {rank}: ")
    assert line.endswith(", and 1 point-to-point link") and " of 1" not in line and " of 2" in line


def test_the_report_names_the_communicators() -> None:
    run_turns(describe_everywhere, 4)


def buckets_everywhere(rank: int, world_size: int) -> None:
    lines = [describe_buckets(build(rank, world_size, {"zero_stage": stage})) for stage in (1, 3)]
    assert (
        lines[0] == f"gradient buckets of rank {rank}: 1, of at least 25 MiB (the default), over 2 data-parallel ranks"
    )
    assert lines[1] is not None and "one per FSDP unit" in lines[1]


def test_the_report_names_the_size_of_buckets() -> None:
    run_turns(buckets_everywhere, 2)
    assert describe_buckets(build(0, 1, {})) is None


def context_everywhere(rank: int, world_size: int) -> None:
    state = build(rank, world_size, {"context_parallel_size": 2, "zero_stage": 1})
    line, buckets = describe_context(state), describe_buckets(state)
    assert line is not None and buckets is not None and buckets.endswith("over 2 data-parallel and context ranks")
    length = state.model.arch.seq_length
    low, high = rank * length // 4, (3 - rank) * length // 4
    where = f"{low} to {low + length // 4 - 1}, {high} to {high + length // 4 - 1}"
    held = f"context: 2 ranks, of which this one has positions {where}; keys and values by all_gather"
    assert line == f"{held}; pairs of rows by flash attention"


def test_the_report_names_the_positions_of_a_context_rank() -> None:
    run_turns(context_everywhere, 2)
    assert describe_context(build(0, 1, {})) is None


def test_the_line_on_communicators_names_each() -> None:
    line = describe_connections([("data", 1.25), ("pipeline 0 to 1", 0.5)])
    assert line == "> 2 communicators of rank 0 connected in 1.75 s: data 1.25, pipeline 0 to 1 0.50"
