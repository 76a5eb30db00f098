"""Fact: with the same weights our model computes what classes of transformers do: logits, loss and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.activations import ACT2CLS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from megatron3d.model.modules import ACTIVATIONS
from megatron3d.model.spec import ACTIVATION_PARAMS
from tests.support.peers import LLAMA_NAMES, compare, widened

SIZES = {
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "hidden_size": 18,
    "intermediate_size": 14,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
}
OURS = {
    "family": "llama",
    "vocab_size": 37,
    "make_vocab_size_divisible_by": 8,
    "seq_length": 64,
    "hidden_size": 18,
    "ffn_hidden_size": 14,
    "num_layers": 3,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 10,
    "norm_epsilon": 1e-6,
}
BASE = {"rope_theta": 500.0}

# Class of transformers with its settings, and our keys.
PEERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama", "rope_parameters": {**BASE, "rope_type": "default"}}, {"rotary_base": 500.0}),
    "linear scaling": (
        {"model_type": "llama", "rope_parameters": {**BASE, "rope_type": "linear", "factor": 3.0}},
        {"rotary_base": 500.0, "rotary_scaling": "linear", "rotary_scaling_factor": 3.0},
    ),
    "llama 3.1": (
        {
            "model_type": "llama",
            "rope_parameters": {
                **BASE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {
            "rotary_base": 500.0,
            "rotary_scaling": "llama3",
            "rotary_scaling_factor": 8.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "yarn": (
        {
            "model_type": "llama",
            "rope_parameters": {
                **BASE,
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {
            "rotary_base": 500.0,
            "rotary_scaling": "yarn",
            "rotary_scaling_factor": 4.0,
            "rotary_beta_fast": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen3": (
        {"model_type": "qwen3", "rope_parameters": {**BASE, "rope_type": "default"}},
        {"rotary_base": 500.0, "qk_layernorm": True},
    ),
    "layers without positions": (
        {"model_type": "smollm3", "rope_parameters": {**BASE, "rope_type": "default"}, "no_rope_layer_interval": 2},
        {"rotary_base": 500.0, "no_rope_freq": 2, "tie_embeddings": True},
    ),
    "part of each head": (
        {
            "model_type": "glm4_moe",
            "first_k_dense_replace": 3,
            "n_routed_experts": 2,
            "rope_parameters": {**BASE, "rope_type": "default", "partial_rotary_factor": 0.4},
        },
        {"rotary_base": 500.0, "rotary_percent": 0.4},
    ),
}


PLAIN = {**BASE, "rope_type": "default"}
SANDWICH = {
    "layers.{n}.attention_output_norm": "model.layers.{n}.post_attention_layernorm",
    "layers.{n}.post_attention_norm": "model.layers.{n}.pre_feedforward_layernorm",
    "layers.{n}.mlp_output_norm": "model.layers.{n}.post_feedforward_layernorm",
}
POST = {name: theirs for name, theirs in SANDWICH.items() if "output" in name}
FULL = ["full_attention"] * 3
GEMMA = {
    "rotary_base": 500.0,
    "activation": "geglu_tanh",
    "norm_placement": "sandwich",
    "apply_layernorm_1p": True,
    "embedding_scale": 18**0.5,
    "softmax_scale": 0.25,
    "tie_embeddings": True,
}
# Class of transformers with its settings, our keys, and the modules that have other names than Llama's.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "qwen2": (
        {"model_type": "qwen2", "head_dim": 10, "rope_parameters": PLAIN},
        {"rotary_base": 500.0, "add_qkv_bias": True},
        {},
    ),
    "biases of attention": (
        {"model_type": "llama", "attention_bias": True, "rope_parameters": PLAIN},
        {"rotary_base": 500.0, "add_bias_linear": True, "add_mlp_bias": False},
        {},
    ),
    "olmo2": (
        {"model_type": "olmo2", "hidden_size": 60, "rope_parameters": PLAIN},
        {
            "hidden_size": 60,
            "rotary_base": 500.0,
            "norm_placement": "post",
            "qk_layernorm": True,
            "qk_layernorm_scope": "projection",
        },
        POST,
    ),
    "gemma 2": (
        {
            "model_type": "gemma2",
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": PLAIN,
        },
        {
            **GEMMA,
            "attention_softcap": 1.5,
            "logit_softcap": 2.5,
            "window_size": (6, 0),
            "window_attn_skip_freq": 2,
        },
        SANDWICH,
    ),
    "gemma 3": (
        {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {**BASE, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 20.0, "rope_type": "default"},
            },
        },
        {
            **GEMMA,
            "window_size": (6, 0),
            "window_attn_skip_freq": 3,
            "rope_local_base_freq": 20.0,
            "rotary_scaling": "linear",
            "rotary_scaling_factor": 8.0,
            "qk_layernorm": True,
        },
        SANDWICH,
    ),
    "olmo 3": (
        {
            "model_type": "olmo3",
            "hidden_size": 60,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    **BASE,
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "beta_fast": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": PLAIN,
            },
        },
        {
            "hidden_size": 60,
            "rotary_base": 500.0,
            "rope_local_base_freq": 500.0,
            "rotary_scaling": "yarn",
            "rotary_scaling_factor": 4.0,
            "rotary_beta_fast": 4.0,
            "original_max_position_embeddings": 16,
            "window_size": (4, 0),
            "window_attn_skip_freq": 2,
            "norm_placement": "post",
            "qk_layernorm": True,
            "qk_layernorm_scope": "projection",
        },
        POST,
    ),
    "granite": (
        {
            "model_type": "granite",
            "hidden_size": 60,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.3,
            "rope_parameters": PLAIN,
        },
        {
            "hidden_size": 60,
            "rotary_base": 500.0,
            "embedding_scale": 3.0,
            "softmax_scale": 0.2,
            "logit_scale": 0.25,
            "residual_scale": 0.3,
        },
        {},
    ),
    "olmo": (
        {"model_type": "olmo", "hidden_size": 60, "rope_parameters": PLAIN},
        {"hidden_size": 60, "rotary_base": 500.0, "normalization": "PlainLayerNorm", "norm_epsilon": 1e-5},
        {},
    ),
    "nemotron": (
        {
            "model_type": "nemotron",
            "norm_eps": 1e-6,
            "hidden_act": "relu2",
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.4},
        },
        {
            "normalization": "LayerNorm",
            "apply_layernorm_1p": True,
            "activation": "squared_relu",
            "rotary_base": 500.0,
            "rotary_percent": 0.4,
        },
        {},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_a_set_of_keys(name: str) -> None:
    settings, keys, names = FAMILIES[name]
    compare({**SIZES, **settings}, {**OURS, **keys}, {**LLAMA_NAMES, **names})


def test_an_output_gate() -> None:
    """Qwen3-Next's layers with full attention gate attention's output; queries and gate are one tensor by heads."""
    settings = {
        "model_type": "qwen3_next",
        "layer_types": FULL,
        "mlp_only_layers": [0, 1, 2],
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.4},
    }
    keys = {"rotary_base": 500.0, "rotary_percent": 0.4, "apply_layernorm_1p": True, "qk_layernorm": True}
    names = {"layers.{n}.attention.gate": "model.layers.{n}.self_attn.gate_proj"}

    def split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(tensors)
        for name in [name for name in tensors if name.endswith("q_proj.weight")]:
            query, gate = tensors[name].unflatten(0, (6, 2, 10)).unbind(1)
            found |= {name: query.flatten(0, 1), name.replace("q_proj", "gate_proj"): gate.flatten(0, 1)}
        return found

    ours = {**OURS, **keys, "attention_output_gate": True}
    compare({**SIZES, **settings}, ours, {**LLAMA_NAMES, **names}, split)


def test_gpt_neox() -> None:
    """Attention and MLP in parallel, all biases; queries, keys and values are one tensor by heads."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    settings = {
        "model_type": "gpt_neox",
        "hidden_size": 60,
        "layer_norm_eps": 1e-6,
        "use_parallel_residual": True,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.4},
    }
    keys = {
        "hidden_size": 60,
        "num_query_groups": 6,
        "normalization": "LayerNorm",
        "activation": "gelu",
        "add_bias_linear": True,
        "rotary_base": 500.0,
        "rotary_percent": 0.4,
        "use_parallel_residual": True,
    }
    layer = "gpt_neox.layers.{n}"
    names = {
        "embedding": "gpt_neox.embed_in",
        "layers.{n}.input_norm": f"{layer}.input_layernorm",
        "layers.{n}.attention.q": f"{layer}.attention.q",
        "layers.{n}.attention.k": f"{layer}.attention.k",
        "layers.{n}.attention.v": f"{layer}.attention.v",
        "layers.{n}.attention.proj": f"{layer}.attention.dense",
        "layers.{n}.post_attention_norm": f"{layer}.post_attention_layernorm",
        "layers.{n}.mlp.up": f"{layer}.mlp.dense_h_to_4h",
        "layers.{n}.mlp.fc2": f"{layer}.mlp.dense_4h_to_h",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
    }

    def split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: value for name, value in tensors.items() if ".query_key_value." not in name}
        for name in tensors.keys() - found.keys():
            parts = tensors[name].unflatten(0, (6, 3, 10)).unbind(1)
            found |= {
                name.replace("query_key_value", letter): part.flatten(0, 1)
                for letter, part in zip("qkv", parts, strict=True)
            }
        return found

    compare({**sizes, **settings}, {**OURS, **keys}, names, split)


def test_gpt_oss() -> None:
    """Attention sinks, YaRN and windows; biases of the router and of experts, whose gate and up features alternate."""
    settings = {
        "model_type": "gpt_oss",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            **BASE,
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    }
    keys = {
        "add_bias_linear": True,
        "activation": "clamped_swiglu",
        "softmax_type": "learnable",
        "window_size": (4, 0),
        "window_attn_skip_freq": (1, 0),
        "rotary_base": 500.0,
        "rotary_scaling": "yarn",
        "rotary_scaling_factor": 4.0,
        "rotary_beta_fast": 4.0,
        "rotary_truncate": False,
        "original_max_position_embeddings": 16,
        "num_moe_experts": 5,
        "moe_router_topk": 2,
        "moe_router_bias": True,
    }
    mlp = "model.layers.{n}.mlp"
    names = {"layers.{n}.attention.sinks": "model.layers.{n}.self_attn.sinks", "layers.{n}.mlp.router": f"{mlp}.router"}
    for expert in range(5):
        modules = {"gate": "gate_proj", "up": "up_proj", "fc2": "down_proj"}
        names |= {f"layers.{{n}}.mlp.experts.{expert}.{us}": f"{mlp}.{expert}.{them}" for us, them in modules.items()}

    def split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: value for name, value in tensors.items() if ".experts." not in name}
        for name in (name for name in tensors if ".experts." in name):
            layer, _, what = name.partition(".experts.")
            module, kind = what.replace("_bias", ""), "bias" if "bias" in what else "weight"
            for expert, stored in enumerate(tensors[name]):
                path, value = f"{layer}.{expert}", stored.mT if kind == "weight" else stored
                if module == "gate_up_proj":
                    found |= {f"{path}.gate_proj.{kind}": value[::2], f"{path}.up_proj.{kind}": value[1::2]}
                else:
                    found[f"{path}.down_proj.{kind}"] = value
        return found

    compare({**SIZES, **settings}, {**OURS, **keys}, {**LLAMA_NAMES, **names}, split)


def test_the_clamped_activation_is_that_of_gpt_oss() -> None:
    torch.manual_seed(0)
    with widened():
        config = transformers.GptOssConfig(hidden_size=8, intermediate_size=5, num_local_experts=1)
        experts = GptOssExperts(config)
        fused = 6 * torch.randn(9, 10)
        wanted = experts._apply_gate(torch.stack(fused.chunk(2, dim=-1), -1).flatten(1))
    torch.testing.assert_close(ACTIVATIONS["clamped_swiglu"](fused), wanted, rtol=1e-13, atol=1e-13)


def test_the_activation_with_parameters_is_that_of_apertus() -> None:
    """Gradients too, of features that are 0 as well, and away from the initial values of the parameters."""
    torch.manual_seed(0)
    make: Any = ACT2CLS["xielu"]
    theirs = make(dtype=torch.float64)
    x = (3 * torch.randn(9, 10, dtype=torch.float64)).requires_grad_()
    params = [theirs.alpha_p, theirs.alpha_n]
    initial = [param.item() for param in params]
    assert initial == pytest.approx([*ACTIVATION_PARAMS["xielu"].values()], rel=1e-13)
    for change in (0.0, 0.7):
        for param in params:
            param.data += change
        wanted = torch.autograd.grad(theirs(x).sin().sum(), (x, *params))
        found = torch.autograd.grad(ACTIVATIONS["xielu"](x, *params).sin().sum(), (x, *params))
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(ACTIVATIONS["xielu"](x, *params), theirs(x), rtol=1e-11, atol=1e-11)
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(ACTIVATIONS["xielu"](zero, *params).sum(), zero)
    assert torch.equal(slope, torch.full((3,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("name", PEERS)
def test_our_model_equals_a_class_of_transformers(name: str) -> None:
    settings, keys = PEERS[name]
    compare({**SIZES, **settings}, {**OURS, **keys})
