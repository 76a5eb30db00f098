"""Fact: context ranks compute the numbers of whole sequences: packed documents, masked losses and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.attention.context.plan import CONTEXT_EXCHANGES, DOCUMENTS, LOAD_BALANCERS, ZIGZAG
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import Microbatch
from megatron3d.data.packing import Packing
from megatron3d.parallel.modes import MODES
from megatron3d.train.state import build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import differences
from tests.support.context_runs import DATA, EOD, TOLERANCE, VOCAB_SIZE, alone, config_of, exchange_of, run_trace
from tests.support.turn_ranks import connect, run_turns

MODELS = ("gpt2", "llama", "uneven groups")
SHAPES = {1: (2,), 2: (1, 2), 3: (2, 1, 2)}
EVERY_FORM = [(mode, form) for mode, entry in MODES.items() for form in entry.forms]
CASES = [
    (mode, form, MODELS[place % len(MODELS)], list(DATA)[place // 2 % len(DATA)])
    for place, (mode, form) in enumerate(EVERY_FORM)
]


@pytest.mark.parametrize(("mode", "form", "model", "data"), CASES)
def test_documents_in_every_mode(mode: str, form: str, model: str, data: str) -> None:
    shape = SHAPES[len(MODES[mode].axis_names)]
    tensor = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_parallel_shape": shape}
    context = 2 if len(shape) == 3 else 4
    config = config_of(model, tensor | {"context_parallel_size": context, "zero_stage": len(form) % 4}, data)
    assert check(config, 8, VOCAB_SIZE) == []
    values = run_turns(run_trace, 8, config)[0]
    assert list(differences(alone(model, data), values, TOLERANCE)) == []


# Forms that split sequences before context ranks do, or tokens behind them; models with dropout and few key heads.
BALANCED = [
    ("1d", "sequence_parallel", "gpt2", "a2a+p2p", {}),
    ("1d", "sequence_parallel", "uneven groups", "p2p", {"window_size": (5, 0), "window_attn_skip_freq": 2}),
    ("2d", None, "gpt2", "all_gather", {}),
    ("3d", None, "gpt2", "p2p", {}),
    ("grid", None, "llama", "a2a", {"window_size": (3, 0)}),
]


@pytest.mark.parametrize(("mode", "form", "model", "exchange", "changes"), BALANCED)
def test_documents_balance_the_work_of_context_ranks(
    mode: str, form: str | None, model: str, exchange: str, changes: dict[str, Any]
) -> None:
    shape, data = SHAPES[len(MODES[mode].axis_names)], next(iter(DATA))
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_parallel_shape": shape}
    context = 2 if len(shape) == 3 else 4
    parallel |= exchange_of(exchange, DOCUMENTS) | {"context_parallel_size": context, "zero_stage": 1}
    expected = config_of(model, {}, data, micro_batch_size=8)
    config = config_of(model, parallel, data, recompute_granularity="selective")
    expected, config = (
        each.model_copy(update={"model": each.model.model_copy(update=changes)}) for each in (expected, config)
    )
    assert check(config, 8, VOCAB_SIZE) == []
    alone_values, values = run_trace(0, 1, expected), run_turns(run_trace, 8, config)[0]
    assert alone_values is not None
    assert list(differences(alone_values, values, TOLERANCE)) == []


@pytest.mark.parametrize("model", MODELS)
def test_the_core_of_attention_is_recomputed_with_documents(model: str) -> None:
    data = next(iter(DATA))
    parallel = {"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 1}
    config = config_of(model, parallel, data, recompute_granularity="selective", micro_batch_size=2)
    assert list(differences(alone(model, data), run_turns(run_trace, 4, config)[0], TOLERANCE)) == []


TEXTS = [[5, 6, 1, 9, EOD], [7, EOD], [8, 9, 3, 2, 2, 10, EOD], [4, 1]]


def logits(rank: int, world_size: int, config: Config, rows: list[list[int]], packing: Packing) -> Tensor:
    """Return the logits of every position of samples, as each rank has them."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    model = build_state(spec, connect(spec), torch.device("cpu")).model
    at = replace(model.begin(torch.tensor([[*row, 0] for row in rows]), 1, packing=packing), target=None)
    with torch.no_grad():
        (stage,) = model.stages
        found: Tensor = model(stage, None, at)
        return found


PACKED = [token for document in TEXTS for token in document]


@pytest.mark.parametrize("balancer", LOAD_BALANCERS)
@pytest.mark.parametrize("exchange", CONTEXT_EXCHANGES)
@pytest.mark.parametrize(("model", "restarts"), [("gpt2", True), ("llama", True), ("llama", False)])
def test_packed_documents_of_four_ranks_equal_each_document_alone(
    model: str, restarts: bool, exchange: str, balancer: str
) -> None:
    """Where positions go on, RoPE turns all queries and keys of a later document alike, which changes no score."""
    config, one = config_of(model, exchange_of(exchange, balancer)), config_of(model, {})
    packing = Packing(EOD, reset_position_ids=restarts, reset_attention_mask=True)
    every = run_turns(logits, 4, config, [PACKED, PACKED[::-1]], packing)
    expected = torch.cat([logits(0, 1, one, [document], Packing())[0] for document in TEXTS])
    for found in every:
        assert torch.allclose(found[0], expected, atol=1e-12, rtol=0)
    assert torch.allclose(every[0][1], logits(0, 1, one, [PACKED[::-1]], packing)[0], atol=1e-12, rtol=0)


def train_on(rank: int, world_size: int, config: Config, steps: list[list[list[int]]], packing: Packing) -> list[float]:
    """Return loss and gradient norm of steps, each of which trains on its rows as its microbatches."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    state, found = build_state(spec, connect(spec), torch.device("cpu")), list[float]()
    for rows in steps:
        each = [torch.tensor([row]) for row in rows]
        batches = [Microbatch(row, place, packing.starts(row)) for place, row in enumerate(each)]
        settings = StepSettings(1, sum(row.shape[1] - 1 for row in each), len(rows), packing)
        result = train_step(state, batches, 1e-2, settings)
        found += [result.loss.item(), result.grad_norm.item()]
    return found


@pytest.mark.parametrize("exchange", CONTEXT_EXCHANGES)
@pytest.mark.parametrize(("restarts", "balancer"), [(True, ZIGZAG), (False, ZIGZAG), (False, DOCUMENTS)])
def test_losses_of_packed_documents_are_those_of_each_alone(restarts: bool, balancer: str, exchange: str) -> None:
    """One process trains on each document as a microbatch of its own; the sum of their losses is divided once."""
    packing = Packing(EOD, reset_position_ids=restarts, reset_attention_mask=True, eod_mask_loss=True)
    sizes = {"micro_batch_size": 1}
    alone_rows = [[*document, 3] for document in TEXTS]
    one = config_of("llama", {}, **sizes, global_batch_size=len(alone_rows))
    plain = replace(packing, reset_attention_mask=False, reset_position_ids=False)
    expected = train_on(0, 1, one, [alone_rows] * 2, plain)
    packed = config_of("llama", exchange_of(exchange, balancer), **sizes, global_batch_size=1)
    for found in run_turns(train_on, 4, packed, [[[*PACKED, 3]]] * 2, packing):
        assert found == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("model", MODELS)
def test_shorter_sequences_of_a_warm_up(model: str) -> None:
    """A batch of the sequence-length warm-up is cut into chunks of its own length."""
    rows = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
    expected = logits(0, 1, config_of(model, {}), rows, Packing())
    for found in run_turns(logits, 2, config_of(model, {"context_parallel_size": 2}), rows, Packing()):
        assert torch.allclose(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("exchange", CONTEXT_EXCHANGES)
@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_a_warm_up_of_the_length_with_scaled_rope(scaling: str, exchange: str) -> None:
    """Lengths of 8 and of 16 train in turn; windows are longer than the first and shorter than the second."""
    changes = {"rotary_scaling": scaling, "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8}
    changes |= {"window_size": (9, 0), "window_attn_skip_freq": 2}
    steps = [[PACKED[:9]], [[*PACKED, 3]], [[*PACKED[:8], 3]]]

    def scaled(parallel: dict[str, Any]) -> Config:
        config = config_of("llama", parallel, micro_batch_size=1, global_batch_size=1)
        return config.model_copy(update={"model": config.model.model_copy(update=changes)})

    assert check(scaled(exchange_of(exchange)), 4, VOCAB_SIZE) == []
    expected = train_on(0, 1, scaled({}), steps, Packing())
    for found in run_turns(train_on, 4, scaled(exchange_of(exchange)), steps, Packing()):
        assert found == pytest.approx(expected, rel=TOLERANCE)
