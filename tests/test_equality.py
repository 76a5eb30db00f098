"""Every layout computes the same numbers as one process: losses, gradient norms, gradients, parameters, in float64.

Modes, forms and axes come from the registry, so that a new mode is covered as soon as it is entered there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest

from megatron3d.config.check import check
from megatron3d.config.derive import make_mesh, num_microbatches, tensor_shape
from megatron3d.config.schema import Config
from megatron3d.modes import MODES
from megatron3d.train.state import connect
from megatron3d.verify import Trace, differences, trace
from tests.pool import Pool

VOCAB_SIZE = 61
TOLERANCE = 1e-10
NUM_STEPS = 2
NUM_RANKS = 8
NUM_TURNS = 2

TRAIN = {"precision": "fp64", "loss_chunk_tokens": 12, "bucket_mb": 0.01, "global_batch_size": 8}
OPTIMIZER = {"lr": 1e-2, "clip_grad": 0.5, "lr_warmup_iters": 1}
SMALL = {"num_layers": 2, "hidden_size": 48, "seq_length": 8, "kv_channels": 8, "make_vocab_size_divisible_by": 1}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2, tied, dropout": {
        **SMALL,
        "family": "gpt2",
        "num_attention_heads": 8,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "llama, untied, grouped queries": {
        **SMALL,
        "family": "llama",
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "ffn_hidden_size": 40,
    },
    "fewer key/value heads than ranks, QK-norm, tied": {
        **SMALL,
        "family": "llama",
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "ffn_hidden_size": 40,
        "qk_layernorm": True,
        "tie_embeddings": True,
    },
    "uneven groups, every choice turned round": {
        **SMALL,
        "family": "gpt2",
        "num_attention_heads": 24,
        "num_query_groups": 3,
        "ffn_hidden_size": 24,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "geglu",
        "tie_embeddings": False,
        "qk_layernorm": True,
        "hidden_dropout": 0.2,
    },
}


def shapes(num_axes: int, num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number of ranks as a product of axes with at most one axis of size 1."""
    for shape in product(*[[n for n in range(1, num_ranks + 1) if num_ranks % n == 0]] * num_axes):
        if math.prod(shape) == num_ranks and shape.count(1) <= 1:
            yield shape


def layouts() -> Iterator[dict[str, Any]]:
    """Every mode and form on 8 ranks, alone and on 4 ranks with data parallelism of 2, cubes and rectangles."""
    for mode, entry in MODES.items():
        for form in entry.forms:
            for size in (NUM_RANKS, NUM_RANKS // 2):
                for shape in shapes(len(entry.axis_names), size):
                    yield {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_parallel_shape": shape}


def configure(model: dict[str, Any], parallel: dict[str, Any], **train: Any) -> Config:
    return Config.model_validate({"model": model, "parallel": parallel, "train": TRAIN | train, "optimizer": OPTIMIZER})


def run_traces(rank: int, world_size: int, configs: list[Config]) -> list[Trace | None]:
    """The steps of several configurations, one after another."""
    return [trace(config, *connect(config, VOCAB_SIZE, world_size, rank), NUM_STEPS) for config in configs]


@cache
def reference(name: str) -> Trace:
    """What one process computes, the whole batch in one microbatch."""
    alone = configure(MODELS[name], {}, micro_batch_size=TRAIN["global_batch_size"])
    (values,) = run_traces(0, 1, [alone])
    assert values is not None, "one process is rank 0"
    return values


def smallest_micro_batch(name: str, parallel: dict[str, Any]) -> Config:
    """The configuration with the fewest sequences per microbatch that the rules allow, and so the most microbatches."""
    configs = (configure(MODELS[name], parallel, micro_batch_size=size) for size in (1, 2, 4, 8))
    return next(config for config in configs if not check(config, NUM_RANKS, VOCAB_SIZE))


def describe(config: Config) -> str:
    parallel = config.parallel
    return f"{parallel.tensor_parallel_mode} {parallel.tensor_parallel_form} {parallel.tensor_parallel_shape}"


def matrix(name: str) -> list[Config]:
    """Layouts that are tried with a model: every second one, in turn with the other models."""
    return [smallest_micro_batch(name, parallel) for parallel in list(layouts())[list(MODELS).index(name) % 2 :: 2]]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("turn", range(NUM_TURNS))
def test_every_layout_equals_one_process(pool: Pool, name: str, turn: int) -> None:
    configs = matrix(name)[turn::NUM_TURNS]
    traces = pool.run(run_traces, NUM_RANKS, configs)[0]
    wrong = [
        f"{describe(config)}: {difference}"
        for config, got in zip(configs, traces, strict=True)
        for difference in list(differences(reference(name), got, TOLERANCE))[:3]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_matrix_is_wide() -> None:
    """It holds, for each mode and form, all axes above 1 at once, rectangles, data parallelism, micro-batch 1."""
    configs = [config for name in MODELS for config in matrix(name)]
    for mode, entry in MODES.items():
        for form in entry.forms:
            same = [c for c in configs if describe(c).startswith(f"{mode} {form} ")]
            axes = [tensor_shape(c.parallel) for c in same]
            assert any(min(shape) > 1 for shape in axes), f"{mode} {form}: no layout has all axes above 1"
            assert {math.prod(shape) for shape in axes} == {NUM_RANKS, NUM_RANKS // 2}
            assert len(entry.axis_names) == 1 or any(len(set(shape)) > 1 for shape in axes)
    assert {c.train.micro_batch_size for c in configs} >= {1, 2, 4}
    assert any(num_microbatches(c, make_mesh(c.parallel, NUM_RANKS)) > 1 for c in configs)


def test_the_comparison_finds_a_wrong_gradient() -> None:
    """A comparison that cannot fail proves nothing."""
    values = dict(reference(next(iter(MODELS))))
    name = next(name for name in values if "mlp.fc2.weight" in name)
    values[name] = values[name] * (1 + 1e-9)
    assert [line.partition(":")[0] for line in differences(reference(next(iter(MODELS))), values, TOLERANCE)] == [name]
