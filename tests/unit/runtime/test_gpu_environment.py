"""Fact: what a user has set in the environment, under any of its names, stays; everything else has its default."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from megatron3d.runtime import machine as gpu_environment
from megatron3d.runtime import process
from megatron3d.runtime.launcher_env import LauncherEnv

NAMES = [(variable, name) for variable in gpu_environment.variables(600) for name in (variable.name, *variable.others)]


def test_defaults_are_set_and_reported() -> None:
    environ: dict[str, str] = {}
    report = gpu_environment.set_up(environ, 600)
    assert environ["TORCH_FR_BUFFER_SIZE"] == "2000" and environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "660"
    assert environ["PYTORCH_ALLOC_CONF"] == report["GPU allocator"] == "expandable_segments:True"
    assert report["collectives in flight recorder"] == "2000"


@pytest.mark.parametrize(("variable", "name"), NAMES, ids=lambda value: str(getattr(value, "name", value)))
def test_the_choice_of_the_user_stays(variable: gpu_environment.Variable, name: str) -> None:
    """Bug that this finds: a setting under torch's older name is overruled, since the newer one takes precedence."""
    environ = {name: "mine"}
    report = gpu_environment.set_up(environ, 600)
    assert environ[name] == "mine" and {*environ} & {variable.name, *variable.others} == {name}
    assert variable.fact is None or report[variable.fact] == f"mine ({name})"


def test_the_allocator_is_chosen_before_the_first_use_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug that this finds: the environment is set after the device is chosen, when the allocator has read it."""
    seen: list[str | None] = []

    def device(*_: object) -> torch.device:
        seen.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        return torch.device("cpu")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process, "_device", device)
    monkeypatch.setattr(process, "launcher_env", LauncherEnv)
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            os.environ.pop(name, None)
        with process.start() as here:
            assert here.settings["GPU allocator"] == "expandable_segments:True"
    assert seen == ["expandable_segments:True"]
