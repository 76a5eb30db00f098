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
from megatron3d.train.state import TrainState, build_state, connect
from tests.support.shards import pretended_world

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
