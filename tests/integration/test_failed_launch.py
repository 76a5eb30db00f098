"""Fact: a launch that fails before training leaves nothing behind, and nothing of an earlier run is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb

from megatron3d.errors import ExitCode
from tests.support.tiny_run import in_run, run, write_config


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**values: object) -> None:
        (Path(str(values["dir"])) / "wandb" / "debug.log").write_text("no key")
        raise wandb.errors.UsageError("api_key not configured (no-tty)")

    monkeypatch.setattr(wandb, "init", refuse)


@pytest.mark.usefixtures("no_login")
def test_without_a_login_of_wandb_nothing_is_written(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    asked = [*in_run(str(tmp_path / "new" / "run")), "logging.wandb_project=p"]
    outcome = run(config, *asked, f"logging.tensorboard_dir={tmp_path}/new/board")
    assert outcome.code == ExitCode.USER_ERROR and "wandb login" in outcome.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("no_login")
def test_a_failed_restart_changes_nothing_of_the_run(tmp_path: Path) -> None:
    config, folder = write_config(tmp_path), tmp_path / "run"
    assert run(config, *in_run(str(folder)), "train.train_iters=3").code == ExitCode.DONE
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcome = run(config, *in_run(str(folder)), "train.train_iters=4", "logging.wandb_project=p")
    assert outcome.code == ExitCode.USER_ERROR
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_padding_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    outcome = run(write_config(tmp_path), *in_run(str(tmp_path / "run")), "data.pad_token_id=257")
    assert outcome.code == ExitCode.USER_ERROR
    assert (
        "data.pad_token_id=257: outside the vocabulary of 257 tokens" in outcome.err and "use 0 to 256" in outcome.err
    )
