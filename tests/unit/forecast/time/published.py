"""Published runs as configurations, and the cost model's predictions for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.time.layer import Machine
from megatron3d.forecast.time.practices import MEGATRON_2021, MEGATRON_CORE, ExecutionProfile, divided_as
from megatron3d.forecast.time.step import SimulatedStep, load_machine, simulated_step, step_time

DATA = Path(__file__).parent / "data"
Row = Mapping[str, Any]


def read(name: str) -> Any:
    """Read a file of published numbers."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def run(row: Row, num_stages: int = 1, **train: Any) -> Config:
    """Return a run with `num_stages` stages on each pipeline rank."""
    layers, ranks = row["layers"], row["pp"]
    model = {"num_layers": layers, "hidden_size": row["hidden"], "num_attention_heads": row["heads"]}
    model |= {"seq_length": row["seq"], "vocab_size": row["vocab"]} | row.get("model_keys", {})
    parallel = {
        "tensor_model_parallel_size": row["tp"],
        "pipeline_model_parallel_size": ranks,
        "pipeline_model_parallel_layout": [layers // ranks // num_stages] * (ranks * num_stages),
    }
    if num_stages > 1:
        parallel |= {"pipeline_schedule": "interleaved", "virtual_pipeline_model_parallel_size": num_stages}
    sections = {
        "model": model,
        "parallel": parallel | row.get("parallel_keys", {}),
        "train": {"bucket_mb": 25.0, "compile": False, **train},
    }
    return Config.model_validate(sections)


def step_of(config: Config, num_gpus: int, machine: Machine) -> SimulatedStep:
    """Return the predicted step of a run."""
    assert config.model.vocab_size is not None, "published runs have a vocabulary"
    return simulated_step(divided_as(RunSpec(config, num_gpus), machine.profile), machine)


DROPOUTS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def sc21_step(row: Row, profile: ExecutionProfile = MEGATRON_2021, num_stages: int | None = None) -> SimulatedStep:
    """Return the step of a row of table 1 of Narayanan et al. 2021, or a variant with another profile or stages."""
    machine = load_machine("selene", "fp16", row["gpus"], profile)
    train = {"micro_batch_size": row["micro_batch"], "global_batch_size": row["batch"]}
    here = {**row, "seq": 2048, "vocab": 51200, "model_keys": DROPOUTS}
    config = run(here, num_stages or row["virtual_chunks_v"], precision="fp16", recompute_granularity="full", **train)
    return step_of(config, row["gpus"], machine)


def sc21_tflops(row: Row) -> float:
    """Return the TFLOP/s per GPU by the paper's equation 3, which includes the recomputed forward."""
    h, layers, seq = row["hidden"], row["layers"], 2048
    flops = 96 * row["batch"] * seq * layers * h**2 * (1 + seq / (6 * h) + 51200 / (16 * layers * h))
    return float(flops / step_time(sc21_step(row)).step_s / row["gpus"] / 1e12)


def core_tflops(row: Row) -> float:
    """Return the TFLOP/s per GPU of a row of Megatron-Core's table, by its count of FLOPs.

    Microbatch sizes and virtual stages are not published: the fastest predicted ones are used for all rows.
    """
    machine = load_machine("eos", "bf16", row["gpus"], MEGATRON_CORE)
    per_rank, each = row["gbs"] // row["dp"], row["layers"] // row["pp"]
    micro_batches = [n for n in (1, 2, 4) if per_rank % n == 0] if row["pp"] == 1 else [1]
    stages = [v for v in range(1, each + 1) if each % v == 0] if row["pp"] > 1 else [1]
    parallel = {"zero_stage": 1, "sequence_parallel": row["tp"] > 1}
    here = {**row, "seq": 4096, "vocab": 131072, "parallel_keys": parallel}
    times = [
        step_time(
            step_of(
                run(here, v, precision="bf16", micro_batch_size=n, global_batch_size=row["gbs"]), row["gpus"], machine
            )
        ).step_s
        for n in micro_batches
        for v in (stages[0], *stages[1:])
    ]
    h, layers, seq = row["hidden"], row["layers"], 4096
    flops = 72 * row["gbs"] * seq * layers * h**2 * (1 + seq / (6 * h) + 131072 / (12 * layers * h))
    return float(flops / min(times) / row["gpus"] / 1e12)


def without_scatter(profile: ExecutionProfile) -> ExecutionProfile:
    """Return the profile without the paper's scatter/gather."""
    return replace(profile, scatters_pipeline=False)
