"""Fact: transformers 4 and 5 compute the same from the config.json that is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.convert.config_json import read_settings, write_settings
from megatron3d.convert.hub_weights import SINGLE
from megatron3d.convert.tokenizer import ID_KEYS
from tests.support.hub_models import GPT2, HUB_FAMILIES, write_hub
from tests.support.older_transformers import install_older, logits_of, older_logits

_LENGTH = {"factor": 2.0, "original_max_position_embeddings": 8}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, **_LENGTH, "beta_fast": 4.0, "attention_factor": 0.9}
_PLAIN = {"rope_type": "default", "rope_theta": 500.0}
# Version 4 has no MiniMax-M2 and Ministral 3, and computes the parameters of Apertus' activation in bf16, whatever the
# model's dtype.
_OTHERWISE = {"minimax_m2", "ministral3", "apertus"}
# Models that version 4 has; it derives YaRN's factor from lengths, OLMo 3's layers with a window have no base of
# their own there, and Llama 4 no biases, whatever attention_bias says.
MODELS: dict[str, dict[str, Any]] = {
    **{name: hub for name, hub in HUB_FAMILIES.items() if name not in _OTHERWISE},
    "gpt2": GPT2,
    "olmo3": {**HUB_FAMILIES["olmo3"], "rope_parameters": {"sliding_attention": _PLAIN, "full_attention": _YARN}},
    "deepseek_v3": {**HUB_FAMILIES["deepseek_v3"], "rope_parameters": {**_YARN, "mscale_all_dim": 1.1}},
    "gpt_oss": {**HUB_FAMILIES["gpt_oss"], "rope_parameters": _YARN},
    "llama4_text": {**HUB_FAMILIES["llama4_text"], "attention_bias": False},
    "gemma3, linear": {
        **HUB_FAMILIES["gemma3_text"],
        "rope_parameters": {
            "sliding_attention": _PLAIN,
            "full_attention": {**_PLAIN, "rope_type": "linear", "factor": 2.0},
        },
    },
}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits of every model by both versions, from the same files."""
    root = tmp_path_factory.mktemp("older")
    installed, folders = install_older(root / "installed"), []
    for place, hub in enumerate(MODELS.values()):
        folder = write_hub(root / str(place), hub)
        arch = resolve_architecture(read_settings(hub), hub["vocab_size"])
        weights = {key: value.double() for key, value in load_file(folder / SINGLE).items()}
        save_file(weights, folder / SINGLE, {"format": "pt"})
        written = {**write_settings(arch, hub["model_type"])[1], **dict.fromkeys(ID_KEYS)}
        (folder / "config.json").write_text(json.dumps(written))
        folders.append(folder)
    older = older_logits(installed, folders)
    return dict(zip(MODELS, zip(older, map(logits_of, folders), strict=True), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_both_versions_compute_the_same(name: str, computed: dict[str, tuple[Tensor, Tensor]]) -> None:
    older, newer = computed[name]
    torch.testing.assert_close(older, newer, atol=1e-9, rtol=1e-9)
