"""Fact: a model converted to and from Hugging Face computes the same logits in both, and returns bit for bit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron3d.checkpoint import store
from megatron3d.checkpoint.index import Index, read_index
from megatron3d.checkpoint.store import Piece
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ModelConfig
from megatron3d.convert.compare import stored_inputs
from megatron3d.convert.conversion import ConversionRequest, from_hub, read_architecture, to_hub
from megatron3d.parallel.mesh import Mesh
from megatron3d.train.checkpointing import load_weights
from megatron3d.train.state import TrainState, build_state, connect
from tests.support.checkpoints import save_state
from tests.support.hub_models import (
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN3,
    gpt2_settings,
    llama_settings,
    other_settings,
    write_hub,
)

pytestmark = pytest.mark.slow

few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
DATA = {"tokenizer_type": "ByteTokenizer"}


def state_of(model: ModelConfig, precision: str = "fp32") -> TrainState:
    config = Config.model_validate({"model": model, "train": {"precision": precision, "seed": 3}})
    assert model.vocab_size is not None
    spec = RunSpec(config, 1, model.vocab_size, 0)
    return build_state(spec, connect(spec), torch.device("cpu"))


def logits(state: TrainState, tokens: Tensor) -> Tensor:
    """Return the logits of all positions, computed by the training code."""
    positions = range(tokens.shape[1])
    return torch.stack([state.executor.logits(tokens, position) for position in positions], dim=1)


def hub_logits(folder: Path, tokens: Tensor) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        found: Tensor = model.eval()(tokens).logits
    return found


def hub_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@few
@given(hub=gpt2_settings() | llama_settings() | other_settings(), seed=st.integers(0, 9))
def test_from_hugging_face_and_back(hub: dict[str, Any], seed: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        write_hub(here / "hub", hub, seed, max_shard_size="2KB")
        report = from_hub(ConversionRequest(here / "hub", here / "run", with_transformers=False))
        assert all(agreement.holds for agreement in report.agreements)
        config = read_config(here / "run" / "config.yaml").config
        state = state_of(config.model)
        load_weights(store.resolve(here / "run"), state, {})
        tokens = stored_inputs(config.model.vocab_size or 0, state.model.arch.max_position_embeddings)
        theirs = hub_logits(here / "hub", tokens)
        assert (logits(state, tokens) - theirs).abs().max() <= 1e-5 * max(1, theirs.abs().max().item())
        to_hub(ConversionRequest(here / "run", here / "back", max_shard_bytes=3000, with_transformers=False))
        before, after = hub_tensors(here / "hub"), hub_tensors(here / "back")
        before.pop("lm_head.weight", None) if hub["tie_word_embeddings"] else None
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        torch.testing.assert_close(hub_logits(here / "back", tokens), theirs)
        assert json.loads((here / "back" / "config.json").read_text())["model_type"] == hub["model_type"]


ours = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 3),
        "vocab_size": st.integers(257, 270),
        "seq_length": st.integers(2, 20),
        "tie_embeddings": st.booleans(),
        "norm_epsilon": st.sampled_from([1e-5, 1e-3]),
    }
)


@few
@given(
    common=ours,
    heads=st.integers(1, 5),
    share=st.integers(1, 3),
    is_llama=st.booleans(),
    dtype=st.sampled_from([None, torch.bfloat16]),
)
def test_to_hugging_face_and_back(
    common: dict[str, Any], heads: int, share: int, is_llama: bool, dtype: torch.dtype | None
) -> None:
    shape = {"num_attention_heads": heads, "hidden_size": 6 * heads, "family": "gpt2"}
    if is_llama:
        shape = {"family": "llama", "num_attention_heads": heads * share, "num_query_groups": heads}
        shape |= {"hidden_size": 4 * heads * share, "kv_channels": 6, "ffn_hidden_size": 14}
    model = ModelConfig.model_validate({**common, **shape})
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        state = state_of(model)
        save_state(here / "run", state, {"tokenizer": "none"})
        request = ConversionRequest(
            here / "run", here / "hub", dtype, tokenizer_type="ByteTokenizer", with_transformers=False
        )
        assert all(agreement.holds for agreement in to_hub(request).agreements)
        tokens = stored_inputs(model.vocab_size or 0, model.seq_length)
        got, theirs = logits(state, tokens), hub_logits(here / "hub", tokens)
        assert (got - theirs).abs().max() <= (1e-5 if dtype is None else 0.05) * max(1, theirs.abs().max().item())
        back = ConversionRequest(here / "hub", here / "back", tokenizer_type="ByteTokenizer", with_transformers=False)
        from_hub(back)
        assert read_architecture(store.resolve(here / "back")) == read_architecture(store.resolve(here / "run"))


# Rotary frequencies that bf16 and fp16 do not represent, at positions where that matters.
LONG = {"head_dim": 32, "max_position_embeddings": 64}
HUBS = {"gpt2": GPT2, "llama": {**LLAMA, **LONG}, "mistral": {**MISTRAL, **LONG, "sliding_window": None}}
HUBS["qwen3"] = {**QWEN3, **LONG}


@pytest.mark.parametrize("model_type", HUBS)
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp64"])
def test_data_types(model_type: str, name: str, tmp_path: Path) -> None:
    """Weights are rounded to the requested dtype on import and keep it on export; transformers agrees."""
    hub = HUBS[model_type]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}[name]
    write_hub(tmp_path / "hub", hub)
    report = from_hub(ConversionRequest(tmp_path / "hub", tmp_path / "run", dtype))
    assert [agreement.holds for agreement in report.agreements] == [True, True]
    assert read_config(tmp_path / "run" / "config.yaml").config.train.precision == name
    to_hub(ConversionRequest(tmp_path / "run", tmp_path / "back"))
    before, after = hub_tensors(tmp_path / "hub"), hub_tensors(tmp_path / "back")
    assert all(torch.equal(value, before[tensor].to(dtype)) for tensor, value in after.items())


def test_weights_are_rounded_on_export(tmp_path: Path) -> None:
    """Rotary frequencies are computed in fp32 by both models, and no weights."""
    from_hub(ConversionRequest(write_hub(tmp_path / "hub", HUBS["llama"]), tmp_path / "run"))
    report = to_hub(ConversionRequest(tmp_path / "run", tmp_path / "back", torch.bfloat16))
    assert [agreement.holds for agreement in report.agreements] == [True, True]


def test_gpt2_without_biases_gets_zeros(tmp_path: Path) -> None:
    """A model without biases is exactly a GPT-2 whose biases are zero."""
    shape = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "vocab_size": 257, "seq_length": 16}
    state = state_of(ModelConfig.model_validate({**shape, "family": "gpt2", "add_bias_linear": False}))
    save_state(tmp_path / "run", state, {"tokenizer": "none"})
    report = to_hub(ConversionRequest(tmp_path / "run", tmp_path / "hub", tokenizer_type="ByteTokenizer"))
    assert [agreement.holds for agreement in report.agreements] == [True, True]
    assert "the tensors are written as zeros; a conversion back will say true" in report.notes[1]
    tokens = stored_inputs(257, 16)
    torch.testing.assert_close(hub_logits(tmp_path / "hub", tokens), logits(state, tokens))
    zeros = [
        value for name, value in hub_tensors(tmp_path / "hub").items() if name.endswith(("c_attn.bias", "c_fc.bias"))
    ]
    assert len(zeros) == 4 and not any(value.any() for value in zeros)
    back = from_hub(ConversionRequest(tmp_path / "hub", tmp_path / "back", tokenizer_type="ByteTokenizer"))
    assert all(agreement.holds for agreement in back.agreements)


def test_names_without_the_models_prefix_are_read(tmp_path: Path) -> None:
    """The first GPT-2 files lack the prefix `transformer.`, and contain constants next to the weights."""
    hub = write_hub(tmp_path / "hub", GPT2)
    tensors = {name.removeprefix("transformer."): value for name, value in hub_tensors(hub).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, hub / "model.safetensors", {"format": "pt"})
    from_hub(ConversionRequest(hub, tmp_path / "run"))
    save_file(tensors | {"lm_head.weight": tensors["wte.weight"] + 1}, hub / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"ties the embedding and the head, but lm_head.weight differs"):
        from_hub(ConversionRequest(hub, tmp_path / "other"))


def test_a_padded_vocabulary_is_cut(tmp_path: Path) -> None:
    """However our layout pads the vocabulary, files have the vocabulary of config.json."""
    hub = write_hub(tmp_path / "hub", LLAMA)
    from_hub(ConversionRequest(hub, tmp_path / "run"))
    arch = read_architecture(store.resolve(tmp_path / "run"))
    config = read_config(tmp_path / "run" / "config.yaml").config
    assert state_of(config.model).model.arch.padded_vocab_size == 128 > arch.vocab_size == 37
    to_hub(ConversionRequest(tmp_path / "run", tmp_path / "back"))
    assert hub_tensors(tmp_path / "back")["lm_head.weight"].shape == (37, 24)


def test_the_compared_logits_are_stored(tmp_path: Path) -> None:
    from_hub(ConversionRequest(write_hub(tmp_path / "hub", GPT2), tmp_path / "run"))
    found = json.loads((tmp_path / "run" / "conversion.json").read_text())
    assert torch.equal(torch.tensor(found["tokens"]), stored_inputs(37, 16))
    assert [entry["largest_difference"] < 1e-5 for entry in found["logits"]] == [True, True]


def test_one_wrong_tensor_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name table that swapped two tensors of equal size would fail."""
    from megatron3d.convert import conversion as module
    from megatron3d.convert.tensor_names import MODULES

    exchanged = {"{n}.attention.k": "{n}.attention.v", "{n}.attention.v": "{n}.attention.k"}
    table = {
        theirs: tuple(next((o.replace(a, b) for a, b in exchanged.items() if o.endswith(a)), o) for o in ours)
        for theirs, ours in MODULES["llama"].items()
    }
    monkeypatch.setattr("megatron3d.convert.tensor_names.MODULES", {"llama": table})
    with pytest.raises(module.LogitsDiffer, match="computes other logits; nothing was written"):
        from_hub(ConversionRequest(write_hub(tmp_path / "hub", LLAMA), tmp_path / "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """Else the message speaks of two models, of which neither is wrong."""
    from megatron3d.convert.conversion import LogitsDiffer

    hub, name = write_hub(tmp_path / "hub", LLAMA), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(hub / "model.safetensors")
    tensors[name][0, 0] = float("nan")
    save_file(tensors, hub / "model.safetensors", {"format": "pt"})
    with pytest.raises(LogitsDiffer, match=f"numbers that are not finite in torch.float64 are in {name}$"):
        from_hub(ConversionRequest(hub, tmp_path / "run"))


def test_only_a_few_tensors_are_in_memory(tmp_path: Path) -> None:
    """Writing a file reads runs of tensors no larger than the largest tensor."""
    from megatron3d.convert import conversion as module
    from megatron3d.convert.tensor_names import file_tensors

    state = state_of(ModelConfig(num_layers=6, hidden_size=16, num_attention_heads=2, vocab_size=257, seq_length=4))
    save_state(tmp_path / "run", state, {})
    table = file_tensors(state.model.arch, "gpt2")
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        load = store.load_with_index

        def counted(path: Path, index: Index, pieces: Iterable[Piece]) -> None:
            asked.append(size(listed := list(pieces)))
            load(path, index, listed)

        patch.setattr(store, "load_with_index", counted)
        folder = store.resolve(tmp_path / "run")
        list(module._values(folder, read_index(folder), table, torch.float32))
    assert max(asked) <= 257 * 16 < sum(asked) and len(asked) < len(table)


def size(pieces: list[store.Piece]) -> int:
    return sum(piece.tensor.numel() for piece in pieces)


def test_the_mesh_of_the_comparison_has_no_groups() -> None:
    comm = ProcessComm(Mesh((("pipeline", 3), ("t", 1)), 1), ())
    assert comm.all_gather(torch.ones(1), ("t",), dim=0).wait().shape == (1,)
