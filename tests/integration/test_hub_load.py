"""Fact: a run that starts from a Hugging Face folder is, bit for bit, one that starts from the converted folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron3d.checkpoint import store
from megatron3d.checkpoint.index import read_meta
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.convert.config_json import read_settings
from megatron3d.convert.conversion import ConversionRequest, from_hub
from megatron3d.convert.hub_weights import read_json
from megatron3d.train.build import HUGGING_FACE
from megatron3d.train.checkpointing import LoadOptions, load_state
from megatron3d.train.state import build_state
from tests.integration.test_resharding import BATCH, LAYOUTS, NUM_RANKS, advance
from tests.support.hub_models import GPT2, LLAMA, write_hub
from tests.support.tiny_run import assert_refused, refuse, run, steps, stored, write_config
from tests.support.turn_ranks import connect, run_turns

# Fused and transposed matrices, tied embeddings; grouped queries in bf16; two fused matrices; rows that alternate by
# head.  All in several files.
HUBS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **GPT2,
        "vocab_size": 61,
        "n_embd": 48,
        "n_layer": 4,
        "n_head": 8,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": {**LLAMA, "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 4}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48},
}
HUBS["phi3"] = {**HUBS["llama"], "model_type": "phi3", "pad_token_id": None, "sliding_window": 5}
HUBS["gpt_neox"] = {name: value for name, value in HUBS["llama"].items() if name != "num_key_value_heads"}
HUBS["gpt_neox"] |= {"model_type": "gpt_neox", "hidden_size": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0}
WEIGHTS = {"progress": False, "optimizer": False}
PLACES = [
    (
        name,
        ("mixtral", "gpt_oss", "glm4_moe")[place % 3]
        if "expert_model_parallel_size" in keys
        else list(HUBS)[place % 4],
    )
    for place, (name, keys) in enumerate(LAYOUTS.items())
]
HUBS["mixtral"] = {**HUBS["llama"], "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
HUBS["gpt_oss"] = {**HUBS["mixtral"], "model_type": "gpt_oss", "head_dim": 6, "sliding_window": 5}
HUBS["glm4_moe"] = {**HUBS["llama"], "model_type": "glm4_moe", "pad_token_id": None, "head_dim": 8, "num_mtp_layers": 0}
HUBS["glm4_moe"] |= {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
HUBS["glm4_moe"] |= {"moe_intermediate_size": 16}
HUBS["gpt_oss"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return the folder of each model and that of its conversion."""
    here = tmp_path_factory.mktemp("hubs")
    found = {}
    for name, settings in HUBS.items():
        hub = write_hub(here / name, settings, max_shard_size="40KB")
        for path in hub.glob("*.safetensors") if name == "llama" else ():
            save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path, {"format": "pt"})
        run_folder = here / f"{name}_run"
        from_hub(ConversionRequest(hub, run_folder, with_logits=False, with_transformers=False))
        found[name] = hub, run_folder
    return found


def configure(hub: Path, layout: str) -> tuple[Config, int]:
    """Return the configuration of a layout with the folder's model, and its number of ranks."""
    parallel = LAYOUTS[layout]
    ranks = 1 if layout == "one process" else NUM_RANKS
    model = read_settings(read_json(hub / "config.json"), 8).model_copy(update={"make_vocab_size_divisible_by": 1})
    for micro in (8, 4, 2, 1):
        train = {"precision": "fp64", "bucket_mb": 0.01, "micro_batch_size": micro, "global_batch_size": BATCH}
        config = Config.model_validate({"model": model, "parallel": parallel, "train": train})
        least = 2 if "pipeline_schedule" in LAYOUTS[layout] else 1
        if not check(config, ranks, 61) and RunSpec(config, ranks).num_microbatches >= least:
            return config, ranks
    raise AssertionError(f"no batch fits {layout}: {check(config, ranks, 61)}")


def numbers(rank: int, world_size: int, config: Config, hub: Path, converted: Path) -> list[list[float]]:
    """Return loss and gradient norm of two steps from each source."""
    spec = RunSpec(config, world_size, 61, rank)
    found = []
    for folder, options in (
        (hub, LoadOptions(**WEIGHTS, source=HUGGING_FACE)),
        (store.resolve(converted), LoadOptions(**WEIGHTS)),
    ):
        state = build_state(spec, connect(spec), torch.device("cpu"))
        load_state(folder, state, {"tokenizer": tokenizer_of(converted)}, options)
        found.append(advance(config, state, 2))
    return found


def tokenizer_of(converted: Path) -> Any:
    return read_meta(store.resolve(converted)).identity["tokenizer"]


@pytest.mark.parametrize(("layout", "model"), PLACES)
def test_every_layout_starts_as_from_the_converted_folder(
    folders: dict[str, tuple[Path, Path]], layout: str, model: str
) -> None:
    hub, converted = folders[model]
    config, ranks = configure(hub, layout)
    for direct, indirect in run_turns(numbers, ranks, config, hub, converted):
        assert direct == indirect


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folder of a model of bytes without a tokenizer, and a configuration that starts with its weights."""
    here = tmp_path_factory.mktemp("tiny")
    hub = write_hub(here / "hub", {**LLAMA, "vocab_size": 257, "tie_word_embeddings": True})
    (hub / "tokenizer.json").unlink()
    config = write_config(here)
    return hub, config


def start(hub: Path, **changes: object) -> list[str]:
    """Return the overrides of a run that starts with a folder's weights."""
    model = {**read_settings(read_json(hub / "config.json")).model_dump(mode="json"), "seq_length": 16, **changes}
    words = [f"model.{key}={json.dumps(value)}" for key, value in model.items()]
    return [*words, f"checkpoint.load={hub}", "checkpoint.finetune=true"]


def test_a_run_starts_with_the_weights_of_a_folder(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    hub, config = tiny
    outcome = run(config, *start(hub), f"checkpoint.save={tmp_path}/run", "train.train_iters=2", "optimizer.lr=1e-300")
    assert outcome.code == 0, outcome
    assert f"> starting with the weights of {hub}" in outcome.out
    assert [iteration for iteration, *_ in steps(tmp_path / "run")] == [1, 2]
    assert read_meta(store.resolve(tmp_path / "run")).model_type == "llama"
    after, before = stored(tmp_path / "run", 2), load_file(hub / "model.safetensors")
    assert torch.equal(after["model.embedding.weight"], before["model.embed_tokens.weight"])
    assert torch.equal(after["model.layers.1.mlp.gate.weight"], before["model.layers.1.mlp.gate_proj.weight"])


def test_another_model_is_one_message_with_all_keys(tiny: tuple[Path, Path]) -> None:
    hub, config = tiny
    other = start(hub, num_layers=3, ffn_hidden_size=32, max_position_embeddings=None)
    saved = (
        "saved with model.num_layers=2, model.ffn_hidden_size=20, but this run has 3, 32; continue with the saved ",
    )
    refuse(config, [*other, "checkpoint.save=null"], saved)
    alone = [word for word in start(hub) if "finetune" not in word]
    refuse(config, [*alone, "checkpoint.save=null"], ("a Hugging Face folder holds weights only", "finetune=true"))


def test_another_tokenizer_is_refused(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """The folder's own tokenizer counts if there is one; a larger one than the model's vocabulary never fits."""
    hub, config = shutil.copytree(tiny[0], tmp_path / "hub"), tiny[1]
    write_hub(tmp_path / "words", LLAMA)
    shutil.copyfile(tmp_path / "words" / "tokenizer.json", hub / "tokenizer.json")
    refuse(config, [*start(hub), "checkpoint.save=null"], ("saved with tokenizer=", "accept_changed=[tokenizer]"))
    accepted = [*start(hub), "checkpoint.accept_changed=[tokenizer]", "checkpoint.save=null", "train.train_iters=2"]
    assert run(config, *accepted).code == 0
    small = [*start(tmp_path / "words"), "checkpoint.save=null"]
    refuse(config, small, ("model.vocab_size=37", "257"))


DAMAGE = {
    "cut": (lambda hub: cut(hub / "model.safetensors"), "model.safetensors is no whole safetensors file"),
    "a pickle": (lambda hub: (hub / "model.safetensors").rename(hub / "pytorch_model.bin"), "is a pickle"),
    "another model": (lambda hub: edit(hub, model_type="bloom"), 'model_type="bloom"'),
    "code": (
        lambda hub: edit(hub, auto_map={}, architectures=["X"]),
        "defines the model by code, which is never run here",
    ),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def edit(hub: Path, **changes: object) -> None:
    settings = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps({**settings, **changes}))


@pytest.mark.parametrize("name", DAMAGE)
def test_bad_folders_are_refused_in_one_message(tiny: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    hub = shutil.copytree(tiny[0], tmp_path / "hub")
    words = start(hub)
    damage, expected = DAMAGE[name]
    damage(hub)
    assert_refused(run(tiny[1], *words, "checkpoint.save=null"), tmp_path, (expected,))
