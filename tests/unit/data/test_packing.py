"""Fact: packed documents do not attend to each other, in any layout, and count in the loss as configured."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron3d.attention.packed import Visible
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.data.packing import IGNORED, Packing
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.engine import PipelineExecutor
from megatron3d.train.state import build_state
from megatron3d.verify.layouts import StepTrace, differences, trace
from tests.support.turn_ranks import connect, run_turns

EOD, VOCAB_SIZE, SEQ_LENGTH = 0, 11, 8
RESET = {"reset_position_ids": True, "reset_attention_mask": True}
SMALL = {"num_layers": 2, "hidden_size": 32, "seq_length": SEQ_LENGTH, "make_vocab_size_divisible_by": 1}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**SMALL, "family": "gpt2", "num_attention_heads": 8, "attention_dropout": 0.1},
    "llama": {**SMALL, "family": "llama", "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 32},
}
TOKENS = st.lists(st.lists(st.integers(0, 4), min_size=SEQ_LENGTH + 1, max_size=SEQ_LENGTH + 1), min_size=1, max_size=3)


def configure(model: str, data: dict[str, Any], parallel: dict[str, Any] | None = None, **train: Any) -> Config:
    settings = {"precision": "fp64", "loss_chunk_tokens": 12, "micro_batch_size": 8, "global_batch_size": 8}
    sections = {"model": MODELS[model], "parallel": parallel or {}, "train": settings | train, "data": data}
    return Config.model_validate({**sections, "optimizer": {"lr": 1e-2, "clip_grad": 0.5}})


def reference(tokens: list[int]) -> tuple[list[list[bool]], list[int]]:
    """Return the attention mask and positions, computed one by one."""
    document = [sum(token == EOD for token in tokens[:place]) for place in range(len(tokens))]
    sees = [
        [key <= query and document[key] == document[query] for key in range(len(tokens))]
        for query in range(len(tokens))
    ]
    return sees, [place - document.index(document[place]) for place in range(len(tokens))]


@given(rows=TOKENS)
def test_documents_equal_those_found_one_by_one(rows: list[list[int]]) -> None:
    packing, length = Packing(EOD, **RESET), len(rows[0])
    documents = packing.documents(torch.tensor(rows))
    assert documents is not None and documents.positions_BS is not None
    seen = Visible(packing.starts(torch.tensor([[*tokens, EOD] for tokens in rows])))
    mask = [seen.mask(row, range(length), range(length), torch.device("cpu")) for row in range(len(rows))]
    for row, tokens in enumerate(rows):
        sees, positions = reference(tokens)
        assert mask[row].tolist() == sees and documents.positions_BS[row].tolist() == positions


@given(rows=TOKENS)
def test_labels_mask_padding_and_tokens_after_an_end(rows: list[list[int]]) -> None:
    labels = Packing(EOD, eod_mask_loss=True, pad=4).labels(torch.tensor(rows))
    for row, tokens in enumerate(rows):
        wanted = [IGNORED if before == EOD or after == 4 else after for before, after in pairwise(tokens)]
        assert labels[row].tolist() == wanted


def test_goldfish_masks_one_of_k_tokens_by_their_context() -> None:
    tokens = torch.randint(1000, (64, 257), generator=torch.Generator().manual_seed(0))
    dropped = Packing(goldfish=(4, 5)).labels(tokens) == IGNORED
    assert not dropped[:, :4].any() and abs(dropped[:, 4:].double().mean().item() - 1 / 4) < 0.01
    moved = torch.cat((torch.randint(1000, (64, 7)), tokens), dim=1)
    assert torch.equal((Packing(goldfish=(4, 5)).labels(moved) == IGNORED)[:, 11:], dropped[:, 4:])


@cache
def executor(model: str) -> PipelineExecutor:
    config = configure(model, RESET)
    spec = RunSpec(config, 1, VOCAB_SIZE, 0)
    return build_state(spec, connect(spec), torch.device("cpu")).executor


def logits(model: str, tokens: list[int], packing: Packing) -> Tensor:
    """Return the logits of every position of one sample."""
    made = executor(model).model
    at = replace(made.begin(torch.tensor([[*tokens, 0]]), 1, packing=packing), target=None)
    with torch.no_grad():
        (stage,) = made.stages
        return made(stage, None, at)[0]


@pytest.mark.parametrize("model", MODELS)
@given(seed=st.integers(0, 10**6))
def test_changing_a_document_changes_no_other_documents_logits(model: str, seed: int) -> None:
    draw = random.Random(seed)
    tokens = [1, 2, EOD, *(draw.randrange(1, VOCAB_SIZE) for _ in range(2)), EOD, 3, 4]
    changed = [1, 2, EOD, *(draw.randrange(1, VOCAB_SIZE) for _ in range(2)), EOD, 3, 4]
    others = [0, 1, 2, 6, 7]
    packing = Packing(EOD, **RESET)
    before, after = (logits(model, row, packing)[others] for row in (tokens, changed))
    assert torch.equal(before, after)
    if tokens != changed:
        before, after = (logits(model, row, Packing())[others] for row in (tokens, changed))
        assert not torch.equal(before, after)


@pytest.mark.parametrize("model", MODELS)
def test_a_packed_document_has_the_logits_of_one_alone(model: str) -> None:
    documents = [[5, 6, EOD], [7, EOD], [8, 9, 3]]
    packed = logits(model, [token for document in documents for token in document], Packing(EOD, **RESET))
    alone = torch.cat([logits(model, document, Packing()) for document in documents])
    assert torch.allclose(packed, alone, atol=1e-12, rtol=0)


DATA = {**RESET, "eod_mask_loss": True, "pad_token_id": 3, "goldfish_k": 5, "goldfish_h": 2}


def run_trace(rank: int, world_size: int, config: Config) -> StepTrace | None:
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    return trace(spec, connect(spec), num_steps=2)


@cache
def alone(model: str) -> StepTrace:
    values = run_trace(0, 1, configure(model, DATA))
    assert values is not None
    return values


def layouts() -> list[dict[str, Any]]:
    """Return every form on four or eight ranks, some of them in a pipeline."""
    shapes = {1: (4,), 2: (2, 2), 3: (2, 2, 2)}
    found = []
    for mode, entry in MODES.items():
        for form in entry.forms:
            shape = shapes[len(entry.axis_names)]
            stages = 2 if len(shape) < 3 else 1
            found.append(
                {
                    "tensor_parallel_mode": mode,
                    "tensor_parallel_form": form,
                    "tensor_parallel_shape": shape,
                    "pipeline_model_parallel_size": stages,
                }
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", layouts(), ids=lambda p: f"{p['tensor_parallel_mode']}-{p['tensor_parallel_form']}"
)
def test_every_layout_equals_one_process_with_packing(parallel: dict[str, Any]) -> None:
    world = 8
    for model in MODELS:
        config = configure(model, DATA, parallel, micro_batch_size=4)
        values = run_turns(run_trace, world, config)[0]
        assert list(differences(alone(model), values, 1e-10)) == []


def test_masked_tokens_change_the_loss_and_its_divisor() -> None:
    plain = run_trace(0, 1, configure("llama", {}))
    assert plain is not None
    assert abs(plain["loss of step 1"] - alone("llama")["loss of step 1"]).item() > 1e-4
    masked = configure("llama", {"pad_token_id": 3})
    config = masked.model_copy(update={"train": masked.train.model_copy(update={"micro_batch_size": 1})})
    assert list(differences(run_trace(0, 1, masked) or {}, run_trace(0, 1, config) or {}, 1e-10)) == []
