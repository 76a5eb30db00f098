"""Fact: the closed form of the parameter count is the sum of the table, for any architecture, and as published; that of
the FLOPs is what a meter counts, with every switch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.attention.plan import num_scores
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.model.gpt import GPT
from megatron3d.model.linear_spec import flops_per_token, num_parameters, weights_of_layer
from megatron3d.model.param_spec import param_specs
from megatron3d.model.spec import Architecture, attention_kind
from megatron3d.model.stage_plan import StageAssignment, make_stages
from megatron3d.ops.plan import LossChunk
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.verify.flop_memory_meter import FlopMemoryMeter

GPT2_124M = ModelConfig(family="gpt2", num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024)
GPT3_175B = ModelConfig(family="gpt2", num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048)
LLAMA3_8B = ModelConfig(
    family="llama",
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    seq_length=8192,
)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    heads = draw(st.integers(1, 6))
    fields: dict[str, Any] = {
        "family": draw(st.sampled_from(["gpt2", "llama"])),
        "num_layers": draw(st.integers(1, 3)),
        "hidden_size": draw(st.integers(1, 40)),
        "ffn_hidden_size": draw(st.integers(1, 50)),
        "num_attention_heads": heads,
        "num_query_groups": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        "kv_channels": draw(st.integers(1, 9)),
        "seq_length": draw(st.integers(1, 20)),
        "qk_layernorm": draw(st.booleans()),
        "attention_output_gate": draw(st.booleans()),
        "softmax_type": draw(st.sampled_from(["vanilla", "off-by-one", "learnable"])),
        "norm_placement": draw(st.sampled_from(["pre", "post", "sandwich"])),
        "qk_layernorm_scope": draw(st.sampled_from(["head", "projection"])),
        "mtp_num_layers": draw(st.integers(0, 2)),
    }
    optional = {
        "position_embedding_type": ["learned_absolute", "rope", "none"],
        "normalization": ["LayerNorm", "RMSNorm", "PlainLayerNorm"],
        "activation": ["gelu", "swiglu", "geglu"],
        "add_bias_linear": [True, False],
        "add_qkv_bias": [True, False],
        "add_mlp_bias": [True, False],
        "tie_embeddings": [True, False],
    }
    if draw(st.booleans()):
        fields |= {
            "multi_latent_attention": True,
            "q_lora_rank": draw(st.sampled_from([None, 3])),
            **{key: draw(st.integers(1, 9)) for key in ("kv_lora_rank", "qk_head_dim", "v_head_dim")},
            "qk_pos_emb_head_dim": 2 * draw(st.integers(1, 3)),
        }
    if draw(st.booleans()):
        fields |= {"num_moe_experts": 4, "moe_router_topk": 1, "moe_ffn_hidden_size": draw(st.integers(1, 9))}
        fields |= {"moe_layer_freq": draw(st.sampled_from([1, (0, 1), (1, 0)]))}
        fields |= {"moe_shared_expert_intermediate_size": draw(st.integers(1, 9))}
    fields |= {name: draw(st.sampled_from([None, *values])) for name, values in optional.items()}  # type: ignore[misc]
    return resolve_architecture(ModelConfig(**fields), vocab_size=draw(st.integers(1, 60)), vocab_multiple=4)


@settings(deadline=None)
@given(arch=architectures(), name=st.sampled_from(list(MODES)))
def test_the_closed_form_equals_the_sum_of_the_table_in_every_mode(arch: Architecture, name: str) -> None:
    mode = build_mode(name, None, MODES[name].default_shape(8))
    shapes = [part.shape for spec in param_specs(arch, mode).values() for part in spec.parts]
    assert num_parameters(arch) == sum(math.prod(shape) for shape in shapes)


@settings(deadline=None)
@given(arch=architectures(), name=st.sampled_from(list(MODES)))
def test_every_logical_tensor_has_its_own_name(arch: Architecture, name: str) -> None:
    mode = build_mode(name, None, MODES[name].default_shape(8))
    names = [part.name for spec in param_specs(arch, mode).values() for part in spec.parts]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "model,vocab_size,expected",
    [(GPT2_124M, 50257, 124_439_808), (LLAMA3_8B, 128256, 8_030_261_248), (GPT3_175B, 50257, 174_604_259_328)],
)
def test_published_totals(model: ModelConfig, vocab_size: int, expected: int) -> None:
    """Totals are those of GPT-2 and Llama 3 by Hugging Face, and of GPT-3 by Brown et al. (2020), table 2.1."""
    assert num_parameters(resolve_architecture(model, vocab_size)) == expected


def test_flops_per_token_by_hand() -> None:
    """In one layer: q, k and v 8 x (12 + 2 x 6), projection 12 x 8, gate, up and down 3 x 8 x 12, head 8 x 10."""
    model = ModelConfig(
        family="llama",
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=12,
        num_attention_heads=2,
        num_query_groups=1,
        kv_channels=6,
        seq_length=16,
    )
    weights = 2 * (8 * 24 + 12 * 8 + 3 * 8 * 12) + 8 * 10
    scores_and_values = 2 * 3 * 2 * 2 * 12 * 16
    assert flops_per_token(resolve_architecture(model, 10)) == 6 * weights + scores_and_values


def test_flops_of_multi_token_prediction_by_hand() -> None:
    """A module has a layer, two linears 8 x 8, and the LM head."""
    model = ModelConfig(
        family="llama", num_layers=1, hidden_size=8, ffn_hidden_size=12, num_attention_heads=2, seq_length=16
    )
    layer, core, head = 4 * 8 * 8 + 3 * 8 * 12, 12 * 2 * 4 * 16, 8 * 10
    for modules in (0, 1, 3):
        arch = resolve_architecture(model.model_copy(update={"mtp_num_layers": modules}), 10)
        weights = (1 + modules) * (layer + head) + modules * 2 * 8 * 8
        assert flops_per_token(arch) == 6 * weights + (1 + modules) * core


def test_flops_of_gpt3_are_six_per_parameter_and_attention() -> None:
    arch = resolve_architecture(GPT3_175B, 50257)
    attention = 12 * 96 * 12288 * 2048
    assert abs(flops_per_token(arch) - attention - 6 * num_parameters(arch)) < 1e-3 * flops_per_token(arch)


LATENTS: dict[str, Any] = {
    "family": "llama",
    "multi_latent_attention": True,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_head_dim": 5,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
EXPERTS: dict[str, Any] = {
    "family": "llama",
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 10,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
}


SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "grouped queries, gated": {"family": "llama", "num_query_groups": 2},
    "norms": {"norm_placement": "sandwich", "apply_layernorm_1p": True, "qk_layernorm": True},
    "projections normed": {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_scope": "projection"},
    "biases of queries, keys and values": {"add_bias_linear": False, "add_qkv_bias": True},
    "output gate": {"attention_output_gate": True},
    "activation": {"activation": "clamped_swiglu"},
    "activation with parameters": {"activation": "xielu"},
    "scales and caps of logits": {
        "embedding_scale": 2.0,
        "residual_scale": 0.5,
        "softmax_scale": 0.3,
        "logit_scale": 0.5,
        "logit_softcap": 3.0,
    },
    "heads apart from the hidden size": {"kv_channels": 5},
    "part of each head rotated": {"position_embedding_type": "rope", "rotary_percent": 0.5, "no_rope_freq": 2},
    "windows": {
        "position_embedding_type": "rope",
        "window_size": (2, 0),
        "window_attn_skip_freq": 2,
        "rope_local_base_freq": 50.0,
    },
    "capped scores": {"attention_softcap": 2.0},
    "sinks": {"softmax_type": "learnable"},
    "capped scores in windows with sinks": {
        "attention_softcap": 2.0,
        "softmax_type": "off-by-one",
        "window_size": (2, 0),
    },
    "parallel residual": {"use_parallel_residual": True},
    "one norm": {"use_parallel_residual": True, "norm_placement": "shared", "normalization": "BiaslessLayerNorm"},
    "dropout of weights": {"attention_dropout": 0.1, "attention_softcap": 2.0, "softmax_type": "learnable"},
    "latents": LATENTS,
    "latents, values larger than keys, queries without latent, windows": {
        **LATENTS,
        "q_lora_rank": None,
        "v_head_dim": 13,
        "window_size": (2, 0),
        "window_attn_skip_freq": 2,
    },
    "one module ahead": {"family": "llama", "mtp_num_layers": 1, "window_size": (2, 0), "window_attn_skip_freq": 2},
    "two modules ahead, tied": {"mtp_num_layers": 2, "tie_embeddings": True},
    "experts": EXPERTS,
    "experts in every second layer, with shared ones and a gate": {
        **EXPERTS,
        "moe_layer_freq": (0, 1),
        "moe_shared_expert_intermediate_size": 6,
        "moe_shared_expert_gate": True,
        "moe_router_score_function": "sigmoid",
    },
    "latents, experts, modules ahead": {**LATENTS, **EXPERTS, "mtp_num_layers": 2},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_the_flops_of_a_step_are_the_closed_form_with_every_switch(name: str) -> None:
    """6 per weight of a GEMM and token, and 12 per score and channel of a head; a window has its pairs' scores.

    Kernels see heads of one size, so that those of latents have as many channels as the larger of keys and values.
    """
    sizes = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 20, "seq_length": 12}
    arch = resolve_architecture(ModelConfig.model_validate({**sizes, **SWITCHES[name]}), vocab_size=128)
    mode = build_mode(next(iter(MODES)), None, (1,))
    assignment = StageAssignment(make_stages([arch.num_layers]), (0,))
    comm = ProcessComm(Mesh((("pipeline", 1), ("replica", 1), ("data", 1), *mode.axes)), ())
    model = GPT(arch, mode, comm, assignment, LossChunk(5)).to_empty(device="cpu").double()
    for param in model.parameters():
        param.data.normal_(std=0.1)
    tokens_BT = torch.arange(2 * 13).view(2, 13)
    at = model.begin(tokens_BT, 24, key=(1, 2), all_tokens=24, num_ahead=arch.mtp_num_layers * [24])
    with FlopMemoryMeter() as meter:
        model(assignment.stages[0], None, at).sum().backward()
    ahead = arch.mtp_num_layers
    layers = [*range(arch.num_layers), *ahead * [arch.num_layers - 1]]
    windows = [attention_kind(arch, layer).window for layer in layers]
    scores = sum(num_scores(arch.seq_length, window) for window in windows)
    weights = sum(weights_of_layer(arch, layer) for layer in layers) + 2 * ahead * arch.hidden_size**2
    weights += (1 + ahead) * arch.hidden_size * arch.vocab_size
    channels = arch.num_attention_heads * arch.kv_channels
    assert meter.flops == 2 * (6 * 12 * weights + 12 * scores * channels)
    if not any(windows):
        padding = 2 * arch.kv_channels - arch.key_size - arch.value_size
        unseen = 6 * len(layers) * arch.num_attention_heads * padding * arch.seq_length
        assert meter.flops == 2 * 12 * (flops_per_token(arch) + unseen)
