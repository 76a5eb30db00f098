"""The declared training set of `fit_cost_model.py`: published runs as simulated steps."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.report import ROOT
from fit.fit_sample import NANOTRON, VTRAIN

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.time.practices import ON, PROFILES, divided_as
from megatron3d.forecast.time.step import SimulatedStep, load_machine, simulated_step, step_time
from tests.unit.forecast.time import held_out, published

# Runs of nanotron whose nodes measured less than this before they began are left out: a link was broken.  Others have
# 390 GB/s and more.
LEAST_BANDWIDTH = 100.0
# All-reduces of nanotron's runs in a node measured either 410 to 430 GB/s or 450 to 460; those between nodes, over 64
# ranks and more, up to 100 or from 150.  A run with the lower of either was on a degraded cluster.
HEALTHY_IN_NODE, HEALTHY_BETWEEN = 440.0, 125.0
# Throughputs of https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md (Apache 2.0),
# runs in fp8 left out, and the layers, hidden sizes and heads of its models.
FOUNDRY = ROOT / "benchmarks" / "fit" / "llm_foundry.csv"
FOUNDRY_CLUSTERS = {"a100_80gb": "selene", "a100_40gb": "dgx_a100_40gb", "h100_80gb": "eos"}
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
FSDP_GROUPS = ("fsdp_a100", "fsdp_h100", "olmo3", "tinyllama")


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        choice: what layouts of the same choice have in common: model, batch and cluster.
    """

    group: str
    practice: str
    choice: tuple[object, ...]
    measured_s: float
    step: SimulatedStep

    def is_on(self, name: str) -> bool:
        """Return whether the accelerator is of the kind in the name of a practice, as in `PyTorch FSDP on a100`."""
        return Path(self.step.machine.network.cluster.accelerator).stem.startswith(name.partition(ON)[2])


def declared_rows(samples: Path) -> Iterator[Run]:
    """Yield all rows that set constants."""
    yield from vtrain_rows(samples / VTRAIN)
    yield from sc21_rows()
    yield from fsdp_rows()
    yield from foundry_rows()
    yield from nanotron_rows(samples / NANOTRON)


def vtrain_rows(path: Path) -> Iterator[Run]:
    """Yield Megatron-LM on up to 8 A100 of one node, with full recomputation."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line.removeprefix("# ") for line in file):
            num = {key: float(value) for key, value in row.items()}
            gpus, batch, hidden = (int(num[key]) for key in ("GPUs", "global batch", "hidden size"))
            model = {"num_layers": int(num["# layers"]), "hidden_size": hidden, "vocab_size": 51200}
            model |= {"num_attention_heads": int(num["attention heads"]), "seq_length": int(num["sequence length"])}
            config = config_of(
                model | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
                {
                    "tensor_model_parallel_size": int(num["tensor parallelism"]),
                    "pipeline_model_parallel_size": int(num["pipeline parallelism"]),
                },
                {"micro_batch_size": int(num["micro batch"]), "global_batch_size": batch, "precision": "fp16"}
                | {"recompute_granularity": "full"},
            )
            choice = ("vtrain", model["num_layers"], hidden, batch, gpus)
            seconds = num["iteration time (ms)"] / 1e3
            step = step_of(config, "selene", gpus, "Megatron-LM, 2021")
            yield Run("Megatron-LM on one node (vTrain)", "Megatron-LM, 2021", choice, seconds, step)


def sc21_rows() -> Iterator[Run]:
    """Yield Megatron-LM's weak scaling on 32 to 3072 A100 (Narayanan et al. 2021, table 1)."""
    for row in published.read("megatron_sc21")["rows"]:
        step = published.sc21_step(row)
        seconds = step_time(step).step_s * published.sc21_tflops(row) / row["tflops_per_gpu"]
        yield Run("Narayanan et al. 2021", "Megatron-LM, 2021", ("sc21", row["gpus"]), seconds, step)


def fsdp_rows() -> Iterator[Run]:
    """Yield torchtitan, OLMo and TinyLlama."""
    for row in held_out.ROWS:
        if row["group"] in FSDP_GROUPS:
            each = held_out.beside(row)
            step = held_out.step_for(row)
            seconds = held_out.step_time(step).step_s * each.predicted / each.published
            yield Run("FSDP", "PyTorch FSDP", (each.name,), seconds, step)


def foundry_rows() -> Iterator[Run]:
    """Yield MosaicML's runs of MPT with PyTorch FSDP on A100 and H100, lengths 512 to 65,536 (`llm_foundry.csv`)."""
    with FOUNDRY.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gpus, micro, length = (int(row[key]) for key in ("gpus", "microbatch", "seq_length"))
            batch, cluster = micro * int(row["accumulation"]) * gpus, FOUNDRY_CLUSTERS[row["gpu"]]
            layers, hidden, heads = MPT[row["model"]]
            model = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": length}
            train = {"micro_batch_size": micro, "global_batch_size": batch, "precision": "bf16", "compile": False}
            config = config_of(
                model | {"vocab_size": 50368, "add_bias_linear": False},
                {"zero_stage": 3 if row["sharding"] == "FULL_SHARD" else 2},
                train | {"recompute_granularity": "full" if row["recomputes"] == "1" else None},
            )
            seconds = batch * length / gpus / float(row["tokens_per_s_per_gpu"])
            choice = ("foundry", row["model"], length, gpus, row["gpu"])
            step = step_of(config, cluster, gpus, "PyTorch FSDP")
            yield Run(f"MPT on {row['gpu'].split('_')[0].upper()}", "PyTorch FSDP", choice, seconds, step)


def nanotron_rows(path: Path) -> Iterator[Run]:
    """Yield finished runs of nanotron on 1 to 64 nodes of 8 H100, those with a pipeline after its engine was mended."""
    for row in nanotron_table(path):
        if not is_mended(row) or float(row["AR Intra-node (GB/s)"]) < LEAST_BANDWIDTH:
            continue
        gpus, config = 8 * int(float(row["nodes"])), nanotron_config(row)
        tokens = config.train.global_batch_size * config.model.seq_length
        choice = ("nanotron", row["hidden_size"], row["num_layers"], gpus)
        seconds = tokens / gpus / float(row["tok/s/gpu"])
        step = step_of(config, "eos", gpus, "nanotron")
        yield Run("nanotron", "nanotron", choice, seconds, on_degraded(step) if is_degraded(row) else step)


def is_degraded(row: Mapping[str, str]) -> bool:
    """Return whether a row of nanotron's table measured the lower bandwidth in its nodes or between them."""
    inside, between = float(row["AR Intra-node (GB/s)"]), float(row["AllReduce (GB/s)"])
    return inside < HEALTHY_IN_NODE or between < HEALTHY_BETWEEN


def on_degraded(step: SimulatedStep) -> SimulatedStep:
    """Return a step on its cluster in the degraded state."""
    network = step.machine.network
    cluster = network.cluster.model_copy(update={"is_degraded": True})
    return replace(step, machine=replace(step.machine, network=replace(network, cluster=cluster)))


def nanotron_table(path: Path, status: str = "Success") -> Iterator[dict[str, str]]:
    """Yield the rows of nanotron's table that ended so."""
    with path.open(encoding="utf-8", newline="") as file:
        yield from (row for row in csv.DictReader(file) if row["status"] == status)


def is_mended(row: Mapping[str, str]) -> bool:
    """Return whether a row of nanotron's table has no pipeline, or one of the engine after it was mended."""
    return int(row["pp"]) == 1 or row["after_pp_fix"] == "True"


def nanotron_config(row: Mapping[str, str]) -> Config:
    """Return the configuration of a row of nanotron's table."""
    heads, data, tensor = int(row["num_heads"]), int(row["dp"]), int(row["tp"])
    model = {
        "family": "llama",
        "num_layers": int(row["num_layers"]),
        "hidden_size": int(row["hidden_size"]),
        "ffn_hidden_size": int(float(row["interm_dim"] or 3.5 * int(row["hidden_size"]))),
        "num_attention_heads": heads,
        "num_query_groups": int(float(row["num_kv_heads"] or heads)),
        "seq_length": int(row["seq_len"]),
        "vocab_size": int(row["vocab_size"]),
        "tie_embeddings": row["tie_word_embeddings"] == "True",
    }
    parallel = {
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,
        "pipeline_model_parallel_size": int(row["pp"]),
        "zero_stage": int(row["zero_stage"]),
    }
    micro = int(row["mbs"])
    batch = micro * int(float(row["batch_accum"])) * data
    return config_of(
        model, parallel, {"micro_batch_size": micro, "global_batch_size": batch, "precision": "bf16", "compile": False}
    )


def config_of(model: Mapping[str, Any], parallel: Mapping[str, Any], train: Mapping[str, Any]) -> Config:
    """Return a configuration of three sections."""
    return Config.model_validate({"model": model, "parallel": parallel, "train": {"bucket_mb": 25.0, **train}})


def step_of(config: Config, cluster: str, gpus: int, practice: str) -> SimulatedStep:
    """Return the simulated step of a run without fitted terms."""
    machine = load_machine(cluster, config.train.precision, gpus, PROFILES[practice])
    return simulated_step(divided_as(RunSpec(config, gpus), machine.profile), machine)
