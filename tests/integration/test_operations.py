"""Fact: every operation of the lists does what the real step does, in its order: GEMMs, collectives, and storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import Operation
from tests.support import operation_record
from tests.support.covering import Row
from tests.support.equality import MODELS, NUM_RANKS, VOCAB_SIZE, configure
from tests.support.latent_rows import CASES, latent_config
from tests.support.layout_rows import NORM_ROWS, ROWS, build, name_of, pick
from tests.support.operation_record import problems

# What a list depends on, each value of which a row has.
FACTORS = ("form", "model", "folding", "dispatcher", "exchange", "overlap", "recompute", "documents")
PLACES = pick([frozenset((name, row[name]) for name in FACTORS) for row in ROWS])


@pytest.mark.parametrize("place", PLACES, ids=name_of)
def test_operations_are_those_of_the_step(place: int, tmp_path: Path) -> None:
    """On the last rank, whose coordinates are not 0."""
    _, config, num_ranks = build(ROWS[place], tmp_path)
    assert problems(RunSpec(config, num_ranks, VOCAB_SIZE, num_ranks - 1)) == []


@pytest.mark.parametrize("row", NORM_ROWS, ids=lambda row: f"{'-'.join(row['form'])}-{row['model']}")
def test_operations_with_norms_that_are_recomputed(row: Row, tmp_path: Path) -> None:
    _, config, num_ranks = build(row, tmp_path)
    assert problems(RunSpec(config, num_ranks, VOCAB_SIZE, num_ranks - 1)) == []


@pytest.mark.parametrize("row", [row for row in NORM_ROWS if row["model"] == next(iter(MODELS))], ids=str)
def test_scaled_queries_that_nothing_else_copies_are_kept_apart(row: Row, tmp_path: Path) -> None:
    """As with muP and learned positions: without a factor attention keeps the output of the projection as a whole."""
    _, config, num_ranks = build(row, tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"softmax_scale": 0.3})})
    assert problems(RunSpec(config, num_ranks, VOCAB_SIZE, num_ranks - 1)) == []


@pytest.mark.parametrize("place", range(len(CASES)))
def test_operations_of_latent_attention(place: int) -> None:
    assert problems(RunSpec(latent_config(place), NUM_RANKS, VOCAB_SIZE, NUM_RANKS - 1)) == []


@pytest.mark.parametrize("is_split", [True, False])
def test_operations_of_qk_clip(is_split: bool, tmp_path: Path) -> None:
    """The search for the largest logits, with the keys of other context ranks and without."""
    found = (build(row, tmp_path, "muon in groups")[1:] for row in ROWS if (row["context ranks"] > 1) == is_split)
    config, num_ranks = next(each for each in found if each[0].optimizer.qk_clip)
    assert problems(RunSpec(config, num_ranks, VOCAB_SIZE, num_ranks - 1)) == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_learned_positions_that_restart_are_kept_where_context_ranks_cut_them(num_ranks: int) -> None:
    """On one context rank they are a view of those of the microbatch."""
    model, parallel = next(iter(MODELS.values())), {"context_parallel_size": num_ranks}
    config = configure(model, parallel, "positions restart", micro_batch_size=2, global_batch_size=2)
    assert problems(RunSpec(config, num_ranks, VOCAB_SIZE, num_ranks - 1)) == []


FC2, CORE = "mlp.fc2", "attention.core"
WRONG: dict[str, tuple[str, Callable[[Operation], Sequence[Operation]]]] = {
    "left out": (FC2, lambda each: []),
    "doubled": (FC2, lambda each: [each, each]),
    "without what it keeps": (FC2, lambda each: [replace(each, saves=())]),
    "without what it writes": ("attention.proj", lambda each: [replace(each, writes=())]),
    "that sends nothing": ("input_norm", lambda each: [replace(each, sent=())]),
    "whose backward sends nothing": ("input_norm", lambda each: [replace(each, sent_back=())]),
    "with half of its FLOPs": (CORE, lambda each: [replace(each, flops=each.flops // 2)]),
}


def small_spec() -> RunSpec:
    """Return a run of one layer in a grid."""
    parallel = {"tensor_model_parallel_size": 4, "tensor_parallel_mode": "2d"}
    config = configure(
        {**next(iter(MODELS.values())), "num_layers": 1}, parallel, micro_batch_size=8, global_batch_size=8
    )
    return RunSpec(config, 4, VOCAB_SIZE, 3)


def test_a_birth_in_the_wrong_order_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second norm before attention would move what lives during attention."""
    right = operation_record.layer_operations

    def listed(local: LocalSizes) -> list[Operation]:
        return sorted(right(local), key=lambda each: each.name != "post_attention_norm")

    monkeypatch.setattr(operation_record, "layer_operations", listed)
    assert problems(small_spec()) == [
        "order of layers.0.post_attention_norm: listed before layers.0.input_norm, run behind it"
    ]


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_operation_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list with a seeded error in one operation differs from the step there, and nowhere else."""
    spec = small_spec()
    wrong, change = WRONG[what]
    right = operation_record.layer_operations

    def listed(local: LocalSizes) -> list[Operation]:
        return [one for each in right(local) for one in (change(each) if each.name == wrong else [each])]

    assert problems(spec) == []
    monkeypatch.setattr(operation_record, "layer_operations", listed)
    found = problems(spec)
    assert found and all(f"layers.0.{wrong}" in problem for problem in found), found
