"""Fact: a run logs where the time of its steps goes, on which rank, and names a slow rank.

Non-finite values are visible in every log; the tensor statistics of layers are equal in every layout.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron3d.data.loader import PrefetchingLoader
from megatron3d.errors import ExitCode
from megatron3d.metrics.journal import read_journal
from megatron3d.metrics.timers import BACKWARD, COMPUTES, EVALUATE, FORWARD, PARTS, SAVE, SCHEDULE
from megatron3d.parallel.modes import MODES
from megatron3d.train import loop
from megatron3d.train.state import TrainState
from tests.support.pool import Pool
from tests.support.tiny_run import in_run, run, run_as_rank, write_config

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("watching"))


def rows(folder: Path, key: str) -> list[dict[str, Any]]:
    return [row for row in read_journal(folder / "metrics.jsonl") if key in row]


def test_phase_times_add_up_to_at_most_the_step_time(config: Path, pool: Pool) -> None:
    """Check on two data-parallel ranks of two stages each, with the time between steps."""
    folder = config.parent / "phases"
    asked = [*in_run(str(folder)), "parallel.pipeline_model_parallel_size=2", "train.train_iters=6"]
    asked += ["train.eval_interval=4", "checkpoint.save_interval=4", "logging.log_interval=3"]
    assert pool.run(run_as_rank, 4, config, [asked]) == [[ExitCode.DONE]] * 4
    first, second = rows(folder, "timers")
    for row in (first, second):
        timers, elapsed = row["timers"], row["elapsed_ms"]
        assert {*PARTS, *COMPUTES, "along pipeline", "along data", "along pipeline·data"} <= timers.keys()
        assert all(0 <= each["min"] <= each["mean"] <= each["max"] for each in timers.values())
        assert all(0 <= each["max_rank"] < 4 for each in timers.values())
        assert sum(timers[part]["min"] for part in PARTS) <= elapsed, "elapsed_ms is rank 0's"
        busy = timers[FORWARD]["mean"] + timers[BACKWARD]["mean"]
        assert row["pipeline_bubble"] == pytest.approx(1 - busy / timers[SCHEDULE]["max"], abs=1e-3) and busy > 0
        assert row["memory"]["peak"]["max"] == row["peak_memory_bytes"] and row["memory"]["allocated"]["min"] > 0
    assert {EVALUATE, SAVE} & first["timers"].keys() == set() and {EVALUATE, SAVE} <= second["timers"].keys()


def run_slowed(rank: int, world_size: int, config: Path, asked: list[list[str]]) -> list[int]:
    """Run with a slow data loader on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        step = PrefetchingLoader.step

        def slow(data: PrefetchingLoader, first: int) -> Any:
            time.sleep(0.3 if rank == 1 else 0)
            return step(data, first)

        patch.setattr(PrefetchingLoader, "step", slow)
        return run_as_rank(rank, world_size, config, asked)


def test_a_slow_rank_is_named(config: Path, pool: Pool) -> None:
    folder = config.parent / "slowed"
    asked = [*in_run(str(folder)), "train.global_batch_size=12", "train.micro_batch_size=2", "train.train_iters=5"]
    asked += ["logging.straggler_factor=4", "logging.straggler_steps=3"]
    assert pool.run(run_slowed, 3, config, [asked]) == [[ExitCode.DONE]] * 3
    (row,) = rows(folder, "straggler")
    assert row["iteration"] >= 3 and row["straggler_rank"] == 1
    assert row["straggler"].startswith(f"rank 1 (host {socket.gethostname()}, CPU) is slow: ")


def test_nan_is_visible_in_every_output(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Non-finite loss, gradient and validation loss appear on the terminal, in metrics.jsonl and in tensorboard."""
    step = loop.train_step  # type: ignore[attr-defined]

    def spoiled(state: TrainState, *rest: Any, **named: Any) -> Any:
        for flat in state.buffers.flat_buffers if state.iteration == 1 else ():
            flat.main.mul_(math.nan)
        return step(state, *rest, **named)

    monkeypatch.setattr(loop, "train_step", spoiled)
    asked = [*in_run(f"{tmp_path}/run"), f"logging.tensorboard_dir={tmp_path}/events", "train.train_iters=2"]
    outcome = run(config, *asked, "train.eval_interval=2", "train.eval_iters=1")
    (line,) = (line for line in outcome.out.splitlines() if "iteration        2/" in line)
    assert "lm loss: NaN |" in line and "grad norm: nan |" in line and "skipped iterations:   1 |" in line
    assert "validation loss at iteration 2 | lm loss value: NaN" in outcome.out
    text = (tmp_path / "run/metrics.jsonl").read_text()
    assert '"lm_loss": NaN' in text and '"grad_norm": NaN' in text and '"validation_loss": NaN' in text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(f"{tmp_path}/events").Reload()
    for name in ("lm_loss", "grad_norm", "validation_loss"):
        assert math.isnan(events.Scalars(name)[-1].value), name


LAYOUTS = {
    "3d": ["parallel.tensor_parallel_mode=3d", "parallel.tensor_parallel_shape=[2,2,2]", "train.micro_batch_size=8"],
    "2d, data, ZeRO 2": [
        "parallel.tensor_parallel_mode=2d",
        "parallel.tensor_parallel_shape=[2,2]",
        "parallel.zero_stage=2",
        "train.recompute_granularity=full",
    ],
    "pipeline, data, ZeRO 3": [
        "parallel.pipeline_model_parallel_size=2",
        "parallel.tensor_model_parallel_size=2",
        "parallel.zero_stage=3",
    ],
}
MOMENTS = ["train.precision=fp64", "train.train_iters=2", "logging.log_moments_interval=2", "model.hidden_dropout=0.1"]


def flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        yield from flat(value, f"{path}/{name}") if isinstance(value, Mapping) else [(f"{path}/{name}", value)]


def test_tensor_statistics_are_the_same_in_every_layout(config: Path, pool: Pool) -> None:
    """Check with tied embeddings and padded vocabulary; the layers' gradients give the logged norm before clipping."""
    alone = config.parent / "moments alone"
    assert run(config, *in_run(str(alone)), *MOMENTS, "optimizer.clip_grad=0.01").code == ExitCode.DONE
    folders = {name: config.parent / f"moments {name}" for name in LAYOUTS}
    asked = [[*in_run(str(folders[name])), *MOMENTS, "optimizer.clip_grad=0.01", *LAYOUTS[name]] for name in LAYOUTS]
    assert pool.run(run_as_rank, 8, config, asked) == [[ExitCode.DONE] * len(asked)] * 8
    (reference,) = rows(alone, "moments")
    table = reference["moments"]
    layers = {"embedding", "layers.0", "layers.1"}
    assert table["params"].keys() == table["grads"].keys() == layers | {"final_norm"}
    assert table["activations"].keys() == layers
    sizes = {"embedding": (257 + 16) * 32, "final_norm": 64} | dict.fromkeys(("layers.0", "layers.1"), 12704)
    norm = math.sqrt(sum(sizes[name] * one["rms"] ** 2 for name, one in table["grads"].items()))
    assert norm == pytest.approx(rows(alone, "lm_loss")[-1]["grad_norm"], rel=1e-12)
    for name, folder in folders.items():
        (row,) = rows(folder, "moments")
        got, expected = dict(flat(row["moments"])), dict(flat(table))
        assert got.keys() == expected.keys()
        scale = {key: expected[key.replace("/mean", "/rms")] for key in expected}
        wrong = {key for key in expected if not abs(got[key] - expected[key]) <= TOLERANCE * scale[key]}
        assert not wrong, f"{name}: {wrong}"


def every_layout() -> dict[str, list[str]]:
    """Return layouts of 4 ranks: each mode on all, and each ZeRO stage on 2 with another schedule on the other 2."""
    found = {}
    for mode, entry in MODES.items():
        asked = {"mode": mode, "shape": list(entry.default_shape(4))}
        found[mode] = [f"parallel.tensor_parallel_{key}={value}" for key, value in asked.items()]
    for stage, name in enumerate(("1f1b", "interleaved", "zb-h1", "zb-v")):
        found[name] = ["parallel.pipeline_model_parallel_size=2", f"parallel.pipeline_schedule={name}"]
        found[name].append(f"parallel.zero_stage={stage}")
    return found


def run_told(rank: int, world_size: int, config: Path, asked: list[list[str]]) -> list[str]:
    """Return the lines of steps that a rank prints in all runs."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run_as_rank(rank, world_size, config, asked) == [ExitCode.DONE] * len(asked)
    return [line for line in out.getvalue().splitlines() if "iteration " in line and "lm loss" in line]


def test_every_layout_reports_the_same_numbers(config: Path, pool: Pool) -> None:
    """Loss, gradient norm and throughput agree in metrics.jsonl and on the console, where only rank 0 prints."""
    asked = ["train.precision=fp64", "train.train_iters=1", "optimizer.lr_warmup_iters=0"]
    asked += ["train.micro_batch_size=2", "model.num_layers=4"]
    alone = config.parent / "told alone"
    assert run(config, *in_run(str(alone)), *asked).code == ExitCode.DONE
    (expected,) = rows(alone, "lm_loss")
    folders = {name: config.parent / f"told {name}" for name in every_layout()}
    wanted = [[*in_run(str(folders[name])), *asked, *keys] for name, keys in every_layout().items()]
    first, *others = pool.run(run_told, 4, config, wanted)
    assert len(first) == len(folders) and not any(others)
    for (name, folder), line in zip(folders.items(), first, strict=True):
        (row,) = rows(folder, "lm_loss")
        for key in ("lm_loss", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=TOLERANCE), f"{name}: {key}"
        assert row["tokens_per_s"] == pytest.approx(4 * row["tokens_per_s_per_rank"]) and row["mfu"] > 0, name
        said = (f"lm loss: {expected['lm_loss']:.6E} |", f"grad norm: {expected['grad_norm']:.3f} |")
        assert all(words in line for words in (*said, f"tokens per second: {row['tokens_per_s']:.0f} |")), line


def test_a_profile_has_the_phases_of_a_step(config: Path) -> None:
    """Profiles are written for the requested iterations, on rank 0 alone."""
    folder = config.parent / "profiled"
    asked = [
        "train.train_iters=4",
        "logging.profile=true",
        "logging.profile_step_start=2",
        "logging.profile_step_end=4",
    ]
    outcome = run(config, *in_run(str(folder)), *asked)
    assert outcome.code == ExitCode.DONE, outcome.err
    (path,) = (folder / "profiles").iterdir()
    assert path.name == "iter_0000003_rank0.json.gz" and str(path) in outcome.out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert names.count("forward-backward") == names.count("optimizer") == 2
    assert names.count("0F3") == names.count("0B0") == 2


def test_a_memory_history_needs_a_gpu(config: Path, tmp_path: Path) -> None:
    asked = ["logging.profile=true", "logging.record_memory_history=true", "logging.profile_step_start=1"]
    outcome = run(config, *in_run(f"{tmp_path}/run"), *asked, "logging.profile_step_end=2")
    assert outcome.code == ExitCode.USER_ERROR and "record_memory_history=true: this run computes" in outcome.err
    assert not (tmp_path / "run").exists()
