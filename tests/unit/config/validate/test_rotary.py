"""Fact: keys of RoPE that are unused, missing or contradictory are refused, with a value that works."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.validate.rules import check
from tests.support.valid_config import with_changes

YARN = {"rotary_scaling": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = YARN | {"rotary_scaling": "llama3"}
LONGROPE = {"rotary_scaling": "longrope", "original_max_position_embeddings": 8, "kv_channels": 4}
LONGROPE |= {"rotary_short_factor": [1.0, 1.0], "rotary_long_factor": [2.0, 4.0]}
BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {"rotary_percent": 0.4, "kv_channels": 8},
        "model.rotary_percent=0.4: RoPE rotates pairs of channels, but 0.4 of a head's 8 are 3; use 0.25 or 0.5",
    ),
    (
        {"no_rope_freq": 1},
        "model.no_rope_freq=1: no layer has RoPE; use model.position_embedding_type=none, or a number from 2",
    ),
    ({"no_rope_freq": [0]}, "model.no_rope_freq=[0]: every layer has RoPE; leave it out"),
    ({"no_rope_freq": 9, "num_layers": 4}, "model.no_rope_freq=9: longer than model.num_layers=4; use 4 or less"),
    (
        {"rotary_scaling": "linear"},
        "model.rotary_scaling=linear: needs model.rotary_scaling_factor; set it, for example to 8.0",
    ),
    (
        {"rotary_scaling": "llama3", "rotary_scaling_factor": 8.0},
        "model.rotary_scaling=llama3: needs model.original_max_position_embeddings; set it, for example to 8192",
    ),
    (
        {"rotary_scaling_factor": 8.0},
        "model.rotary_scaling_factor=8.0: not used with model.rotary_scaling=null; use linear, llama3, yarn or "
        "longrope, or leave it out",
    ),
    (
        {**LLAMA3, "rotary_beta_fast": 8.0},
        "model.rotary_beta_fast=8.0: not used with model.rotary_scaling=llama3; use yarn, or leave it out",
    ),
    (
        {**LLAMA3, "rotary_low_freq_factor": 5.0},
        "model.rotary_low_freq_factor=5.0: 5 is above rotary_high_freq_factor 4; use 1",
    ),
    (
        {**YARN, "rotary_beta_slow": 64.0},
        "model.rotary_beta_slow=64.0: 64 is above rotary_beta_fast 32; use 8",
    ),
    (
        {"rope_local_base_freq": 1e4},
        "model.rope_local_base_freq=10000.0: no layer with RoPE has a window; set model.window_size, or leave it out",
    ),
    (
        {"rope_local_base_freq": 1e4, "window_size": (3, 0)},
        "model.rope_local_base_freq=10000.0: every layer with RoPE has the window, so that rotary_base and "
        "rotary_scaling have no effect; set model.rotary_base instead, or model.window_attn_skip_freq",
    ),
    (
        {"qk_l2_norm": True, "qk_layernorm": True, "normalization": "RMSNorm"},
        "model.qk_l2_norm=true: queries and keys have norms with weights; use false, or model.qk_layernorm=false",
    ),
    (
        {"qk_l2_norm": True, "normalization": "LayerNorm"},
        "model.qk_l2_norm=true: only with norms by the root mean square; use model.normalization=RMSNorm, or leave it "
        "out",
    ),
    (
        {"attention_temperature_length": 4},
        "model.attention_temperature_length=4: not used without model.attention_temperature_beta; set it, for example "
        "to 0.1, or leave model.attention_temperature_length out",
    ),
    (
        {"attention_temperature_beta": 0.1, "attention_temperature_layers": "no_rope"},
        "model.attention_temperature_layers=no_rope: every layer has RoPE; use all, or set model.no_rope_freq",
    ),
    (
        {"qk_layernorm_after_rope": True},
        "model.qk_layernorm_after_rope=true: queries and keys have no norm; use model.qk_layernorm=true, or leave it "
        "out",
    ),
    (
        {"qk_layernorm_after_rope": True, "qk_layernorm": True, "qk_layernorm_scope": "projection"},
        "model.qk_layernorm_after_rope=true: RoPE works on heads; use model.qk_layernorm_scope=head, or leave it out",
    ),
    (
        {**LONGROPE, "rotary_long_factor": None},
        "model.rotary_scaling=longrope: needs model.rotary_long_factor; set it, for example to a list of 8.0 for each "
        "pair of channels",
    ),
    (
        {**LONGROPE, "rotary_long_factor": [2.0]},
        "model.rotary_long_factor: 1 factors for 2 pairs of channels; give one for each",
    ),
    (
        {**LONGROPE, "original_max_position_embeddings": 1},
        "model.original_max_position_embeddings=1: longrope divides by its logarithm; use 2",
    ),
    ({**YARN, "rotary_base": 1.0}, "model.rotary_base=1.0: yarn needs a base above 1; use 10000.0"),
]


@pytest.mark.parametrize("changes,message", BROKEN, ids=[message.partition(":")[0] for _, message in BROKEN])
def test_a_broken_rule_is_reported(changes: dict[str, Any], message: str) -> None:
    model = {"position_embedding_type": "rope", **changes}
    assert check(with_changes({"model": model}), 1) == [message]


@pytest.mark.parametrize(
    "key,value",
    [("rotary_percent", 0.5), ("no_rope_freq", 2), ("rotary_scaling", "linear"), ("rope_local_base_freq", 9.0)],
)
def test_keys_of_rope_are_refused_without_rope(key: str, value: Any) -> None:
    changes = {key: value, "position_embedding_type": "learned_absolute"}
    if key == "rotary_scaling":
        changes["rotary_scaling_factor"] = 2.0
    (message,) = check(with_changes({"model": changes}), 1)
    assert (
        message
        == f"model.{key}={value}: not used with position_embedding_type learned_absolute; use rope, or leave it out"
    )
