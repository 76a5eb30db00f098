"""Fact: deterministic kernels are chosen before CUDA starts, and a contradicting environment is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.errors import UserError
from megatron3d.runtime.machine import WORKSPACE, set_up_determinism, sum_gemms_in_fp32


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    set_up_determinism({}, False)


def test_the_mode_is_set_and_reported() -> None:
    environ: dict[str, str] = {}
    assert "yes" in set_up_determinism(environ, True)["deterministic"]
    assert environ == {WORKSPACE: ":4096:8"} and torch.are_deterministic_algorithms_enabled()
    environ = {WORKSPACE: ":16:8"}
    assert ":16:8" in set_up_determinism(environ, True)["deterministic"]
    assert "no" in set_up_determinism({WORKSPACE: "anything"}, False)["deterministic"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_mode_that_is_set_is_not_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug that this finds: torch's call imports its compiler, which took each rank longer than a short run."""

    def refuse(_: bool) -> None:
        raise AssertionError("it is off already")

    monkeypatch.setattr(torch, "use_deterministic_algorithms", refuse)
    set_up_determinism({}, False)


def test_another_workspace_is_refused() -> None:
    with pytest.raises(UserError, match=f"train.deterministic_mode=true: {WORKSPACE}=:0:0 .*unset it"):
        set_up_determinism({WORKSPACE: ":0:0"}, True)


def test_choices_that_cannot_be_deterministic_are_refused() -> None:
    config = Config.model_validate(
        {
            "train": {"deterministic_mode": True, "norm_implementation": "apex"},
            "optimizer": {"adam_implementation": "apex"},
        }
    )
    found = check(config, 1, 100)
    assert sum("deterministic_mode" in problem for problem in found) == 2


def test_gemms_sum_in_fp32() -> None:
    sum_gemms_in_fp32()
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
