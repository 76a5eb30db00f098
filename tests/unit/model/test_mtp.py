"""Fact: multi-token prediction computes DeepSeek-V3's formulas: losses and every gradient equal a reference in plain
torch, which counts its labels one by one, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import Microbatch
from megatron3d.data.packing import PLAIN, Packing
from megatron3d.forecast.memory.rank import rank_memory
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.model.stage_plan import divide
from megatron3d.train.state import TrainState, build_state, connect
from megatron3d.train.step import StepSettings, evaluate, train_step, valid_tokens
from megatron3d.verify.layouts import differences
from tests.support.equality import run_trace
from tests.support.turn_ranks import run_turns

VOCAB, SEQ, HIDDEN, HEADS, EOD, PAD = 20, 8, 16, 2, 0, 1
FACTOR, MODULES = 0.3, 2
MODEL: dict[str, Any] = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "ffn_hidden_size": 24,
    "seq_length": SEQ,
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 1,
    "init_method_std": 0.4,
    "mtp_num_layers": MODULES,
    "mtp_loss_scaling_factor": FACTOR,
}
DOCUMENTS = Packing(EOD, reset_position_ids=True, reset_attention_mask=True)
PACKINGS: Mapping[str, Packing] = {
    "plain": PLAIN,
    "documents": DOCUMENTS,
    "documents, next one not predicted": replace(DOCUMENTS, eod_mask_loss=True, pad=PAD),
    "goldfish and padding": Packing(EOD, pad=PAD, goldfish=(2, 3)),
}


def make(model: Mapping[str, Any] = MODEL, num_rows: int = 4, **parallel: Any) -> TrainState:
    train = {"precision": "fp64", "micro_batch_size": 2, "global_batch_size": num_rows, "loss_chunk_tokens": 5}
    spec = RunSpec(Config.model_validate({"model": dict(model), "train": train, "parallel": parallel}), 1, VOCAB)
    return build_state(spec, connect(spec), torch.device("cpu"))


def batch(packing: Packing, num_rows: int = 4) -> list[Microbatch]:
    """Return microbatches of two rows each, with documents of all lengths, one that ends a row, and padding."""
    rows = torch.randint(2, VOCAB, (num_rows, SEQ + 1), generator=torch.Generator().manual_seed(5))
    rows[0, [2, 3]] = rows[1, SEQ] = rows[2, SEQ - 1] = EOD
    rows[3, 5] = PAD
    return [Microbatch(part, 2 * place, packing.starts(part)) for place, part in enumerate(rows.split(2))]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x_BSND: Tensor, positions_BS: Tensor) -> Tensor:
    half = x_BSND.shape[-1] // 2
    angle = positions_BS[..., None, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x_BSND[..., :half], x_BSND[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def reference_layer(p: Mapping[str, Tensor], name: str, x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
    heads = (*x.shape[:2], HEADS, -1)
    parts = F.linear(rms(x, p[f"{name}.input_norm.weight"]), p[f"{name}.attention.qkv.weight"]).chunk(3, -1)
    q, k, v = (part.reshape(heads) for part in parts)
    scores = torch.einsum("bind,bjnd->bnij", turned(q, positions), turned(k, positions)) / (HIDDEN / HEADS) ** 0.5
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    y = torch.einsum("bnij,bjnd->bind", weights, v).flatten(2)
    x = x + F.linear(y, p[f"{name}.attention.proj.weight"])
    gate, up = F.linear(rms(x, p[f"{name}.post_attention_norm.weight"]), p[f"{name}.mlp.fc1.weight"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, p[f"{name}.mlp.fc2.weight"])


def counts_at(row: list[int], place: int, further: int, packing: Packing, next_counts: list[bool]) -> bool:
    """Return whether the label of a position counts: inside the row and the document, and counted as a next token."""
    label = place + further + 1
    if label > SEQ or not next_counts[place + further]:
        return False
    return not (further and packing.reason and EOD in row[place:label])


def reference_losses(p: Mapping[str, Tensor], tokens: Tensor, packing: Packing) -> list[Tensor]:
    """Return the losses of the model and of its modules, each divided by its own number of labels."""
    rows, documents = tokens.tolist(), torch.zeros_like(tokens)
    documents[:, 1:] = (tokens[:, :-1] == EOD).cumsum(1)
    documents, places = documents[:, :-1], torch.arange(SEQ)
    seen = (places[:, None] >= places)[None].expand(len(rows), -1, -1)
    positions = places.expand(len(rows), -1)
    if packing.reset_attention_mask:
        seen = seen & (documents[:, :, None] == documents[:, None, :])
        positions = torch.stack([torch.tensor([row[:i].count(row[i]) for i in places]) for row in documents.tolist()])
    next_counts = (packing.labels(tokens) >= 0).tolist()
    embedding = p["embedding.weight"]
    x = embedding[tokens[:, :-1]]
    for index in range(2):
        x = reference_layer(p, f"layers.{index}", x, positions, seen)
    h, losses = rms(x, p["final_norm.weight"]), list[Tensor]()
    for further in range(1 + MODULES):
        if further:
            name = f"mtp.{further - 1}"
            ahead = torch.tensor([[*row, *MODULES * [7]][further : further + SEQ] for row in rows])  # 7: never counts
            sides = rms(h, p[f"{name}.hidden_norm.weight"]), rms(embedding[ahead], p[f"{name}.embedding_norm.weight"])
            both = torch.cat((p[f"{name}.hidden_proj.weight"], p[f"{name}.embedding_proj.weight"]), 1)
            h = reference_layer(p, f"{name}.layer", F.linear(torch.cat(sides, -1), both), positions, seen)
            h = rms(h, p[f"{name}.final_norm.weight"])
        logs = F.linear(h, p.get("head.weight", embedding)).log_softmax(-1)
        each = [
            -logs[b, i, row[i + further + 1]]
            for b, row in enumerate(rows)
            for i in range(SEQ)
            if counts_at(row, i, further, packing, next_counts[b])
        ]
        losses.append(torch.stack(each).sum() / len(each))
    return losses


def gradients(state: TrainState, microbatches: list[Microbatch], packing: Packing) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses and the gradient of each parameter."""
    model, settings = state.model, StepSettings(3, 4 * SEQ, 4, packing)
    count, *ahead = valid_tokens(model, microbatches, settings)
    passes = [
        model.begin(each.tokens, count, each.first_sample, packing=packing, starts=each.starts, num_ahead=ahead)
        for each in microbatches
    ]
    state.buffers.begin_step(len(passes))
    losses = state.executor.train(passes, state.buffers.check_stage)
    state.buffers.reduce_grads()
    return losses, {name: grad.clone() for name, _, grad in state.buffers.shards("grad")}


def close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() <= 1e-10 * max(expected.abs().max().item(), 1e-3))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PACKINGS)
def test_losses_and_gradients_equal_the_reference(name: str, tied: bool) -> None:
    packing, state = PACKINGS[name], make({**MODEL, "tie_embeddings": tied})
    values = {each: param.detach().clone().requires_grad_() for each, param in state.model.named_parameters()}
    expected = reference_losses(values, torch.cat([each.tokens for each in batch(packing)]), packing)
    (expected[0] + FACTOR / MODULES * torch.stack(expected[1:]).sum()).backward()
    losses, grads = gradients(state, batch(packing), packing)
    assert close(losses, torch.stack(expected).detach())
    for each, value in values.items():
        assert value.grad is not None and close(grads[each].view(value.shape), value.grad), each


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": [2, 0]},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ],
)
def test_layouts_equal_one_process(parallel: dict[str, Any]) -> None:
    """The last of two stages holds the embedding matrix as well; with sequence parallelism tokens become features."""
    train = {"precision": "fp64", "micro_batch_size": 1, "global_batch_size": 2}
    sections = {"model": MODEL, "train": train, "optimizer": {"lr": 1e-2}}
    one, two = (Config.model_validate({**sections, "parallel": layout}) for layout in ({}, parallel))
    expected, got = run_trace(0, 1, one, 1), run_turns(run_trace, 2, two, 1)[0]
    assert expected is not None and list(differences(expected, got, 1e-10)) == []


def test_a_step_reports_the_losses_apart_and_evaluation_finds_the_same() -> None:
    """The loss of the next token is that of a model without modules, as training started."""
    packing = PACKINGS["documents, next one not predicted"]
    settings, plain = StepSettings(3, 4 * SEQ, 4, packing), make({**MODEL, "mtp_num_layers": 0})
    state = make()
    found = evaluate(state.executor, [batch(packing)], settings)
    without = evaluate(plain.executor, [batch(packing)], settings)
    result = train_step(state, batch(packing), 0.1, settings)
    assert close(found, torch.stack((result.loss, *result.mtp_losses)))
    assert without.shape == (1,) and close(found[:1], without)
    later = evaluate(state.executor, [batch(packing)], settings)
    assert (later < found).all()


EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "moe_router_load_balancing_type": "seq_aux_loss"}


def test_the_router_of_a_module_counts_as_that_of_a_layer() -> None:
    """Its balance loss depends neither on the modules' factor nor, as a mean, on the number of sequences."""
    found = []
    for factor, copies in ((1e-9, 1), (1e-8, 1), (1e-9, 2)):
        keys = {"moe_aux_loss_coeff": 0.5, "mtp_loss_scaling_factor": factor}
        state = make({**MODEL, **EXPERTS, **keys}, 4 * copies)
        rows = copies * [each.tokens for each in batch(PLAIN)]
        state.buffers.begin_step(len(rows))
        passes = [
            state.model.begin(tokens, copies * 4 * SEQ, all_tokens=copies * 4 * SEQ, num_ahead=[copies * 4 * SEQ] * 2)
            for tokens in rows
        ]
        state.executor.train(passes, state.buffers.check_stage)
        grads = {name: grad.clone() for name, _, grad in state.buffers.shards("grad")}
        found.append(grads["mtp.0.layer.mlp.router.weight"])
    expected = found[0]
    assert expected.abs().max() > 1e-4
    assert all((each - expected).abs().max() < 1e-5 * expected.abs().max() for each in found[1:])


def test_the_last_stage_gets_fewer_layers() -> None:
    """A module costs a layer, two linears, and the LM head once more."""
    arch = make({**MODEL, "num_layers": 12}).spec.arch
    assert divide(replace(arch, mtp_num_layers=0), 4) == (3, 3, 3, 3)
    assert divide(arch, 4) == (3, 4, 4, 1)


def test_memory_counts_the_modules_on_the_last_rank() -> None:
    train = {"micro_batch_size": 1, "global_batch_size": 4}
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": [1, 1]}
    found = []
    for modules in (0, 1):
        model = {**MODEL, "mtp_num_layers": modules}
        config = Config.model_validate({"model": model, "train": train, "parallel": parallel})
        found.append([rank_memory(make_step_spec(RunSpec(config, 2, VOCAB, rank))) for rank in (0, 1)])
    assert found[1][1].activations > found[0][1].activations
    assert found[1][1].weights > found[0][1].weights and found[1][0].weights == found[0][0].weights


def edited(text: str, **model: Any) -> Callable[[], None]:
    def run() -> None:
        train = {"micro_batch_size": 1, "global_batch_size": 8}
        values = {"model": {**MODEL, **model}, "train": train | model.pop("train", {})}
        values["model"].pop("train", None)
        assert check(Config.model_validate(values), 1, VOCAB) == ([text] if text else [])

    return run


@pytest.mark.parametrize(
    "run",
    [
        edited("", position_embedding_type="learned_absolute"),
        edited(
            "model.mtp_num_layers=8: the last module predicts 9 tokens ahead, but model.seq_length 8 has labels for 7 "
            "modules at most; use 0, 1 or 7",
            mtp_num_layers=8,
        ),
        edited(
            "model.mtp_num_layers=2: the last module predicts 3 tokens ahead, but the first length of "
            "train.seq_length_warmup, 2 has labels for 1 modules at most; use 0 or 1",
            train={"seq_length_warmup": (2, 2, 16)},
        ),
        edited("", num_moe_experts=4),
        edited(
            "model.mtp_loss_scaling_factor=0.3: not used with model.mtp_num_layers=0; leave it out, or use "
            "model.mtp_num_layers 1",
            mtp_num_layers=0,
        ),
    ],
)
def test_rules(run: Callable[[], None]) -> None:
    run()
