"""Fact: fields that published folders of a model type have in config.json are read, with the values that they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.convert.config_json import read_settings, write_settings
from megatron3d.convert.conversion import ConversionReport, ConversionRequest, from_hub, to_hub
from megatron3d.convert.hub_weights import SINGLE
from megatron3d.errors import UserError
from tests.support.hub_models import HUB_FAMILIES, write_hub

# Fields without effect, or of older files, in folders that their authors published.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma": {"hidden_act": "gelu", "hidden_activation": None},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window_size": 5},
    "apertus": {"hidden_dropout": 0.0, "mlp_bias": False, "post_norm": False, "qk_norm": True},
    "cohere": {"model_max_length": 131072, "use_qk_norm": False},
    "cohere2": {
        "cache_implementation": "hybrid",
        "head_dim": 10,
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": False,
    },
    "gpt_neox": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "classifier_dropout": 0.1},
    "minimax_m2": {
        "attn_type_list": [1] * 5,
        "layernorm_full_attention_beta": 1.0,
        "mlp_intermediate_size": 8192,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rotary_dim": 4,
        "scoring_func": "sigmoid",
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
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
    "apertus": {"post_norm": True},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"head_dim": 8},
    "gpt_neox": {"hidden_dropout_prob": 0.1},
    "minimax_m2": {"use_routing_bias": False},
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
    "deepseek_v2": {"topk_method": "group_limited_greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "topk_group": 2},
}


@pytest.mark.parametrize("name", DEEPSEEK)
def test_fields_that_serving_engines_read_are_written(name: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
    scaling |= {"mscale": 0.707, "mscale_all_dim": 0.707}
    arch = resolve_architecture(read_settings({**HUB_FAMILIES[name], "rope_parameters": scaling}), 37)
    written = write_settings(arch, name)[1]
    wanted = {**DEEPSEEK[name], "moe_layer_freq": 1, "ep_size": 1, "n_shared_experts": 2, "rope_theta": 1e4}
    wanted |= {"num_nextn_predict_layers": 0} if name == "deepseek_v3" else {"n_group": 3, "topk_group": 2}
    assert {key: written.get(key) for key in wanted} == wanted
    rope = written["rope_scaling"]
    assert isinstance(rope, dict) and rope["mscale"] == rope["mscale_all_dim"] == 0.707
    assert resolve_architecture(read_settings(written), 37) == arch


def both_ways(folder: Path) -> tuple[ConversionReport, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Convert a folder there and back; return the report, and the tensors of both folders."""
    there = from_hub(ConversionRequest(folder, folder.with_name("run")))
    back = to_hub(ConversionRequest(folder.with_name("run"), folder.with_name("back")))
    assert [agreement.holds for report in (there, back) for agreement in report.agreements] == [True] * 4
    before, after = (load_file(each / SINGLE) for each in (folder, folder.with_name("back")))
    return there, before, after


IMAGES = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
IMAGES |= {"image_size": 28, "patch_size": 14}
# Whole models by the language model in them.
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": (
        "gemma3",
        {"mm_tokens_per_image": 4, "image_token_index": 37, "boi_token_index": 35, "eoi_token_index": 34},
    ),
    "llama4_text": ("llama4", {"image_token_index": 37, "boi_token_index": 35, "eoi_token_index": 34}),
    "mistral": ("mistral3", {"image_token_index": 37, "spatial_merge_size": 1}),
    "ministral3": ("mistral3", {"image_token_index": 37, "spatial_merge_size": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", WHOLE)
def test_the_language_model_of_a_whole_model_is_converted(part: str, tmp_path: Path) -> None:
    name, fields = WHOLE[part]
    text = {**HUB_FAMILIES[part], "tie_word_embeddings": name == "gemma3", "pad_token_id": 0}
    ids = {"bos_token_id": None, "eos_token_id": None, "final_logit_softcapping": None}  # not read in whole models
    whole = {**fields, "model_type": name, "vision_config": IMAGES, "text_config": {**text, **ids}}
    folder = write_hub(tmp_path / "hub", whole, auto=transformers.AutoModelForImageTextToText)
    report, before, after = both_ways(folder)
    assert any(f'model_type="{name}": the language model is converted' in note for note in report.notes)
    prefix = "language_model."
    text_tensors = {key.removeprefix(prefix): value for key, value in before.items() if key.startswith(prefix)}
    assert len(text_tensors) < len(before) and text_tensors.keys() == after.keys()
    assert all(torch.equal(text_tensors[key], after[key]) for key in after)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == part


def test_another_language_model_inside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"model_type": "x"}}))
    with pytest.raises(UserError, match="text_config of model_type"):
        from_hub(ConversionRequest(tmp_path, tmp_path / "run"))


@pytest.mark.slow
def test_a_type_with_the_layers_of_another_is_read_as_that(tmp_path: Path) -> None:
    """Kimi K2's folders name code of their own, and the class that they would run."""
    folder = write_hub(tmp_path / "hub", HUB_FAMILIES["deepseek_v3"])
    settings = json.loads((folder / "config.json").read_text())
    settings |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    report, before, after = both_ways(folder)
    assert any("its layers are those of deepseek_v3" in note for note in report.notes)
    assert all(torch.equal(before[key], after[key]) for key in before)
