"""Fact: the closed form of what a layer keeps is, to the byte, what autograd saves, in every mode and precision."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.live import Live
from megatron3d.analysis.memory_model.activations import (
    Item,
    document_activations,
    embedding_activations,
    head_activations,
    layer_activations,
    recomputed_activations,
    run_activations,
    total,
)
from megatron3d.analysis.memory_model.local_sizes import Work
from megatron3d.comm.interface import Comm
from megatron3d.config.run_spec import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.data.packing import Packing
from megatron3d.model.architecture import Architecture
from megatron3d.model.gpt import GPT
from megatron3d.model.microbatch import Pass
from megatron3d.model.recompute_spec import KEEP_ALL, MODULES, Recompute
from megatron3d.model.stages import Stage, StageAssignment, make_stages
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.parallel.modes.mode import Mode
from tests.support.saved_tensors import saved_beside
from tests.support.shards import every_group, pretended_world

NUM_RANKS = 8
SEQ_LENGTH, MICRO_BATCH_SIZE = 8, 4
DTYPES = {4: torch.float32, 2: torch.bfloat16, 8: torch.float64}
SMALL = {"num_layers": 1, "hidden_size": 48, "seq_length": SEQ_LENGTH, "kv_channels": 8}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "num_attention_heads": 8},
    "gpt2, dropout": {"family": "gpt2", "num_attention_heads": 8, **DROPOUT},
    "gpt2, relu, QK-norm": {"family": "gpt2", "num_attention_heads": 8, "activation": "relu", "qk_layernorm": True},
    "llama": {"family": "llama", "num_attention_heads": 16, "num_query_groups": 8, "ffn_hidden_size": 40},
    "llama, one key head": {
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 1,
        "ffn_hidden_size": 40,
        "qk_layernorm": True,
    },
    "uneven groups": {"family": "gpt2", "num_attention_heads": 24, "num_query_groups": 3, "hidden_dropout": 0.1},
    "llama, uneven groups, dropout": {
        "family": "llama",
        "num_attention_heads": 24,
        "num_query_groups": 3,
        "ffn_hidden_size": 24,
        **DROPOUT,
    },
}


def arch_of(name: str) -> Architecture:
    return resolve_architecture(ModelConfig.model_validate(SMALL | MODELS[name]), vocab_size=61, vocab_multiple=64)


def build(work: Work, comm: Comm) -> tuple[GPT, Stage, Pass]:
    """A model of one stage with memory for its parameters, and a microbatch."""
    stages = make_stages([work.arch.num_layers])
    assignment = StageAssignment(stages, (0,))
    model = GPT(work.arch, work.mode, comm, assignment, loss_chunk_tokens=12, recompute=work.recompute)
    model.to_empty(device="cpu").to(DTYPES[work.itemsize])
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    sequences = work.part(work.micro_batch_size, work.mode.batch_axes)
    tokens = torch.zeros(sequences, work.arch.seq_length + 1, dtype=torch.long)
    packing = Packing(0, reset_attention_mask=work.keeps_apart, reset_position_ids=work.begins_anew)
    at = model.begin(tokens, 7, 0, (1, 2), packing=packing)
    return model, stages[0], replace(at, tokens_BS=at.tokens_BS.clone())


def kept(work: Work, comm: Comm) -> dict[str, int]:
    """Bytes that a forward of each piece saves."""
    model, _, at = build(work, comm)
    shared = [*model.parameters(), *(at.rotary or ())]
    out = {}
    with saved_beside(shared) as saved:
        x = model.embedding_dropout(model.embedding(at), at)
    out["embedding"] = saved.num_bytes
    with saved_beside(shared) as saved:
        x = model.layers["0"](x, at)
    out["layer"] = saved.num_bytes
    with saved_beside(shared) as saved:
        model.head(model.final_norm(x), model.head_weight, at)
    out["head"] = saved.num_bytes
    return out


def expected(work: Work) -> dict[str, int]:
    parts = {"embedding": embedding_activations, "layer": layer_activations, "head": head_activations}
    return {name: total(part(work)) for name, part in parts.items()}


def compare(rank: int, works: list[Work]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """What is kept and what is expected, for several settings one after another."""
    comms = {axes: every_group(Mesh(axes, rank)) for axes in dict.fromkeys(work.mesh.axes for work in works)}
    mine = [replace(work, mesh=work.mesh.at(rank)) for work in works]
    return [(kept(work, comms[work.mesh.axes]), expected(work)) for work in mine]


def mesh_of(mode: Mode) -> Mesh:
    return Mesh((("pipeline", 1), ("replica", 1), ("data", 1), *mode.axes))


def settings(name: str) -> list[Work]:
    """Every mode and form with one model, in turn in fp32 and bf16."""
    works = []
    for mode, entry in MODES.items():
        for form in entry.forms:
            built = build_mode(mode, form, entry.default_shape(NUM_RANKS))
            works += [Work(arch_of(name), built, mesh_of(built), MICRO_BATCH_SIZE, itemsize) for itemsize in (4, 2)]
    return works


@pytest.mark.parametrize("name", MODELS)
def test_every_mode_keeps_what_is_said(name: str) -> None:
    works = settings(name)
    for rank in range(NUM_RANKS):
        with pretended_world(rank, NUM_RANKS):
            results = compare(rank, works)
        for work, (got, expected) in zip(works, results, strict=True):
            assert got == expected, f"rank {rank}, {work.mode.name} {work.mode.residual}, {work.itemsize} bytes"


@pytest.mark.parametrize("name,itemsize,micro_batch_size", list(product(MODELS, DTYPES, (1, 3))))
def test_one_rank_keeps_what_is_said(name: str, itemsize: int, micro_batch_size: int) -> None:
    work = alone(name, micro_batch_size, itemsize)
    ((got, expected),) = compare(0, [work])
    assert got == expected


def alone(name: str, micro_batch_size: int = MICRO_BATCH_SIZE, itemsize: int = 2) -> Work:
    mode = build_mode("1d", None, (1,))
    return Work(arch_of(name), mode, mesh_of(mode), micro_batch_size, itemsize)


def named(items: tuple[Item, ...]) -> dict[tuple[str, str], int]:
    return {item[:2]: item.num_bytes for item in items}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_named_twice(name: str) -> None:
    for work in settings(name):
        for items in (layer_activations(work), embedding_activations(work), head_activations(work)):
            assert len(named(items)) == len(items)


RECOMPUTED = {
    "core": Recompute("selective", frozenset({"core_attn"})),
    "activation": Recompute("selective", frozenset({"mlp_act"})),
    "core and activation": Recompute("selective", frozenset(MODULES)),
    "every layer": Recompute("full"),
    "layers by two": Recompute("full", num_layers=2),
    "the first layer": Recompute("full", method="block"),
}


@pytest.mark.parametrize("name,recompute", list(product(MODELS, RECOMPUTED)))
def test_what_is_left_by_recomputation(name: str, recompute: str) -> None:
    """Of three layers, by all tensors that a forward leaves behind: recomputation keeps what no hook sees."""
    check_left(replace(alone(name), recompute=RECOMPUTED[recompute]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keeps_apart,begins_anew", [(True, True), (True, False), (False, True)])
def test_what_documents_leave(name: str, keeps_apart: bool, begins_anew: bool) -> None:
    work = replace(alone(name), keeps_apart=keeps_apart, begins_anew=begins_anew)
    assert document_activations(work) or not keeps_apart or work.arch.attention_dropout
    for recompute in (KEEP_ALL, RECOMPUTED["core"], RECOMPUTED["every layer"]):
        check_left(replace(work, recompute=recompute))


def check_left(work: Work) -> None:
    """That a forward through three layers leaves what is said."""
    work = replace(work, arch=replace(work.arch, num_layers=3))
    model, stage, at = build(work, every_group(work.mesh))
    assert at.target is not None, "a microbatch has labels"
    known = [at.documents.segments_BS, at.documents.positions_BS] if at.documents else []
    known += [*model.parameters(), at.tokens_BS, at.target.labels_M, *(at.rotary or ())]
    with Live([tensor for tensor in known if tensor is not None]) as live:
        before = live.now
        loss = model(stage, None, at)
        left = live.now - before - loss.untyped_storage().nbytes()
    gradient = model.head_weight.grad
    assert gradient is not None, "the head's gradient is there after the forward"
    ends = total(embedding_activations(work)) + total(head_activations(work)) + total(document_activations(work))
    layers = sum(run_activations(work, run) for run in work.recompute.runs(stage.layers))
    assert left - gradient.untyped_storage().nbytes() == ends + layers


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_kept_is_there_again_for_a_moment(name: str) -> None:
    """Of as many layers as are computed again at one time; a recomputed relu keeps its input beside its output."""
    for work in settings(name):
        work = replace(work, arch=replace(work.arch, num_layers=3))
        everything = total(layer_activations(work))
        for recompute in RECOMPUTED.values():
            less = replace(work, recompute=recompute)
            again, kept = recomputed_activations(less), total(layer_activations(less))
            if recompute.granularity == "full":
                assert again == recompute.num_layers * everything - work.residual
            else:
                assert again == max(everything - kept, 0)
                assert again > 0 or work.arch.activation == "relu" or recompute == RECOMPUTED["core"]


def test_offloaded_layers_keep_nothing_on_the_device() -> None:
    work = replace(alone("llama"), recompute=Recompute(offloads=True))
    (run,) = work.recompute.runs(range(3))
    assert run_activations(work, run) == 0
    assert recomputed_activations(work) == total(layer_activations(work))
