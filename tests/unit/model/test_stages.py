"""Fact: layers are divided among stages so that the busiest rank has the least possible work, head included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ModelConfig
from megatron3d.model.linear_spec import flops_of_layer, head_flops_per_token, layer_flops_per_token
from megatron3d.model.spec import Architecture
from megatron3d.model.stage_plan import Stage, divide, make_stages
from megatron3d.pipeline.actions import Action, ActionKind, RankOfStage, rank_in_loop, rank_in_v
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.validate import write_schedule

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}


def arch_of(num_layers: int, vocab_size: int) -> Architecture:
    """Return an architecture in which 104 vocabulary entries of the head cost as much as a layer.

    A layer takes 6 x 12 x 8 x 8 + 12 x 8 x 4 = 4992 FLOPs per token, the head 48 per vocabulary entry.
    """
    return resolve_architecture(ModelConfig(num_layers=num_layers, **SIZES), vocab_size)


def divisions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Return every way to give each stage at least one layer."""
    if num_stages == 1:
        yield (num_layers,)
        return
    for first in range(1, num_layers - num_stages + 2):
        yield from ((first, *rest) for rest in divisions(num_layers - first, num_stages - 1))


def costs(arch: Architecture, counts: Sequence[int]) -> list[int]:
    """Return the work of each stage."""
    work = [count * layer_flops_per_token(arch) for count in counts]
    work[-1] += head_flops_per_token(arch)
    return work


def loads(arch: Architecture, counts: Sequence[int], owners: Sequence[int]) -> list[int]:
    """Return the work of each rank."""
    work = costs(arch, counts)
    return [sum(w for w, owner in zip(work, owners, strict=True) if owner == rank) for rank in sorted(set(owners))]


@given(stages=st.integers(1, 4), extra=st.integers(0, 6), vocab_size=st.integers(0, 500))
def test_the_most_expensive_stage_is_minimal(stages: int, extra: int, vocab_size: int) -> None:
    arch = arch_of(stages + extra, vocab_size)
    counts = divide(arch, stages)
    assert sum(counts) == arch.num_layers and min(counts) >= 1 and len(counts) == stages
    assert max(costs(arch, counts)) == min(max(costs(arch, c)) for c in divisions(arch.num_layers, stages))


@given(
    ranks=st.integers(1, 3),
    virtual=st.integers(1, 3),
    extra=st.integers(0, 5),
    vocab_size=st.integers(0, 500),
    place=st.sampled_from([rank_in_loop, rank_in_v]),
)
def test_the_most_expensive_rank_is_minimal(
    ranks: int, virtual: int, extra: int, vocab_size: int, place: RankOfStage
) -> None:
    stages = ranks * virtual
    arch, owners = arch_of(stages + extra, vocab_size), [place(stage, ranks) for stage in range(stages)]
    counts = divide(arch, stages, owners)
    assert sum(counts) == arch.num_layers and min(counts) >= 1
    best = min(max(loads(arch, c, owners)) for c in divisions(arch.num_layers, stages))
    assert max(loads(arch, counts, owners)) == best
    for rank in range(ranks):
        mine = [w for w, owner in zip(costs(arch, counts), owners, strict=True) if owner == rank]
        head = head_flops_per_token(arch) if owners[-1] == rank else 0
        assert max(mine) - min(mine) <= max(layer_flops_per_token(arch), head)


def windowed(num_layers: int, pattern: list[int], vocab_size: int) -> Architecture:
    """Return layers of which those with a 1 see one key of 512: they take a twelfth of the FLOPs of the others."""
    model = {**SIZES, "seq_length": 512, "window_size": [1, 0], "window_attn_skip_freq": pattern}
    return resolve_architecture(ModelConfig.model_validate({"num_layers": num_layers, **model}), vocab_size)


def unequal_loads(arch: Architecture, counts: Sequence[int], owners: Sequence[int]) -> list[int]:
    """Return the work of each rank where layers differ."""
    work = [sum(flops_of_layer(arch, layer) for layer in stage.layers) for stage in make_stages(counts)]
    work[-1] += head_flops_per_token(arch)
    return [sum(w for w, owner in zip(work, owners, strict=True) if owner == rank) for rank in sorted(set(owners))]


PATTERNS = st.lists(st.integers(0, 1), min_size=2, max_size=4).filter(lambda each: len(set(each)) == 2)


@given(stages=st.integers(1, 4), extra=st.integers(2, 7), vocab_size=st.integers(0, 2000), pattern=PATTERNS)
def test_layers_with_a_window_count_less(stages: int, extra: int, vocab_size: int, pattern: list[int]) -> None:
    arch = windowed(stages + extra, pattern, vocab_size)
    counts = divide(arch, stages)
    assert sum(counts) == arch.num_layers and min(counts) >= 1 and len(counts) == stages
    best = min(max(unequal_loads(arch, c, range(stages))) for c in divisions(arch.num_layers, stages))
    assert max(unequal_loads(arch, counts, range(stages))) == best


@given(
    virtual=st.integers(2, 3),
    extra=st.integers(2, 5),
    pattern=PATTERNS,
    place=st.sampled_from([rank_in_loop, rank_in_v]),
)
def test_ranks_with_several_stages_are_nearly_balanced(
    virtual: int, extra: int, pattern: list[int], place: RankOfStage
) -> None:
    """The busiest rank has at most one large layer more than in the best division."""
    stages = 2 * virtual
    arch, owners = windowed(stages + extra, pattern, 0), [place(stage, 2) for stage in range(stages)]
    counts = divide(arch, stages, owners)
    best = min(max(unequal_loads(arch, c, owners)) for c in divisions(arch.num_layers, stages))
    assert max(unequal_loads(arch, counts, owners)) <= best + max(flops_of_layer(arch, layer) for layer in range(2, 6))


def test_unequal_stages_by_hand() -> None:
    """Work 12 1 1 1 12 1 1 1 12 1 1 1: each stage has a layer without the window."""
    assert divide(windowed(12, [0, 1, 1, 1], 0), 3) == (4, 4, 4)
    assert divide(windowed(9, [0, 1, 1, 1, 1, 1, 1, 1, 1], 0), 2) == (1, 8)


def test_stages_by_hand() -> None:
    assert divide(arch_of(12, 0), 4) == (3, 3, 3, 3)
    assert divide(arch_of(11, 104), 4) == (3, 3, 3, 2)
    assert divide(arch_of(10, 0), 4) == (2, 2, 3, 3)
    assert divide(arch_of(10, 1000), 4) == (3, 3, 3, 1)


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_stages_hold_each_layer_once_and_in_order(counts: list[int]) -> None:
    stages = make_stages(counts)
    assert [layer for stage in stages for layer in stage.layers] == list(range(sum(counts)))
    assert [len(stage.layers) for stage in stages] == counts
    assert make_stages([sum(counts)]) == (Stage(0, range(sum(counts)), has_embedding=True, has_head=True),)
    assert [stage.index for stage in stages if stage.has_embedding] == [0]
    assert [stage.index for stage in stages if stage.has_head] == [len(counts) - 1]


def config_of(num_layers: int = 16, **parallel: object) -> Config:
    train = {"micro_batch_size": 1, "global_batch_size": 6}
    return Config.model_validate({"model": {"num_layers": num_layers, **SIZES}, "parallel": parallel, "train": train})


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_makes_a_pipeline(name: str, size: int) -> None:
    config = config_of(pipeline_model_parallel_size=size, pipeline_schedule=name)
    pipeline = RunSpec(config, size).pipeline
    virtual = SCHEDULES[name].min_virtual
    assert pipeline.num_ranks == size and len(pipeline.stages) == size * virtual
    assert pipeline.owners == tuple(SCHEDULES[name].rank_of_stage(stage, size) for stage in range(size * virtual))
    assert [stage.index for rank in range(size) for stage in pipeline.on_rank(rank)] == sorted(
        range(size * virtual), key=lambda stage: (pipeline.owners[stage], stage)
    )
    assert all(len(stage.layers) == 16 // (size * virtual) for stage in pipeline.stages)
    assert pipeline.splits_backward == name.startswith("zb-")


def test_one_rank_alternates_forward_and_backward() -> None:
    config = config_of()
    pipeline = RunSpec(config).pipeline
    kinds = ActionKind.F, ActionKind.B
    assert pipeline.schedule == (tuple(Action(kind, 0, mb) for mb in range(6) for kind in kinds),)


def test_a_given_layout_and_file_are_used_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    for size in (1, 3):
        schedule = build_schedule("interleaved", size, 6, 2)
        write_schedule(schedule, file)
        layout = (0, *[1] * (2 * size - 2), 18 - 2 * size)
        config = config_of(
            pipeline_model_parallel_size=size,
            pipeline_schedule="file",
            pipeline_schedule_file=str(file),
            pipeline_model_parallel_layout=layout,
        )
        pipeline = RunSpec(config, size).pipeline
        assert pipeline.schedule == schedule
        assert tuple(len(stage.layers) for stage in pipeline.stages) == layout
