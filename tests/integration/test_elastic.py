"""Fact: an elastic run that loses ranks goes on in another layout, with the losses of an undisturbed run."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron3d.checkpoint.store import latest
from megatron3d.errors import ExitCode
from megatron3d.metrics.journal import read_journal
from tests.support.tiny_run import evaluations, launch_forked, launch_local, launch_ranks, steps, write_config

ITERS = 16
KEYS = ["train.precision=fp64", f"train.train_iters={ITERS}", "train.micro_batch_size=1", "optimizer.lr=1e-3"]
KEYS += ["checkpoint.save_interval=3", "train.elastic=true"]
TOLERANCE = 1e-10
# Of three ranks that are left two train and one is spare, since runs that measure this have no empty microbatches.
WHOLE_MICROBATCHES = ("logging.noise_scale_interval=1000", "logging.noise_scale_batch_size=8")
# Bound to a step, in the order of training: a rank ends its process, hangs, or sleeps there.
PROGRAM = """
import os, signal, sys, time
from megatron3d.runtime import process
import pretrain_gpt
preload = pretrain_gpt.preload
if __name__ == "__main__":
    from megatron3d.train import {module} as place
    calls, inner = [], place.{function}
    def disturbed(*arguments, **options):
        calls.append(1)
        if (int(os.environ["RANK"]), len(calls)) in {moments}:
            {act}
        return inner(*arguments, **options)
    place.{function} = disturbed
    sys.exit(process.run_program(pretrain_gpt.main))
"""
DIE, STOP, HANG = "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(1000)"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run of one rank."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (rank,) = launch_ranks(["pretrain_gpt.py", "--config", str(write_config(folder)), *KEYS], 1)
    _, errors = rank.communicate(timeout=120)
    assert rank.returncode == ExitCode.DONE, errors
    return [loss for _, loss, _ in steps(folder / "run")]


def program(folder: Path, place: str, moments: Sequence[tuple[int, int]], act: str = DIE) -> str:
    """Write the program whose ranks act before a call of a function of `train`, and return its path.

    Args:
        moments: rank, as it was at the start, and number of the call in its process.
    """
    module, function = place.split(".")
    path = folder / "disturbed.py"
    path.write_text(PROGRAM.format(module=module, function=function, moments=moments, act=act))
    return str(path)


def survive(folder: Path, num_ranks: int, path: str, *keys: str) -> str:
    """Run a disturbed program; require that it ends well, and return what its processes said."""
    launched = launch_forked(path, num_ranks, "--config", str(write_config(folder)), *KEYS, *keys)
    try:
        out, errors = launched.communicate(timeout=150)
    finally:
        launched.kill()
    print(out, errors)  # which a test that fails shows
    assert launched.returncode == ExitCode.DONE
    return out + errors


def replans(folder: Path) -> list[dict[str, Any]]:
    """Return the details of each layout that the run has gone on in."""
    return [dict(row["replan_details"]) for row in read_journal(folder / "run" / "metrics.jsonl") if "replan" in row]


def saved(folder: Path) -> set[int]:
    """Return the iterations of the checkpoints on disk."""
    return {int(place.name.removeprefix("iter_")) for place in (folder / "run").glob("iter_*")}


def assert_equal(folder: Path, losses: list[float]) -> None:
    """Require that every step is there once, with the loss of the undisturbed run."""
    found = steps(folder / "run")
    assert [iteration for iteration, _, _ in found] == list(range(1, ITERS + 1))
    assert max(abs(loss - other) for (_, loss, _), other in zip(found, losses, strict=True)) < TOLERANCE


LAYOUTS = {
    "zero 1": ["parallel.zero_stage=1"],
    "zero 3": ["parallel.zero_stage=3"],
    "pipeline": ["parallel.pipeline_model_parallel_size=2"],
    "1d": ["parallel.tensor_model_parallel_size=2"],
    "peers": ["parallel.zero_stage=3", "checkpoint.in_memory_interval=2", "checkpoint.save_interval=null"],
    "2d": ["parallel.tensor_parallel_mode=2d", "parallel.tensor_parallel_shape=[2,2]", "train.micro_batch_size=2"],
}


@pytest.mark.parametrize(
    ("layout", "lost"), [("zero 1", (3,)), ("zero 3", (0,)), ("pipeline", (1, 2)), ("1d", (1,)), ("2d", (0, 1, 2))]
)
def test_losses_are_those_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: list[float], layout: str, lost: tuple[int, ...]
) -> None:
    survive(tmp_path, 4, program(tmp_path, "loop.train_step", [(rank, 8) for rank in lost]), *LAYOUTS[layout])
    assert_equal(tmp_path, undisturbed)
    (details,) = replans(tmp_path)
    assert details["lost"] == list(lost) and not {*details["members"]} & {*lost}
    assert {"agree", "plan", "connect", "restore"} <= details["seconds"].keys()


@pytest.mark.parametrize(("layout", "iteration"), [("1d", 7), ("peers", 6)])
def test_no_checkpoint_is_read_where_memory_has_a_step(
    tmp_path: Path, undisturbed: list[float], layout: str, iteration: int
) -> None:
    """Two ranks go on, and a third one, which has no place, hands over what they lack."""
    text = survive(tmp_path, 4, program(tmp_path, "loop.train_step", [(1, 8)]), *LAYOUTS[layout], *WHOLE_MICROBATCHES)
    assert f"> going on from iteration {iteration} from memory" in text
    assert_equal(tmp_path, undisturbed)


def test_peers_have_copies_again_after_a_loss(tmp_path: Path, undisturbed: list[float]) -> None:
    """The process that is lost next had a copy of the first one; its own is made before the next step."""
    path = program(tmp_path, "loop.train_step", [(1, 8), (2, 10)])
    keys = ["parallel.zero_stage=3", "checkpoint.in_memory_interval=5", "checkpoint.save_interval=null"]
    text = survive(tmp_path, 4, path, *keys, *WHOLE_MICROBATCHES)
    assert text.count("> going on from iteration 5 from memory") == 2
    assert_equal(tmp_path, undisturbed)


def test_a_half_done_update_is_not_used(tmp_path: Path, undisturbed: list[float]) -> None:
    """All ranks have updated their weights in part when one of them ends, and go on from their last checkpoint."""
    path = Path(program(tmp_path, "loop.train_step", [], DIE))
    half = "    from megatron3d.optim.optimizer import Optimizer\n"
    half += "    average, updates = Optimizer._average, []\n    def dies(self, skipped):\n        updates.append(1)\n"
    half += "        if len(updates) == 8 and os.environ['RANK'] == '3':\n            " + DIE + "\n"
    half += "        if len(updates) == 8:\n            self.buffers.comm.barrier()\n"
    half += "        return average(self, skipped)\n    Optimizer._average = dies\n    sys.exit"
    path.write_text(path.read_text().replace("    sys.exit", half))
    text = survive(tmp_path, 4, str(path))
    assert "> going on from iteration 6 from " in text and "iter_0000006" in text
    assert_equal(tmp_path, undisturbed)


def test_a_spare_takes_the_place_of_the_next_rank_that_is_lost(tmp_path: Path, undisturbed: list[float]) -> None:
    """Three of four ranks are left, of which two train: when one of these ends, the third does its work."""
    survive(tmp_path, 4, program(tmp_path, "loop.train_step", [(3, 6), (0, 10)]), *WHOLE_MICROBATCHES)
    assert_equal(tmp_path, undisturbed)
    first, second = replans(tmp_path)
    assert (first["members"], first["spares"]) == ([0, 1], [2])
    assert (second["lost"], second["members"], second["spares"]) == ([0], [2, 1], [])


def test_a_second_loss_while_the_ranks_connect(tmp_path: Path, undisturbed: list[float]) -> None:
    """Rank 3 ends before its second save of the first epoch; rank 1 then when the second epoch builds its groups."""
    path = Path(program(tmp_path, "loop.save", [(3, 2)]))
    dies = (
        "    import megatron3d.train.build as build\n    connect, made = build.connect, []\n    def connects(spec):\n"
    )
    dies += "        made.append(1)\n        if (os.environ['RANK'], len(made)) == ('1', 2):\n            "
    dies += DIE + "\n        return connect(spec)\n    build.connect = connects\n    sys.exit"
    path.write_text(path.read_text().replace("    sys.exit", dies))
    survive(tmp_path, 4, str(path))
    assert_equal(tmp_path, undisturbed)
    assert replans(tmp_path)[-1]["members"] == [0, 2]


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_a_loss_while_a_checkpoint_is_saved(tmp_path: Path, undisturbed: list[float], is_async: str) -> None:
    """The checkpoint that was interrupted is saved before the next step."""
    survive(tmp_path, 4, program(tmp_path, "loop.save", [(1, 2)]), f"checkpoint.async_save={is_async}")
    assert_equal(tmp_path, undisturbed)
    assert saved(tmp_path) == {3, 6, 9, 12, 15, 16}


def test_a_loss_while_the_disk_is_full(tmp_path: Path, undisturbed: list[float]) -> None:
    """The save of iteration 6 finds no space on any rank: the run goes on from memory, and makes up for it."""
    path = Path(program(tmp_path, "loop.train_step", [(3, 8)]))
    full = "    from megatron3d.checkpoint import store\n    write, writes = store.write_boxes, []\n"
    full += "    def writes_not(*arguments):\n        writes.append(1)\n        if len(writes) == 2:\n"
    full += "            raise OSError(28, 'No space left on device')\n"
    full += "        return write(*arguments)\n    store.write_boxes = writes_not\n    sys.exit"
    path.write_text(path.read_text().replace("    sys.exit", full))
    text = survive(tmp_path, 4, str(path), "checkpoint.async_save=true")
    assert "iter_0000006 cannot be written: No space left on device" in text
    assert "> going on from iteration 7 from memory" in text
    assert_equal(tmp_path, undisturbed)
    assert saved(tmp_path) == {3, 7, 9, 12, 15, 16}


def test_a_loss_while_the_run_evaluates(tmp_path: Path, undisturbed: list[float]) -> None:
    """The step before is complete, and goes on from memory; the evaluation that was interrupted is repeated."""
    path = program(tmp_path, "loop.report_validation_loss", [(1, 2)])
    text = survive(tmp_path, 4, path, "train.eval_interval=4", "train.eval_iters=1")
    assert "> going on from iteration 8 from memory" in text
    assert_equal(tmp_path, undisturbed)
    assert [iteration for iteration, _ in evaluations(tmp_path / "run")] == [4, 8, 12, 16]


def test_the_best_checkpoint_is_saved_after_a_loss(tmp_path: Path) -> None:
    """A rank ends when the loss of iteration 8 is known, before the checkpoint that it asks for."""
    keys = ["train.eval_interval=4", "train.eval_iters=1", "checkpoint.keep_best=true", "checkpoint.save_interval=100"]
    text = survive(tmp_path, 4, program(tmp_path, "loop.save_what_is_due", [(1, 8)]), *keys)
    assert "> going on from iteration 8 from memory" in text
    assert text.count("validation loss at iteration 8 ") == 1
    best = min(evaluations(tmp_path / "run"), key=lambda each: each[1])
    assert best[0] >= 8 and "iter_0000008, the best so far" in text


def test_a_rank_that_cannot_connect_is_waited_for_by_nobody(tmp_path: Path, undisturbed: list[float]) -> None:
    """Rank 2 does not reach the store of the second epoch, so that it cannot tell either: all begin another one."""
    path = Path(program(tmp_path, "loop.train_step", [(3, 7)]))
    fails = "    watch, watched = process._Connect.watch, []\n    def watches(*arguments):\n        watched.append(1)\n"
    fails += "        if os.environ['RANK'] == '2' and len(watched) == 2:\n"
    fails += "            raise OSError('the store cannot be reached')\n"
    fails += "        return watch(*arguments)\n    process._Connect.watch = watches\n    sys.exit"
    path.write_text(path.read_text().replace("    sys.exit", fails))
    text = survive(tmp_path, 4, str(path))
    assert "rank 2 cannot connect: the store cannot be reached" in text and "has left, since ranks are lost" in text
    assert_equal(tmp_path, undisturbed)
    assert [details["lost"] for details in replans(tmp_path)] == [[]]


def test_a_rank_that_hangs_is_left_out(tmp_path: Path, undisturbed: list[float]) -> None:
    path = program(tmp_path, "loop.train_step", [(2, 7)], HANG)
    text = survive(tmp_path, 4, path, "train.distributed_timeout_minutes=0.1")
    assert_equal(tmp_path, undisturbed)
    assert "rank 2 keeps the others waiting" in text and replans(tmp_path)[0]["lost"] == [2]


def test_a_rank_that_is_late_is_no_loss(tmp_path: Path, undisturbed: list[float]) -> None:
    """It sleeps for longer than a dead process is noticed in, but answers."""
    survive(tmp_path, 4, program(tmp_path, "loop.train_step", [(2, 7)], "time.sleep(4)"))
    assert_equal(tmp_path, undisturbed)
    assert replans(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stopped_process_is_left_out_and_killed(tmp_path: Path, rank: int) -> None:
    began_s = time.monotonic()
    survive(tmp_path, 4, program(tmp_path, "loop.train_step", [(rank, 7)], STOP))
    assert replans(tmp_path)[0]["lost"] == [rank] and time.monotonic() - began_s < 60


# One rank takes longer than the others to load a batch, which is time of its own.
SLOWED = """
import os, sys, time
from megatron3d.runtime import process
import pretrain_gpt
preload = pretrain_gpt.preload
if __name__ == "__main__":
    from megatron3d.data.loader import PrefetchingLoader
    step = PrefetchingLoader.step
    def slow(data, first):
        time.sleep({slow_s} if os.environ["RANK"] == "{rank}" else {others_s})
        return step(data, first)
    PrefetchingLoader.step = slow
    sys.exit(process.run_program(pretrain_gpt.main))
"""
REPLAN = ["train.on_straggler=replan", "logging.straggler_steps=3"]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_slow_rank_is_left_out(tmp_path: Path, undisturbed: list[float], rank: int) -> None:
    path = tmp_path / "slowed.py"
    path.write_text(SLOWED.format(rank=rank, slow_s=1, others_s=0))
    survive(tmp_path, 4, str(path), *REPLAN, "logging.straggler_factor=2")
    assert_equal(tmp_path, undisturbed)
    (details,) = replans(tmp_path)
    assert details["slow"] == details["spares"] == [rank] and details["lost"] == []
    assert {*details["members"]} == {*range(4)} - {rank}


def test_a_slow_rank_is_kept_where_nothing_is_gained(tmp_path: Path) -> None:
    """Without the slower one of two ranks a step would have no wait for it, and twice the work."""
    path = tmp_path / "slowed.py"
    path.write_text(SLOWED.format(rank=1, slow_s=3, others_s=2))  # of which a busy machine's noise is little
    text = survive(tmp_path, 2, str(path), *REPLAN, "logging.straggler_factor=1.2", "train.train_iters=5")
    assert "> straggler: rank 1 (" in text and "without it a step would take 1." in text
    assert replans(tmp_path) == []


def join_at_step_10(
    folder: Path, keys: Sequence[str], lost: int | None, num_new: int
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Start a run of 4 ranks that waits before a step until `num_new` processes have asked to join; return both."""
    ready, place = folder / "ready", folder / "run"
    path = Path(program(folder, "loop.train_step", [] if lost is None else [(lost, 6)]))
    waits = f"while len(calls) == 10 and not os.path.exists({str(ready)!r}): time.sleep(0.05)"
    path.write_text(path.read_text().replace("        return inner", f"        {waits}\n        return inner"))
    arguments = ["--config", str(write_config(folder)), *KEYS, *keys]
    run = launch_forked(str(path), 4, *arguments)
    while not (place / "members.json").exists() or (lost is not None and not replans(folder)):
        assert run.poll() is None
        time.sleep(0.1)
    joins = launch_forked("pretrain_gpt.py", num_new, *arguments, "--join")
    assert joins.stderr is not None
    for _ in range(num_new):
        assert any("waits to join" in line for line in joins.stderr)
    time.sleep(2)  # until it has signed in
    ready.touch()
    return run, joins


@pytest.mark.parametrize(
    ("keys", "lost", "num_new"),
    [((), 3, 1), (("parallel.tensor_model_parallel_size=2",), 0, 1), (("parallel.zero_stage=3",), None, 2)],
)
def test_processes_join(
    tmp_path: Path, undisturbed: list[float], keys: Sequence[str], lost: int | None, num_new: int
) -> None:
    """They take the place of a lost rank, or are further ones, from the next checkpoint on."""
    for each in join_at_step_10(tmp_path, keys, lost, num_new):
        _, errors = each.communicate(timeout=120)
        assert each.returncode == ExitCode.DONE, errors
    assert_equal(tmp_path, undisturbed)
    details = replans(tmp_path)[-1]
    assert details["joined"] == [*range(4, 4 + num_new)] and {*details["joined"]} <= {*details["members"]}


def test_a_process_that_gains_nothing_waits(tmp_path: Path, undisturbed: list[float]) -> None:
    """Five ranks would compute no less each than four, so that the run is not interrupted; the fifth can be stopped."""
    run, joins = join_at_step_10(tmp_path, [], None, 1)
    joins.send_signal(signal.SIGTERM)
    for each, code in ((joins, ExitCode.STOPPED), (run, ExitCode.DONE)):
        _, errors = each.communicate(timeout=120)
        assert each.returncode == code, errors
    assert_equal(tmp_path, undisturbed)
    assert replans(tmp_path) == []


def test_the_launcher_lets_the_others_finish(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    launched = launch_local(4, "--config", str(config), *KEYS, "train.train_iters=100000", "checkpoint.save_interval=9")
    assert launched.stdout is not None and launched.stderr is not None
    assert any("iteration       11/" in line for line in launched.stdout)
    children = subprocess.run(["pgrep", "-P", str(launched.pid)], capture_output=True, text=True, check=True)
    pids = list(map(int, children.stdout.split()))
    subprocess.run(["kill", "-9", str(pids[1])], check=True)
    assert any("> lost processes: 1;" in line for line in launched.stdout)
    launched.send_signal(signal.SIGTERM)
    _, errors = launched.communicate(timeout=60)
    assert launched.returncode == ExitCode.STOPPED, errors


def test_where_no_layout_fits_the_run_fails_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    """Four context ranks are part of the configuration, and three are left."""
    path = program(tmp_path, "loop.train_step", [(3, 8)])
    config = ["--config", str(write_config(tmp_path)), "parallel.context_parallel_size=4"]
    launched = launch_forked(path, 4, *config, *KEYS)
    try:
        _, errors = launched.communicate(timeout=100)
    finally:
        launched.kill()
    assert launched.returncode == ExitCode.CRASH, errors
    assert "no layout of this model on 3 ranks or fewer is valid with train.global_batch_size=" in errors
    assert latest(tmp_path / "run") == tmp_path / "run" / "iter_0000006"


def test_without_the_key_nothing_changes(tmp_path: Path) -> None:
    path = program(tmp_path, "loop.train_step", [(1, 6)])
    keys = [*KEYS, "train.elastic=false"]
    ranks = launch_ranks([path, "--config", str(write_config(tmp_path)), *keys], 2)
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert ranks[0].returncode == ExitCode.CRASH and "ends, since another rank has ended: " in said[0]
