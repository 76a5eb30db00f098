"""Fact: sizes that tensor cores or fused attention are slow with are named by --check, with sizes that are not."""

from __future__ import annotations

from typing import Any

from megatron3d.config.report import slow_shapes
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config

MODEL = {"num_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 64, "vocab_size": 512}


def lines(model: dict[str, Any], ranks: int, precision: str = "bf16") -> list[str]:
    parallel = {"tensor_model_parallel_size": ranks}
    values = {"model": {**MODEL, **model}, "parallel": parallel, "train": {"precision": precision}}
    return list(slow_shapes(RunSpec(Config.model_validate(values), ranks)))


def test_a_rank_s_part_counts() -> None:
    assert lines({"ffn_hidden_size": 1536}, 4) == []
    assert lines({"ffn_hidden_size": 1536}, 8) == []
    assert lines({"ffn_hidden_size": 1364}, 1) == [
        "slow on GPUs: a rank's 1,364 features of mlp.fc1, mlp.fc2 are not a multiple of 64, as 1,344 or 1,408 would be"
    ]
    assert lines({"ffn_hidden_size": 192}, 4) == [
        "slow on GPUs: a rank's 48 features of mlp.fc1, mlp.fc2 are not a multiple of 64, as 64 would be"
    ]


def test_heads_of_odd_sizes() -> None:
    first, *_ = lines({"kv_channels": 60}, 1)
    assert first == (
        "slow on GPUs: heads of 60 channels are not a multiple of 8; model.kv_channels=64 is the next that is"
    )


def test_other_precisions_do_not_use_tiles_of_tensor_cores() -> None:
    assert lines({"ffn_hidden_size": 1364}, 1, "fp32") == []
