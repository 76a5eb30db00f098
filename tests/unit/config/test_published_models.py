"""Fact: each preset of a published model has the parameters that its authors' class has for their config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron3d.analysis.memory_model.kernel_memory import KERNELS
from megatron3d.analysis.memory_model.rank import predict_memory
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.convert.config_json import read_settings
from megatron3d.model.architecture import architecture_record, changed_fields, may_change
from megatron3d.model.flops import num_parameters

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
    assert num_parameters(arch) == sum(param.numel() for param in theirs.parameters())
    assert f"# parameters {num_parameters(arch):,} (vocabulary {arch.vocab_size:,})\n" in path.read_text()


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
