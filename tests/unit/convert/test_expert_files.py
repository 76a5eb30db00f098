"""Fact: experts come from files with one tensor for each or for all, and further modules come back as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron3d.checkpoint import store
from megatron3d.checkpoint.index import read_meta
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.convert.config_json import read_settings, write_settings
from megatron3d.convert.conversion import ConversionRequest, from_hub, to_hub
from megatron3d.convert.hub_weights import rows_of
from megatron3d.convert.tensor_names import FileTensor
from megatron3d.errors import UserError
from tests.support.hub_models import HUB_FAMILIES, write_hub
from tests.support.tiny_run import stored

PLAIN = {"with_logits": False, "with_transformers": False}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_stacked_files_hold_the_same_experts(name: str, tmp_path: Path) -> None:
    """Files as transformers' classes have them, with one tensor for all experts of a layer."""
    apart = write_hub(tmp_path / "apart", HUB_FAMILIES[name])
    model = transformers.AutoModelForCausalLM.from_pretrained(apart)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    (tmp_path / "stacked" / "tokenizer.json").write_bytes((apart / "tokenizer.json").read_bytes())
    assert any(key.endswith("gate_up_proj") for key in load_file(tmp_path / "stacked" / "model.safetensors"))
    from_hub(ConversionRequest(apart, tmp_path / "one", **PLAIN))
    assert from_hub(ConversionRequest(tmp_path / "stacked", tmp_path / "two")).agreements[0].holds
    one, two = (stored(tmp_path / run, 0) for run in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_rows_of_stacked_experts_are_found() -> None:
    """Two experts of two rows, transposed, whose gate and up alternate row by row."""
    parts = tuple((f"{part}{expert}", (2, 3)) for expert in range(2) for part in ("gate", "up"))
    tensor = FileTensor("both", parts, is_transposed=True, num_experts=2, is_striped=True)
    values = torch.arange(24).view(2, 3, 4)
    found = {rows.name: rows_of(values, rows) for rows in tensor.row_ranges()}
    assert tensor.shape == (2, 3, 4)
    for expert in range(2):
        assert torch.equal(found[f"gate{expert}"], values[expert].T[0::2])
        assert torch.equal(found[f"up{expert}"], values[expert].T[1::2])


DEEPSEEK = {**HUB_FAMILIES["deepseek_v3"], "num_mtp_layers": 1}


def with_module(hub: Path) -> dict[str, Tensor]:
    """Add a module of multi-token prediction to the files of a model, as DeepSeek publishes it; return all tensors."""
    torch.manual_seed(1)
    tensors = load_file(hub / "model.safetensors")
    last = {name: value for name, value in tensors.items() if name.startswith("model.layers.4.")}
    module = {name.replace("layers.4.", "layers.5."): torch.randn_like(value) for name, value in last.items()}
    sizes = {"enorm": (18,), "hnorm": (18,), "eh_proj": (18, 36), "shared_head.norm": (18,)}
    module |= {f"model.layers.5.{name}.weight": torch.randn(size) for name, size in sizes.items()}
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    module |= {f"model.layers.5.{copy}.weight": tensors[f"{name}.weight"].clone() for copy, name in copies.items()}
    save_file({**tensors, **module}, hub / "model.safetensors", {"format": "pt"})
    return {**tensors, **module}


@pytest.mark.slow
def test_modules_of_multi_token_prediction_come_back(tmp_path: Path) -> None:
    """Without the copies of embedding and head that DeepSeek's files have, which must be copies."""
    hub = write_hub(tmp_path / "hub", DEEPSEEK)
    tensors = with_module(hub)
    from_hub(ConversionRequest(hub, tmp_path / "run", with_transformers=False))
    ours = stored(tmp_path / "run", 0)
    both = tensors["model.layers.5.eh_proj.weight"]
    assert torch.equal(ours["model.mtp.0.embedding_proj.weight"], both[:, :18])
    assert torch.equal(ours["model.mtp.0.hidden_proj.weight"], both[:, 18:])
    to_hub(ConversionRequest(tmp_path / "run", tmp_path / "back", with_transformers=False))
    back = load_file(tmp_path / "back" / "model.safetensors")
    missing = {"model.layers.5.embed_tokens.weight", "model.layers.5.shared_head.head.weight"}
    assert tensors.keys() - back.keys() == missing and all(torch.equal(back[key], tensors[key]) for key in back)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_mtp_layers"] == 1
    tensors["model.layers.5.embed_tokens.weight"][0, 0] += 1
    save_file(tensors, hub / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model.layers.5.embed_tokens.weight differs from model.embed_tokens.weight"):
        from_hub(ConversionRequest(hub, tmp_path / "other", **PLAIN))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_bias_of_the_choice_stays_in_fp32(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Next to weights in bf16, as DeepSeek publishes them, and where a conversion rounds to it."""
    hub = write_hub(tmp_path / "hub", HUB_FAMILIES["glm4_moe"])
    path, bias = hub / "model.safetensors", "e_score_correction_bias"
    tensors = load_file(path)
    if dtype is None:
        tensors = {name: value if bias in name else value.bfloat16() for name, value in tensors.items()}
        save_file(tensors, path, {"format": "pt"})
    from_hub(ConversionRequest(hub, tmp_path / "run", dtype, **PLAIN))
    assert "precision: bf16" in (tmp_path / "run" / "config.yaml").read_text()
    ours = stored(tmp_path / "run", 0)
    for layer in (2, 3, 4):
        row = ours[f"model.layers.{layer}.mlp.router.expert_bias"]
        assert row.dtype == torch.float32 and torch.equal(row, tensors[f"model.layers.{layer}.mlp.gate.{bias}"])
        assert ours[f"model.layers.{layer}.mlp.router.weight"].dtype == torch.bfloat16
    to_hub(ConversionRequest(tmp_path / "run", tmp_path / "back", **PLAIN))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], value.to(back[name].dtype)) for name, value in tensors.items())
    assert {value.dtype for name, value in back.items() if bias in name} == {torch.float32}
    assert {value.dtype for name, value in back.items() if bias not in name} == {torch.bfloat16}


def test_modules_that_files_lack_are_left_out(tmp_path: Path) -> None:
    """transformers writes the number of modules, which its class of the model does not have."""
    hub = write_hub(tmp_path / "hub", DEEPSEEK)
    report = from_hub(ConversionRequest(hub, tmp_path / "run", **PLAIN))
    assert any("the files have none" in note for note in report.notes)
    assert "mtp_num_layers" not in read_meta(store.resolve(tmp_path / "run")).model


CHOICES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "no groups, as in V2-Lite": ("deepseek_v2", {"topk_method": "greedy", "n_group": 1, "topk_group": 1}, None),
    "two scores of four": ("deepseek_v3", {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}, 2),
    "one score of two, as in V2": ("deepseek_v2", {}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_experts_are_chosen_as_deepseek_does(name: str, tmp_path: Path) -> None:
    """A group's score is its best score in V2, and the sum of its two best in V3, whatever number is chosen in it."""
    family, change, num_scores = CHOICES[name]
    hub = write_hub(tmp_path / "hub", {**HUB_FAMILIES[family], **change})
    report = from_hub(ConversionRequest(hub, tmp_path / "run"))
    assert [agreement.holds for agreement in report.agreements] == [True, True]
    arch = resolve_architecture(read_settings({**HUB_FAMILIES[family], **change}), 37)
    assert arch.experts is not None and (arch.experts.num_groups and arch.experts.num_group_scores) == num_scores
    assert resolve_architecture(read_settings(write_settings(arch, family)[1]), 37) == arch


def test_deepseek_scales_scores_as_published() -> None:
    """The rope_scaling of DeepSeek-V3, with attention factor 1 and scores times the square of 0.1 ln 40 + 1."""
    scaling = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
    hub = {**HUB_FAMILIES["deepseek_v3"], "rope_parameters": None, "rope_theta": 10000}
    hub |= {"rope_scaling": {**scaling, "original_max_position_embeddings": 4096}, "max_position_embeddings": 163840}
    arch = resolve_architecture(read_settings({**hub, "num_nextn_predict_layers": 0}), 37)
    assert arch.rotary_scaling is not None and arch.rotary_scaling.attention_factor == 1
    assert arch.softmax_scale == pytest.approx(10**-0.5 * 1.3688879454113936**2)
    _, written, _ = write_settings(arch, "deepseek_v3")
    assert written["rope_parameters"]["mscale_all_dim"] == 1.0  # type: ignore[index, call-overload]


def test_two_names_of_a_field_must_agree() -> None:
    with pytest.raises(UserError, match=r"num_nextn_predict_layers=2 and num_mtp_layers=0: they are one field"):
        read_settings({**HUB_FAMILIES["deepseek_v3"], "num_nextn_predict_layers": 2})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads of keys apart": ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2: latent attention has 6"),
    "another epsilon": ("deepseek_v3", {"rms_norm_eps": 1e-5}, "norms of latents have this epsilon"),
    "weights that are not divided by their sum": ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=false"),
    "another choice": ("deepseek_v2", {"topk_method": "noaux_tc"}, 'topk_method="noaux_tc": only "greedy" or'),
    "two shares of a head": (
        "minimax_m2",
        {"rotary_dim": 6},
        "rotary_dim=6 and partial_rotary_factor=0.4: they differ",
    ),
    "noise": ("mixtral", {"router_jitter_noise": 0.1}, "tokens reach the router as they are"),
    "no step": ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    "no experts of a token": ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok=null"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_with_experts_cannot_have_is_refused(name: str) -> None:
    family, change, words = REFUSED[name]
    with pytest.raises(UserError) as raised:
        read_settings({**HUB_FAMILIES[family], **change})
    (problem,) = raised.value.problems
    assert problem.startswith("config.json: ") and words in problem


NOT_WRITTEN: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "dense as mixtral": ("mistral", "mixtral", {"sliding_window": None}, "every layer of this model type has experts"),
    "experts as a dense type": ("mixtral", "mistral", {}, "MistralForCausalLM has no experts"),
    "an MLP behind experts": ("qwen3_moe", "mixtral", {}, "every layer of this model type has experts"),
    "shared experts": ("deepseek_v2", "olmoe", {}, "moe_shared_expert_intermediate_size=20: this model type has none"),
    "other shares": ("olmoe", "mixtral", {}, "moe_router_pre_softmax=true: this model type has false"),
}


def test_a_bias_for_the_choice_is_never_dropped() -> None:
    arch = resolve_architecture(read_settings(HUB_FAMILIES["mixtral"]), 37)
    assert arch.experts is not None
    biased = replace(arch, experts=replace(arch.experts, has_expert_bias=True))
    with pytest.raises(UserError, match="moe_router_enable_expert_bias=true: this model type has false"):
        write_settings(biased, "mixtral")


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_experts_that_a_type_lacks_are_refused(name: str) -> None:
    family, wanted, change, words = NOT_WRITTEN[name]
    arch = resolve_architecture(read_settings({**HUB_FAMILIES[family], **change}), 37)
    with pytest.raises(UserError) as raised:
        write_settings(arch, wanted)
    assert any(words in problem for problem in raised.value.problems), raised.value.problems
