"""Fact: lengths that the context ranks cannot split are refused, with the nearest that they can."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check

MODEL = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 61}


def problems(world_size: int, model: dict[str, Any], context: int, **train: Any) -> list[str]:
    values = {"model": MODEL | model, "parallel": {"context_parallel_size": context}, "train": train}
    return check(Config.model_validate(values), world_size)


def test_the_sequence_is_two_chunks_for_each_rank() -> None:
    assert problems(4, {"seq_length": 64}, 4) == []
    (problem,) = problems(4, {"seq_length": 60}, 4)
    assert problem == (
        "parallel.context_parallel_size=4: model.seq_length=60 is not a multiple of 8, two chunks for each of 4 ranks; "
        "use model.seq_length 56 or 64, or another context_parallel_size"
    )


def test_a_length_of_no_whole_chunks_has_one_message() -> None:
    """64 tokens are no multiple of 3 ranks either, but multiples of 3 are not right."""
    (problem,) = problems(3, {"seq_length": 64}, 3)
    assert problem.endswith("use model.seq_length 60 or 66, or another context_parallel_size")


def test_a_balance_of_documents_needs_documents() -> None:
    parallel = {"context_parallel_size": 2, "context_parallel_load_balancer": "documents"}
    values = {"model": MODEL | {"seq_length": 64}, "parallel": parallel}
    (problem,) = check(Config.model_validate(values), 2)
    assert problem == (
        "parallel.context_parallel_load_balancer=documents: without data.reset_attention_mask every sequence is one "
        "document, of which zigzag gives all ranks the same work; use data.reset_attention_mask=true, or zigzag"
    )
    assert check(Config.model_validate(values | {"data": {"reset_attention_mask": True}}), 2) == []


def test_the_warm_up_of_the_sequence_length_keeps_to_chunks() -> None:
    assert problems(2, {"seq_length": 64}, 2, seq_length_warmup=(16, 4, 100)) == []
    (problem,) = problems(2, {"seq_length": 64}, 2, seq_length_warmup=(10, 6, 100))
    assert problem == (
        "train.seq_length_warmup=[10,6,100]: start and increment must be multiples of 4, two chunks of a sequence for "
        "each of the 2 context ranks; use for example [8,4,100]"
    )


def test_the_world_size_has_the_context_ranks_as_a_factor() -> None:
    (problem,) = problems(6, {"seq_length": 64}, 4)
    assert problem == (
        "world_size 6: not a multiple of TP 1 x CP 4 x PP 1 = 4; use 4 or 8 processes (--world-size), or another "
        "parallel.context_parallel_size"
    )


@pytest.mark.parametrize("context", (1, 2, 4))
def test_context_ranks_read_the_same_sequences(context: int) -> None:
    parallel = {"context_parallel_size": context, "tensor_model_parallel_size": 2}
    config = Config.model_validate({"model": MODEL, "parallel": parallel})
    state = RunSpec(config, 16, 61, rank=13).parallel_state
    assert (state.mesh.size(state.mesh.context), state.tensor_parallel_size) == (context, 2)
    assert state.data_parallel_size == 8 // context
    assert state.group(state.mesh.context).index(13) == state.mesh.index(state.mesh.context)
    assert state.tensor_axes == ("t",)


def test_forms_that_split_tokens_inside_sequences_need_enough_positions() -> None:
    keys = {"context_parallel_size": 4, "tensor_model_parallel_size": 8, "sequence_parallel": True}
    sizes = {"micro_batch_size": 1, "global_batch_size": 1}
    model = {**MODEL, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 8}
    config = Config.model_validate({"model": model, "parallel": keys, "train": sizes})
    assert check(config, 32) == [
        "model.seq_length=8: micro_batch_size 1 x 8 = 8 tokens are not a multiple of context*t = 32 and context = 4, "
        "over which 1d: t 8 splits them; use 32"
    ]
