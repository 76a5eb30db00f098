"""Fact: the model predicts published throughputs, layer times, gains and bytes with one file per accelerator.

No constant is fitted to a single row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from gpu.gpu_steps import RANKS, rank_spec
from gpu.gpu_timing import Place
from tables import measured_on_h100, predicted_on_h100

from megatron3d.config.schema import Config
from megatron3d.forecast.memory.activations import run_activations
from megatron3d.forecast.memory.rank import predict_memory
from megatron3d.forecast.time.hardware import load_accelerator, load_cluster
from megatron3d.forecast.time.layer import layer_times
from megatron3d.forecast.time.practices import DEEPSPEED, MEGATRON_2021, MEGATRON_2022, practice
from megatron3d.forecast.time.step import load_machine, make_machine, step_time
from megatron3d.model.local_sizes import KERNELS
from megatron3d.model.spec import NO_RECOMPUTE, Recompute
from tests.unit.forecast.time.published import (
    DROPOUTS,
    core_tflops,
    read,
    run,
    sc21_step,
    sc21_tflops,
    step_of,
    without_scatter,
)

SC21, CORE, LAYER = (read(name) for name in ("megatron_sc21", "megatron_core_h100", "activation_recompute"))
MEAN, WORST = 0.05, 0.10


def test_weak_scaling_of_megatron_on_a100() -> None:
    errors = [sc21_tflops(row) / row["tflops_per_gpu"] - 1 for row in SC21["rows"]]
    assert len(errors) == 10
    assert mean(map(abs, errors)) <= MEAN and max(map(abs, errors)) <= WORST, errors


def test_weak_scaling_of_megatron_core_on_h100() -> None:
    errors = [core_tflops(row) / row["tflops_gpu"] - 1 for row in CORE["rows"]]
    assert len(errors) == 9
    assert mean(map(abs, errors)) <= MEAN and max(map(abs, errors)) <= WORST, errors


# The 22B model on 8 GPUs: whether it has sequence parallelism, and its recomputation.
EXPERIMENTS = ((False, None), (True, None), (False, "full"), (False, "selective"), (True, "selective"))


def layer_of_22b(sequence_parallel: bool, granularity: str | None) -> Config:
    row = {"layers": 48, "hidden": 6144, "heads": 64, "tp": 8, "pp": 1, "seq": 2048, "vocab": 51200}
    keys = {"model_keys": DROPOUTS, "parallel_keys": {"sequence_parallel": sequence_parallel}}
    train = {"micro_batch_size": 4, "global_batch_size": 4, "precision": "fp16"}
    return run({**row, **keys}, **train, recompute_granularity=granularity)


@pytest.mark.parametrize(("experiment", "row"), list(zip(EXPERIMENTS, LAYER["layers"], strict=True)))
def test_layer_times_on_a100(experiment: tuple[bool, str | None], row: dict[str, float]) -> None:
    step = step_of(layer_of_22b(*experiment), 8, load_machine("selene", "fp16", 8, MEGATRON_2022))
    phases = layer_times(step.local, step.machine)
    assert 1e3 * phases.forward.total == pytest.approx(row["fwd"], rel=0.05)
    assert 1e3 * phases.backward.total == pytest.approx(row["bwd"], rel=0.05)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("granularity", ["none", "full"])
def test_published_activation_bytes_of_a_layer(sequence_parallel: bool, granularity: str) -> None:
    """Fused attention saves what Megatron-LM saves with selective recomputation: the rows without scores."""
    config = layer_of_22b(sequence_parallel, None)
    config = config.model_copy(update={"model": config.model.model_copy(update={"attention_dropout": 0.0})})
    local = step_of(config, 8, load_machine("selene", "fp16", 8)).local
    recompute = NO_RECOMPUTE if granularity == "none" else Recompute("full")
    (kept,) = (each for each in recompute.runs(range(1)) if each.layers)
    sbh, t = 2048 * 4 * 6144, 8
    formulas = {"none": {True: 34 * sbh / t, False: sbh * (10 + 24 / t)}, "full": {True: 2 * sbh / t, False: 2 * sbh}}
    assert run_activations(replace(local, recompute=recompute), kept) == pytest.approx(
        formulas[granularity][sequence_parallel], rel=0.05
    )


def row_of_175b(batch: int) -> dict[str, int]:
    sizes = {"heads": 96, "hidden": 12288, "layers": 96, "tp": 8, "pp": 12, "gpus": 96}
    return {**sizes, "batch": batch, "micro_batch": 1, "virtual_chunks_v": 1}


def test_published_gain_of_interleaving() -> None:
    """The gain is at least a tenth up to a batch of 60, and shrinks with the batch."""
    gains = [
        step_time(sc21_step(row_of_175b(batch))).step_s / step_time(sc21_step(row_of_175b(batch), num_stages=4)).step_s
        - 1
        for batch in (12, 24, 36, 48, 60)
    ]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] == pytest.approx(SC21["gains"]["interleaved"], abs=0.03)


def test_published_gain_of_scatter_gather() -> None:
    """The gain is up to 11 % at the batches of the figure, with stages of two layers or one."""
    gains = []
    for stages in (4, 8):
        each = [
            sc21_step(row_of_175b(60), profile, stages) for profile in (MEGATRON_2021, without_scatter(MEGATRON_2021))
        ]
        gains.append(step_time(each[1]).step_s / step_time(each[0]).step_s - 1)
    assert gains[0] < SC21["gains"]["scatter_gather_up_to"] < gains[1] < 0.17


# Runs of nanotron behind the Ultrascale playbook: ranks of data, tensor and pipeline, gradient accumulation, layers,
# hidden and FFN size, ZeRO stage, whether its nodes measured the lower bandwidth, and seconds of a step.
NANOTRON = (
    ((2, 2, 2), 128, (28, 3072, 8192), 1, False, 10.19),
    ((1, 8, 16), 256, (16, 2048, 8192), 0, False, 2.676),
    ((32, 8, 1), 128, (32, 4096, 14336), 0, True, 106.6),
)


@pytest.mark.parametrize(("ranks", "accumulation", "sizes", "zero", "is_degraded", "measured_s"), NANOTRON)
def test_hosts_cost_more_by_the_state_of_the_cluster_and_not_by_the_pipeline(
    ranks: tuple[int, int, int],
    accumulation: int,
    sizes: tuple[int, int, int],
    zero: int,
    is_degraded: bool,
    measured_s: float,
) -> None:
    """Host times of degraded nodes would make the first two 1.6 and 4 times as long, of others the last a fifth."""
    (data, tensor, pipeline), (layers, hidden, ffn) = ranks, sizes
    gpus = data * tensor * pipeline
    model = {"family": "llama", "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn}
    model |= {"num_attention_heads": 32, "num_query_groups": 32, "seq_length": 4096, "vocab_size": 131072}
    parallel = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, "zero_stage": zero}
    train = {"micro_batch_size": 1, "global_batch_size": accumulation * data, "precision": "bf16", "bucket_mb": 25.0}
    sections = {
        "model": model | {"tie_embeddings": hidden < 4096},
        "parallel": parallel | {"sequence_parallel": True},
        "train": train | {"compile": False},
    }
    cluster = load_cluster("eos").model_copy(update={"is_degraded": is_degraded})
    accelerator = load_accelerator(cluster.accelerator)
    machine = make_machine(cluster, accelerator, "bf16", gpus, practice("nanotron"))
    step = step_of(Config.model_validate(sections), gpus, machine)
    assert step_time(step).step_s == pytest.approx(measured_s, rel=0.3)


# BigScience's search for the shape of BLOOM: TP, PP, microbatch, and seconds of a step with 96 and with 128 heads,
# which have 144 and 108 channels (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md).
UNALIGNED = ((8, 6, 4, 124.75, 162.72), (4, 12, 2, 107.12, 147.41))


@pytest.mark.parametrize(("tensor", "pipeline", "micro", "aligned_s", "unaligned_s"), UNALIGNED)
def test_heads_of_unaligned_channels_cost_what_was_published(
    tensor: int, pipeline: int, micro: int, aligned_s: float, unaligned_s: float
) -> None:
    parallel = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, "zero_stage": 1}
    train = {"micro_batch_size": micro, "global_batch_size": 2048, "precision": "fp16", "bucket_mb": 25.0}
    train |= {"compile": False, "recompute_granularity": "full"}
    model = {"num_layers": 78, "hidden_size": 13824, "seq_length": 2048, "vocab_size": 250880, **DROPOUTS}
    machine, seconds = load_machine("selene", "fp16", 384, DEEPSPEED), []
    for heads in (96, 128):
        sections = {"model": model | {"num_attention_heads": heads}, "parallel": parallel, "train": train}
        seconds.append(step_time(step_of(Config.model_validate(sections), 384, machine)).step_s)
    assert seconds[1] / seconds[0] == pytest.approx(unaligned_s / aligned_s, rel=0.07)


@pytest.mark.parametrize("row", [*measured_on_h100("preset")], ids=lambda row: row["preset"])
def test_steps_of_this_framework_on_an_h100(row: Mapping[str, Any]) -> None:
    """The rates of single kernels give whole steps, none of which they were fitted to; memory is all tensors'."""
    step_s, gib = predicted_on_h100(row["preset"])
    assert 1e3 * step_s == pytest.approx(row["step_ms"], rel=0.02)
    assert gib == pytest.approx(row["peak_gib"], rel=1e-3)


@pytest.mark.parametrize("row", [*measured_on_h100("rank")], ids=lambda row: row["rank"])
def test_memory_of_ranks_on_an_h100(row: Mapping[str, Any]) -> None:
    """Ranks of large layouts at real size, which communicate with themselves."""
    spec = rank_spec(Place(torch.device("cpu"), False, Path()), RANKS[row["rank"]])
    assert predict_memory(spec, KERNELS["gpu"]).total / 2**30 == pytest.approx(row["peak_gib"], rel=1e-3)
