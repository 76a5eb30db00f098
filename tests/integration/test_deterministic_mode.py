"""Fact: with `train.deterministic_mode` a run that another process resumes writes the bytes of one never stopped."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import torch

from megatron3d.errors import ExitCode
from megatron3d.runtime.machine import set_up_determinism
from tests.support.processes import start
from tests.support.tiny_run import ROOT, in_run, run, write_config

ASKED = ["train.deterministic_mode=true", "train.manual_gc=true", "train.manual_gc_interval=2", "train.train_iters=4"]


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "iter_0000004/rank_00000.safetensors").read_bytes()).hexdigest()


def test_a_resumed_run_writes_the_same_bytes(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    settings = [*ASKED, "model.hidden_dropout=0.1", "checkpoint.save_interval=2"]
    try:
        whole = run(config, *in_run(f"{tmp_path}/whole"), *settings)
        assert torch.are_deterministic_algorithms_enabled()
        assert whole.code == ExitCode.DONE and "deterministic: yes (CUBLAS_WORKSPACE_CONFIG=:4096:8)" in whole.out
        resumed = [*in_run(f"{tmp_path}/resumed"), *settings]
        assert run(config, *resumed, "train.exit_interval=2").code == ExitCode.STOPPED
    finally:
        set_up_determinism({}, False)
    command = [sys.executable, "pretrain_gpt.py", "--config", str(config), *resumed]
    child = start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = child.communicate(timeout=120)
    assert child.returncode == ExitCode.DONE and "continuing from" in out, out
    assert digest(tmp_path / "whole") == digest(tmp_path / "resumed")
