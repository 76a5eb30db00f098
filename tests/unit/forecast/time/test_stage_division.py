"""Fact: nanotron fills pipeline stages one after another, and the last may have no layer; Megatron's are equal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.rank import largest_rank_memory
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.time.practices import (
    MEGATRON_2021,
    MEGATRON_CORE,
    NANOTRON,
    OURS,
    ExecutionProfile,
    divided_as,
    filled_stages,
)
from megatron3d.forecast.time.step import load_machine, predict_time
from megatron3d.model.local_sizes import KERNELS

MODEL = {"family": "llama", "num_layers": 28, "hidden_size": 3072, "ffn_hidden_size": 8192, "num_attention_heads": 24}
MODEL |= {"seq_length": 4096, "vocab_size": 131072}


def spec(num_stages: int, **parallel: object) -> RunSpec:
    parallel |= {"pipeline_model_parallel_size": num_stages}
    train = {"precision": "bf16", "global_batch_size": 32, "compile": False}
    return RunSpec(Config.model_validate({"model": MODEL, "parallel": parallel, "train": train}), num_stages)


def test_stages_are_filled_until_they_have_their_part() -> None:
    """The head weighs 3.56 layers, so that each of 16 stages has a part of 1.97 layers, and each of 2 one of 15.78."""
    arch = spec(1).arch
    assert filled_stages(arch, 2) == (16, 12)
    assert filled_stages(arch, 16) == (2,) * 14 + (0, 0)
    assert filled_stages(arch, 4) == (8, 8, 8, 4)
    assert filled_stages(replace(arch, num_layers=4), 2) == (4, 0)
    exact = replace(arch, num_layers=16, hidden_size=2048, num_attention_heads=16)  # the head weighs 4 layers
    assert filled_stages(exact, 2) == (10, 6) and filled_stages(exact, 4) == (5, 5, 5, 1)


def test_the_practice_divides_what_a_run_leaves_open() -> None:
    whole = spec(16)
    assert divided_as(whole, OURS) is whole
    assert [len(stage.layers) for stage in divided_as(whole, NANOTRON).pipeline.stages] == [2] * 14 + [0, 0]
    given = spec(2, pipeline_model_parallel_layout=[20, 8])
    assert divided_as(given, NANOTRON) is given and divided_as(spec(1), NANOTRON).sizes.pipeline == 1
    machine = load_machine("eos", "bf16", 16, NANOTRON)
    assert predict_time(divided_as(whole, NANOTRON), machine).step_s < 0.9 * predict_time(whole, machine).step_s
    assert largest_rank_memory(make_step_spec(divided_as(whole, NANOTRON), KERNELS["gpu"])).total > 0


@pytest.mark.parametrize("profile", [MEGATRON_2021, MEGATRON_CORE], ids=lambda profile: profile.name)
def test_megatron_has_as_many_layers_in_each_stage(profile: ExecutionProfile) -> None:
    def layers(num_stages: int, **parallel: object) -> list[int]:
        divided = divided_as(spec(num_stages, **parallel), profile)
        return [len(stage.layers) for stage in divided.pipeline.stages]

    assert layers(4) == [7] * 4
    interleaved = {"pipeline_schedule": "interleaved", "virtual_pipeline_model_parallel_size": 7}
    assert layers(2, **interleaved) == [2] * 14
    uneven = spec(8)
    assert divided_as(uneven, profile) is uneven
