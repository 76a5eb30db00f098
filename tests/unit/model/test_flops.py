"""Fact: the closed form of the parameter count is the sum of the table, for any architecture, and as published."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.model_schema import ModelConfig
from megatron3d.model.architecture import Architecture
from megatron3d.model.flops import flops_per_token, num_parameters
from megatron3d.model.params import param_specs
from megatron3d.parallel.modes import MODES, build_mode

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
        "norm_placement": draw(st.sampled_from(["pre", "post", "sandwich"])),
        "qk_layernorm_scope": draw(st.sampled_from(["head", "projection"])),
    }
    optional = {
        "position_embedding_type": ["learned_absolute", "rope", "none"],
        "normalization": ["LayerNorm", "RMSNorm"],
        "activation": ["gelu", "swiglu", "geglu"],
        "add_bias_linear": [True, False],
        "add_qkv_bias": [True, False],
        "add_mlp_bias": [True, False],
        "tie_embeddings": [True, False],
    }
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


def test_flops_of_gpt3_are_six_per_parameter_and_attention() -> None:
    arch = resolve_architecture(GPT3_175B, 50257)
    attention = 12 * 96 * 12288 * 2048
    assert abs(flops_per_token(arch) - attention - 6 * num_parameters(arch)) < 1e-3 * flops_per_token(arch)
