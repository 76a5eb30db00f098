"""Fact: each preset of a published model has the parameters that its authors' class has for their config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.convert.config_json import read_settings
from megatron3d.forecast.memory.rank import predict_memory
from megatron3d.model.linear_spec import num_active_parameters, num_parameters
from megatron3d.model.local_sizes import KERNELS
from megatron3d.model.spec import architecture_record, changed_fields, expert_layers, may_change

FOLDER = Path(__file__).parents[3] / "configs" / "models"
GPU_BYTES = 80e9


def shape(layers: int, hidden: int, inner: int, heads: int, groups: int, vocab: int) -> dict[str, Any]:
    """Return the sizes in a config.json."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (layers, hidden, inner, heads, groups), strict=True)) | {"vocab_size": vocab}


def rope(base: float, **scaling: Any) -> dict[str, Any]:
    """Return rotary positions."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **scaling}}


LLAMA31 = rope(5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA31["rope_parameters"]["original_max_position_embeddings"] = 8192
LLAMA31 |= {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
OLMO2 = {"model_type": "olmo2", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, **rope(5e5)}
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960, **rope(1e6)}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32, "beta_slow": 1}
YARN["attention_factor"] = 1.2079441541679836
STAR = {
    "model_type": "starcoder2",
    "use_bias": True,
    "max_position_embeddings": 16384,
    "sliding_window": 4096,
    "norm_epsilon": 1e-5,
}
MIXTRAL = {"model_type": "mixtral", "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2, **rope(1e6)}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
}
V2_LITE |= {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2}
V2_LITE["rope_scaling"] = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707}
V2_LITE["rope_scaling"] |= {"mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}
GRANITE = {"model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, **rope(1e4)}
GRANITE |= {"logits_scaling": 16.0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
GPT_OSS: dict[str, Any] = {"model_type": "gpt_oss", "rope_theta": 150000, "num_experts_per_tok": 4}
GPT_OSS["rope_scaling"] = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS["rope_scaling"] |= {"original_max_position_embeddings": 4096}
V3: dict[str, Any] = {"model_type": "deepseek_v3", "max_position_embeddings": 163840, "rope_theta": 10000}
V3 |= {"num_nextn_predict_layers": 1, "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0}}
KIMI: dict[str, Any] = {"model_type": "deepseek_v3", "n_routed_experts": 384, "n_group": 1, "topk_group": 1}
KIMI |= {"first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000, "num_nextn_predict_layers": 0}
KIMI |= {"max_position_embeddings": 131072, "rope_scaling": {**V3["rope_scaling"], "factor": 32, "beta_fast": 1}}
QWEN2_MOE = {"model_type": "qwen2_moe", **rope(1e6)}
GLM = {"model_type": "glm4_moe", "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
GLM |= {"rope_theta": 1000000, "partial_rotary_factor": 0.5, "attention_bias": True, "num_nextn_predict_layers": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2-7b": shape(32, 4096, 11008, 32, 32, 32000)
    | {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **rope(1e4)},
    "llama-3-8b": shape(32, 4096, 14336, 32, 8, 128256)
    | {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, **rope(5e5)},
    "llama-3.1-8b": shape(32, 4096, 14336, 32, 8, 128256) | LLAMA31,
    "llama-3.1-70b": shape(80, 8192, 28672, 64, 8, 128256) | LLAMA31,
    "llama-3.1-405b": shape(126, 16384, 53248, 128, 8, 128256) | LLAMA31,
    "mistral-7b": shape(32, 4096, 14336, 32, 8, 32000)
    | {"model_type": "mistral", "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "sliding_window": 4096}
    | rope(1e4),
    "qwen2-7b": shape(28, 3584, 18944, 28, 4, 152064)
    | {"model_type": "qwen2", "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, **rope(1e6)},
    "qwen3-8b": shape(36, 4096, 12288, 32, 8, 151936) | QWEN3,
    "qwen3-32b": shape(64, 5120, 25600, 64, 8, 151936) | QWEN3,
    "gemma-2-9b": shape(42, 3584, 14336, 16, 8, 256000)
    | {"model_type": "gemma2", "head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
    "gemma-3-27b": shape(62, 5376, 21504, 32, 16, 262208)
    | {"model_type": "gemma3_text", "head_dim": 128, "query_pre_attn_scalar": 168, "tie_word_embeddings": True}
    | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    | {"sliding_window": 1024, "max_position_embeddings": 131072},
    "olmo-2-7b": shape(32, 4096, 11008, 32, 32, 100352) | OLMO2,
    "olmo-2-13b": shape(40, 5120, 13824, 40, 40, 100352) | OLMO2,
    "olmo-3-7b": shape(32, 4096, 11008, 32, 32, 100278)
    | {"model_type": "olmo3", "sliding_window": 4096, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6}
    | {"rope_theta": 5e5, "rope_scaling": YARN},
    "smollm3-3b": shape(36, 2048, 11008, 16, 4, 128256)
    | {"model_type": "smollm3", "max_position_embeddings": 65536, "tie_word_embeddings": True, **rope(5e6)},
    "phi-3-mini": shape(32, 3072, 8192, 32, 32, 32064) | {"model_type": "phi3", "sliding_window": 2047},
    "starcoder2-7b": shape(32, 4608, 18432, 36, 4, 49152) | {**STAR, "tie_word_embeddings": True, **rope(1e6)},
    "starcoder2-15b": shape(40, 6144, 24576, 48, 4, 49152) | {**STAR, "tie_word_embeddings": False, **rope(1e5)},
    "mixtral-8x7b": shape(32, 4096, 14336, 32, 8, 32000) | {**MIXTRAL, "max_position_embeddings": 32768},
    "mixtral-8x22b": shape(56, 6144, 16384, 48, 8, 32000) | {**MIXTRAL, "max_position_embeddings": 65536},
    "qwen3-30b-a3b": shape(48, 2048, 6144, 32, 4, 151936) | {**QWEN3_MOE, "moe_intermediate_size": 768},
    "qwen3-235b-a22b": shape(94, 4096, 12288, 64, 4, 151936) | {**QWEN3_MOE, "moe_intermediate_size": 1536},
    "olmoe-1b-7b": shape(16, 2048, 1024, 16, 16, 50304)
    | {"model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 4096},
    "deepseek-v2-lite": shape(27, 2048, 10944, 16, 16, 102400) | {**V2_LITE, "first_k_dense_replace": 1},
    "deepseek-v3": shape(61, 7168, 18432, 128, 128, 129280) | V3,
    "kimi-k2": shape(61, 7168, 18432, 64, 64, 163840) | KIMI,
    "qwen1.5-moe-a2.7b": shape(24, 2048, 5632, 16, 16, 151936) | {**QWEN2_MOE, "max_position_embeddings": 8192},
    "qwen2-57b-a14b": shape(28, 3584, 18944, 28, 4, 151936)
    | {**QWEN2_MOE, "max_position_embeddings": 131072, "num_experts": 64, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480},
    "glm-4.5": shape(92, 5120, 12288, 96, 8, 151552)
    | {**GLM, "n_routed_experts": 160, "moe_intermediate_size": 1536, "first_k_dense_replace": 3}
    | {"routed_scaling_factor": 2.5, "use_qk_norm": True},
    "glm-4.5-air": shape(46, 4096, 10944, 96, 8, 151552) | {**GLM, "moe_intermediate_size": 1408},
    "gpt-oss-20b": shape(24, 2880, 2880, 64, 8, 201088) | {**GPT_OSS, "num_local_experts": 32},
    "gpt-oss-120b": shape(36, 2880, 2880, 64, 8, 201088) | {**GPT_OSS, "num_local_experts": 128},
    "granite-3-8b": shape(40, 4096, 12800, 32, 8, 49155) | {**GRANITE, "max_position_embeddings": 4096},
    "olmo-7b": shape(32, 4096, 11008, 32, 32, 50304)
    | {"model_type": "olmo", "max_position_embeddings": 2048, **rope(1e4)},
    "nemotron-4-15b": shape(32, 6144, 24576, 48, 8, 256000) | {"model_type": "nemotron", "tie_word_embeddings": False},
    "gpt-neox-20b": {"model_type": "gpt_neox", "hidden_act": "gelu_fast"}
    | {name: size for name, size in shape(44, 6144, 24576, 64, 64, 50432).items() if name != "num_key_value_heads"},
}


def test_every_preset_of_a_published_model_is_compared() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_model(name: str) -> None:
    settings = dict(PUBLISHED[name])
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    path = FOLDER / f"{name}.yaml"
    ours = read_config(path).config
    arch = resolve_architecture(ours.model, ours.model.vocab_size or 0)
    # transformers' classes have no modules of multi-token prediction.
    assert num_parameters(replace(arch, mtp_num_layers=0)) == sum(param.numel() for param in theirs.parameters())
    assert f"# parameters {num_parameters(arch):,} (vocabulary {arch.vocab_size:,})\n" in path.read_text()


# Billions of parameters that compute a token, by their authors, and how many of embedding and head some do not count.
ACTIVE = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "olmoe-1b-7b": 1.3}
ACTIVE |= {"deepseek-v2-lite": 2.4, "gpt-oss-20b": 3.6, "gpt-oss-120b": 5.1}
ACTIVE |= {"deepseek-v3": 37, "glm-4.5": 32, "glm-4.5-air": 12}
ACTIVE |= {"kimi-k2": 32.6, "qwen1.5-moe-a2.7b": 2.7, "qwen2-57b-a14b": 14.2}
UNCOUNTED = {"deepseek": 1, "gpt-oss": 1, "glm": 2}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_that_the_authors_count(name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    ours = read_config(path).config.model
    arch = replace(resolve_architecture(ours, ours.vocab_size or 0), mtp_num_layers=0)
    experts = arch.experts
    assert experts is not None, f"{name} has experts"
    unused = len(expert_layers(arch)) * (experts.num_experts - experts.topk)
    biases = (2 * experts.ffn_hidden_size + arch.hidden_size) * arch.has_mlp_bias
    active = num_parameters(arch) - unused * (3 * arch.hidden_size * experts.ffn_hidden_size + biases)
    assert active == num_active_parameters(arch)
    assert f"# active {active:,} for each token\n" in path.read_text()
    matrices = next((count for start, count in UNCOUNTED.items() if name.startswith(start)), 0)
    assert abs((active - matrices * arch.vocab_size * arch.hidden_size) / 1e9 - ACTIVE[name]) < 0.03 * ACTIVE[name]


LOADED = [name for name in PUBLISHED if read_config(FOLDER / f"{name}.yaml").config.checkpoint.load]


@pytest.mark.parametrize("name", LOADED)
def test_a_preset_starts_from_the_published_folder(name: str) -> None:
    """The model section differs from config.json in nothing that `checkpoint.load` would refuse."""
    model = read_settings(PUBLISHED[name])
    theirs = architecture_record(resolve_architecture(model, model.vocab_size or 0))
    ours = read_config(FOLDER / f"{name}.yaml").config.model
    arch = resolve_architecture(ours, ours.vocab_size or 0)
    found = changed_fields(theirs, arch)
    assert [each for each in found if not may_change(each, arch)] == []
    assert {each.name for each in found} <= {"seq_length", "init_method_std"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_memory_is_predicted_to_fit(name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    world_size = int(path.read_text().split("# world_size ")[1].split()[0])
    assert predict_memory(RunSpec(read_config(path).config, world_size), KERNELS["gpu"]).total < 0.8 * GPU_BYTES
