"""Fact: a run keeps its state in the memory of two ranks, from which another layout goes on without one of them.

Its losses are those of a run that keeps nothing; memory and bytes are the closed form's.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.config.resolve import resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.memory.rank import in_memory_bytes, predict_memory, snapshot_bytes
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.runtime.process import Runtime
from megatron3d.runtime.program import StartupPhases, StopSignal
from megatron3d.train.build import build_run
from megatron3d.train.checkpointing import held_pieces
from megatron3d.train.loop import train
from megatron3d.train.restore import restore
from megatron3d.train.state import build_state, connect
from tests.support.pool import Pool
from tests.support.tiny_run import in_run, run_as_rank, steps, stored, write_config

CPU = torch.device("cpu")
TYPED = [
    "train.train_iters=5",
    "model.make_vocab_size_divisible_by=1",
    "train.precision=fp64",
    "checkpoint.save_interval=4",
    "optimizer.ema_decay=0.9",
]
BEFORE = ["parallel.tensor_model_parallel_size=2", "parallel.zero_stage=1"]
AFTER = ["parallel.pipeline_model_parallel_size=2", "parallel.tensor_parallel_mode=1d"]


def train_and_lose(rank: int, world_size: int, config: Path, typed: list[str], lost: int) -> dict[str, Any]:
    """Train, and let a rank without memory and the others go on in another layout; return what was found."""
    out = io.StringIO()
    here = Runtime(rank, world_size, rank, CPU)
    with contextlib.redirect_stdout(out):
        run = build_run(resolve(config, typed, world_size), here, StartupPhases(printing=False))
        assert run.memory is not None
        begin = run.memory.sent_bytes
        train(run, StopSignal())
        run.close()
    held = run.memory.held() if rank != lost else ()
    other = resolve(config, [*typed, *AFTER, "parallel.tensor_model_parallel_size=1"], world_size).config
    spec = RunSpec(other, world_size, run.spec.arch.vocab_size, rank)
    state = build_state(spec, connect(spec), CPU, initializes=False)
    found = restore(state, held, None, run.identity)
    whole = stored(Path(typed[0].partition("=")[2]), 4)
    wrong = [
        piece.key
        for piece in held_pieces(state)
        if not piece.tensor.equal(whole[piece.name][tuple(slice(*ends) for ends in piece.box)])
    ]
    step = make_step_spec(run.spec)
    return {
        "out": out.getvalue(),
        "wrong": wrong,
        "restored": (found.iteration, found.folder, state.iteration, state.consumed_samples),
        "steps": sorted(each.meta["iteration"] for each in held),
        "bytes": (run.memory.num_bytes, in_memory_bytes(step)),
        "sent": (run.memory.sent_bytes - begin, snapshot_bytes(step)),
    }


@pytest.mark.parametrize("lost", [1])
def test_another_layout_goes_on_from_memory_without_a_rank(pool: Pool, tmp_path: Path, lost: int) -> None:
    config = write_config(tmp_path)
    plain = [*in_run(f"{tmp_path}/plain"), *TYPED, *BEFORE]
    pool.run(run_as_rank, 4, config, [plain])
    typed = [*in_run(f"{tmp_path}/kept"), *TYPED, *BEFORE, "checkpoint.in_memory_interval=2"]
    found = pool.run(train_and_lose, 4, config, typed, lost)
    assert steps(tmp_path / "kept") == steps(tmp_path / "plain"), "copies change no number"
    for rank, each in enumerate(found):
        assert each["wrong"] == [] and each["restored"] == (4, None, 4, 64)
        assert each["steps"] == ([] if rank == lost else [2, 2, 4, 4])
        measured, expected = each["bytes"]
        assert 0.95 < expected / measured < 1.05, f"{measured} bytes of memory, not {expected}"
        sent, once = each["sent"]
        assert 0.85 < once * 2 / sent < 1.3, f"{sent} bytes sent, not twice {once} and the metadata"
    said = found[0]["out"]
    assert "> in-memory checkpoints every 2 iterations: rank 0 sends " in said
    assert "to rank 2, on the only host, so that they do not outlive it; they take" in said


def test_the_prediction_has_the_memory_of_the_copies(tmp_path: Path) -> None:
    """On a CPU they share the ranks' memory; a rank alone has no copies."""
    config = write_config(tmp_path)
    asked = ["checkpoint.in_memory_interval=3", *BEFORE]

    def memory(world_size: int, *typed: str) -> Mapping[str, int]:
        spec = RunSpec(resolve(config, [*in_run(f"{tmp_path}/run"), *typed], world_size).config, world_size, 61)
        return predict_memory(spec).categories | {"copies": in_memory_bytes(make_step_spec(spec))}

    without, kept = memory(4, *BEFORE), memory(4, *asked)
    assert kept["buffers"] - without["buffers"] == kept["copies"] > 0
    assert {name: size for name, size in kept.items() if name != "buffers"} == {
        name: size for name, size in without.items() if name != "buffers"
    }
    assert memory(1, asked[0])["buffers"] == memory(1)["buffers"]


def test_a_run_alone_keeps_no_copies(pool: Pool, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    typed = [*in_run(f"{tmp_path}/run"), *TYPED, "checkpoint.in_memory_interval=1"]
    assert pool.run(run_as_rank, 1, config, [typed]) == [[0]]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("iteration") == 5 for row in rows)
