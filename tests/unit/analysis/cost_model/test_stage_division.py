"""Fact: nanotron fills pipeline stages one after another, and the head may have the last one alone."""

from __future__ import annotations

from dataclasses import replace

from megatron3d.analysis.cost_model.execution_profile import OURS
from megatron3d.analysis.cost_model.practices import NANOTRON
from megatron3d.analysis.cost_model.stage_division import divided_as, filled_stages
from megatron3d.analysis.cost_model.step import load_machine, predict_time
from megatron3d.analysis.memory_model.kernel_memory import KERNELS
from megatron3d.analysis.memory_model.pipeline_ranks import largest_rank_memory
from megatron3d.analysis.memory_model.step_spec import make_step_spec
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config

MODEL = {"family": "llama", "num_layers": 28, "hidden_size": 3072, "ffn_hidden_size": 8192, "num_attention_heads": 24}
MODEL |= {"seq_length": 4096, "vocab_size": 131072}


def spec(num_stages: int, **parallel: object) -> RunSpec:
    parallel |= {"pipeline_model_parallel_size": num_stages}
    train = {"precision": "bf16", "global_batch_size": 32, "compile": False}
    return RunSpec(Config.model_validate({"model": MODEL, "parallel": parallel, "train": train}), num_stages)


def test_stages_are_filled_until_they_have_more_than_their_part() -> None:
    """The head weighs 3.56 layers, so that each of 16 stages has a part of 1.97 layers, and each of 2 one of 15.78."""
    arch = spec(1).arch
    assert filled_stages(arch, 2) == (16, 12)
    assert filled_stages(arch, 16) == (2,) * 14 + (0, 0)
    assert filled_stages(arch, 4) == (8, 8, 8, 4)
    assert filled_stages(replace(arch, num_layers=4), 2) == (4, 0)


def test_the_practice_divides_what_a_run_leaves_open() -> None:
    whole = spec(16)
    assert divided_as(whole, OURS) is whole
    assert [len(stage.layers) for stage in divided_as(whole, NANOTRON).pipeline.stages] == [2] * 14 + [0, 0]
    given = spec(2, pipeline_model_parallel_layout=[20, 8])
    assert divided_as(given, NANOTRON) is given and divided_as(spec(1), NANOTRON).sizes.pipeline == 1
    machine = load_machine("eos", "bf16", 16, NANOTRON)
    assert predict_time(divided_as(whole, NANOTRON), machine).step_s < 0.9 * predict_time(whole, machine).step_s
    assert largest_rank_memory(make_step_spec(divided_as(whole, NANOTRON), KERNELS["gpu"])).total > 0
