"""Fact: a resumed run equals the run that never stopped: bit for bit in the same layout, within 1e-10 in any other.

A rank that dies ends the run and leaves its last checkpoint complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.checkpoint import store
from megatron3d.errors import ExitCode
from megatron3d.metrics import MetricsWriter, StepRecord
from megatron3d.metrics.journal import FILE_NAME, read_journal
from megatron3d.runtime import process
from megatron3d.train import loop
from tests.support.pool import Pool
from tests.support.tiny_run import (
    LAUNCHED,
    evaluations,
    in_run,
    launch,
    launch_forked,
    launch_local,
    run,
    run_as_rank,
    steps,
    stored,
    tree,
    write_config,
)

HARD = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1", "train.eval_interval=3", "train.eval_iters=1"]
FP64 = [*HARD, "train.precision=fp64"]
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    """Return the folder of a run of 8 iterations in float64 that never stopped."""
    folder = config.parent / "whole"
    assert run(config, *in_run(str(folder)), *FP64).code == ExitCode.DONE
    return folder


def assert_same_run(folder: Path, reference: Path) -> None:
    """Require equal bits of every logged number and every stored tensor, each present once."""
    assert steps(folder) == steps(reference)
    assert evaluations(folder) == evaluations(reference)
    got, wanted = stored(folder, 8), stored(reference, 8)
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


def assert_near_run(folder: Path, reference: Path) -> None:
    """Require equality of the resumed run with the other within float64 rounding."""
    for got, wanted in ((steps(folder), steps(reference)), (evaluations(folder), evaluations(reference))):
        assert [row[0] for row in got] == [row[0] for row in wanted]
        assert all(
            value == pytest.approx(other, rel=TOLERANCE, abs=0)
            for row, expected in zip(got, wanted, strict=True)
            for value, other in zip(row, expected, strict=True)
        )
    got_tensors, tensors = stored(folder, 8), stored(reference, 8)
    errors = {name: (got_tensors[name] - tensor).abs().max().item() for name, tensor in tensors.items()}
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


def after_each_step(patch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Call `act` after the report of each step."""
    report = MetricsWriter.step

    def step(writer: MetricsWriter, record: StepRecord, more: Mapping[str, float]) -> None:
        report(writer, record, more)
        act(record.iteration)

    patch.setattr(MetricsWriter, "step", step)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_the_same_layout_continues_bit_for_bit(config: Path, precision: str) -> None:
    """Resume a run with dropout and four microbatches per step."""
    once, twice = (config.parent / f"{precision}-{name}" for name in ("once", "twice"))
    settings = [*HARD, f"train.precision={precision}"]
    assert run(config, *in_run(str(once)), *settings).code == ExitCode.DONE
    first = run(config, *in_run(str(twice)), *settings, "train.exit_interval=4")
    assert first.code == ExitCode.STOPPED, first
    assert [iteration for iteration, *_ in steps(twice)] == [1, 2, 3, 4]
    second = run(config, *in_run(str(twice)), *settings)
    assert second.code == ExitCode.DONE and f"> continuing from {twice}/iter_0000004" in second.out
    assert_same_run(twice, once)


def test_a_finished_run_has_nothing_to_do(config: Path, whole: Path) -> None:
    before = tree(whole)
    assert run(config, *in_run(str(whole)), *FP64).code == ExitCode.DONE
    assert tree(whole) == before


def test_another_run_continues_in_its_own_folder(config: Path, whole: Path, tmp_path: Path) -> None:
    before = tree(whole)
    places = [f"checkpoint.save={tmp_path}/more", f"checkpoint.load={whole}", "train.train_iters=9"]
    assert run(config, *FP64, *places).code == ExitCode.DONE
    assert [iteration for iteration, *_ in steps(tmp_path / "more")] == [9]
    assert tree(whole) == before


def test_iterations_after_the_checkpoint_are_logged_once(config: Path, whole: Path, tmp_path: Path) -> None:
    """The run crashes at iteration 6, after the checkpoint of iteration 4."""
    settings = [*in_run(f"{tmp_path}/run"), *FP64, "checkpoint.save_interval=4"]

    def crash(iteration: int) -> None:
        if iteration == 6:
            raise RuntimeError("the machine is gone")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="the machine is gone"):
        after_each_step(patch, crash)
        run(config, *settings)
    assert [iteration for iteration, *_ in steps(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert run(config, *settings).code == ExitCode.DONE
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_the_next_run_continues(
    config: Path, whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    settings = [*in_run(f"{tmp_path}/run"), *FP64]
    with pytest.MonkeyPatch.context() as patch:
        after_each_step(patch, lambda iteration: os.kill(os.getpid(), number) if iteration == 2 else None)
        assert run(config, *settings).code == ExitCode.STOPPED
    assert 2 < len(steps(tmp_path / "run")) <= 4, "it stops within two steps"
    assert run(config, *settings).code == ExitCode.DONE
    assert_same_run(tmp_path / "run", whole)


def test_a_signal_stops_a_run_in_which_a_library_took_it(config: Path, tmp_path: Path) -> None:
    """As the compiler of the first step does on a GPU (`test_process.py`)."""

    def take_then_send(iteration: int) -> None:
        if iteration == 1:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if iteration == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.MonkeyPatch.context() as patch:
        after_each_step(patch, take_then_send)
        assert run(config, *in_run(f"{tmp_path}/run")).code == ExitCode.STOPPED


@pytest.mark.parametrize("kind", ["file", "folder", "full folder"])
def test_a_stop_file_or_folder_saves(config: Path, tmp_path: Path, kind: str) -> None:
    settings, stop = [*in_run(f"{tmp_path}/run"), *FP64], tmp_path / "run" / "stop"

    def ask(iteration: int) -> None:
        if iteration == 2:
            stop.touch() if kind == "file" else (stop / ("x" * (kind == "full folder"))).mkdir(parents=True)
        time.sleep(0.1)  # a thread looks for it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.StopFile, "INTERVAL_S", 0.01)
        after_each_step(patch, ask)
        outcome = run(config, *settings)
    assert outcome.code == ExitCode.STOPPED and "> saved" in outcome.out
    assert [row["stop"] for row in read_journal(tmp_path / "run" / FILE_NAME) if "stop" in row] == ["the file `stop`"]
    assert stop.exists() == ("cannot be removed (Directory not empty)" in outcome.out) == (kind == "full folder")


def test_a_crash_does_not_cost_the_checkpoint_that_is_being_written(config: Path, tmp_path: Path) -> None:
    """Bug that this finds: a rank that raises ends its process, and a nearly complete checkpoint with it."""
    written = store.write_boxes

    def slowly(*arguments: Any) -> Any:
        time.sleep(1.0)
        return written(*arguments)

    def crash(iteration: int) -> None:
        assert iteration < 3, "a crash"

    settings = [*in_run(f"{tmp_path}/run"), "checkpoint.async_save=true", "checkpoint.save_interval=2"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="a crash"):
        patch.setattr(store, "write_boxes", slowly)
        after_each_step(patch, crash)
        run(config, *settings)
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "2\n"


def test_outputs_are_closed_after_the_watchdogs_end(config: Path, tmp_path: Path) -> None:
    """Bug that this finds: an upload to wandb at the end, longer than the watchdog waits, is a run that hangs."""
    start, close, told = process.start, MetricsWriter.close, list[str]()

    def tell(metrics: MetricsWriter) -> None:
        told.append("closed")
        close(metrics)

    @contextlib.contextmanager
    def watched(*arguments: Any, **options: Any) -> Iterator[process.Runtime]:
        with start(*arguments, **options) as here:
            yield here
        told.append("ranks have parted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start", watched)
        patch.setattr(MetricsWriter, "close", tell)
        assert run(config, *in_run(f"{tmp_path}/run"), "train.train_iters=2").code == ExitCode.DONE
    assert told == ["ranks have parted", "closed"]


def test_a_folder_in_the_way_is_one_message(config: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    outcome = run(config, *in_run(f"{tmp_path}/run"))
    assert (outcome.code, outcome.err.count("\n")) == (ExitCode.USER_ERROR, 1), outcome.err
    assert f"{tmp_path}/run/" in outcome.err and "Is a directory" in outcome.err


def test_a_reached_time_limit_saves_and_the_next_run_continues(config: Path, whole: Path, tmp_path: Path) -> None:
    settings = [*in_run(f"{tmp_path}/run"), *FP64]
    assert run(config, *settings, "train.exit_duration_in_mins=1e-9").code == ExitCode.STOPPED
    assert 0 < len(steps(tmp_path / "run")) <= 2
    assert run(config, *settings).code == ExitCode.DONE
    assert_same_run(tmp_path / "run", whole)


def test_any_layout_continues_any_other(config: Path, whole: Path, pool: Pool, tmp_path: Path) -> None:
    """Train two steps in each layout: 3-D, one process, 2-D with data parallelism, sequence and data parallelism."""
    settings = [*in_run(f"{tmp_path}/run"), *FP64, "train.exit_interval=2"]
    cube, square = (
        [*settings, f"parallel.tensor_parallel_mode={mode}", f"parallel.tensor_parallel_shape={shape}"]
        for mode, shape in (("3d", [2, 2, 2]), ("2d", [2, 2]))
    )
    sequence = [*settings, "parallel.tensor_model_parallel_size=4", "parallel.sequence_parallel=true"]
    assert pool.run(run_as_rank, 8, config, [cube]) == [[ExitCode.STOPPED]] * 8
    assert run(config, *settings).code == ExitCode.STOPPED
    assert pool.run(run_as_rank, 8, config, [square, sequence]) == [[ExitCode.STOPPED, ExitCode.DONE]] * 8
    assert_near_run(tmp_path / "run", whole)


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return the exit code and the remaining output; kill the process after a minute."""
    try:
        out, err = child.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    return child.returncode, out, err


def wait_for(child: subprocess.Popen[str], words: str) -> None:
    """Read lines until one contains the words."""
    assert child.stdout is not None, "launch() pipes the output"
    lines = []
    for line in child.stdout:
        lines.append(line)
        if words in line:
            return
    raise AssertionError(f"it ended without {words!r}: {''.join(lines)}{finish(child)[2]}")


@pytest.mark.parametrize(
    ("num_ranks", "axis", "number"),
    [(1, "tensor", signal.SIGINT), (2, "tensor", signal.SIGINT), (2, "pipeline", signal.SIGUSR1)],
)
def test_a_signal_to_launch_local(
    config: Path, tmp_path: Path, num_ranks: int, axis: str, number: signal.Signals
) -> None:
    """Ctrl-C reaches all processes, other signals only the script."""
    size = f"parallel.{axis}_model_parallel_size={num_ranks}"
    settings = [*in_run(f"{tmp_path}/run"), *FP64, "optimizer.lr_decay_style=constant"]
    child = launch_local(num_ranks, "--config", str(config), *settings, size, "train.train_iters=1000000")
    wait_for(child, "iteration        3/")
    (os.killpg if number == signal.SIGINT else os.kill)(child.pid, number)
    code, out, err = finish(child)
    once_more = "; once more: ends at once, without saving" if number == signal.SIGINT else ""
    told = f"> {number.name}: stopping after this step or the next, and saving{once_more}\n"
    assert code == ExitCode.STOPPED and re.fullmatch(LAUNCHED + re.escape(told), err), err
    last = steps(tmp_path / "run")[-1][0]
    stopped = read_journal(tmp_path / "run" / FILE_NAME)[-1]
    assert stopped == {"iteration": last, "stop": f"signal {number.name}"}
    assert f"> stopped at iteration {last} of 1000000, saved in {tmp_path}/run\n> to go on: the same command\n" in out
    assert run(config, *settings, f"train.train_iters={last + 2}").code == ExitCode.DONE
    alone = [*in_run(f"{tmp_path}/alone"), *settings[2:], f"train.train_iters={last + 2}"]
    assert run(config, *alone).code == ExitCode.DONE
    for got, wanted in zip(steps(tmp_path / "run"), steps(tmp_path / "alone"), strict=True):
        assert got == pytest.approx(wanted, rel=TOLERANCE, abs=0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_whose_reader_leaves_goes_on(config: Path, tmp_path: Path, num_ranks: int) -> None:
    settings = [*in_run(f"{tmp_path}/run"), f"parallel.tensor_model_parallel_size={num_ranks}"]
    child = launch_local(num_ranks, "--config", str(config), *settings)
    wait_for(child, "iteration        1/")
    assert child.stdout is not None and child.stderr is not None, "both are pipes"
    child.stdout.close()
    child.stderr.close()
    assert child.wait(60) == ExitCode.DONE
    assert len(steps(tmp_path / "run")) == 8 and (tmp_path / "run" / "iter_0000008").is_dir()


def test_a_stop_under_torchrun_is_no_crash(config: Path, tmp_path: Path) -> None:
    """torchrun prints a traceback, exits with 1 and may restart the ranks if they end with another code than 0."""
    settings = [*in_run(f"{tmp_path}/run"), "parallel.tensor_model_parallel_size=2", "train.exit_interval=2"]
    child = launch(["pretrain_gpt.py", "--config", str(config), *settings], num_ranks=2)
    code, out, err = finish(child)
    assert code == ExitCode.DONE and "Traceback" not in err, err
    assert "> stopped on request; exit code 0" in out and "> saved" in out
    assert [iteration for iteration, *_ in steps(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_killed_rank_ends_the_run_and_leaves_the_checkpoint_whole(
    config: Path, whole: Path, tmp_path: Path, axis: str
) -> None:
    program = tmp_path / "victim.py"
    program.write_text(
        "import os, signal, sys\nfrom megatron3d.runtime import process\nfrom megatron3d.train import loop\n"
        "import pretrain_gpt\nfrom pretrain_gpt import preload\nstep = loop.train_step\n"
        "def train_step(state, *rest, **named):\n"
        "    if state.iteration == 5 and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(state, *rest, **named)\n"
        "if __name__ == '__main__':\n"
        "    loop.train_step = train_step\n    sys.exit(process.run_program(pretrain_gpt.main))\n"
    )
    settings = [*in_run(f"{tmp_path}/run"), *FP64, "checkpoint.save_interval=4"]
    typed = ["--config", str(config), *settings, f"parallel.{axis}_model_parallel_size=2"]
    child = launch_forked(str(program), 2, *typed)
    wait_for(child, "iteration        5/")
    began = time.monotonic()
    code, _, err = finish(child)
    assert code == 128 + signal.SIGKILL and "> rank 1 was killed by SIGKILL\n" in err, err
    assert time.monotonic() - began < 30
    assert run(config, *settings).code == ExitCode.DONE
    assert_near_run(tmp_path / "run", whole)
