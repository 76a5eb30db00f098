"""Fact: an unusable checkpoint, or a disk that fails during a save, ends in exit code 2 and one message per problem.

The message names the problem and a remedy, there is no traceback, and checkpoints saved before stay unchanged.
"""

from __future__ import annotations

import errno
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from megatron3d.checkpoint import store
from megatron3d.checkpoint.index import StoredTensor
from megatron3d.checkpoint.pieces import Piece
from megatron3d.checkpoint.store import verify
from megatron3d.errors import ExitCode
from tests.support.checkpoints import newest_intact
from tests.support.tiny_run import Words, cut, in_run, launch, refuse, run, steps, tree, write_config

Damage = Callable[[Path], object]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    config = write_config(tmp_path_factory.mktemp("trained"))
    assert run(config).code == ExitCode.DONE
    return config.parent / "run"


def flip(path: Path) -> None:
    """Flip the last bit of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit(path: Path, old: str, new: str) -> None:
    """Replace text that occurs once in a file."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


OTHER_MODEL = ["model.num_layers=3", "model.hidden_size=64", "model.ffn_hidden_size=128"]
LOADS: dict[str, tuple[Damage, list[str], list[Words]]] = {
    "absent": (lambda run: shutil.rmtree(run), [], [("checkpoint.load", "no such folder", "null")]),
    "empty": (
        lambda run: (shutil.rmtree(run), run.mkdir()),
        [],
        [("checkpoint.load", "latest_checkpointed_iteration")],
    ),
    "a file": (lambda run: (shutil.rmtree(run), run.touch()), [], [("checkpoint.load", "no such folder")]),
    "checkpoint gone": (
        lambda run: shutil.rmtree(run / "iter_0000008"),
        [],
        [("latest_checkpointed_iteration.txt names iter_0000008", "not there")],
    ),
    "tracker gone": (
        lambda run: (run / "latest_checkpointed_iteration.txt").unlink(),
        [],
        [("latest_checkpointed_iteration.txt", "load one of iter_0000008")],
    ),
    "tracker damaged": (
        lambda run: (run / "latest_checkpointed_iteration.txt").write_text("eight"),
        [],
        [("latest_checkpointed_iteration.txt", "'eight'")],
    ),
    "no index": (lambda run: (run / "iter_0000008/index.json").unlink(), [], [("iter_0000008", "no index.json")]),
    "damaged index": (lambda run: cut(run / "iter_0000008/index.json", 9), [], [("index.json is damaged",)]),
    "cut tensors": (
        lambda run: cut(run / "iter_0000008/rank_00000.safetensors", 9),
        [],
        [("rank_00000.safetensors is missing or damaged", "load another checkpoint")],
    ),
    "no tensors": (
        lambda run: (run / "iter_0000008/rank_00000.safetensors").unlink(),
        [],
        [("rank_00000.safetensors is missing or damaged", "load another checkpoint")],
    ),
    "a flipped bit": (
        lambda run: flip(run / "iter_0000008/rank_00000.safetensors"),
        [],
        [("rank_00000.safetensors: optimizer.", "is damaged", "checksum", "load another checkpoint")],
    ),
    "a flipped bit in the index": (
        lambda run: edit(run / "iter_0000008/index.json", '"consumed_samples":128', '"consumed_samples":129'),
        [],
        [("iter_0000008: index.json is damaged", "checksum")],
    ),
    "a pickle": (
        lambda run: (run / "iter_0000008/rank_00000.safetensors").write_bytes(pickle.dumps([print] * 9)),
        [],
        [("rank_00000.safetensors is missing or damaged", "load another checkpoint")],
    ),
    "Megatron's": (
        lambda run: (
            shutil.rmtree(run / "iter_0000008"),
            (run / "iter_0000008/mp_rank_00").mkdir(parents=True),
            (run / "iter_0000008/mp_rank_00/model_optim_rng.pt").write_bytes(b"PK"),
        ),
        [],
        [("iter_0000008 is not a megatron3d checkpoint: it has no index.json",)],
    ),
    "of an older format": (
        lambda run: edit(run / "iter_0000008/index.json", '"version":2', '"version":1'),
        [],
        [("iter_0000008 is of version 1, this megatron3d reads 2", "use the megatron3d that wrote it")],
    ),
    "another model": (
        lambda run: None,
        OTHER_MODEL,
        [("saved with model.num_layers=2, model.hidden_size=32, but this run has 3, 64", "in another folder")],
    ),
    "another order of samples": (
        lambda run: None,
        ["train.seed=5", "data.split=80,20,0"],
        [("data.split=90,10,0", "this run has 80,20,0"), ("train.seed=1234", "this run has 5")],
    ),
}


NO_TRACKER = ("tracker gone", "tracker damaged")
NEW_RUNS = ("absent", "empty", "a file")


@pytest.mark.parametrize(
    ("name", "own"),
    [(name, own) for name in LOADS for own in (False, True) if not (own and name in (*NEW_RUNS, *NO_TRACKER))],
)
def test_damaged_checkpoints_are_refused(config: Path, trained: Path, name: str, own: bool) -> None:
    """A run starts from scratch only if it saves to the folder that it loads from and the folder has no checkpoint."""
    damage, overrides, problems = LOADS[name]
    there = config.parent / "run"
    shutil.copytree(trained, there)
    damage(there)
    save = there if own else config.parent / "other"
    refuse(config, [f"checkpoint.save={save}", f"checkpoint.load={there}", *overrides], *problems)


OF_RUNS = ("another model", "another order of samples", "checkpoint gone")


@pytest.mark.parametrize("name", [name for name in LOADS if name not in (*NEW_RUNS, *OF_RUNS)])
def test_a_run_continues_from_the_newest_undamaged_checkpoint(config: Path, trained: Path, name: str) -> None:
    """A run resumes from the newest good checkpoint, in that checkpoint's layout, even without a tracker file."""
    damage, _, problems = LOADS[name]
    there = config.parent / "run"
    typed = [f"checkpoint.save={there}", f"checkpoint.load={there}"]
    assert run(config, *typed, "train.exit_interval=4").code == ExitCode.STOPPED
    assert run(config, *typed).code == ExitCode.DONE
    damage(there)
    outcome = run(config, *typed)
    assert outcome.code == ExitCode.DONE, outcome.err
    assert f"> continuing from {there}/iter_000000{8 if name in NO_TRACKER else 4}" in outcome.out
    if name not in NO_TRACKER:
        (line,) = [line for line in outcome.out.splitlines() if line.startswith("> skipping checkpoint")]
        told = line.replace(f"{there}/iter_0000008: ", "")
        assert any(word in told for word in problems[0]), line
    assert steps(there) == steps(trained)


TWO_RANKS: dict[str, tuple[Damage, Words]] = {
    "before the ranks meet": (lambda here: cut(here / "corpus.bin", 10), ("corpus.bin", "cut short")),
    "after they met": (
        lambda here: cut(here / "run/iter_0000008/rank_00000.safetensors", 9),
        ("rank_00000.safetensors is missing or damaged",),
    ),
}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_report_an_error_once(config: Path, trained: Path, name: str) -> None:
    """The ranks print the message once; torchrun adds its own report and exits with 1."""
    damage, words = TWO_RANKS[name]
    shutil.copytree(trained, config.parent / "run")
    damage(config.parent)
    before = tree(config.parent)
    layout = "parallel.tensor_model_parallel_size=2"
    child = launch(["pretrain_gpt.py", "--config", str(config), *in_run(f"{config.parent}/run"), layout], num_ranks=2)
    _, err = child.communicate(timeout=60)
    assert tree(config.parent) == before
    said = [line for line in err.splitlines() if all(word in line for word in words)]
    assert len(said) == 1 and "rank 1]" not in said[0], err
    assert err.count("Traceback") == err.count("ChildFailedError(")


def test_two_ranks_report_a_wrong_option_once(config: Path) -> None:
    child = launch(["pretrain_gpt.py", "--config", str(config), "--no-such-option"], num_ranks=2)
    _, err = child.communicate(timeout=60)
    assert err.count("--no-such-option") == 1 and err.count("usage:") == 1, err


ANOTHER_STEP = ["checkpoint.save_interval=1", "train.train_iters=10"]


def fails_once(patch: pytest.MonkeyPatch, error: OSError) -> None:
    """Make the first write of a file of boxes fail after part of it was written."""
    errors, write = [error], store.write_boxes

    def write_boxes(path: Path, pieces: Iterable[Piece], count: Callable[[int], None]) -> dict[str, StoredTensor]:
        if errors:
            path.write_bytes(b"a part")
            raise errors.pop()
        return write(path, pieces, count)

    patch.setattr(store, "write_boxes", write_boxes)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("in_background", ["false", "true"])
def test_a_failing_disk_ends_a_save_with_an_error(config: Path, trained: Path, code: int, in_background: str) -> None:
    """Earlier checkpoints stay unchanged; a failed foreground save ends the run, a background one is reported."""
    there = config.parent / "run"
    shutil.copytree(trained, there)
    before = tree(there / "iter_0000008")
    with pytest.MonkeyPatch.context() as patch:
        fails_once(patch, OSError(code, os.strerror(code)))
        outcome = run(config, *ANOTHER_STEP, f"checkpoint.async_save={in_background}")
    words = (
        f"checkpoint.save={there}: iter_0000009 cannot be written: {os.strerror(code)}; earlier checkpoints are intact"
    )
    assert tree(there / "iter_0000008") == before and verify(there / "iter_0000008") == ()
    names = {path.name for path in there.iterdir() if "iter" in path.name and path.is_dir()}
    if in_background == "true":
        assert outcome.code == ExitCode.DONE and "> not saved, training goes on" in outcome.out
        assert words in outcome.out and names == {"iter_0000008", "iter_0000010"}
    else:
        assert outcome.code == ExitCode.USER_ERROR and outcome.err.startswith(words)
        assert len(outcome.err.splitlines()) == 1 and names == {"iter_0000008"}
        assert newest_intact(there) == (there / "iter_0000008", [])
    assert run(config, *ANOTHER_STEP).code == ExitCode.DONE
    assert newest_intact(there) == (there / "iter_0000010", [])


def test_a_full_file_system_ends_a_save_with_an_error(config: Path, trained: Path) -> None:
    """A real error of the operating system: the file size limit is below the size of one rank's file."""
    there = config.parent / "run"
    shutil.copytree(trained, there)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        outcome = run(config, *ANOTHER_STEP)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome.code == ExitCode.USER_ERROR and "iter_0000009 cannot be written: File too large" in outcome.err
    assert newest_intact(there) == (there / "iter_0000008", [])
    assert not [path.name for path in there.iterdir() if path.name.startswith(".iter")]
