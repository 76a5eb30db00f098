"""Fact: every setting of the configuration that concerns layers reaches every layer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.train.monitor.reports import describe_compilation
from megatron3d.train.state import TrainState, build_state, connect
from tests.support.shards import pretended_world

MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}


def build(**train: Any) -> TrainState:
    config = Config.model_validate({"model": MODEL, "train": train})
    spec = RunSpec(config, 1, 61, 0)
    return build_state(spec, connect(spec), torch.device("cpu"))


@pytest.mark.parametrize("setting", [True, False, "auto"])
def test_each_layer_is_compiled_if_configured(setting: bool | str) -> None:
    state = build(compile=setting)
    is_compiled = setting is True
    assert ["forward" in vars(layer) for layer in state.model.layers.values()] == [is_compiled] * 2
    expected = {
        True: "layers: compiled each as one graph (train.compile=true), in the first step",
        False: "layers: not compiled (train.compile=false)",
        "auto": "layers: not compiled (train.compile=auto on a CPU)",
    }
    assert describe_compilation(state) == expected[setting]
    assert state.spec.compiles(on_gpu=True) == (setting is not False)


def test_layers_whose_elements_in_fp8_are_counted_are_not_compiled() -> None:
    """By default; without fp8 there are none."""
    for fp8 in (None, "e4m3"):
        train, logging = {"fp8": fp8, "fp8_recipe": "rowwise"}, {"fp8_stats_interval": 5}
        config = Config.model_validate({"model": MODEL, "train": train, "logging": logging})
        assert RunSpec(config, 1, 61, 0).compiles(on_gpu=True) == (fp8 is None)


def test_offloading_from_the_host_to_the_host_is_refused() -> None:
    with pytest.raises(UserError, match="computes on the CPU; use false, or a GPU"):
        build(cpu_offloading=True)


def test_every_process_group_has_the_timeout_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with torch's own ten minutes fails while the watchdog of a longer run still waits, which then is lost."""
    timeouts: list[Any] = []
    new_group = dist.new_group

    def record(ranks: list[int], timeout: timedelta | None = None, **options: Any) -> dist.ProcessGroup:
        timeouts.append(timeout)
        group: dist.ProcessGroup = new_group(ranks, timeout, **options)
        return group

    monkeypatch.setattr(dist, "new_group", record)
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    train = {"distributed_timeout_minutes": 45, "global_batch_size": 4, "micro_batch_size": 1}
    config = Config.model_validate({"model": MODEL, "parallel": parallel, "train": train})
    with pretended_world(0, 8):
        connect(RunSpec(config, 8, 61, 0))
    assert timeouts, "this layout has groups"
    assert set(timeouts) == {timedelta(minutes=45, seconds=30)}
