"""Architecture of a model section: every key that is null gets the default of the model family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from megatron3d.attention.rotary_spec import (
    LINEAR,
    LLAMA3,
    LONGROPE,
    YARN,
    RotaryScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)
from megatron3d.config.schema import ITEMSIZES, Config, ModelConfig
from megatron3d.experts.plan import Balance, Experts, fewest_bytes
from megatron3d.model.option_table import ModelOptions
from megatron3d.model.spec import FAMILIES, Architecture, default_ffn_hidden_size
from megatron3d.parallel.modes.mode import ALLGATHER

T = TypeVar("T")
DEFAULT_TOPK, DEFAULT_BIAS_UPDATE_RATE = 2, 1e-3


def resolve_architecture(model: ModelConfig, vocab_size: int, vocab_multiple: int = 1) -> Architecture:
    """Return the architecture of a model with `vocab_size` tokens, every default resolved.

    The padded vocabulary is a multiple of both `vocab_multiple` and `make_vocab_size_divisible_by`.
    """
    options = {each.name: getattr(model, each.name) for each in fields(ModelOptions)}
    options |= {key: default for key, default in FAMILIES[model.family].items() if options[key] is None}
    if options["ffn_hidden_size"] is None:
        options["ffn_hidden_size"] = default_ffn_hidden_size(model.hidden_size, options["activation"])
    skips = _pattern(model.window_attn_skip_freq)
    multiple = math.lcm(model.make_vocab_size_divisible_by, vocab_multiple)
    derived = {
        "num_query_groups": _or_default(model.num_query_groups, model.num_attention_heads),
        "max_position_embeddings": _or_default(model.max_position_embeddings, model.seq_length),
        "vocab_size": vocab_size,
        "add_qkv_bias": _unless(model.add_qkv_bias, options["add_bias_linear"]),
        "add_mlp_bias": _unless(model.add_mlp_bias, options["add_bias_linear"]),
        **_head_sizes(model),
    }
    scales = _mup(model, derived["kv_channels"] or 1)
    return Architecture(
        **options | derived | scales,
        padded_vocab_size=-(-vocab_size // multiple) * multiple,
        rotary_scaling=_rotary_scaling(model),
        no_rope_freq=_pattern(model.no_rope_freq),
        window=None if model.window_size is None else model.window_size[0] + 1,
        window_pattern=tuple(1 - full for full in skips) if isinstance(model.window_attn_skip_freq, int) else skips,
        experts=_experts(model, options["ffn_hidden_size"]),
        balance=_balance(model),
    )


def _mup(model: ModelConfig, head_size: int) -> dict[str, float]:
    """Return the factors of scores and of logits under muP (Yang et al. 2022, arXiv:2203.03466, table 8), else nothing.

    Scores are divided by the size of a head, not by its root, unless a factor is given, and logits by the width; what
    follows for initial values and learning rates is declared with the parameters (`model/param_spec.py`).
    """
    if model.mup_base_hidden_size is None:
        return {}
    scale = 1 / head_size if model.softmax_scale is None else model.softmax_scale
    return {"softmax_scale": scale, "logit_scale": model.logit_scale * model.mup_base_hidden_size / model.hidden_size}


# Keys of multi-head latent attention and their defaults, Megatron's.
LATENT_KEYS: Mapping[str, int | None] = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}


def _head_sizes(model: ModelConfig) -> dict[str, int | None]:
    """Return the sizes of heads and latents; those of multi-head latent attention are 0 or None without it."""
    if not model.multi_latent_attention:
        size = _or_default(model.kv_channels, model.hidden_size // model.num_attention_heads)
        return {key: None if key.endswith("rank") else 0 for key in LATENT_KEYS} | {"kv_channels": size}
    sizes = {key: _or_default(getattr(model, key), default) for key, default in LATENT_KEYS.items()}
    return {**sizes, "kv_channels": max(sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"], sizes["v_head_dim"])}


def _experts(model: ModelConfig, ffn_hidden_size: int) -> Experts | None:
    """Return the mixture of experts; None where every layer has an MLP."""
    if model.num_moe_experts is None:
        return None
    freq = model.moe_layer_freq
    return Experts(
        num_experts=model.num_moe_experts,
        topk=_or_default(model.moe_router_topk, DEFAULT_TOPK),
        ffn_hidden_size=_or_default(model.moe_ffn_hidden_size, ffn_hidden_size),
        shared_ffn_hidden_size=model.moe_shared_expert_intermediate_size or 0,
        has_shared_gate=model.moe_shared_expert_gate,
        layers=(1, *(freq - 1) * (0,)) if isinstance(freq, int) else _pattern(freq),
        score_function=model.moe_router_score_function,
        pre_softmax=model.moe_router_pre_softmax,
        num_groups=model.moe_router_num_groups,
        group_topk=model.moe_router_group_topk,
        group_score_topk=model.moe_router_group_score_topk,
        scaling_factor=_or_default(model.moe_router_topk_scaling_factor, 1.0),
        has_router_bias=model.moe_router_bias,
        has_expert_bias=model.moe_router_enable_expert_bias,
        applies_probs_on_input=model.moe_apply_probs_on_input,
    )


def token_dispatcher(config: Config) -> str:
    """Return how tokens reach the ranks of their experts: as configured, else with the fewest bytes."""
    model, ranks = config.model, config.parallel.expert_model_parallel_size
    if model.num_moe_experts is None or ranks == 1:
        return ALLGATHER
    if config.parallel.moe_token_dispatcher_type is not None:
        return config.parallel.moe_token_dispatcher_type
    topk = _or_default(model.moe_router_topk, DEFAULT_TOPK)
    return fewest_bytes(ranks, model.hidden_size, topk, ITEMSIZES[config.train.precision])


def _balance(model: ModelConfig) -> Balance | None:
    """Return what balances the experts' load in training; None where nothing does."""
    if model.num_moe_experts is None:
        return None
    rate = _or_default(model.moe_router_bias_update_rate, DEFAULT_BIAS_UPDATE_RATE)
    rate = rate if model.moe_router_enable_expert_bias else 0.0
    balance = Balance(
        model.moe_router_load_balancing_type,
        model.moe_aux_loss_coeff,
        model.moe_z_loss_coeff,
        rate,
        model.moe_expert_capacity_factor,
        model.moe_token_drop_policy,
        model.moe_pad_expert_input_to_capacity,
        model.moe_router_force_load_balancing,
    )
    return None if balance == Balance() else balance


def _unless(value: bool | None, default: bool) -> bool | None:
    """Return a value, None where it is the default."""
    return None if value == default else value


def _pattern(freq: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the pattern of a key that names every n-th layer, or lists a pattern."""
    if freq is None:
        return ()
    return (*(freq - 1) * (0,), 1) if isinstance(freq, int) else tuple(map(int, freq))


# Keys of each scaling of RoPE, and the defaults of those that need not be set.
ROTARY_KEYS: Mapping[str, Mapping[str, float | bool | None]] = {
    LINEAR: {},
    LLAMA3: {
        "original_max_position_embeddings": None,
        "rotary_low_freq_factor": 1.0,
        "rotary_high_freq_factor": 4.0,
    },
    YARN: {
        "original_max_position_embeddings": None,
        "rotary_beta_slow": 1.0,
        "rotary_beta_fast": 32.0,
        "rotary_attention_factor": None,
        "rotary_truncate": True,
    },
    LONGROPE: {
        "original_max_position_embeddings": None,
        "rotary_short_factor": None,
        "rotary_long_factor": None,
        "rotary_attention_factor": None,
    },
}


def _rotary_scaling(model: ModelConfig) -> RotaryScaling | None:
    """Return the scaling of RoPE; the rules report a value that is missing."""
    if model.rotary_scaling is None:
        return None
    factor, keys = model.rotary_scaling_factor or 1.0, ROTARY_KEYS[model.rotary_scaling]
    length = model.original_max_position_embeddings or model.seq_length
    if model.rotary_scaling == LONGROPE and model.rotary_scaling_factor is None:
        factor = max((model.max_position_embeddings or model.seq_length) / length, 1.0)
    given: dict[str, Any] = {
        name.removeprefix("rotary_"): _or_default(getattr(model, name), default) for name, default in keys.items()
    }
    if model.rotary_scaling == YARN:
        given["attention_factor"] = _or_default(given["attention_factor"], yarn_attention_factor(factor))
    if model.rotary_scaling == LONGROPE:
        given["attention_factor"] = _or_default(given["attention_factor"], longrope_attention_factor(factor, length))
    return RotaryScaling(model.rotary_scaling, factor, **given)


def wrong_pair_factors(model: ModelConfig) -> Mapping[str, str]:
    """Return what is wrong with each list of longrope, by its key: it has one factor for each pair of channels."""
    lists = {key: getattr(model, key) for key in ("rotary_short_factor", "rotary_long_factor")}
    size = (_head_sizes(model)["qk_pos_emb_head_dim"] or 0) if model.multi_latent_attention else None
    if size is None:
        size = int(
            _or_default(model.kv_channels, model.hidden_size // model.num_attention_heads) * model.rotary_percent
        )
    wrong = {key: factors for key, factors in lists.items() if factors is not None and len(factors) != size // 2}
    return {key: f"{len(factors)} factors for {size // 2} pairs of channels" for key, factors in wrong.items()}


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value
