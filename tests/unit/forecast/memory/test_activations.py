"""Fact: the closed form of a layer's activation memory is, to the byte, what autograd saves in every mode and dtype."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from common.live import Live
from torch import nn

from megatron3d.attention.context.plan import BOTH, CONTEXT_EXCHANGES, head_axes, with_context
from megatron3d.comm.interface import Comm
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.data.packing import Packing
from megatron3d.forecast.memory.activations import (
    embedding_activations,
    head_activations,
    layer_activations,
    recomputed_activations,
    run_activations,
    total_bytes,
)
from megatron3d.model.gpt import GPT
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.microbatch import Pass
from megatron3d.model.operation import Stored
from megatron3d.model.operations import document_tables
from megatron3d.model.spec import MODULES, NO_RECOMPUTE, Architecture, Recompute
from megatron3d.model.stage_plan import Stage, StageAssignment, make_stages
from megatron3d.ops.plan import LossChunk
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
    "GPT-NeoX": {"family": "gpt2", "num_attention_heads": 8, "use_parallel_residual": True, "hidden_dropout": 0.1},
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
    "llama, part of each head, layers without RoPE": {
        "family": "llama",
        "num_attention_heads": 8,
        "ffn_hidden_size": 24,
        "rotary_percent": 0.5,
        "no_rope_freq": [0, 1, 1],
    },
    "llama, first layer without RoPE": {
        "family": "llama",
        "num_attention_heads": 8,
        "ffn_hidden_size": 24,
        "no_rope_freq": [1, 0],
    },
    "post-norm, output gate, clamped, projections normed": {
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 24,
        "norm_placement": "post",
        "use_parallel_residual": True,
        "attention_output_gate": True,
        "activation": "clamped_swiglu",
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
    },
    "clipped queries and keys": {
        "family": "llama",
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "ffn_hidden_size": 40,
        "clip_qkv": 0.5,
    },
    "factors of queries by position": {
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 40,
        "attention_temperature_beta": 0.7,
    },
    "factors of queries by position, without RoPE": {
        "family": "llama",
        "num_attention_heads": 8,
        "ffn_hidden_size": 40,
        "no_rope_freq": [1, 0],
        "attention_temperature_beta": 0.7,
        "attention_temperature_layers": "no_rope",
    },
    "norms without weights, one key head": {
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 1,
        "ffn_hidden_size": 40,
        "qk_l2_norm": True,
        "no_rope_freq": [0, 1],
    },
    "norms behind RoPE": {
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 40,
        "qk_layernorm": True,
        "qk_layernorm_after_rope": True,
    },
    "clipped queries and keys, one key head, QK-norm": {
        "family": "gpt2",
        "num_attention_heads": 8,
        "num_query_groups": 1,
        "qk_layernorm": True,
        "clip_qkv": 0.5,
    },
    "sandwich of zero-centred norms, projections normed, one key head": {
        "family": "gpt2",
        "num_attention_heads": 8,
        "num_query_groups": 1,
        "norm_placement": "sandwich",
        "apply_layernorm_1p": True,
        "activation": "squared_relu",
        "add_qkv_bias": False,
        "embedding_scale": 3.0,
        "residual_scale": 0.7,
        "softmax_scale": 0.2,
        "logit_scale": 0.5,
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
    },
    "norms without weights": {
        "family": "gpt2",
        "num_attention_heads": 8,
        "normalization": "PlainLayerNorm",
        "qk_layernorm": True,
    },
    "one norm without biases for attention and MLP": {
        "family": "llama",
        "num_attention_heads": 8,
        "ffn_hidden_size": 24,
        "use_parallel_residual": True,
        "activation": "xielu",
        "norm_placement": "shared",
        "normalization": "BiaslessLayerNorm",
    },
    "capped scores, sinks of 0": {
        "family": "llama",
        "use_parallel_residual": True,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 24,
        "attention_softcap": 3.0,
        "softmax_type": "off-by-one",
    },
    "capped scores, sinks, dropout": {
        "family": "gpt2",
        "num_attention_heads": 8,
        "attention_softcap": 3.0,
        "softmax_type": "learnable",
        **DROPOUT,
    },
    "latent attention": {
        "family": "llama",
        "num_attention_heads": 8,
        "kv_channels": None,
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 10,
    },
    "latent attention, queries without latent, output gate, dropout": {
        "family": "gpt2",
        "attention_output_gate": True,
        "position_embedding_type": "rope",
        "num_attention_heads": 8,
        "kv_channels": None,
        "multi_latent_attention": True,
        "kv_lora_rank": 16,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 14,
        "rotary_interleaved": True,
        **DROPOUT,
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


def build(local: LocalSizes, comm: Comm) -> tuple[GPT, Stage, Pass]:
    """Return a model of one stage with allocated parameters, and a microbatch."""
    stages = make_stages([local.arch.num_layers])
    assignment = StageAssignment(stages, (0,))
    model = GPT(
        local.arch,
        local.mode,
        comm,
        assignment,
        LossChunk(12),
        recompute=local.recompute,
        context_exchange=local.mode.exchange or CONTEXT_EXCHANGES[0],
    )
    model.to_empty(device="cpu").to(DTYPES[local.itemsize])
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    sequences = local.part(local.micro_batch_size, local.mode.batch_axes)
    tokens = torch.zeros(sequences, local.arch.seq_length + 1, dtype=torch.long)
    packing = Packing(0, reset_attention_mask=local.masks_documents, reset_position_ids=local.resets_positions)
    at = model.begin(tokens, 7, key=(1, 2), packing=packing)
    return model, stages[0], replace(at, tokens_BL=at.tokens_BL.clone())


def kept(local: LocalSizes, comm: Comm) -> dict[str, int]:
    """Return the bytes that a forward of each module saves."""
    model, _, at = build(local, comm)
    shared = [*model.parameters(), *sum(at.rotary, ())]
    out = {}
    with saved_beside(shared) as saved:
        x = model.embedding_dropout(model.embedding(at, model.embedding_weight), at)
    out["embedding"] = saved.num_bytes
    with saved_beside(shared) as saved:
        x = model.layers["0"](x, at)
    out["layer"] = saved.num_bytes
    with saved_beside(shared) as saved:
        model.head(model.final_norm(x), model.head_weight, at)
    out["head"] = saved.num_bytes
    return out


def expected(local: LocalSizes) -> dict[str, int]:
    parts = {"embedding": embedding_activations, "layer": layer_activations, "head": head_activations}
    return {name: total_bytes(part(local)) for name, part in parts.items()}


def compare(rank: int, cases: list[LocalSizes]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Return measured and expected bytes for several settings in turn."""
    comms = {axes: every_group(Mesh(axes, rank)) for axes in dict.fromkeys(local.mesh.axes for local in cases)}
    mine = [replace(local, mesh=local.mesh.at(rank)) for local in cases]
    return [(kept(local, comms[local.mesh.axes]), expected(local)) for local in mine]


def mesh_of(mode: Mode) -> Mesh:
    return Mesh((("pipeline", 1), ("replica", 1), ("data", 1), *mode.axes))


def settings(name: str) -> list[LocalSizes]:
    """Return every mode and form with one model, alternating fp32 and bf16."""
    cases = []
    for mode, entry in MODES.items():
        for form in entry.forms:
            built = build_mode(mode, form, entry.default_shape(NUM_RANKS))
            cases += [
                LocalSizes(arch_of(name), built, mesh_of(built), MICRO_BATCH_SIZE, itemsize) for itemsize in (4, 2)
            ]
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_mode_keeps_the_predicted_activations(name: str) -> None:
    cases = settings(name)
    for rank in range(NUM_RANKS):
        with pretended_world(rank, NUM_RANKS):
            results = compare(rank, cases)
        for local, (got, expected) in zip(cases, results, strict=True):
            assert got == expected, f"rank {rank}, {local.mode.name} {local.mode.residual}, {local.itemsize} bytes"


@pytest.mark.parametrize("name,itemsize,micro_batch_size", list(product(MODELS, DTYPES, (1, 3))))
def test_one_rank_keeps_the_predicted_activations(name: str, itemsize: int, micro_batch_size: int) -> None:
    local = alone(name, micro_batch_size, itemsize)
    ((got, expected),) = compare(0, [local])
    assert got == expected


@pytest.mark.parametrize("exchange", CONTEXT_EXCHANGES)
def test_exchanges_between_context_ranks_keep_the_predicted_activations(exchange: str) -> None:
    sizes = (("context", 2), ("context_inner", 2 if exchange == BOTH else 1))
    mode = with_context(build_mode("1d", None, (2,)), sizes, exchange)
    archs = [replace(arch_of(name), attention_dropout=0.0) for name in MODELS]
    mesh = mesh_of(mode)
    cases = [LocalSizes(arch, mode, mesh, MICRO_BATCH_SIZE, itemsize) for arch in archs for itemsize in (4, 2)]
    cases += [replace(local, recompute=Recompute("selective")) for local in cases]
    # Heads on a rank are a multiple of the ranks that share them, unless the model has too few.
    ranks = mesh.size(head_axes(exchange, mode.context))
    cases = [local for local in cases if local.num_queries % ranks == 0]
    with pretended_world(1, mesh.world_size):
        results = compare(1, cases)
    for local, (got, expected) in zip(cases, results, strict=True):
        assert got == expected, f"{local.arch}, {local.itemsize} bytes"


def alone(name: str, micro_batch_size: int = MICRO_BATCH_SIZE, itemsize: int = 2) -> LocalSizes:
    mode = build_mode("1d", None, (1,))
    return LocalSizes(arch_of(name), mode, mesh_of(mode), micro_batch_size, itemsize)


def named(items: tuple[Stored, ...]) -> dict[tuple[str, str], int]:
    return {item[:2]: item.num_bytes for item in items}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_named_twice(name: str) -> None:
    for local in settings(name):
        for items in (layer_activations(local), embedding_activations(local), head_activations(local)):
            assert len(named(items)) == len(items)


RECOMPUTED = {
    "core": Recompute("selective", frozenset({"core_attn"})),
    "activation": Recompute("selective", frozenset({"mlp_act"})),
    "norms": Recompute("selective", frozenset({"layernorm"})),
    "MLP": Recompute("selective", frozenset({"mlp"})),
    "everything by name": Recompute("selective", frozenset(MODULES)),
    "every layer": Recompute("full"),
    "layers by two": Recompute("full", num_layers=2),
    "the first layer": Recompute("full", method="block"),
}


@pytest.mark.parametrize("name,recompute", list(product(MODELS, RECOMPUTED)))
def test_recomputation_keeps_the_predicted_activations(name: str, recompute: str) -> None:
    """Three layers are measured by all tensors alive after forward: no hook sees what recomputation keeps."""
    check_left(replace(alone(name), recompute=RECOMPUTED[recompute]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("masks_documents,resets_positions", [(True, True), (True, False), (False, True)])
def test_document_masks_are_kept_as_predicted(name: str, masks_documents: bool, resets_positions: bool) -> None:
    local = replace(alone(name), masks_documents=masks_documents, resets_positions=resets_positions)
    for recompute in (NO_RECOMPUTE, RECOMPUTED["core"], RECOMPUTED["every layer"]):
        check_left(replace(local, recompute=recompute))


def check_left(local: LocalSizes) -> None:
    """Require that a forward through three layers leaves the expected bytes alive."""
    local = replace(local, arch=replace(local.arch, num_layers=3))
    model, stage, at = build(local, every_group(local.mesh))
    assert at.target is not None, "a microbatch has labels"
    known = [at.documents.positions_BS] if at.documents else []
    known += [*model.parameters(), at.target.labels_M, *sum(at.rotary, ())]
    with Live([tensor for tensor in known if tensor is not None]) as live:
        before = live.now
        loss = model(stage, None, at)
        left = live.now - before - loss.untyped_storage().nbytes()
    gradient = model.head_weight.grad
    assert gradient is not None, "the head's gradient is there after the forward"
    ends = (
        total_bytes(embedding_activations(local))
        + total_bytes(head_activations(local))
        + total_bytes(document_tables(local))
    )
    layers = sum(run_activations(local, run) for run in local.recompute.runs(stage.layers))
    assert left - gradient.untyped_storage().nbytes() == ends + layers


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_activations_set_a_transient_peak(name: str) -> None:
    """The longest run of recomputed layers sets the transient peak; a recomputed relu keeps input and output.

    So does a recomputed norm that is no kernel, which itself does not keep its input where it is widened.
    """
    may_keep_all = RECOMPUTED["core"], RECOMPUTED["norms"]
    for local in settings(name):
        local = replace(local, arch=replace(local.arch, num_layers=3))
        for recompute in RECOMPUTED.values():
            less = replace(local, recompute=recompute)
            again, layers = recomputed_activations(less), [replace(less, layer=place) for place in range(3)]
            kept = [total_bytes(layer_activations(each)) for each in layers]
            everything = [total_bytes(layer_activations(replace(each, recompute=NO_RECOMPUTE))) for each in layers]
            if recompute.granularity == "full":
                runs = [run.layers for run in recompute.runs(range(3)) if run.is_recomputed]
                assert again == max(sum(everything[place] for place in run) for run in runs) - local.residual
            else:
                assert again == max(0, *(size - left for size, left in zip(everything, kept, strict=True)))
                assert again > 0 or "relu" in local.arch.activation or recompute in may_keep_all


def test_offloaded_layers_keep_nothing_on_the_device() -> None:
    local = replace(alone("llama"), recompute=Recompute(offloads=True))
    runs = local.recompute.runs(range(3))
    assert len(runs) == 3 and not any(run_activations(local, run) for run in runs)
    assert recomputed_activations(local) == 2 * total_bytes(layer_activations(local)), "one is computed, one copied"
