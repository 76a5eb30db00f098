"""Fact: a window of [w - 1, 0] lets a query see w keys, in the layers of the pattern."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ModelConfig
from megatron3d.model.linear_spec import flops_per_token
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.spec import Architecture, attention_kind, has_window, mean_keys
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import build_mode
from megatron3d.train.state import build_state
from tests.support.turn_ranks import connect

SEQ = 16


def arch(**keys: object) -> Architecture:
    model = {"num_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "seq_length": SEQ, **keys}
    return resolve_architecture(ModelConfig.model_validate(model), 10)


@pytest.mark.parametrize(
    "freq,windowed",
    [(None, "wwwwww"), (3, "ww-ww-"), ([1, 0], "w-w-w-"), ([0, 1, 1, 1], "-www-w"), ([1, 1, 1, 1, 1, 0], "wwwww-")],
)
def test_layers_with_a_window(freq: object, windowed: str) -> None:
    made = arch(window_size=[3, 0], window_attn_skip_freq=freq)
    windows = [attention_kind(made, layer).window for layer in range(6)]
    assert windows == [4 if letter == "w" else None for letter in windowed] and has_window(made)
    assert mean_keys(made) == pytest.approx(sum(window or SEQ for window in windows) / 6)


def test_costs_of_windows() -> None:
    whole, long, short = arch(), arch(window_size=[SEQ - 1, 0]), arch(window_size=[3, 0])
    assert flops_per_token(whole) == flops_per_token(long) and not has_window(long)
    assert flops_per_token(whole) - flops_per_token(short) == 12 * 6 * 32 * (SEQ - 4)
    assert local(whole).seen_share == local(long).seen_share == 1
    band = (4 * SEQ - 4**2 / 2) / (SEQ**2 / 2)
    assert local(short).seen_share == band, "the band is the triangle less a smaller one"
    mixed = arch(window_size=[3, 0], window_attn_skip_freq=2)
    assert [replace(local(mixed), layer=layer).seen_share for layer in range(4)] == [band, 1, band, 1]


def local(made: Architecture) -> LocalSizes:
    return LocalSizes(made, build_mode("1d", None, (1,)), Mesh((("t", 1),)), 1, 4)


@pytest.mark.parametrize("window", [4, 2])
def test_a_query_sees_as_many_keys_as_the_window(window: int) -> None:
    """One layer: changing token t changes the logits of positions t to t + w - 1, and no others."""
    model = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": SEQ, "family": "llama"}
    settings = {"model": {**model, "window_size": (window - 1, 0)}, "train": {"precision": "fp64"}}
    spec = RunSpec(Config.model_validate(settings), 1, 11, 0)
    state = build_state(spec, connect(spec), torch.device("cpu"))
    tokens = torch.arange(SEQ).remainder(7).unsqueeze(0)
    other = tokens.clone()
    other[0, 5] = 9
    before, after = (torch.stack([state.executor.logits(row, at)[0] for at in range(SEQ)]) for row in (tokens, other))
    changed = (before != after).any(-1).nonzero().flatten().tolist()
    assert changed == list(range(5, 5 + window))
