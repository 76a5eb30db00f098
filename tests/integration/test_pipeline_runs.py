"""Fact: a pipelined run equals the run without a pipeline, bit for bit where nothing else is sharded.

Its folder has the same files, its checkpoints load under any other pipeline, and a rank that dies ends the others.
"""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from megatron3d.config.resolve import resolve
from megatron3d.errors import ExitCode
from megatron3d.metrics.journal import read_journal
from megatron3d.pipeline.schedules import SCHEDULES
from megatron3d.runtime import process
from megatron3d.runtime.program import StartupPhases
from megatron3d.train.build import build_run
from tests.support.checkpoints import save_state
from tests.support.dependencies import dual_pipe_v
from tests.support.pool import Pool
from tests.support.tiny_run import evaluations, in_run, launch_ranks, run, run_as_rank, steps, stored, write_config

MODEL = ["model.num_layers=8", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
EVALUATES = ["train.eval_interval=3", "train.eval_iters=1"]
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("pipelines"))


def pipeline(ranks: int, schedule: str, *more: str) -> list[str]:
    """Return the overrides that select a pipeline."""
    asked = {"pipeline_model_parallel_size": ranks, "pipeline_schedule": schedule}
    return [f"parallel.{key}={value}" for key, value in asked.items()] + [f"parallel.{text}" for text in more]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_pipeline_alone_changes_no_bit(config: Path, pool: Pool, precision: str) -> None:
    """Losses, evaluations, parameters and moments are equal for every schedule on 4 ranks, with dropout.

    The runs take 4 steps of 4 microbatches.  Tied embeddings would be reduced in another order, and so is the gradient
    norm, which must therefore not clip.
    """
    settings = [*MODEL, *EVALUATES, f"train.precision={precision}", "train.train_iters=4", "optimizer.clip_grad=0"]
    settings += ["model.tie_embeddings=false"]
    folders = {name: config.parent / f"{precision} {name}" for name in ("alone", *SCHEDULES)}
    asked = [[*in_run(str(folders[name])), *settings, *pipeline(4, name)] for name in SCHEDULES]
    assert run(config, *in_run(str(folders["alone"])), *settings).code == ExitCode.DONE
    assert pool.run(run_as_rank, 4, config, asked) == [[ExitCode.DONE] * len(asked)] * 4
    expected = stored(folders["alone"], 4)
    for name in SCHEDULES:
        got = stored(folders[name], 4)
        assert [row[:2] for row in steps(folders[name])] == [row[:2] for row in steps(folders["alone"])], name
        assert evaluations(folders[name]) == evaluations(folders["alone"]), name
        assert got.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(got[key], expected[key])] == [], name
        assert keys(folders[name]) == keys(folders["alone"])
        assert {path.name for path in folders[name].iterdir()} == {path.name for path in folders["alone"].iterdir()}


def keys(folder: Path) -> list[set[str]]:
    """Return the keys of each line of metrics.jsonl; rank 0 writes them, which has no loss in most schedules."""
    return [set(row) for row in read_journal(folder / "metrics.jsonl")]


def own_schedule(path: Path) -> list[str]:
    """Write a schedule for 2 microbatches: three stages on rank 0, one on rank 1, full and split backwards."""
    path.write_text("0F0,1F0,0F1,1F1,3F0,3B0,3F1,3B1,1B0,0B0,1B1,0B1\n2F0,2F1,2I0,2W0,2B1\n")
    return pipeline(2, "file", f"pipeline_schedule_file={path}")


def tensor(mode: str, *shape: int, **more: object) -> list[str]:
    asked = {"tensor_parallel_mode": mode, "tensor_parallel_shape": list(shape), **more}
    return [f"parallel.{key}={value}" for key, value in asked.items()]


def test_any_pipeline_continues_any_other(config: Path, pool: Pool, tmp_path: Path) -> None:
    """Each pipeline trains two steps on 8 ranks, with dropout and evaluations; all but the third are data-parallel."""
    settings = [*MODEL, *EVALUATES, "train.precision=fp64", *in_run(f"{tmp_path}/run")]
    assert run(config, *settings, *in_run(f"{tmp_path}/whole")).code == ExitCode.DONE
    others = [
        [*pipeline(4, "zb-h1"), "parallel.zero_stage=2"],
        [*pipeline(2, "interleaved", "virtual_pipeline_model_parallel_size=3"), *tensor("2d", 1, 2)],
        [*own_schedule(tmp_path / "mine.csv"), *tensor("1d", 4), "train.micro_batch_size=8"],
        [*pipeline(2, "zb-v"), *tensor("grid", 2, 1, 1), "parallel.zero_stage=3"],
    ]
    asked = [[*settings, *other, "train.exit_interval=2"] for other in others]
    codes = [ExitCode.STOPPED] * 3 + [ExitCode.DONE]
    assert pool.run(run_as_rank, 8, config, asked) == [codes] * 8
    for read in (steps, evaluations):
        got, expected = (read(tmp_path / name) for name in ("run", "whole"))
        assert len(got) == len(expected) > 0
        for row, other in zip(got, expected, strict=True):
            assert row == pytest.approx(other, rel=TOLERANCE, abs=0)
    got, expected = (stored(tmp_path / name, 8) for name in ("run", "whole"))  # type: ignore[assignment]
    assert got.keys() == expected.keys()  # type: ignore[union-attr]
    assert {name: error for name in expected if (error := distance(got[name], expected[name])) > TOLERANCE} == {}  # type: ignore[call-overload]


def test_torchs_dual_pipe_v_equals_one_process(config: Path, pool: Pool, tmp_path: Path) -> None:
    """The file that torch's DualPipeV writes, with its overlapped forwards and backwards, trains 4 steps on 2 ranks."""
    settings = [*MODEL, "train.precision=fp64", "train.train_iters=4"]
    file = tmp_path / "dual_pipe_v.csv"
    file.write_text("\n".join(map(",".join, dual_pipe_v(2, 4))))
    assert run(config, *settings, *in_run(f"{tmp_path}/alone")).code == ExitCode.DONE
    asked = [*settings, *in_run(f"{tmp_path}/run"), *pipeline(2, "file", f"pipeline_schedule_file={file}")]
    assert pool.run(run_as_rank, 2, config, [asked]) == [[ExitCode.DONE]] * 2
    for row, other in zip(steps(tmp_path / "run"), steps(tmp_path / "alone"), strict=True):
        assert row == pytest.approx(other, rel=TOLERANCE, abs=0)
    got, expected = (stored(tmp_path / name, 4) for name in ("run", "alone"))
    assert got.keys() == expected.keys()
    assert {name: error for name in expected if (error := distance(got[name], expected[name])) > TOLERANCE} == {}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def save_again(rank: int, world_size: int, config: Path, asked: list[list[str]], folders: list[Path]) -> None:
    """Load a checkpoint in each layout and save it to another folder."""
    for overrides, folder in zip(asked, folders, strict=True):
        here = process.Runtime(rank, world_size, rank, torch.device("cpu"))
        built = build_run(resolve(config, overrides, world_size), here, StartupPhases(printing=False))
        save_state(folder, built.state, built.identity)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_loading_and_saving_in_any_pipeline_keeps_every_bit(
    config: Path, pool: Pool, tmp_path: Path, tied: str
) -> None:
    """Weights and moments of bf16 runs pass through three pipelines bit for bit, embeddings on one rank or two."""
    settings = [*MODEL, "train.precision=bf16", f"model.tie_embeddings={tied}", "train.train_iters=3"]
    folders = [tmp_path / str(place) for place in range(4)]
    assert run(config, *settings, *in_run(str(folders[0]))).code == ExitCode.DONE
    layouts = [
        [*pipeline(4, "1f1b"), *tensor("1d", 2)],
        [*pipeline(2, "zb-v"), *tensor("3d", 1, 2, 2)],
        [*pipeline(4, "interleaved"), "parallel.zero_stage=3"],
    ]
    asked = [
        [*settings, *layout, f"checkpoint.load={source}", "checkpoint.save=null"]
        for layout, source in zip(layouts, folders, strict=False)
    ]
    pool.run(save_again, 8, config, asked, folders[1:])
    expected = stored(folders[0], 3)
    for folder in folders[1:]:
        got = stored(folder, 3)
        assert got.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(got[key], expected[key])] == [], folder.name


def begun(config: Path, *asked: str) -> list[subprocess.Popen[str]]:
    """Start three pipeline ranks of an endless run and wait for three steps; the first rank has no head."""
    endless = ["train.train_iters=1000000", "optimizer.lr_decay_style=constant"]
    typed = ["--config", str(config), *MODEL, *pipeline(3, "1f1b"), *endless, *asked]
    ranks = launch_ranks(["pretrain_gpt.py", *typed], 3)
    assert ranks[0].stdout is not None, "launch_ranks() pipes the output"
    assert any("iteration        3/" in line for line in ranks[0].stdout), ranks[0].communicate()[1]
    return ranks


def test_a_rank_that_dies_ends_the_others(config: Path) -> None:
    """The other ranks end without a launcher's help, although the first has no link to the last."""
    ranks = begun(config, *in_run("null"))
    ranks[2].kill()
    began = time.monotonic()
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.CRASH, ExitCode.CRASH, -signal.SIGKILL], errors
    assert time.monotonic() - began < 30
    for error in errors[:2]:
        assert "since another rank has ended" in error and "Traceback" not in error


@pytest.mark.parametrize(("number", "signalled"), [(signal.SIGINT, [0, 1, 2]), (signal.SIGTERM, [1])])
def test_a_signal_saves_and_stops_every_rank(
    config: Path, tmp_path: Path, number: signal.Signals, signalled: list[int]
) -> None:
    """Every rank saves and stops, whether Ctrl-C reaches all of them or a batch system signals one."""
    ranks = begun(config, *in_run(f"{tmp_path}/run"))
    for rank in signalled:
        ranks[rank].send_signal(number)
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.STOPPED] * 3, said
    last = steps(tmp_path / "run")[-1][0]
    assert f"> saved {tmp_path}/run/iter_{last:07d}\n" in said[0][0]
    assert [err.count("\n") for _, err in said] == [int(0 in signalled), 0, 0], said
