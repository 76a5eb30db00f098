"""Fact: every field of config.json is a key of ours, harmless, or refused; our properties have a field or a note."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.attention.rotary_spec import RotaryScaling
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.convert.config_json import read_settings, write_settings
from megatron3d.convert.family_table import MODEL_TYPES
from megatron3d.convert.fields import METADATA
from megatron3d.convert.tensor_names import file_tensors, logical_shapes
from megatron3d.errors import UserError
from megatron3d.experts.plan import Experts
from megatron3d.model.spec import FAMILIES, Architecture
from tests.support.hub_models import (
    DEFAULTS,
    GPT2,
    HUB_FAMILIES,
    LLAMA,
    MISTRAL,
    QWEN3,
    gpt2_settings,
    llama_settings,
    other_settings,
)


@given(hub=gpt2_settings() | llama_settings() | other_settings())
def test_settings_survive_reading_and_writing(hub: dict[str, Any]) -> None:
    model = read_settings(hub)
    arch = resolve_architecture(model, model.vocab_size or 0)
    model_type, written, notes = write_settings(arch, hub["model_type"])
    again = read_settings(written)
    assert (model_type, notes) == (hub["model_type"], ())
    assert resolve_architecture(again, again.vocab_size or 0) == arch


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_field_of_transformers_is_mapped(model_type: str) -> None:
    """The installed configuration class has no field that would be neither read nor refused."""
    hub_type = MODEL_TYPES[model_type]
    known = hub_type.read_names | METADATA
    ours = transformers.AutoConfig.for_model(model_type)
    other = {name for name in ours.to_dict() if name not in known}
    assert {name for name in other if ours.to_dict()[name] is not None} == set()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    given = DEFAULTS.get(model_type, {})
    said = transformers.AutoConfig.for_model(model_type, **given).to_dict()
    short, long = (read_settings(one) for one in ({"model_type": model_type, **given}, {**said, "architectures": None}))
    assert resolve_architecture(short, 100) == resolve_architecture(long, 100)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_field_of_the_architecture_is_mapped(model_type: str) -> None:
    """Changing any of them changes the output, is refused, or is reported."""
    hub = GPT2 if model_type == "gpt2" else HUB_FAMILIES[model_type]
    arch = resolve_architecture(read_settings(hub), 37)
    other: dict[str, Any] = {name: getattr(arch, name) for name in (field.name for field in fields(arch))}
    other |= {name: value * 2 for name, value in other.items() if isinstance(value, int | float) and value}
    other |= {"hidden_dropout": 0.3, "attention_dropout": 0.3, "num_query_groups": 2, "seq_length": 7}
    other |= {"position_embedding_type": "none", "normalization": "none", "activation": "gelu"}
    other |= {"norm_placement": "post", "qk_layernorm_scope": "projection", "softmax_scale": 0.3, "logit_softcap": 3.0}
    other |= dict.fromkeys(("apply_layernorm_1p", "attention_output_gate"), True)
    other |= dict.fromkeys(("add_qkv_bias", "add_mlp_bias"), not arch.add_bias_linear)
    other |= {
        "window": 5,
        "rotary_scaling": RotaryScaling("linear", 2.0),
        "rotary_percent": 0.5,
        "no_rope_freq": (0, 1),
        "experts": Experts(4, 2, 8),
        "rope_local_base_freq": 9.0,
        "rotary_interleaved": True,
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 8),
        "attention_softcap": 3.0,
        "use_parallel_residual": True,
        "softmax_type": "learnable",
        "residual_scale": 0.7,
        "mtp_num_layers": 1,
    }
    other |= {name: not getattr(arch, name) for name in ("add_bias_linear", "tie_embeddings", "qk_layernorm")}
    before = write_settings(arch, model_type)
    of_rope = {"rotary_base", "rotary_scaling", "rotary_percent", "no_rope_freq", "rope_local_base_freq"}
    unused = {"padded_vocab_size", "balance", "window_pattern", "seq_length", "mtp_loss_scaling_factor"}
    has_mlp = model_type not in (
        "mixtral",
        "olmoe",
        "gpt_oss",
        "minimax_m2",
        "hunyuan_v1_moe",
    )  # whose layers all have experts
    unused |= set() if has_mlp else {"ffn_hidden_size"}
    for name in set(other) - unused - (of_rope if model_type == "gpt2" else set()):
        if other[name] == getattr(arch, name):
            continue
        try:
            after = write_settings(replace(arch, **{name: other[name]}), model_type)
        except UserError as error:
            assert name in str(error) or FOLLOWS.get(name, name) in str(error)
        else:
            assert after != before, name


# Values that change with others, and which an error names instead.
FOLLOWS = {
    "add_bias_linear": "add_mlp_bias",
    "hidden_size": "embedding_scale",
    "num_attention_heads": "num_query_groups",
    "experts": "moe_",
    "num_layers": "moe_layer_freq",
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another model": (
        LLAMA,
        {"model_type": "bloom"},
        'model_type="bloom": megatron3d has the models gpt2, llama, mistral, ministral3, qwen2, ',
    ),
    "no model": (LLAMA, {"model_type": None}, "model_type=null"),
    "another task": (GPT2, {"architectures": ["GPT2ForSequenceClassification"]}, "only language models are converted"),
    "scaled positions": (
        LLAMA,
        {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
        "only null or rope_type default, linear, llama3 or yarn works",
    ),
    "scaled positions, new": (
        LLAMA,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}},
        "low_freq_factor of rope_type linear is unknown here",
    ),
    "scaled positions without factor": (LLAMA, {"rope_scaling": {"type": "yarn"}}, "has a number as factor; add it"),
    "two descriptions": (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "they describe different rotary positions",
    ),
    "no table": (LLAMA, {"rope_scaling": 4.0}, "rope_scaling=4.0: not a table"),
    "rotary gpt2": (GPT2, {"rope_theta": 10000.0}, "rope_theta=10000.0: gpt2 has no rotary positions; remove it"),
    "a window": (
        LLAMA,
        {"sliding_window": 4096},
        "sliding_window=4096: every position attends to all earlier ones; only null",
    ),
    "an activation": (
        GPT2,
        {"activation_function": "quick_gelu"},
        'activation_function="quick_gelu": not among gelu_new',
    ),
    "two dropouts": (GPT2, {"resid_pdrop": 0.0}, "resid_pdrop=0.0 and embd_pdrop=0.1"),
    "scores by layer": (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "only false works"),
    "part of a head": (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "quantized": (LLAMA, {"quantization_config": {"bits": 4}}, "convert the model before quantization"),
    "windows in some layers": (
        QWEN3,
        {"layer_types": ["full_attention", "sliding_attention"]},
        'layer_types=["full_attention", "sliding_attention"]: there is no window; sliding_window must be a number',
    ),
    "pairs of neighbours": (LLAMA, {"rope_interleaved": True}, "rope_interleaved=true: channels i and i + size / 2"),
    "unknown": (LLAMA, {"logit_softcapping": 30.0}, "logit_softcapping=30.0: unknown here"),
    "a wrong type": (GPT2, {"n_layer": "twelve"}, 'n_layer="twelve": input should be a valid integer'),
    "nothing": (GPT2, {"n_head": 0}, "n_head=0: input should be greater than or equal to 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused(name: str) -> None:
    settings, change, words = REFUSED[name]
    with pytest.raises(UserError) as raised:
        read_settings({**settings, **change})
    (problem,) = raised.value.problems
    assert problem.startswith("config.json: ") and words in problem


HARMLESS: dict[str, Any] = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "_num_labels": 1,
    "max_length": 50,
    "temperature": 0.6,
    "top_p": 0.9,
    "do_sample": True,
    "is_decoder": False,
}


@pytest.mark.parametrize("settings", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("name", HARMLESS)
def test_fields_that_do_not_change_the_network_are_accepted(settings: dict[str, Any], name: str) -> None:
    assert read_settings({**settings, name: HARMLESS[name]}) == read_settings(settings)


def test_windows_that_are_off_do_not_matter() -> None:
    off = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}
    full = {"layer_types": ["full_attention"] * 2}
    assert read_settings({**QWEN3, **off, **full}) == read_settings(QWEN3)


def test_a_model_type_is_chosen() -> None:
    model = read_settings({**MISTRAL, "sliding_window": None})
    arch = resolve_architecture(model, 37)
    assert write_settings(arch)[0] == "llama"
    model_type, written, _ = write_settings(arch, "mistral")
    assert (model_type, written["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert resolve_architecture(read_settings(written), 37) == arch
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM has true; .*\(qwen3\) .*--model-type allows another"):
        write_settings(arch, "qwen3")


def test_gpt2_without_biases_has_zeros_there() -> None:
    model = ModelConfig(family="gpt2", add_bias_linear=False, num_layers=1, hidden_size=24, vocab_size=40)
    arch = resolve_architecture(model, 40)
    model_type, _, notes = write_settings(arch)
    zeros = [tensor for tensor in file_tensors(arch, model_type) if not tensor.parts]
    assert [(tensor.name.removeprefix("transformer.h.0."), tensor.shape) for tensor in zeros] == [
        ("attn.c_attn.bias", (72,)),
        ("attn.c_proj.bias", (24,)),
        ("mlp.c_fc.bias", (96,)),
        ("mlp.c_proj.bias", (24,)),
    ]
    assert notes == ("model.add_bias_linear=false: the tensors are written as zeros; a conversion back will say true",)


def test_all_problems_at_once() -> None:
    with pytest.raises(UserError) as raised:
        read_settings({**LLAMA, "pretraining_tp": 2, "sliding_window": 1, "x": 1, "hidden_act": "tanh"})
    assert len(raised.value.problems) == 4


def test_seq_length_may_be_shorter_than_the_positions() -> None:
    model = read_settings(GPT2, seq_length=5)
    assert (model.seq_length, model.max_position_embeddings) == (5, 16)
    _, written, notes = write_settings(resolve_architecture(model, 37))
    assert written["n_positions"] == 16 and "model.seq_length=5 has no field" in notes[0]
    with pytest.raises(UserError, match="--seq-length 17: the model has 16 positions; use at most 16"):
        read_settings(GPT2, seq_length=17)


NOT_WRITTEN: dict[str, tuple[dict[str, Any], str]] = {
    "norms of queries and biases": (
        {"qk_layernorm": True, "add_bias_linear": True},
        "model.qk_layernorm=true: LlamaForCausalLM has false",
    ),
    "no positions": ({"position_embedding_type": "none"}, 'model.position_embedding_type="none"'),
    "ungated": ({"activation": "relu"}, "model.activation=relu: LlamaForCausalLM has swiglu or geglu"),
    "uneven groups": ({"num_query_groups": 3}, "model.num_query_groups=3: in llama it divides num_attention_heads"),
    "heads": ({"hidden_size": 30, "kv_channels": 8}, "in llama it divides hidden_size=30"),
}


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_architectures_without_a_model_type_are_refused(name: str) -> None:
    change, words = NOT_WRITTEN[name]
    base = {"family": "llama", "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 40}
    with pytest.raises(UserError) as raised:
        write_settings(resolve_architecture(ModelConfig.model_validate({**base, **change}), 40), "llama")
    (problem,) = raised.value.problems
    assert words in problem and "train a model without it" in problem


def test_settings_without_a_field_are_noted() -> None:
    arch = resolve_architecture(ModelConfig(family="llama", hidden_dropout=0.1, vocab_size=40), 40)
    (note,) = write_settings(arch)[2]
    assert note.startswith("model.hidden_dropout=0.1 has no field in config.json")


@given(hub=gpt2_settings() | llama_settings() | other_settings(), tied=st.booleans())
def test_the_tables_hold_every_tensor_once(hub: dict[str, Any], tied: bool) -> None:
    model = read_settings({**hub, "tie_word_embeddings": tied})
    arch: Architecture = resolve_architecture(model, model.vocab_size or 0)
    table = file_tensors(arch, hub["model_type"])
    assert sorted(name for tensor in table for name, _ in tensor.parts) == sorted(logical_shapes(arch))
    assert len({tensor.name for tensor in table}) == len(table)


def test_every_family_is_written() -> None:
    assert {write_settings(resolve_architecture(ModelConfig(family=name), 40))[0] for name in ("gpt2", "llama")} == set(
        FAMILIES
    )
