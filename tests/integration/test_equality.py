"""Every layout computes the same numbers as one process: losses, gradient norms, gradients, parameters, in float64.

Modes, forms, axes and schedules come from the registries, so that a new one is covered as soon as it is entered there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ParallelConfig
from megatron3d.config.validate.rules import check
from megatron3d.parallel.mesh import DATA
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.schedules import FROM_FILE, SCHEDULES
from megatron3d.pipeline.validate import write_schedule
from megatron3d.train.state import connect
from megatron3d.verify.layouts import Trace, differences, trace
from tests.support.pool import Pool
from tests.support.toy_pipeline import any_schedule

VOCAB_SIZE = 61
TOLERANCE = 1e-10
NUM_STEPS = 2
NUM_RANKS = 8
NUM_TURNS = 2
NUM_PIPELINE_TURNS = 4
BATCHES = ((4, 8, 16), (6, 12))

TRAIN = {"precision": "fp64", "loss_chunk_tokens": 12, "bucket_mb": 0.01}
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


DEEP = {name: {**model, "num_layers": 5} for name, model in MODELS.items()}


def shapes(num_axes: int, num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a power of 2 as a product of axes of which at most one, or as few as can be, are 1."""
    num_ones = max(1, num_axes - num_ranks.bit_length() + 1)
    for shape in product(*[[n for n in range(1, num_ranks + 1) if num_ranks % n == 0]] * num_axes):
        if math.prod(shape) == num_ranks and shape.count(1) <= num_ones:
            yield shape


def layouts(num_ranks: int = NUM_RANKS) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """By mode and form: on all ranks alone and on half of them with data parallelism of 2, cubes and rectangles."""
    return {
        (mode, form): [
            {"tensor_parallel_mode": mode, "tensor_parallel_form": form, "tensor_parallel_shape": shape}
            for size in (num_ranks, num_ranks // 2)
            for shape in shapes(len(entry.axis_names), size)
        ]
        for mode, entry in MODES.items()
        for form in entry.forms
    }


def configure(model: dict[str, Any], parallel: Mapping[str, Any], **train: Any) -> Config:
    return Config.model_validate({"model": model, "parallel": parallel, "train": TRAIN | train, "optimizer": OPTIMIZER})


def run_trace(rank: int, world_size: int, config: Config) -> Trace | None:
    """The steps of a configuration."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    return trace(spec, connect(spec), NUM_STEPS)


@cache
def reference(name: str, num_layers: int, batch: int) -> Trace:
    """What one process computes, the whole batch in one microbatch."""
    model = {**MODELS[name], "num_layers": num_layers}
    values = run_trace(0, 1, configure(model, {}, micro_batch_size=batch, global_batch_size=batch))
    assert values is not None, "one process is rank 0"
    return values


def wrong(cases: Sequence[tuple[str, Config]], traces: Sequence[Trace]) -> str:
    """The first differences of each model and configuration from one process, a line each."""
    lines = []
    for (name, config), got in zip(cases, traces, strict=True):
        expected = reference(name, config.model.num_layers, config.train.global_batch_size)
        lines += [f"{describe(config)}: {line}" for line in list(differences(expected, got, TOLERANCE))[:3]]
    return "\n".join(lines)


def small_batches(name: str, parallel: Mapping[str, Any], num_ranks: int, batches: Sequence[int], least: int) -> Config:
    """The fewest sequences per microbatch that the rules allow, and the first batch with enough microbatches."""
    for micro, batch in product((1, 2, 4, 8), batches):
        config = configure(MODELS[name], parallel, micro_batch_size=micro, global_batch_size=batch)
        enough = RunSpec(config, num_ranks).num_microbatches >= least
        if enough and not check(config, num_ranks, VOCAB_SIZE):
            return config
    raise AssertionError(f"no batch of {batches} fits {parallel}")


def describe(config: Config) -> str:
    """The tensor axes, then all else that was chosen."""
    tensor = [f"tensor_parallel_{key}" for key in ("mode", "form", "shape")]
    given = config.parallel.model_dump(exclude_defaults=True, exclude={*tensor})
    mode = " ".join(str(getattr(config.parallel, key)) for key in tensor)
    return f"{mode} {given or ''} micro-batch {config.train.micro_batch_size}"


def matrix(name: str) -> list[Config]:
    """Layouts that are tried with a model: every second one, in turn with the other models."""
    every = [parallel for group in layouts().values() for parallel in group]
    mine = every[list(MODELS).index(name) % 2 :: 2]
    return [small_batches(name, parallel, NUM_RANKS, BATCHES[0], least=2) for parallel in mine]


def pipelines() -> list[dict[str, Any]]:
    """Every schedule with one to three stages per rank where it takes them, and one from a file."""
    takes = [(name, v) for name, entry in SCHEDULES.items() for v in range(1, 4) if entry.supports(v)]
    return [
        {"pipeline_schedule": name, "virtual_pipeline_model_parallel_size": virtual}
        for name, virtual in (*takes, (FROM_FILE, None))
    ]


def divisions(where: Sequence[int], choose: random.Random) -> list[list[int] | None]:
    """By cost where every stage can have a layer, at random, and with nothing between the layers and an end."""
    stages, num_layers = range(len(where)), DEEP[next(iter(DEEP))]["num_layers"]

    def any_of(stages: Sequence[int]) -> list[int]:
        inner = set(where) - {where[0], where[-1]}
        chosen = [choose.choice([stage for stage in stages if where[stage] == rank]) for rank in inner]
        chosen += choose.choices(stages, k=num_layers - len(chosen))
        return [chosen.count(stage) for stage in range(len(where))]

    by_cost = None if len(where) <= num_layers else any_of(stages)
    return [by_cost, any_of(stages[1:]), any_of(stages), any_of(stages[:-1])]


def pipeline_matrix(turn: int, folder: Path) -> list[tuple[str, Config]]:
    """Every pipeline on 2 and 4 ranks, each turn with other models, tensor axes, ZeRO stages and batches."""
    names, found = list(DEEP), []
    for place, (pipeline, ranks) in enumerate(product(pipelines(), (2, 4))):
        index, choose = place // 2, random.Random(100 * turn + place)
        name, batches = names[(index + turn) % len(names)], BATCHES[(index + turn // 2) % 2]
        groups = list(layouts(NUM_RANKS // ranks).values())
        at, round_ = (turn * len(pipelines()) + index) % len(groups), (turn * len(pipelines()) + index) // len(groups)
        tensor = groups[at][(round_ + place) % len(groups[at])]
        alone = small_batches(name, tensor, NUM_RANKS // ranks, batches, least=3)
        spec, train = RunSpec(alone, NUM_RANKS // ranks), alone.train.model_dump(exclude_defaults=True)
        parallel = {**tensor, **pipeline, "pipeline_model_parallel_size": ranks}
        if spec.mesh.sizes["data"] > 1:
            parallel["zero_stage"] = turn % 4
        if pipeline["pipeline_schedule"] == FROM_FILE:
            where = random_owners(ranks, choose)
            parallel["pipeline_schedule_file"] = str(folder / f"{turn}-{place}.csv")
            schedule = any_schedule(choose, where, spec.num_microbatches)
            write_schedule(schedule, Path(parallel["pipeline_schedule_file"]))
        where = RunSpec(Config(parallel=ParallelConfig.model_validate(parallel))).stage_owners
        parallel["pipeline_model_parallel_layout"] = divisions(where, choose)[(turn - index) % 4]
        found.append((name, configure(DEEP[name], parallel, **train)))
    return found


def random_owners(ranks: int, choose: random.Random) -> list[int]:
    """Ranks of two stages more than there are ranks."""
    where = [*range(ranks), *choose.choices(range(ranks), k=2)]
    choose.shuffle(where)
    return where


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("turn", range(NUM_TURNS))
def test_every_layout_equals_one_process(pool: Pool, name: str, turn: int) -> None:
    cases = [(name, config) for config in matrix(name)[turn::NUM_TURNS]]
    traces = [pool.run(run_trace, NUM_RANKS, config)[0] for _, config in cases]
    assert not (lines := wrong(cases, traces)), lines


@pytest.mark.parametrize("turn", range(NUM_PIPELINE_TURNS))
def test_every_pipeline_equals_one_process(pool: Pool, tmp_path: Path, turn: int) -> None:
    cases = pipeline_matrix(turn, tmp_path)
    assert [check(config, NUM_RANKS, VOCAB_SIZE) for _, config in cases] == [[]] * len(cases)
    traces = [pool.run(run_trace, NUM_RANKS, config)[0] for _, config in cases]
    assert not (lines := wrong(cases, traces)), lines


def test_the_matrix_is_wide() -> None:
    """It holds, for each mode and form, all axes above 1 at once, rectangles, data parallelism, micro-batch 1."""
    configs = [config for name in MODELS for config in matrix(name)]
    for mode, entry in MODES.items():
        for form in entry.forms:
            same = [c for c in configs if describe(c).startswith(f"{mode} {form} ")]
            axes = [RunSpec(c).tensor_shape for c in same]
            assert any(min(shape) > 1 for shape in axes), f"{mode} {form}: no layout has all axes above 1"
            assert {math.prod(shape) for shape in axes} == {NUM_RANKS, NUM_RANKS // 2}
            assert len(entry.axis_names) == 1 or any(len(set(shape)) > 1 for shape in axes)
    assert {c.train.micro_batch_size for c in configs} >= {1, 2, 4}
    assert all(RunSpec(c, NUM_RANKS).num_microbatches > 1 for c in configs)


def facts(config: Config) -> Iterator[str]:
    """What a pipeline tries, in words."""
    spec, parallel = RunSpec(config, NUM_RANKS, VOCAB_SIZE), config.parallel
    mesh, m, where = spec.mesh, spec.num_microbatches, spec.stage_owners
    ranks, layers = mesh.sizes["pipeline"], parallel.pipeline_model_parallel_layout
    tied = "tied" if spec.arch.tie_embeddings else "untied"
    yield f"{tied}, ends {'on one rank' if where[0] == where[-1] else 'apart'}"
    yield f"{tied} {parallel.pipeline_schedule} {parallel.virtual_pipeline_model_parallel_size}"
    yield f"{parallel.tensor_parallel_mode} {parallel.tensor_parallel_form}"
    yield f"ZeRO {parallel.zero_stage} on {mesh.size(DATA)} data ranks"
    yield from [f"{layers[0]} layers first", f"{layers[-1]} layers last"] if layers else ["layers by cost"]
    yield "microbatches: " + ("fewer than ranks" if m < ranks else f"{'no ' if m % ranks else ''}multiple of ranks")
    yield f"micro-batch {config.train.micro_batch_size}"


def test_the_pipelines_are_wide(tmp_path: Path) -> None:
    """On 2 and on 4 ranks: every schedule with tied and untied embeddings, every form of a mode, and what is rare."""
    configs = [config for turn in range(NUM_PIPELINE_TURNS) for _, config in pipeline_matrix(turn, tmp_path)]
    forms = {f"{mode} {form}" for mode, form in layouts()}
    schedules = {" ".join(map(str, pipeline.values())) for pipeline in pipelines()}
    for ranks in (2, 4):
        same = [config for config in configs if config.parallel.pipeline_model_parallel_size == ranks]
        found = {fact for config in same for fact in facts(config)}
        wanted = forms | {f"{tied} {schedule}" for tied in ("tied", "untied") for schedule in schedules}
        wanted |= {f"{tied}, ends {how}" for tied in ("tied", "untied") for how in ("apart", "on one rank")}
        wanted |= {"ZeRO 0 on 1 data ranks", *(f"ZeRO {stage} on 2 data ranks" for stage in range(4))}
        wanted |= {"layers by cost", "0 layers first", "0 layers last", "micro-batch 1"}
        wanted |= {f"microbatches: {how}multiple of ranks" for how in ("", "no ")}
        assert wanted - found == set(), f"on {ranks} ranks"
    assert "microbatches: fewer than ranks" in found and len(configs) == 2 * NUM_PIPELINE_TURNS * len(schedules)


def test_the_comparison_finds_a_wrong_gradient() -> None:
    """A comparison that cannot fail proves nothing."""
    expected = reference(next(iter(MODELS)), 2, 4)
    name = next(name for name in expected if "mlp.fc2.weight" in name)
    got = {**expected, name: expected[name] * (1 + 1e-9)}
    assert [line.partition(":")[0] for line in differences(expected, got, TOLERANCE)] == [name]
