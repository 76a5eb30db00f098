"""Predicted and measured step times of a dozen layouts of the quickstart's model on this machine.

The machine is calibrated in the same run: calibration and a few steps of every layout alternate, and the median round
of both counts.  Ranks share the machine's cores, which the cluster `local` describes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common.report import Row, show, write

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.forecast.time.hardware import load_accelerator, load_cluster
from megatron3d.forecast.time.step import make_machine, predict_time
from megatron3d.runtime import process
from megatron3d.train.state import build_state, connect
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples
from tools import calibrate_cpu

MODEL = {
    "family": "llama",
    "num_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "seq_length": 256,
    "tie_embeddings": True,
    "vocab_size": 2048,
}
BATCH = 8


def tensor(mode: str, *shape: int, form: str | None = None) -> dict[str, Any]:
    """Return the keys of a tensor-parallel mode."""
    return {"tensor_parallel_mode": mode, "tensor_parallel_shape": shape, "tensor_parallel_form": form}


# Ranks, keys of `parallel`, keys of `train`.
LAYOUTS: tuple[tuple[str, int, dict[str, Any], dict[str, Any]], ...] = (
    ("one process", 1, {}, {"micro_batch_size": 8}),
    ("one process, small micro-batches", 1, {}, {"micro_batch_size": 1}),
    ("one process, layers again", 1, {}, {"micro_batch_size": 8, "recompute_granularity": "full"}),
    ("1d 2", 2, tensor("1d", 2), {"micro_batch_size": 8}),
    ("1d sp 2", 2, tensor("1d", 2, form="sequence_parallel"), {"micro_batch_size": 8}),
    ("data 2", 2, {}, {"micro_batch_size": 4}),
    ("pipeline 2", 2, {"pipeline_model_parallel_size": 2}, {"micro_batch_size": 2}),
    ("1d 4", 4, tensor("1d", 4), {"micro_batch_size": 8}),
    ("2d 2x2", 4, tensor("2d", 2, 2), {"micro_batch_size": 8}),
    ("data 2 x 1d 2, ZeRO 1", 4, {**tensor("1d", 2), "zero_stage": 1}, {"micro_batch_size": 4}),
    ("3d 2x2x2", 8, tensor("3d", 2, 2, 2), {"micro_batch_size": 8}),
    ("grid 2x2x2", 8, tensor("grid", 2, 2, 2), {"micro_batch_size": 8}),
)


def config_of(parallel: dict[str, Any], train: dict[str, Any], num_ranks: int) -> Config:
    """Return the configuration of a layout."""
    train = {"global_batch_size": BATCH, "precision": "fp32", **train}
    config = Config.model_validate({"model": MODEL, "parallel": parallel, "train": train})
    assert not (broken := check(config, num_ranks, 2048)), broken
    return config


def measure(configs: list[str], num_steps: int) -> list[float]:
    """Return the seconds of the fastest of a few steps of each layout, on one rank, with a barrier before each step."""
    best = []
    with process.start(on_cpu=True) as here:
        torch.set_num_threads(1)
        for text in configs:
            config = Config.model_validate_json(text)
            spec = RunSpec(config, here.world_size, 2048, here.rank)
            comm = connect(spec)
            state = build_state(spec, comm, here.device)
            samples = RandomSamples(0, 2048, spec.arch.seq_length)
            sizes = (config.train.micro_batch_size, BATCH, here.device)
            batch = BatchLoader(samples, comm.mesh, state.model.mode.batch_axes, *sizes).step(0)
            seconds = []
            for _ in range(num_steps):
                comm.barrier()
                begin = time.perf_counter()
                train_step(state, batch, 1e-4, StepSettings(0, BATCH * spec.arch.seq_length, BATCH)).loss.item()
                comm.barrier()
                seconds.append(time.perf_counter() - begin)
            best.append(min(seconds[1:]))
    return best


def compare(options: argparse.Namespace) -> list[Row]:
    """Calibrate and measure alternately, then predict; return a row per layout."""
    chosen = LAYOUTS[:4:3] if options.quick else LAYOUTS
    configs = {label: config_of(parallel, train, num_ranks) for label, num_ranks, parallel, train in chosen}
    numbers, seconds = [], defaultdict[str, list[float]](list)
    for _ in range(options.rounds):
        numbers.append(calibrate_cpu.measure(options.seconds))
        for num_ranks in sorted({each[1] for each in chosen}):
            mine = [each[0] for each in chosen if each[1] == num_ranks]
            texts = [configs[label].model_dump_json() for label in mine]
            alone = num_ranks == 1
            found = measure(texts, options.steps) if alone else process.launch(num_ranks, measure, texts, options.steps)
            for label, took in zip(mine, found, strict=True):
                seconds[label].append(took)
    with tempfile.TemporaryDirectory() as name:
        sheet, cluster = calibrate_cpu.write_files(Path(name), calibrate_cpu.medians(numbers))
        local, accelerator = load_cluster("local", cluster.parent), load_accelerator("local", sheet.parent)
    rows: list[Row] = []
    for label, num_ranks, *_ in chosen:
        config, took = configs[label], median(seconds[label])
        machine = make_machine(local, accelerator, "fp32", num_ranks)
        expected = predict_time(RunSpec(config, num_ranks, 2048), machine).step_s
        rows.append(
            {
                "layout": label,
                "ranks": num_ranks,
                "predicted_ms": 1e3 * expected,
                "measured_ms": 1e3 * took,
                "error_percent": 100 * (expected / took - 1),
                "fastest_ms": 1e3 * min(seconds[label]),
                "slowest_ms": 1e3 * max(seconds[label]),
            }
        )
    return rows


def pairs_in_order(rows: list[Row]) -> float:
    """Return the fraction of all pairs of layouts that prediction and measurement rank in the same order."""
    pairs = [(a, b) for index, a in enumerate(rows) for b in rows[:index]]
    same = [(a["predicted_ms"] < b["predicted_ms"]) == (a["measured_ms"] < b["measured_ms"]) for a, b in pairs]
    return sum(same) / len(same)  # type: ignore[no-any-return]


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=4, help="of each layout in a round, the first not counted; default: %(default)s"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds of calibration and measurement; default: %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="for each measurement of the machine in a round")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds = 2, 1
        options.seconds = 0.01
    rows = compare(options)
    show("predicted and measured steps of the quickstart's model", rows)
    print(f"pairs of layouts in the right order: {100 * pairs_in_order(rows):.0f} %")
    if options.output:
        write(options.output, rows, steps=options.steps, rounds=options.rounds, pairs_in_order=pairs_in_order(rows))


if __name__ == "__main__":
    main()
