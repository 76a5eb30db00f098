"""Fact: fields that published folders of a model type have in config.json are read, with the values that they have."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.convert.config_json import read_settings, write_settings
from megatron3d.errors import UserError
from tests.support.hub_models import HUB_FAMILIES

# Fields without effect, or of older files, in folders that their authors published.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma": {"hidden_act": "gelu", "hidden_activation": None},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window_size": 5},
    "gpt_neox": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "classifier_dropout": 0.1},
    "phi3": {"attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
    "qwen2": {"use_mrope": False},
    "smollm3": {"pretraining_tp": 2, "max_window_layers": 28},
    "starcoder2": {
        "activation_function": "gelu_pytorch_tanh",
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": 1e-5,
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    },
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "gpt_neox": {"hidden_dropout_prob": 0.1},
    "phi3": {"attention_bias": True},
    "qwen2": {"use_mrope": True},
    "starcoder2": {"norm_type": "rms_norm"},
    "gemma2": {"sliding_window_size": 4},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_of_published_folders_changes_nothing(name: str) -> None:
    hub = HUB_FAMILIES[name]
    assert read_settings({**hub, **PUBLISHED[name]}) == read_settings(hub)


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_value_that_would_have_an_effect_is_refused(name: str) -> None:
    ((field, value),) = OTHERWISE[name].items()
    with pytest.raises(UserError, match=f"{field}="):
        read_settings({**HUB_FAMILIES[name], field: value})


def test_the_interval_of_full_layers_is_read_from_older_files() -> None:
    """Gemma 3's first releases list no layers."""
    listed = HUB_FAMILIES["gemma3_text"]
    hub = {**{name: value for name, value in listed.items() if name != "layer_types"}, "sliding_window_pattern": 2}
    arch = resolve_architecture(read_settings(hub), 37)
    assert arch.window_pattern == (1, 0) and arch == resolve_architecture(read_settings(listed), 37)
    assert "sliding_window_pattern" not in write_settings(arch)[1]


# What the authors' code, and serving engines, read without a default.
DEEPSEEK = {
    "deepseek_v2": {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "topk_group": 2},
}


@pytest.mark.parametrize("name", DEEPSEEK)
def test_fields_that_serving_engines_read_are_written(name: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
    scaling |= {"mscale": 0.707, "mscale_all_dim": 0.707}
    arch = resolve_architecture(read_settings({**HUB_FAMILIES[name], "rope_parameters": scaling}), 37)
    written = write_settings(arch, name)[1]
    wanted = {**DEEPSEEK[name], "moe_layer_freq": 1, "ep_size": 1, "n_shared_experts": 2, "rope_theta": 1e4}
    wanted |= {"num_nextn_predict_layers": 0} if name == "deepseek_v3" else {"n_group": 1}
    assert {key: written.get(key) for key in wanted} == wanted
    rope = written["rope_scaling"]
    assert isinstance(rope, dict) and rope["mscale"] == rope["mscale_all_dim"] == 0.707
    assert resolve_architecture(read_settings(written), 37) == arch
