"""Fact: a converted folder keeps its token ids, can be moved, and holds no file from outside of its source."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron3d.checkpoint import index
from megatron3d.config.read import read_config
from megatron3d.convert.conversion import ConversionRequest, from_hub, to_hub, to_torch
from megatron3d.convert.hub_weights import SINGLE, open_folder
from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.errors import UserError
from tests.support.hub_models import HUB_FAMILIES, LLAMA, write_hub

IDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]] = {
    "config": ({"bos_token_id": 1, "eos_token_id": 2}, None, {"bos_token_id": 1, "eos_token_id": 2}),
    "a list": ({"bos_token_id": 1, "eos_token_id": [2, 0]}, None, {"bos_token_id": 1, "eos_token_id": [2, 0]}),
    "generation": ({"bos_token_id": 1, "eos_token_id": 2}, {"eos_token_id": [3, 0]}, {"eos_token_id": [3, 0]}),
    "no beginning": ({"eos_token_id": 2}, None, {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}),
    "padding": ({"eos_token_id": 2, "pad_token_id": 0}, None, {"eos_token_id": 2, "pad_token_id": 0}),
}


@pytest.mark.parametrize("name", IDS)
def test_token_ids_are_kept(name: str, tmp_path: Path) -> None:
    config, generation, wanted = IDS[name]
    hub = write_hub(tmp_path / "hub", LLAMA)
    settings = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps({**settings, **config}))
    (hub / "generation_config.json").unlink()
    if generation is not None:
        (hub / "generation_config.json").write_text(json.dumps(generation))
    from_hub(ConversionRequest(hub, tmp_path / "run", with_transformers=False))
    data = read_config(tmp_path / "run" / "config.yaml").config.data
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model)
    ends = wanted["eos_token_id"]
    assert tokenizer.special.ends == (tuple(ends) if isinstance(ends, list) else (ends,))
    to_hub(ConversionRequest(tmp_path / "run", tmp_path / "back", with_transformers=False))
    for file in ("config.json", "generation_config.json"):
        said = json.loads((tmp_path / "back" / file).read_text())
        assert file != "config.json" or said.keys() >= wanted.keys()
        assert {key: said.get(key) for key in wanted} == wanted


def test_a_run_can_be_moved(tmp_path: Path) -> None:
    """config.yaml names the tokenizer next to it, wherever that is."""
    from_hub(ConversionRequest(write_hub(tmp_path / "hub", LLAMA), tmp_path / "run", with_transformers=False))
    assert "tokenizer_model: tokenizer.json " in (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run").rename(tmp_path / "moved")
    data = read_config(tmp_path / "moved" / "config.yaml").config.data
    assert data.tokenizer_model == str(tmp_path / "moved" / "tokenizer.json")
    to_hub(ConversionRequest(tmp_path / "moved", tmp_path / "back", with_transformers=False))
    typed = read_config(tmp_path / "moved" / "config.yaml", ["data.tokenizer_model=tokenizer.json"])
    assert typed.config.data.tokenizer_model == "tokenizer.json"


def test_an_index_is_read_as_often_for_any_number_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a large model on many ranks has hundreds of megabytes."""
    read, content, counts = list[Path](), index._content, list[int]()
    monkeypatch.setattr(index, "_content", lambda folder: read.append(folder) or content(folder))
    for layers in (2, 4):
        hub, run, back, dcp = (tmp_path / f"{name}{layers}" for name in ("hub", "run", "back", "dcp"))
        write_hub(hub, {**LLAMA, "num_hidden_layers": layers})
        from_hub(ConversionRequest(hub, run, with_transformers=False))
        to_hub(ConversionRequest(run, back, with_transformers=False))
        to_torch(ConversionRequest(run, dcp))
        counts.append(len(read))
        read.clear()
    assert counts[0] == counts[1]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "generation_config.json"])
def test_links_out_of_the_folder_are_refused(file: str, tmp_path: Path) -> None:
    hub = write_hub(tmp_path / "hub", LLAMA)
    (hub / file).rename(tmp_path / "elsewhere")
    (hub / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"{file}: is a link to .*elsewhere, outside of the folder"):
        from_hub(ConversionRequest(hub, tmp_path / "run"))


@pytest.mark.parametrize("name", ["a\\u0000b", "\\ud800", "a/b"])
def test_an_index_with_a_name_that_no_file_can_have_is_refused(name: str, tmp_path: Path) -> None:
    hub = write_hub(tmp_path / "hub", LLAMA)
    (hub / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(UserError, match="weight_map"):
        from_hub(ConversionRequest(hub, tmp_path / "run"))


def test_a_weight_file_that_is_longer_than_its_header_says_is_refused(tmp_path: Path) -> None:
    hub = write_hub(tmp_path / "hub", LLAMA)
    os.truncate(hub / "model.safetensors", 2**40)
    with pytest.raises(UserError, match="its header describes"):
        from_hub(ConversionRequest(hub, tmp_path / "run"))


def test_a_number_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    hub = write_hub(tmp_path / "hub", HUB_FAMILIES["apertus"])
    weights = load_file(hub / SINGLE)
    beta = {"model.layers.1.mlp.act_fn.beta": torch.tensor(0.6)}
    save_file({**weights, **beta}, hub / SINGLE, {"format": "pt"})
    with pytest.raises(UserError, match=r"model.layers.1.mlp.act_fn.beta is 0.6\d*; only 0.5"):
        open_folder(hub)


def test_buffers_of_old_files_are_left_out(tmp_path: Path) -> None:
    """Pythia's files have the causal mask of every layer."""
    hub = write_hub(tmp_path / "hub", HUB_FAMILIES["gpt_neox"])
    weights = load_file(hub / SINGLE)
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 16, 16).bool().to(torch.uint8)}
    mask["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    save_file({**weights, **mask}, hub / SINGLE, {"format": "pt"})
    assert {tensor.name for tensor in open_folder(hub).weights.table} == weights.keys()
