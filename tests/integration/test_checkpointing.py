"""Fact: in whole runs, background saves, retention, short-lived checkpoints and partial loads work as configured."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron3d.checkpoint.index import read_index, read_meta
from megatron3d.checkpoint.publish import FolderLock, finished_checkpoints
from megatron3d.errors import ExitCode
from tests.support.pool import Pool
from tests.support.tiny_run import Words, in_run, refuse, run, run_as_rank, steps, stored, write_config, write_corpus

FP64 = ["train.precision=fp64", "model.hidden_dropout=0.1"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("saving"))


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    """Return the folder of a run of 8 iterations that saved every second one."""
    folder = config.parent / "whole"
    outcome = run(config, *in_run(str(folder)), *FP64, "checkpoint.save_interval=2")
    assert outcome.code == ExitCode.DONE, outcome
    return folder


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert got.keys() == expected.keys()
    return all(torch.equal(got[name], expected[name]) for name in expected)


def test_an_async_save_writes_the_same_bits(config: Path, whole: Path, pool: Pool, tmp_path: Path) -> None:
    """Background saves write the same bits on one process, and on four that partition the replicated tensors."""
    asked = [*FP64, "checkpoint.save_interval=2", "checkpoint.async_save=true"]
    alone = run(config, *in_run(f"{tmp_path}/alone"), *asked)
    assert alone.code == ExitCode.DONE and alone.out.count("> saved ") == 4, alone
    assert all(same(stored(tmp_path / "alone", i), stored(whole, i)) for i in (2, 4, 6, 8))
    runs = [
        [*in_run(f"{tmp_path}/{name}"), *FP64, "checkpoint.save_interval=2", f"checkpoint.async_save={name}"]
        for name in ("false", "true")
    ]
    assert pool.run(run_as_rank, 4, config, runs) == [[ExitCode.DONE] * 2] * 4
    for iteration in (2, 4, 6, 8):
        assert same(stored(tmp_path / "true", iteration), stored(tmp_path / "false", iteration))
        sizes = [path.stat().st_size for path in (tmp_path / f"true/iter_{iteration:07d}").glob("*.safetensors")]
        assert len(sizes) == 4 and max(sizes) < 1.1 * min(sizes), "four ranks with equal weights write equally much"


def test_the_metadata_of_a_checkpoint(whole: Path) -> None:
    meta = read_meta(whole / "iter_0000008")
    assert (meta.iteration, meta.consumed_samples, meta.optimizer_steps) == (8, 128, 8)
    assert meta.config["train"]["precision"] == "fp64" and meta.identity["train.seed"] == 1234  # type: ignore[call-overload, index]
    assert set(meta.mesh.values()) == {1} and meta.versions["torch"] == torch.__version__
    assert len(str(meta.identity["corpus"])) == len(str(meta.identity["tokenizer"])) == 64


@pytest.mark.parametrize("how", [["checkpoint.finetune=true"], ["checkpoint.no_load_optim=true"]])
def test_a_run_that_starts_from_another_resumes_from_its_own(
    how: list[str], config: Path, whole: Path, tmp_path: Path
) -> None:
    """One command starts it and, requeued, continues it, with its own optimizer."""
    begin = [*FP64, f"checkpoint.load={whole}", *how]
    begin += ["train.train_iters=10"] * (how[0] != "checkpoint.finetune=true")
    assert run(config, *begin, f"checkpoint.save={tmp_path}/once").code == ExitCode.DONE
    last = finished_checkpoints(tmp_path / "once")
    parts = [*begin, f"checkpoint.save={tmp_path}/run"]
    first = run(config, *parts, f"train.exit_interval={max(last) - 1}")
    assert first.code == ExitCode.STOPPED and f"{whole}/iter_" in first.out
    second = run(config, *parts)
    assert second.code == ExitCode.DONE
    assert f"> continuing from {tmp_path}/run/iter_{max(last) - 1:07d}" in second.out
    assert steps(tmp_path / "run") == steps(tmp_path / "once")
    assert same(stored(tmp_path / "run", max(last)), stored(tmp_path / "once", max(last)))


def test_permanent_and_non_persistent_checkpoints(config: Path, whole: Path, tmp_path: Path) -> None:
    """A run killed between two permanent checkpoints resumes from the short-lived one."""
    asked = ["checkpoint.save_interval=3", "checkpoint.keep_latest_k=1", "checkpoint.non_persistent_save_interval=1"]
    settings = [*in_run(f"{tmp_path}/run"), *FP64, *asked]
    assert run(config, *settings, "train.exit_interval=4").code == ExitCode.STOPPED
    assert finished_checkpoints(tmp_path / "run").keys() == {4} and not (tmp_path / "run/non_persistent").exists()
    # The state that a kill would leave: iteration 4 as a short-lived checkpoint only.
    short = tmp_path / "run/non_persistent"
    short.mkdir()
    (tmp_path / "run/iter_0000004").rename(short / "iter_0000004")
    (tmp_path / "run/latest_checkpointed_iteration.txt").rename(short / "latest_checkpointed_iteration.txt")
    refuse(config, [*settings, "checkpoint.load=null"], (f"checkpoint.save={tmp_path}/run", "already holds a run"))
    outcome = run(config, *settings)
    assert outcome.code == ExitCode.DONE
    assert f"> continuing from {short}/iter_0000004" in outcome.out
    assert steps(tmp_path / "run") == steps(whole) and same(stored(tmp_path / "run", 8), stored(whole, 8))
    assert finished_checkpoints(tmp_path / "run").keys() == {8} and not short.exists()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Write another corpus."""
    return write_corpus(tmp_path / "other", json.dumps([*range(9999)], indent=1).replace("7,", "7,\n\n"))


def test_another_corpus_is_refused_unless_it_is_accepted(config: Path, whole: Path, other: Path) -> None:
    old, places = read_meta(whole / "iter_0000008").identity["corpus"], [f"checkpoint.load={whole}", *FP64]
    asked = [*places, "checkpoint.save=null", f"data.data_path={other}", "train.train_iters=9", "train.seed=7"]
    seed = ("saved with train.seed=1234, but this run has 7", "checkpoint.accept_changed=[train.seed]")
    refuse(config, asked, (f"saved with corpus={old}, but this run has ", "checkpoint.accept_changed=[corpus]"), seed)
    refuse(config, [*asked, "checkpoint.accept_changed=[corpus]"], seed)
    outcome = run(config, *asked, "checkpoint.accept_changed=[corpus,train.seed]")
    assert outcome.code == ExitCode.DONE and "iteration        9/       9" in outcome.out


def test_finetune_loads_only_weights(config: Path, whole: Path, other: Path, tmp_path: Path) -> None:
    """Fine-tuning loads only the weights and starts at iteration 0, on any corpus with the same tokenizer."""
    asked = [f"checkpoint.save={tmp_path}/tuned", f"checkpoint.load={whole}", "checkpoint.finetune=true", *FP64]
    outcome = run(config, *asked, f"data.data_path={other}", "train.train_iters=2", "optimizer.lr=1e-300")
    assert outcome.code == ExitCode.DONE, outcome
    assert f"> starting with the weights of {whole}/iter_0000008" in outcome.out
    assert [iteration for iteration, *_ in steps(tmp_path / "tuned")] == [1, 2]
    before, after = stored(whole, 8), stored(tmp_path / "tuned", 2)
    weights = [name for name in before if name.startswith("model.")]
    assert all(torch.equal(before[name], after[name]) for name in weights)
    meta = read_meta(tmp_path / "tuned/iter_0000002")
    assert (meta.optimizer_steps, meta.consumed_samples) == (2, 32)


def test_a_continuation_may_change_what_no_weight_depends_on(config: Path, tmp_path: Path) -> None:
    """Longer sequences, scaled positions and dropout, as at the end of a recipe: catches a step that starts over."""
    rope = ["model.position_embedding_type=rope", "train.train_iters=2", *FP64]
    assert run(config, *rope, *in_run(f"{tmp_path}/short")).code == ExitCode.DONE
    asked = [*rope, f"checkpoint.save={tmp_path}/long", f"checkpoint.load={tmp_path}/short"]
    longer = ["model.seq_length=32", "model.rotary_base=500000", "model.rotary_scaling=linear"]
    longer += ["model.rotary_scaling_factor=2.0"]
    names = ("seq_length", "max_position_embeddings", "rotary_base", "rotary_scaling")
    longer += ["train.train_iters=4", "model.hidden_dropout=0.2"]
    outcome = run(config, *asked, *longer)
    assert outcome.code == ExitCode.DONE, outcome
    assert [iteration for iteration, *_ in steps(tmp_path / "long")] == [3, 4]
    assert "> model.seq_length: 16 in the checkpoint, 32 in this run" in outcome.out
    scaling = {"kind": "linear", "factor": 2.0}
    assert f"> model.rotary_scaling: None in the checkpoint, {scaling} in this run" in outcome.out
    meta = read_meta(tmp_path / "long/iter_0000004")
    assert meta.model["rotary_scaling"] == scaling and meta.optimizer_steps == 4
    assert {change["name"] for change in meta.changes} == {*names, "hidden_dropout"}
    assert {"iteration": 2, "name": "seq_length", "saved": 16, "own": 32} in meta.changes
    other = ["model.rotary_percent=0.5", "checkpoint.finetune=true", f"checkpoint.save={tmp_path}/other"]
    refuse(config, [*asked, *other], ("saved with model.rotary_percent=1.0, but this run has 0.5", ""))


def test_another_model_in_the_same_folder_is_one_message_before_it_is_built(config: Path, tmp_path: Path) -> None:
    """Sizes that follow from the keys that differ are not named; both ways out are."""
    assert run(config, *in_run(f"{tmp_path}/run"), "train.train_iters=1").code == ExitCode.DONE
    outcome = run(config, *in_run(f"{tmp_path}/run"), "model.hidden_size=64", "model.num_layers=3")
    assert outcome.code == ExitCode.USER_ERROR and "model and optimizer" not in outcome.out
    assert outcome.err == (
        f"{tmp_path}/run/iter_0000001: saved with model.num_layers=2, model.hidden_size=32, but this run has 3, 64; "
        "continue with the saved values, or train another model in another folder, with checkpoint.save and "
        "checkpoint.load\n"
    )


def test_learned_positions_are_not_extended(config: Path, whole: Path, tmp_path: Path) -> None:
    asked = [f"checkpoint.save={tmp_path}/tuned", f"checkpoint.load={whole}", "checkpoint.finetune=true", *FP64]
    learned = "each learned position is a parameter: use model.max_position_embeddings=16, and seq_length up to 16"
    refuse(config, [*asked, "model.seq_length=32"], ("saved with model.max_position_embeddings=16", ""), (learned, ""))


def test_no_load_optim_leaves_the_optimizer_out(config: Path, whole: Path, tmp_path: Path) -> None:
    """Iteration and data position are restored; moments and their bias correction start from scratch."""
    asked = [f"checkpoint.save={tmp_path}/bare", f"checkpoint.load={whole}", "checkpoint.no_load_optim=true", *FP64]
    assert run(config, *asked, "train.train_iters=9", "optimizer.adam_beta1=0").code == ExitCode.DONE
    assert [iteration for iteration, *_ in steps(tmp_path / "bare")] == [9]
    meta = read_meta(tmp_path / "bare/iter_0000009")
    assert (meta.optimizer_steps, meta.consumed_samples) == (1, 144)


KEYS: dict[str, tuple[list[str], list[Words]]] = {
    "no checkpoint to load": (
        ["checkpoint.save=null", "checkpoint.load=null", "checkpoint.finetune=true"],
        [("checkpoint.finetune=true", "no checkpoint to load")],
    ),
    "finetune itself": (["checkpoint.finetune=true"], [("checkpoint.finetune=true", "save to another folder")]),
    "always permanent": (
        ["checkpoint.save_interval=2", "checkpoint.non_persistent_save_interval=4"],
        [("checkpoint.non_persistent_save_interval=4", "checkpoint.save_interval=2 divides it")],
    ),
    "two ways": (
        ["checkpoint.load={here}", "checkpoint.finetune=true", "checkpoint.no_load_optim=true"],
        [("checkpoint.no_load_optim=true", "leave one out")],
    ),
    "no such part": (
        ["checkpoint.accept_changed=[model]"],
        [("checkpoint.accept_changed=[model]", "a list of tokenizer, corpus, data.split, train.seed or optimizer")],
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_contradicting_checkpoint_keys_are_refused(config: Path, name: str) -> None:
    asked, problems = KEYS[name]
    refuse(config, asked, *problems)


def test_two_runs_in_one_folder_are_refused(config: Path, whole: Path, tmp_path: Path) -> None:
    """The second run is refused while the first one runs, and the message names the first."""
    shutil.copytree(whole, tmp_path / "run")
    lock = FolderLock(tmp_path / "run")
    try:
        outcome = run(config, *in_run(f"{tmp_path}/run"), *FP64)
        assert outcome.code == ExitCode.CRASH, "SLURM requeues it: an earlier launch may still be ending"
        assert f"{tmp_path}/run: process {os.getpid()} on" in outcome.err and "is saving" in outcome.err
        assert "trying again" in outcome.err and "Traceback" not in outcome.err
    finally:
        lock.release()
    assert run(config, *in_run(f"{tmp_path}/run"), *FP64).code == ExitCode.DONE


def test_a_checkpoint_holds_an_index_and_safetensors_files_only(whole: Path) -> None:
    names = {path.name for path in (whole / "iter_0000008").iterdir()}
    assert names == {"index.json", "rank_00000.safetensors"} and read_index(whole / "iter_0000008").checksum
