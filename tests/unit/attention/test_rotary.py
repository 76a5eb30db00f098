"""Fact: scaled rotary rates are those of transformers, and a part of a head is rotated as a smaller head is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron3d.attention.rotary import rotary_rates, rotary_tables, rotate
from megatron3d.attention.rotary_spec import Rotary, RotaryScaling
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.model.spec import attention_kind, attention_kinds, rotaries
from tests.support.peers import widened
from tests.support.shards import error, normal

LLAMA3 = {"rotary_scaling": "llama3", "rotary_scaling_factor": 8.0, "original_max_position_embeddings": 8192}
YARN = {"rotary_scaling": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rotary_scaling": "linear", "rotary_scaling_factor": 2.5},
    "llama3": LLAMA3,
    "llama3, other bounds": {**LLAMA3, "rotary_low_freq_factor": 2.0, "rotary_high_freq_factor": 9.0},
    "llama3, equal bounds": {**LLAMA3, "rotary_low_freq_factor": 1.0, "rotary_high_freq_factor": 1.0},
    "yarn": YARN,
    "yarn, not rounded": {**YARN, "rotary_truncate": False, "rotary_beta_fast": 20.0, "rotary_beta_slow": 2.0},
    "yarn, another factor": {**YARN, "rotary_attention_factor": 0.7},
    "yarn, one channel": {**YARN, "original_max_position_embeddings": 7},
}
THEIRS = {
    "rotary_scaling": "rope_type",
    "rotary_scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}


def their_rates(keys: dict[str, Any], base: float, size: int) -> tuple[torch.Tensor, float]:
    """Return the rates of transformers in float64, and its factor of queries and keys."""
    rope = {THEIRS.get(name, name.removeprefix("rotary_")): value for name, value in keys.items()}
    if keys["rotary_scaling"] == "llama3":
        rope = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | rope
    with widened():
        config = transformers.LlamaConfig(head_dim=size, rope_parameters={"rope_theta": base, **rope})
        rates, factor = ROPE_INIT_FUNCTIONS[keys["rotary_scaling"]](config)
    return rates, factor


def rotary_of(keys: dict[str, Any], base: float, size: int) -> Rotary:
    model = ModelConfig.model_validate({"family": "llama", "kv_channels": size, "rotary_base": base, **keys})
    (rotary,) = rotaries(resolve_architecture(model, 10))
    return rotary


@pytest.mark.parametrize("size,base", [(128, 5e5), (64, 1e4), (6, 150.0)])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rates_are_those_of_transformers(name: str, base: float, size: int) -> None:
    theirs, factor = their_rates(SCALINGS[name], base, size)
    rotary = rotary_of(SCALINGS[name], base, size)
    torch.testing.assert_close(
        rotary_rates(rotary, torch.float64, torch.device("cpu")), theirs, rtol=1e-13, atol=1e-300
    )
    cos, sin = rotary_tables(33, rotary, torch.zeros(1, dtype=torch.float64))
    angles = torch.outer(torch.arange(33.0, dtype=torch.float64), theirs)
    assert error(cos[:, 0], torch.cat((angles.cos(), angles.cos()), 1) * factor) < 1e-13
    assert error(sin[:, 0], torch.cat((angles.sin(), angles.sin()), 1) * factor) < 1e-13


def test_scaling_keeps_what_does_not_turn_fast() -> None:
    """llama3 leaves fast rates alone, divides slow ones by the factor, and is monotonous between them."""
    plain = rotary_rates(Rotary(5e5, 128), torch.float64, torch.device("cpu"))
    scaled = rotary_rates(rotary_of(LLAMA3, 5e5, 128), torch.float64, torch.device("cpu"))
    ratio = plain / scaled
    assert ratio[0] == 1 and ratio[-1] == 8 and bool((ratio.diff() >= 0).all())


def test_a_part_of_a_head_is_rotated_like_a_smaller_head() -> None:
    x_BSND = normal(2, 7, 3, 10, seed=1)
    tables = rotary_tables(7, Rotary(100.0, 4), x_BSND)
    got = rotate(x_BSND, tables)
    assert torch.equal(got[..., :4], rotate(x_BSND[..., :4], tables))
    assert torch.equal(got[..., 4:], x_BSND[..., 4:])


def test_kinds_of_layers_repeat_over_depth() -> None:
    """Every third layer, or the layers of a list, have no rotary positions, wherever a stage begins."""
    base = {"family": "llama", "num_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "rotary_percent": 0.5}
    for freq, skipped in ((3, [2, 5]), ([1, 0], [0, 2, 4, 6]), (None, [])):
        arch = resolve_architecture(ModelConfig.model_validate({**base, "no_rope_freq": freq}), 10)
        kinds = [attention_kind(arch, layer) for layer in range(8)]
        assert [layer for layer, kind in enumerate(kinds) if kind.rotary is None] == skipped
        assert set(attention_kinds(arch)) == set(kinds) and rotaries(arch) == (Rotary(10000.0, 4),)
    none = resolve_architecture(ModelConfig.model_validate({**base, "position_embedding_type": "none"}), 10)
    assert rotaries(none) == ()


def test_a_scaling_without_attention_factor_leaves_the_tables_unit() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    cos, sin = rotary_tables(9, Rotary(10.0, 4, RotaryScaling("linear", 2.0)), like)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))
