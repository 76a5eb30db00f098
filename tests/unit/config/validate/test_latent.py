"""Fact: every key of latent attention that is unused, replaced or impossible is refused with one message."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check

LATENT = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_pos_emb_head_dim": 8}


def problems(
    model: dict[str, Any], parallel: dict[str, Any] | None = None, world_size: int = 1, **keys: Any
) -> list[str]:
    given = {"family": "llama", "hidden_size": 66, "num_attention_heads": 4, "ffn_hidden_size": 64, "vocab_size": 64}
    train = {"micro_batch_size": 8, "global_batch_size": 8, **keys}
    return check(
        Config.model_validate({"model": given | model, "parallel": parallel or {}, "train": train}), world_size
    )


def test_heads_need_not_divide_hidden_size() -> None:
    assert (
        problems({**LATENT, "attention_softcap": 5.0, "softmax_type": "learnable", "attention_output_gate": True})
        == problems(LATENT)
        == []
    )
    assert "does not divide model.hidden_size" in problems({})[0]


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("num_query_groups", 2, "every head has keys of its own"),
        ("kv_channels", 16, "heads have qk_head_dim"),
        ("qk_layernorm", True, "latents are always normalized"),
        ("qk_layernorm_after_rope", True, "latents are always normalized"),
        ("attention_temperature_beta", 0.1, "multiplies its queries by position"),
        ("qk_l2_norm", True, "latents are always normalized"),
        ("clip_qkv", 8.0, "keys and values come from latents"),
        ("rotary_percent", 0.5, "rotates the last qk_pos_emb_head_dim"),
        ("position_embedding_type", "none", "use rope"),
        ("qk_pos_emb_head_dim", 7, "use 6 or 8"),
    ],
)
def test_keys_that_latent_attention_replaces(key: str, value: Any, why: str) -> None:
    (problem,) = problems({**LATENT, key: value})
    assert problem.startswith(f"model.{key}={value}".lower() if value is True else f"model.{key}=") and why in problem


@pytest.mark.parametrize("key", ["q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"])
def test_keys_without_latent_attention(key: str) -> None:
    (problem,) = problems({key: 8, "hidden_size": 64})
    assert f"model.{key}=8: not used without model.multi_latent_attention=true" in problem


@pytest.mark.parametrize("key", ["q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"])
def test_axes_divide_the_latents(key: str) -> None:
    parallel = {"tensor_parallel_mode": "2d", "tensor_parallel_shape": (1, 4)}
    (problem,) = problems({**LATENT, "hidden_size": 64, key: 18}, parallel, 4)
    assert f"does not divide model.{key}=18" in problem
    sequence_parallel = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    assert problems({**LATENT, "hidden_size": 64, key: 18}, sequence_parallel, 4) == [], "1-D shards no latent"


def test_up_projections_are_recomputed_with_latent_attention_only() -> None:
    def found(model: dict[str, Any], *modules: str) -> list[str]:
        return problems(model, recompute_granularity="selective", recompute_modules=modules)

    plain = {"hidden_size": 64}
    assert found(LATENT, "core_attn", "mla_up_proj") == []
    (without,) = found(LATENT, "moe", "mlp_act")
    assert "moe is a part of a mixture of experts only; use [mlp_act]" in without
    mixture = {"hidden_size": 64, "num_moe_experts": 4}
    assert found(mixture, "moe_act", "mlp_act") == found(mixture, "moe", "mlp_act") == []
    assert found(plain, "layernorm", "mlp") == []
    (compiled,) = problems(plain, recompute_granularity="selective", recompute_modules=("layernorm",), compile=True)
    assert "no norm is recomputed with train.compile=true" in compiled and "use train.compile=auto" in compiled
    (without,) = found({**plain, "norm_placement": "post"}, "layernorm", "mlp")
    assert "layernorm is a part of models with norms of inputs only; use [mlp]" in without
    assert found(plain, "mlp", "mlp_act") == found({**mixture, "moe_layer_freq": (0, 1)}, "mlp") == []
    (without,) = found(mixture, "mlp_act", "mlp")
    assert "mlp is a part of dense layers only; use [mlp_act]" in without
    (alone,) = found(mixture, "shared_experts")
    assert "shared_experts is a part of a mixture with shared experts only; use null" in alone
    (both,) = found({**mixture, "moe_shared_expert_intermediate_size": 8}, "moe", "shared_experts", "moe_act")
    assert "moe is recomputed with moe_act and shared_experts, which are parts of it; use [moe]" in both
    (alone,) = found(LATENT, "mla_up_proj", "mlp_act")
    assert "together with the attention after it; use [core_attn,mla_up_proj,mlp_act]" in alone
    for modules, use in ((("mla_up_proj",), "null"), (("mlp_act", "mla_up_proj"), "[mlp_act]")):
        (problem,) = found(plain, *modules)
        assert problem.endswith(f"is a part of latent attention only; use {use}")
