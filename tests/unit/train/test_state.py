"""Fact: every setting of the configuration that concerns layers reaches every layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.train.state import TrainState, build_state, connect

MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}


def build(**train: Any) -> TrainState:
    config = Config.model_validate({"model": MODEL, "train": train})
    spec = RunSpec(config, 1, 61, 0)
    return build_state(spec, connect(spec), torch.device("cpu"))


@pytest.mark.parametrize("compiled", [True, False])
def test_each_layer_is_compiled_if_configured(compiled: bool) -> None:
    layers = build(compile=compiled).model.layers.values()
    assert ["forward" in vars(layer) for layer in layers] == [compiled] * 2


def test_offloading_from_the_host_to_the_host_is_refused() -> None:
    with pytest.raises(UserError, match="computes on the CPU; use false, or a GPU"):
        build(cpu_offloading=True)
