"""Fact: inference holds all experts on each rank, whatever the run's layout of experts was, and says so if asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron3d.errors import UserError
from megatron3d.inference.load import ALL_EXPERTS, read_run
from tests.support.equality import MODELS, configure

MODEL = {**MODELS["experts, shared experts, losses of routers"], "vocab_size": 64}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_of_distributed_experts_is_read(world_size: int, tmp_path: Path) -> None:
    asked = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    config = configure(MODEL, asked, micro_batch_size=2, global_batch_size=8)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    folder = tmp_path / "iter_1"
    parallel = read_run(folder, [], world_size).parallel
    assert {name: getattr(parallel, name) for name in ALL_EXPERTS} == dict(ALL_EXPERTS)
    for name in ALL_EXPERTS:
        with pytest.raises(UserError, match=f"parallel.{name}: generation and evaluation hold all experts"):
            read_run(folder, [f"parallel.{name}=2"], world_size)
