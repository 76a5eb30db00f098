"""Fact: with muP initial values, learning rates, scores and logits follow the width, so that activations do not grow.

The layouts of the covering array have a model with muP (`tests/support/equality.py`).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.convert.config_json import write_settings
from megatron3d.errors import ExitCode, UserError
from megatron3d.optim.rule_spec import is_hidden_matrix
from megatron3d.train.state import TrainState, build_state
from megatron3d.verify.coordinates import LOGITS, changes, growth, with_width
from tests.support.tiny_run import ROOT
from tests.support.turn_ranks import connect
from tools import coord_check

VOCAB_SIZE, BASE, HEAD = 61, 32, 16
PRESET = ROOT / "configs" / "shakespeare_char.yaml"


def configure(width: int, optimizer: dict[str, Any] | None = None, **model: Any) -> Config:
    sizes = {"num_layers": 2, "hidden_size": width, "num_attention_heads": width // HEAD, "seq_length": 16}
    train = {"micro_batch_size": 4, "global_batch_size": 4, "precision": "fp64"}
    keys = {"lr": 4e-3, "adam_eps": 1e-12} | (optimizer or {})
    return Config.model_validate({"model": sizes | model, "train": train, "optimizer": keys})


def build(config: Config) -> TrainState:
    spec = RunSpec(config, 1, VOCAB_SIZE)
    return build_state(spec, connect(spec), torch.device("cpu"))


def deviations(state: TrainState) -> dict[str, float]:
    return {name: values.std().item() for name, _, values in state.buffers.shards("main") if len(values) > 1}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_hidden_matrices_begin_smaller_by_the_root_of_the_width(family: str) -> None:
    """The rows of the others, and all matrices of the base width, are what they are without muP."""
    plain, scaled = (build(configure(256, family=family, **mup)) for mup in ({}, {"mup_base_hidden_size": BASE}))
    base = build(configure(BASE, family=family, mup_base_hidden_size=BASE))
    for name, std in deviations(scaled).items():
        factor = math.sqrt(256 / BASE) if is_hidden_matrix(name, scaled.buffers.specs[name]) else 1.0
        assert std * factor == pytest.approx(deviations(plain)[name], rel=1e-6), name
    assert deviations(base) == deviations(build(configure(BASE, family=family)))


@pytest.mark.parametrize("rule", ["adam", "lion"])
def test_the_first_update_of_hidden_matrices_is_smaller_by_the_width(rule: str) -> None:
    """AdamW's first update is the learning rate, Lion's as well, whatever the gradient."""
    config = configure(128, {"optimizer": rule, "weight_decay": 0.0}, mup_base_hidden_size=BASE)
    state = build(config)
    before = {name: values.clone() for name, _, values in state.buffers.shards("main")}
    for seed, (_, _, grad) in enumerate(state.buffers.shards("grad")):
        grad.copy_(torch.randn(grad.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    state.optimizer.step(torch.tensor(1.0), 1e-2)
    for name, _, values in state.buffers.shards("main"):
        hidden = is_hidden_matrix(name, state.buffers.specs[name])
        expected = 1e-2 * (BASE / 128 if hidden else 1.0)
        assert (values - before[name]).abs().median().item() == pytest.approx(expected, rel=1e-4), name


def test_scores_are_divided_by_the_size_of_a_head_and_logits_by_the_width() -> None:
    arch = RunSpec(configure(128, mup_base_hidden_size=BASE, logit_scale=3.0), 1, VOCAB_SIZE).arch
    assert (arch.softmax_scale, arch.logit_scale, arch.mup_width) == (1 / HEAD, 3.0 * BASE / 128, 4.0)
    given = RunSpec(configure(128, mup_base_hidden_size=BASE, softmax_scale=0.5), 1, VOCAB_SIZE).arch
    assert given.softmax_scale == 0.5
    plain = RunSpec(configure(128), 1, VOCAB_SIZE).arch
    assert (plain.softmax_scale, plain.logit_scale, plain.mup_width) == (None, 1.0, 1.0)


def test_a_group_of_parameters_keeps_muPs_factor() -> None:
    groups = {"param_groups": [{"params": "layers.0.mlp.*", "lr_mult": 0.5}]}
    state = build(configure(128, groups, mup_base_hidden_size=BASE))
    found = {group.lr_mult for group in state.optimizer._groups}
    assert found == {0.5 * BASE / 128, 0.5, BASE / 128, 1.0}  # of the group: matrices and biases


@pytest.mark.parametrize("tied", [True, False])
def test_activations_do_not_grow_with_the_width(tied: bool) -> None:
    """The coordinate check: without muP every kind of activation but the embedding's grows."""
    widths = (32, 64, 128, 256)
    powers = {}
    for base in (None, BASE):
        config = configure(BASE, tie_embeddings=tied, mup_base_hidden_size=base)
        powers[base] = growth({width: changes(with_width(config, width), VOCAB_SIZE, 3) for width in widths})
    kinds = powers[None].keys() - {"embedding"}
    assert kinds == {"attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2", LOGITS}
    assert all(powers[None][kind] > 0.4 for kind in kinds), powers[None]
    assert all(power < 0.1 for power in powers[BASE].values()), powers[BASE]


def test_the_tool_prints_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "check.png"
    arguments = ["--config", str(PRESET), "--widths", "64", "32", "--steps", "2", "--output", str(output)]
    small = ["model.num_layers=1", "model.seq_length=8", "model.mup_base_hidden_size=32"]
    assert coord_check.main([*arguments, *small]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "width 32",
        "width 64",
        "grows with the width to the power of",
    ]
    assert output.read_bytes().startswith(b"\x89PNG")
    wrong = {
        "64": "one width shows no growth",
        "64 100": "no whole number of heads of 32",
        "64 65536": "1e\\+09 for one",
    }
    for widths, said in ((words.split(), said) for words, said in wrong.items()):
        with pytest.raises(UserError, match=said):
            coord_check.main(["--config", str(PRESET), "--widths", *widths])


@pytest.mark.parametrize(
    ("model", "optimizer", "said"),
    [
        ({}, {"optimizer": "muon"}, "learning rates are those of Adam, not of optimizer.optimizer=muon; use adam, or"),
        ({"num_moe_experts": 4}, {}, "not with model.num_moe_experts=4, whose matrices have no rule of muP"),
        ({"mtp_num_layers": 1}, {}, "not with model.mtp_num_layers=1, whose matrices have no rule of muP"),
        ({"multi_latent_attention": True, "position_embedding_type": "rope"}, {}, "not with model.multi_latent_att"),
    ],
)
def test_what_it_does_not_scale_is_refused(model: dict[str, Any], optimizer: dict[str, Any], said: str) -> None:
    problems = check(configure(64, optimizer, mup_base_hidden_size=BASE, **model), 1, VOCAB_SIZE)
    assert any(re.search(re.escape(said), problem) for problem in problems), problems


def test_a_conversion_says_what_it_leaves_out() -> None:
    """Its factors of scores and logits are fields of Granite; without that model type they are an obstacle."""
    arch = RunSpec(configure(64, family="llama", mup_base_hidden_size=BASE), 1, VOCAB_SIZE).arch
    model_type, settings, notes = write_settings(arch)
    assert (model_type, settings["logits_scaling"], settings["attention_multiplier"]) == ("granite", 2.0, 1 / HEAD)
    assert any("model.mup_base_hidden_size=32 has no field in config.json" in note for note in notes)
