"""Fact: one wrong bit in a replica's weights is found and the rank named; equal replicas pass at every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.train.state import build_state, check_replicas, digest
from tests.support.turn_ranks import connect, run_turns

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 64}
BATCH = {"micro_batch_size": 1, "global_batch_size": 8}


def checked(rank: int, world_size: int, parallel: dict[str, Any], precision: str, wrong: int | None) -> str:
    config = Config.model_validate({"model": MODEL, "parallel": parallel, "train": {**BATCH, "precision": precision}})
    spec = RunSpec(config, world_size, 0, rank)
    state = build_state(spec, connect(spec), torch.device("cpu"))
    state.buffers.settle()
    if rank == wrong:
        flat = state.buffers.flat_buffers[-1]
        values = flat.main if state.buffers.sharding.params else flat.params.detach()
        values.view(torch.int16 if values.element_size() == 2 else torch.int32)[3].bitwise_xor_(1)
    try:
        check_replicas(state)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_one_flipped_bit_is_found(zero_stage: int, precision: str) -> None:
    """Check four replicas of a tensor-parallel pair; with ZeRO 3 two replica groups of two shards."""
    parallel = {"zero_stage": zero_stage, "tensor_model_parallel_size": 2}
    parallel |= {"num_distributed_optimizer_instances": 2} if zero_stage == 3 else {}
    assert run_turns(checked, 8, parallel, precision, None) == [""] * 8
    (said,) = set(run_turns(checked, 8, parallel, precision, 5))
    if zero_stage == 3:
        assert "rank 1 (host" in said and "rank 5 (host" in said and "are not the same" in said
    else:
        assert said.startswith("iteration 0: the weights of rank 5 (host") and "not those of ranks 1, 3, 7" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_depends_on_every_bit_and_on_the_order(dtype: torch.dtype) -> None:
    values = torch.randn(2**20 + 5).to(dtype)
    exchanged = values.clone()
    exchanged[[3, 2**20 + 2]] = values[[2**20 + 2, 3]]
    other = values.clone()
    other[-1] = (
        torch.nextafter(other[-1].double(), torch.tensor(9.0, dtype=torch.float64))
        if dtype == torch.float64
        else -other[-1]
    )
    assert len({digest(values), digest(exchanged), digest(other)}) == 3 and digest(values) == digest(values.clone())
