"""Fact: every model type of Hugging Face that converts computes what transformers does, and comes back as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.convert.config_json import read_settings, write_settings
from megatron3d.convert.conversion import ConversionRequest, from_hub, to_hub
from megatron3d.convert.family_table import MODEL_TYPES, family_table
from megatron3d.convert.hub_weights import STACKED
from megatron3d.convert.reference_models import REFERENCE_LOGITS
from megatron3d.convert.tensor_names import file_tensors
from megatron3d.errors import UserError
from tests.support.hub_models import DEFAULTS, GPT2, HUB_FAMILIES, PAIRS, write_hub
from tests.support.peers import Outputs, Unchanged, as_ours, check_equal, our_outputs, peer_outputs
from tests.support.tiny_run import ROOT

# The small models of some types as the first files of these types describe them.
OLDER = {
    "gemma": {**HUB_FAMILIES["gemma"], "hidden_act": "gelu", "hidden_activation": None},
    "gpt_neox": {
        **{name: value for name, value in HUB_FAMILIES["gpt_neox"].items() if name != "rope_parameters"},
        "rotary_pct": 0.4,
        "rotary_emb_base": 500,
    },
    "gemma3_text": {
        **{name: value for name, value in HUB_FAMILIES["gemma3_text"].items() if name != "layer_types"},
        "sliding_window_pattern": 2,
    },
}
TOKENS = torch.randint(37, (2, 16), generator=torch.Generator().manual_seed(3))


def config_json(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as transformers writes them."""
    return {**transformers.AutoConfig.for_model(**hub).to_dict(), "architectures": None}


def in_files(tensors: Mapping[str, Tensor], model_type: str) -> Mapping[str, Tensor]:
    """Return a class's tensors by their names in files."""
    head = "embed_out.weight" if model_type == "gpt_neox" else "lm_head.weight"
    return {head if name == "lm_head.weight" else name: value for name, value in tensors.items()}


def test_every_model_type_has_a_small_model() -> None:
    assert {*HUB_FAMILIES, "gpt2"} == set(MODEL_TYPES) == set(REFERENCE_LOGITS)


@pytest.mark.parametrize("name", HUB_FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    """In float64, with the keys and names that the tables give, whether fields are written out or left to defaults."""
    hub = HUB_FAMILIES[name]
    theirs, wanted = peer_outputs(hub, TOKENS)
    theirs, gradients = (in_files(each, name) for each in (theirs, wanted.gradients))
    model = read_settings(config_json(hub))
    is_stacked = any(STACKED.search(each) for each in theirs)
    table = file_tensors(resolve_architecture(model, 37), name, is_stacked)
    ours = our_outputs(model.model_dump(exclude_unset=True), as_ours(theirs, table), TOKENS, Unchanged())
    params = tuple(tensor for tensor in table if not tensor.is_state)
    check_equal(ours, Outputs(wanted.logits, wanted.loss, as_ours(gradients, params)), 1e-9)
    settings, weights = config_json(hub), {key: value.double() for key, value in theirs.items()}
    for described in (settings, hub, OLDER.get(name, hub)):
        logits = REFERENCE_LOGITS[name](described, weights.__getitem__, TOKENS[:, :-1])
        torch.testing.assert_close(logits, wanted.logits, atol=1e-9, rtol=1e-9)


def test_a_model_whose_layers_all_have_the_window_has_one_base() -> None:
    """Gemma 3 with fewer layers than the period of those without: the other base, and its scaling, are of no layer."""
    listed = HUB_FAMILIES["gemma3_text"]
    hub = {**{name: value for name, value in listed.items() if name != "layer_types"}, "num_hidden_layers": 3}
    theirs, wanted = peer_outputs(hub, TOKENS)
    model = read_settings(config_json(hub))
    assert (model.rope_local_base_freq, model.rotary_base, model.rotary_scaling) == (None, 50.0, None)
    table = file_tensors(resolve_architecture(model, 37), "gemma3_text")
    theirs, gradients = (in_files(each, "gemma3_text") for each in (theirs, wanted.gradients))
    ours = our_outputs(model.model_dump(exclude_unset=True), as_ours(theirs, table), TOKENS, Unchanged())
    check_equal(ours, Outputs(wanted.logits, wanted.loss, as_ours(gradients, table)), 1e-9)


@pytest.mark.parametrize("length,factor", [(8, None), (9, None), (8, 0.7), (9, 0.7)])
def test_longrope_is_chosen_by_the_length_of_the_models_sequences(length: int, factor: float | None) -> None:
    """transformers chooses by the length of an input: the short list up to the original length, 8, else the long."""
    rope = {**HUB_FAMILIES["phi3"]["rope_parameters"], **({"attention_factor": factor} if factor else {})}
    hub = {**HUB_FAMILIES["phi3"], "rope_parameters": rope}
    tokens = TOKENS[:, : length + 1]
    theirs, wanted = peer_outputs(hub, tokens)
    model = read_settings(config_json(hub), seq_length=length)
    table = file_tensors(resolve_architecture(model, 37), "phi3")
    ours = our_outputs(model.model_dump(exclude_unset=True), as_ours(theirs, table), tokens, Unchanged())
    check_equal(ours, Outputs(wanted.logits, wanted.loss, as_ours(wanted.gradients, table)), 1e-9)
    other = model.model_copy(update={"seq_length": 17 - length})
    wrong = our_outputs(other.model_dump(exclude_unset=True), as_ours(theirs, table), tokens, Unchanged())
    assert (wrong.logits - wanted.logits).abs().max() > 1e-3


def test_sequences_of_chunked_attention_are_one_chunk_at_most() -> None:
    """Llama 4 attends in chunks where it has rotary positions: a chunk is like any sequence, more is refused."""
    hub = {**HUB_FAMILIES["llama4_text"], "max_position_embeddings": 64}
    assert read_settings(hub).seq_length == 16 == HUB_FAMILIES["llama4_text"]["attention_chunk_size"]
    with pytest.raises(UserError, match="attention_chunk_size=16"):
        read_settings(hub, seq_length=17)


@pytest.mark.parametrize("name", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_a_fixed_alpha_is_another_base(name: str) -> None:
    """Hunyuan's files name it a dynamic scaling, with fields that have no effect; it comes back as the base."""
    rope = {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    hub = {**HUB_FAMILIES[name], "rope_theta": 500.0, "rope_parameters": None, "rope_scaling": rope}
    theirs, wanted = peer_outputs({**hub, "rope_parameters": {**rope, "rope_theta": 500.0}}, TOKENS)
    model = read_settings(hub)
    assert (model.rotary_base, model.rotary_scaling) == (500.0 * 50.0 ** (10 / 8), None)
    is_stacked = any(STACKED.search(each) for each in theirs)
    table = file_tensors(resolve_architecture(model, 37), name, is_stacked)
    ours = our_outputs(model.model_dump(exclude_unset=True), as_ours(theirs, table), TOKENS, Unchanged())
    torch.testing.assert_close(ours.logits, wanted.logits, atol=1e-9, rtol=1e-9)
    weights = {key: value.double() for key, value in theirs.items()}
    logits = REFERENCE_LOGITS[name](hub, weights.__getitem__, TOKENS[:, :-1])
    torch.testing.assert_close(logits, wanted.logits, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", HUB_FAMILIES)
def test_the_keys_are_a_valid_configuration(name: str) -> None:
    """A run that starts from a folder is checked with what is read from it."""
    model = read_settings(HUB_FAMILIES[name]).model_dump(exclude_unset=True)
    train = {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 1}
    assert check(Config.model_validate({"model": model, "train": train}), 1) == []


def test_longrope_of_other_files() -> None:
    """The first files name it otherwise; a factor that lengths do not give is written where older classes refuse it."""
    rope = HUB_FAMILIES["phi3"]["rope_parameters"]
    arch = resolve_architecture(read_settings(HUB_FAMILIES["phi3"]), 37)
    for older in ("su", "yarn"):
        said = {name: value for name, value in rope.items() if name != "rope_type"}
        hub = {**HUB_FAMILIES["phi3"], "rope_parameters": {**said, "type": older}}
        assert resolve_architecture(read_settings(hub), 37) == arch
    _, written, _ = write_settings(arch)
    assert written["rope_scaling"] == {"type": "longrope", **PAIRS} and written["original_max_position_embeddings"] == 8
    other = {**HUB_FAMILIES["phi3"], "rope_parameters": {**rope, "attention_factor": 0.7}}
    _, written, _ = write_settings(resolve_architecture(read_settings(other), 37))
    assert isinstance(written["rope_scaling"], dict) and written["rope_scaling"]["attention_factor"] == 0.7


@pytest.mark.parametrize("name", HUB_FAMILIES)
def test_settings_come_back(name: str) -> None:
    """As what transformers makes of both, whether fields are written out or left to their defaults."""
    for hub in (HUB_FAMILIES[name], {"model_type": name, **DEFAULTS.get(name, {})}):
        arch = resolve_architecture(read_settings(config_json(hub)), 37)
        assert resolve_architecture(read_settings(hub), 37) == arch
        _, written, notes = write_settings(arch, name)
        assert notes == () and resolve_architecture(read_settings(written), 37) == arch
        one, two = (transformers.AutoConfig.for_model(**settings).to_dict() for settings in (hub, written))
        # transformers keeps older names of a scaling's entries, which are written too.
        two["rope_parameters"] = {key: two["rope_parameters"][key] for key in one["rope_parameters"]}
        unset = {
            "architectures",
            "max_window_layers",
            "no_rope_layer_interval",
            "_sliding_window_pattern",
            "vocab_size",
        }
        unset |= {"original_max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
        # A window that is switched off, and one that no layer has, are written as none.
        unset |= {"sliding_window", "layer_types"} if not two.get("sliding_window") else set()
        unset |= {key for key, value in one.items() if value is None}
        assert {key: value for key, value in one.items() if two.get(key) != value and key not in unset} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", HUB_FAMILIES)
def test_weights_come_back(name: str, tmp_path: Path) -> None:
    """Bit for bit, through files that transformers wrote and a checkpoint of ours."""
    hub = write_hub(tmp_path / "hub", {**HUB_FAMILIES[name], "pad_token_id": 0})
    report = from_hub(ConversionRequest(hub, tmp_path / "run"))
    assert [agreement.holds for agreement in report.agreements] == [True, True]
    (tmp_path / "run" / "conversion.json").unlink()  # a run that starts from a folder has none; its checkpoints tell
    back = to_hub(ConversionRequest(tmp_path / "run", tmp_path / "back"))
    assert [agreement.holds for agreement in back.agreements] == [True, True]
    before, after = (load_file(tmp_path / where / "model.safetensors") for where in ("hub", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == name


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers of another kind": (
        "qwen3",
        {"layer_types": ["full_attention", "chunked_attention"] * 2 + ["full_attention"]},
        "other kinds of",
    ),
    "too few layer types": ("olmo3", {"layer_types": ["full_attention"]}, "a list of 5 entries"),
    "a scaled local rope": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}},
        "only rope_type default with a rope_theta works",
    ),
    "no rope in part of the layers": ("smollm3", {"no_rope_layers": [1, 0]}, "a list of 5 entries"),
    "a scaling of another type": (
        "phi3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "only null or rope_type default or longrope works",
    ),
    "longrope in a Llama": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", **PAIRS, "original_max_position_embeddings": 8}},
        "only null or rope_type default, linear, llama3 or yarn works",
    ),
    "another size of heads": (
        "hunyuan_v1_dense",
        {"attention_head_dim": 12},
        "attention_head_dim=12 and head_dim=10",
    ),
    "two shared experts": ("hunyuan_v1_moe", {"num_shared_expert": [2] * 5}, "every layer has one shared expert"),
    "other experts in a layer": ("hunyuan_v1_moe", {"moe_topk": [2, 3, 3, 3, 3]}, "moe_topk"),
    "a dynamic scaling": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "only null or rope_type default, linear, llama3 or yarn works",
    ),
    "weights of two experts": ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
    "no step between experts": (
        "llama4_text",
        {"moe_layers": None, "interleave_moe_layer_step": 0},
        "interleave_moe_layer_step=0",
    ),
    "no factor of queries": (
        "ministral3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "has numbers as llama_4_scaling_beta",
    ),
    "longrope without a list": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 1.0]}},
        "has lists as short_factor and long_factor",
    ),
    "factors for other pairs": (
        "phi3",
        {"rope_parameters": {**HUB_FAMILIES["phi3"]["rope_parameters"], "long_factor": [2.0]}},
        "long_factor has 1 factors for 2 pairs of channels",
    ),
    "two original lengths": (
        "phi3",
        {"rope_parameters": {**HUB_FAMILIES["phi3"]["rope_parameters"], "original_max_position_embeddings": 4}},
        "original_max_position_embeddings is 8 next to it",
    ),
    "clipped queries": ("olmo2", {"clip_qkv": 8.0}, "unknown here"),
    "both directions": ("gemma", {"use_bidirectional_attention": True}, "every position sees only earlier ones"),
    "capped scores": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "this model type does not cap scores"),
    "two dropouts": ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1 and embd_pdrop=0.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_cannot_have_is_refused(name: str) -> None:
    family, change, words = REFUSED[name]
    with pytest.raises(UserError) as raised:
        read_settings({**HUB_FAMILIES[family], **change})
    (problem,) = raised.value.problems
    assert problem.startswith("config.json: ") and words in problem


def test_a_family_is_not_written_as_another() -> None:
    arch = resolve_architecture(read_settings(HUB_FAMILIES["gemma3_text"]), 37)
    with pytest.raises(UserError, match="LlamaForCausalLM has"):
        write_settings(arch, "llama")
    assert write_settings(arch)[0] == "gemma3_text"
    assert write_settings(resolve_architecture(read_settings(GPT2), 37))[0] == "gpt2"


def test_the_documentation_has_the_table() -> None:
    assert "\n".join(family_table()) in (ROOT / "docs" / "models.md").read_text()
