"""Fact: the closed form of what a layer keeps is, to the byte, what autograd saves, in every mode and precision."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from megatron3d.config.architecture import Architecture, architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.memory.activations import (
    Item,
    embedding_activations,
    head_activations,
    layer_activations,
    recomputed_activations,
    total,
)
from megatron3d.memory.work import Work
from megatron3d.mesh import Mesh
from megatron3d.model.layers import Build, Embedding, HiddenDropout, Layer, Norm, Pass, Target
from megatron3d.model.params import param_specs
from megatron3d.modes import MODES, build_mode
from megatron3d.ops.attention import rotary_tables
from megatron3d.ops.loss import Head, head_loss
from megatron3d.recompute import MODULES, Recompute
from tests.memory.saved import saved_beside
from tests.pool import Pool
from tests.shards import every_group

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
    return architecture(ModelConfig.model_validate(SMALL | MODELS[name]), vocab_size=61, vocab_multiple=64)


def filled(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with memory for its parameters."""
    module.to_empty(device="cpu").to(dtype)
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


def kept(work: Work, comm: Any) -> dict[str, int]:
    """Bytes that a forward of each piece saves."""
    arch, mode, dtype = work.arch, work.mode, DTYPES[work.itemsize]
    build = Build(arch, mode, comm, param_specs(arch, mode))
    like = torch.zeros((), dtype=dtype)
    tables = rotary_tables(arch.seq_length, arch.kv_channels, 1e4, like)
    rotary = tables if arch.position_embedding_type == "rope" else None
    sequences = work.part(work.micro_batch_size, mode.batch_axes)
    tokens = torch.zeros(sequences, arch.seq_length + 1, dtype=torch.long)
    at = Pass(tokens[:, :-1].clone(), Target(tokens[:, 1:].flatten(), 7, 1.0), work.micro_batch_size, 0, (1, 2), rotary)
    layer, norm = filled(Layer("layers.0", build), dtype), filled(Norm("final_norm", mode.residual[1], build), dtype)
    embedding, dropout = filled(Embedding("embedding", build), dtype), HiddenDropout("embedding", build)
    out = {}
    with saved_beside(embedding.parameters()) as saved:
        x = dropout(embedding(at), at)
    out["embedding"] = saved.num_bytes
    with saved_beside([*layer.parameters(), *tables]) as saved:
        x = layer(x, at)
    out["layer"] = saved.num_bytes
    head = Head(mode.expand.on(comm.mesh), comm, arch.vocab_size, arch.padded_vocab_size, 12)
    with saved_beside([*norm.parameters(), embedding.weight]) as saved:
        head_loss(norm(x), embedding.weight, tokens[:, 1:].flatten(), 7, head)
    out["head"] = saved.num_bytes
    return out


def expected(work: Work) -> dict[str, int]:
    parts = {"embedding": embedding_activations, "layer": layer_activations, "head": head_activations}
    return {name: total(part(work)) for name, part in parts.items()}


def compare(rank: int, world_size: int, works: list[Work]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """What is kept and what is expected, for several settings one after another."""
    comms = {axes: every_group(Mesh(axes, rank)) for axes in dict.fromkeys(work.mesh.axes for work in works)}
    mine = [replace(work, mesh=work.mesh.at(rank)) for work in works]
    return [(kept(work, comms[work.mesh.axes]), expected(work)) for work in mine]


def settings(name: str) -> list[Work]:
    """Every mode and form with one model, in turn in fp32 and bf16."""
    works = []
    for mode, entry in MODES.items():
        for form in entry.forms:
            built = build_mode(mode, form, entry.default_shape(NUM_RANKS))
            works += [Work(arch_of(name), built, Mesh(built.axes), MICRO_BATCH_SIZE, itemsize) for itemsize in (4, 2)]
    return works


@pytest.mark.parametrize("name", MODELS)
def test_every_mode_keeps_what_is_said(pool: Pool, name: str) -> None:
    works = settings(name)
    for rank, results in enumerate(pool.run(compare, NUM_RANKS, works)):
        for work, (got, expected) in zip(works, results, strict=True):
            assert got == expected, f"rank {rank}, {work.mode.name} {work.mode.residual}, {work.itemsize} bytes"


@pytest.mark.parametrize("name,itemsize,micro_batch_size", list(product(MODELS, DTYPES, (1, 3))))
def test_one_rank_keeps_what_is_said(name: str, itemsize: int, micro_batch_size: int) -> None:
    work = alone(name, micro_batch_size, itemsize)
    ((got, expected),) = compare(0, 1, [work])
    assert got == expected


def alone(name: str, micro_batch_size: int = MICRO_BATCH_SIZE, itemsize: int = 2) -> Work:
    mode = build_mode("1d", None, (1,))
    return Work(arch_of(name), mode, Mesh(mode.axes), micro_batch_size, itemsize)


def named(items: tuple[Item, ...]) -> dict[tuple[str, str], int]:
    return {item[:2]: item.num_bytes for item in items}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_named_twice(name: str) -> None:
    for work in settings(name):
        for items in (layer_activations(work), embedding_activations(work), head_activations(work)):
            assert len(named(items)) == len(items)


@pytest.mark.parametrize("name", MODELS)
def test_selective_keeps_qkv_and_neither_the_core_nor_the_activation(name: str) -> None:
    for work in settings(name):
        everything = named(layer_activations(work))
        core = named(layer_activations(replace(work, recompute=Recompute("selective"))))
        assert not [what for site, what in core if site in ("attention.core", "attention.q_norm", "attention.k_norm")]
        assert ("attention.qkv", "output") in core
        assert {key: size for key, size in core.items() if key in everything}.items() <= everything.items()
        both = named(layer_activations(replace(work, recompute=Recompute("selective", frozenset(MODULES)))))
        assert {key for key in core if key not in both} <= {
            ("mlp.activation", "input"),
            ("mlp.activation", "gate and up"),
            ("mlp.activation", "gate activated"),
            ("mlp.fc2", "input"),
        }
        assert both[("mlp.fc1", "output")] == work.inner((2 if work.is_gated else 1) * work.ffn)


@pytest.mark.parametrize("name", MODELS)
def test_full_keeps_the_input(name: str) -> None:
    for work in settings(name):
        full = replace(work, recompute=Recompute("full"))
        assert total(layer_activations(full)) == work.residual
        assert recomputed_activations(full) == total(layer_activations(work)) - work.residual
