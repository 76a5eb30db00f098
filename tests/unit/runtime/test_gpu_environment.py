"""Fact: what a user has set in the environment, under any of its names, stays; everything else has its default."""

from __future__ import annotations

import pytest

from megatron3d.runtime import gpu_environment

NAMES = [(variable, name) for variable in gpu_environment.variables(600) for name in (variable.name, *variable.others)]


def test_defaults_are_set_and_reported() -> None:
    environ: dict[str, str] = {}
    report = gpu_environment.set_up(environ, 600)
    assert environ["TORCH_FR_BUFFER_SIZE"] == "2000" and environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "660"
    assert report["collectives in flight recorder"] == "2000"


@pytest.mark.parametrize(("variable", "name"), NAMES, ids=lambda value: str(getattr(value, "name", value)))
def test_the_choice_of_the_user_stays(variable: gpu_environment.Variable, name: str) -> None:
    """Bug that this finds: a setting under torch's older name is overruled, since the newer one takes precedence."""
    environ = {name: "mine"}
    report = gpu_environment.set_up(environ, 600)
    assert environ[name] == "mine" and {*environ} & {variable.name, *variable.others} == {name}
    assert variable.fact is None or report[variable.fact] == f"mine ({name})"
