"""Fact: the loss scale follows Megatron's rule step by step without a host sync; other precisions have no scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron3d.config.schema import TrainConfig
from megatron3d.optim.precision import LossScale

CPU = torch.device("cpu")


def build(**values: Any) -> LossScale:
    return LossScale(TrainConfig(**{"precision": "fp16"} | values), CPU)


def factor_of(scale: LossScale) -> float:
    return float(scale.factor)


class Megatron:
    """DynamicGradScaler of Megatron-LM (core/optimizer/grad_scaler.py), restated with plain numbers."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.scale = config, config.initial_loss_scale
        self.growth, self.hysteresis = 0, config.hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale * 0.5, self.config.min_loss_scale)
        else:
            self.growth += 1
            if self.growth == self.config.loss_scale_window:
                self.growth, self.hysteresis = 0, self.config.hysteresis
                self.scale *= 2.0


@given(
    steps=st.lists(st.booleans(), max_size=60),
    window=st.integers(1, 7),
    hysteresis=st.integers(1, 4),
    initial=st.sampled_from([1.0, 3.0, 2.0**16, 2.0**32]),
    minimum=st.sampled_from([0.25, 1.0]),
)
def test_the_dynamic_scale_equals_megatrons(
    steps: list[bool], window: int, hysteresis: int, initial: float, minimum: float
) -> None:
    config = TrainConfig(
        precision="fp16",
        initial_loss_scale=initial,
        min_loss_scale=minimum,
        loss_scale_window=window,
        hysteresis=hysteresis,
    )
    mine, theirs = LossScale(config, CPU), Megatron(config)
    for found in steps:
        mine.update(torch.tensor(float(found)))
        theirs.update(found)
        assert factor_of(mine) == theirs.scale
    assert {name: value.item() for name, value in mine.state().items()} == {
        "scale": theirs.scale,
        "growth_tracker": theirs.growth,
        "hysteresis_tracker": theirs.hysteresis,
    }


def test_the_defaults_equal_megatrons() -> None:
    scale = build()
    assert factor_of(scale) == 2.0**32
    scale.update(torch.tensor(1.0))
    assert factor_of(scale) == 2.0**32
    scale.update(torch.tensor(1.0))
    assert factor_of(scale) == 2.0**31
    for _ in range(999):
        scale.update(torch.tensor(0.0))
    assert factor_of(scale) == 2.0**31
    scale.update(torch.tensor(0.0))
    assert factor_of(scale) == 2.0**32


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_other_precisions_are_not_scaled_and_multiply_nothing(precision: str) -> None:
    scale, norm = build(precision=precision, loss_scale=None), torch.tensor(3.0)
    scale.update(torch.tensor(1.0))
    assert isinstance(scale.factor, float) and scale.factor == 1.0
    assert scale.unscale(norm) is norm
    assert scale.state() == {}


def test_a_fixed_scale_stays() -> None:
    scale = build(loss_scale=128.0)
    for found in (1.0, 1.0, 1.0):
        scale.update(torch.tensor(found))
    assert factor_of(scale) == 128
    assert scale.unscale(torch.tensor(256.0)) == 2
    scale.load({"scale": 7.0, "growth_tracker": 1.0, "hysteresis_tracker": 1.0})
    assert factor_of(scale) == 128 and scale.state() == {}


def test_a_restored_loss_scale_continues_exactly() -> None:
    one, other = build(loss_scale_window=3), build(loss_scale_window=3)
    for found in (1, 1, 0, 0):
        one.update(torch.tensor(found))
    other.load({name: value.item() for name, value in one.state().items()})
    for found in (0, 1, 0, 0, 0):
        one.update(torch.tensor(found))
        other.update(torch.tensor(found))
        assert factor_of(one) == factor_of(other)


def test_a_checkpoint_of_another_precision_leaves_the_initial_scale() -> None:
    scale = build(initial_loss_scale=64.0)
    scale.load({})
    assert factor_of(scale) == 64


def test_the_loss_scale_is_never_read_on_the_host() -> None:
    """A fake tensor has no value: reading one raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        scale = build()
        scale.update(torch.zeros(()))
        assert isinstance(scale.unscale(torch.zeros(())), Tensor)


def test_the_factor_is_changed_in_place() -> None:
    """Every holder of the tensor, such as a captured graph, sees the new value."""
    scale = build(hysteresis=1)
    held = scale.factor
    scale.update(torch.tensor(1.0))
    assert held is scale.factor and float(held) == 2.0**31
