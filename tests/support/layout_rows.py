"""Covering array of layouts: rows that together contain every feasible pair of choices, as configurations.

The choices are: mode and form, shape, schedule, pipeline, context and data-parallel ranks, exchange between context
ranks, packed documents, ZeRO stage, HSDP replicas, activation recomputation, overlap, division of the layers, global
batch, model, folding of experts, dispatcher.  Modes and schedules come from the registries, so that a new one is
covered as soon as it is registered.  A folding is a class, of which a row has one at random.  Rows that cover every
pair of what keeps state between steps train two steps, between which a non-finite gradient skips an update on all
ranks, half of them with Muon, a quarter with SOAP and the others with AdamW or Lion, half of them with groups of
parameters; the others train one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from megatron3d.attention.context.plan import BOTH, CONTEXT_EXCHANGES
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.experts.plan import expert_sizes, stage_axes
from megatron3d.parallel.mesh import Sizes
from megatron3d.parallel.modes import MODES
from megatron3d.parallel.modes.mode import DISPATCHERS
from megatron3d.pipeline.schedules import FROM_FILE
from megatron3d.pipeline.validate import write_schedule
from tests.support.covering import Row, Rule, Table
from tests.support.equality import (
    BATCHES,
    DOCUMENTS,
    FORMS,
    MODELS,
    NUM_RANKS,
    OF_DENSE,
    OF_EXPERTS,
    OF_NORMS,
    OF_SHARED,
    OVERLAPS,
    RECOMPUTATIONS,
    SCHEDULES_WITH_STAGES,
    SIMILAR_ATTENTION,
    VOCAB_SIZE,
    configure,
    describe,
    divisions,
    random_owners,
    run_trace,
    run_trace_and_skip,
    shapes,
    small_batches,
    smallest_microbatch,
    tensor_keys,
    wrong,
)
from tests.support.toy_pipeline import any_schedule

NO_PIPELINE = (None, None)
OUTSIDE_TENSOR = ("replica", "data", "context", "context_inner")
DEPTHS = {1: 3, 2: 4, 4: 5}  # layers, by number of pipeline ranks

# How experts lie on the ranks of a stage: a dense model, all on each rank, whole ones on ranks of tensor axes alone, on
# ranks of other axes too, each one split, and both.
DENSE, WHOLE, ON_TENSOR, BEYOND_TENSOR, SPLIT, BOTH_FOLDED = FOLDINGS = (
    "dense",
    "all on each rank",
    "on tensor ranks",
    "beyond tensor ranks",
    "split",
    "split and distributed",
)
DISTRIBUTED = frozenset({ON_TENSOR, BEYOND_TENSOR, BOTH_FOLDED})
WITH_EXPERTS = frozenset(name for name, keys in MODELS.items() if "num_moe_experts" in keys)
WITH_SHARED = frozenset(name for name, keys in MODELS.items() if "moe_shared_expert_intermediate_size" in keys)
WITH_DENSE = frozenset(MODELS) - {name for name in WITH_EXPERTS if "moe_layer_freq" not in MODELS[name]}
# Norms are recomputed in rows of their own (`NORM_ROWS`), of models that normalize the inputs of attention and MLP.
WITH_NORMS = frozenset(name for name, keys in MODELS.items() if keys.get("norm_placement") != "post")
# Models that have the modules of a recomputation; all have those of others.
WITH_MODULES = {
    **dict.fromkeys(OF_DENSE, WITH_DENSE),
    **dict.fromkeys(OF_EXPERTS, WITH_EXPERTS),
    **dict.fromkeys(OF_SHARED, WITH_SHARED),
}
ALL_RECOMPUTATIONS = {**RECOMPUTATIONS, **OF_NORMS, **OF_DENSE, **OF_EXPERTS, **OF_SHARED}

FACTORS: dict[str, Sequence[Any]] = {
    "shape": [(1,), *(shape for size in (2, 4, 8) for num_axes in (1, 2, 3) for shape in shapes(num_axes, size))],
    "form": FORMS,
    "data ranks": (1, 2, 4),
    "context ranks": (1, 2, 4),
    "model": list(MODELS),
    "folding": FOLDINGS,
    "dispatcher": (None, *DISPATCHERS),
    "pipeline ranks": (1, 2, 4),
    "schedule": [NO_PIPELINE, *SCHEDULES_WITH_STAGES],
    "exchange": CONTEXT_EXCHANGES,
    "ZeRO": (0, 1, 2, 3),
    "replicas": (1, 2),
    "overlap": list(OVERLAPS),
    "layers": ["by cost", "none on the first stage", "random", "none on the last stage"],
    "batch": range(len(BATCHES)),
    "recompute": [name for name in ALL_RECOMPUTATIONS if name not in OF_NORMS],
    "documents": list(DOCUMENTS),
}
# Factors that a folding meets, and a dispatcher.
MET_BY_FOLDING = {"form", "schedule", "ZeRO", "recompute", "data ranks", "context ranks", "replicas", "dispatcher"}
# Factors that meet every exchange and all documents; schedules, overlaps and batches do not know of either.
MET_BY_ATTENTION = {"form", "pipeline ranks", "data ranks", "context ranks", "ZeRO", "recompute", "model"}
MEETS: dict[str, set[str]] = {
    "exchange": MET_BY_ATTENTION | {"documents"},
    "documents": MET_BY_ATTENTION | {"exchange"},
    "folding": MET_BY_FOLDING,
    "dispatcher": {"form", "ZeRO", "recompute", "folding"},
}


def has_overlap(form: tuple[str, str], shape: tuple[int, ...], name: str) -> bool:
    """Return whether a mode has the communication that the overlap keys control."""
    micro = smallest_microbatch(form, shape)
    train = {"micro_batch_size": micro, "global_batch_size": micro}
    config = configure(next(iter(MODELS.values())), tensor_keys(form, shape) | OVERLAPS[name], **train)
    return not check(config, math.prod(shape), VOCAB_SIZE)


def has_batch(form: tuple[str, str], shape: tuple[int, ...], pipeline: int, data: int, batch: int) -> bool:
    """Return whether one of the global batches has enough microbatches."""
    step, least = data * smallest_microbatch(form, shape), 2 if pipeline == 1 else 3
    return any(size % step == 0 and size // step >= least for size in BATCHES[batch])


def has_ranks_of_exchange(ranks: int, exchange: str) -> bool:
    """Return whether as many context ranks have an exchange: one rank has the default, two axes are four ranks."""
    return exchange == CONTEXT_EXCHANGES[0] or ranks > (2 if exchange == BOTH else 1)


def has_stage_per_layer(ranks: int, schedule: tuple[str | None, int | None]) -> bool:
    """Return whether every stage of a schedule gets a layer."""
    num_stages = ranks + 2 if schedule[0] == FROM_FILE else ranks * (schedule[1] or 1)
    return num_stages <= DEPTHS[ranks]


def has_folding(form: tuple[str, str], shape: tuple[int, ...], data: int, context: int, folding: str) -> bool:
    """Return whether the ranks of a stage have a folding of a class; replicas are data ranks to it."""
    axes = (("data", data), ("context", context), *zip(MODES[form[0]].axis_names, shape, strict=True))
    return folding == DENSE or bool(foldings(axes, folding))


def foldings(axes: Sizes, folding: str) -> list[tuple[int, int]]:
    """Return the sizes EP, ETP of a class that dense axes have, for the fewest experts of a model."""
    tensor = math.prod(size for name, size in axes if name not in OUTSIDE_TENSOR)
    found = [(size, split) for split in (1, 2, 4) for size in expert_sizes(axes, split) if size <= 4]
    return [each for each in found if class_of(*each, tensor) == folding]


def class_of(size: int, split: int, num_tensor: int) -> str:
    """Return the class of a folding on ranks of which `num_tensor` are neighbours on tensor axes."""
    if size == 1:
        return SPLIT if split > 1 else WHOLE
    return BOTH_FOLDED if split > 1 else ON_TENSOR if size <= num_tensor else BEYOND_TENSOR


RULES = [
    Rule(("form", "shape"), lambda form, shape: len(MODES[form[0]].axis_names) == len(shape)),
    Rule(("shape", "pipeline ranks"), lambda shape, pipeline: math.prod(shape) * pipeline <= NUM_RANKS),
    Rule(("shape", "data ranks"), lambda shape, data: math.prod(shape) * data <= NUM_RANKS),
    Rule(("shape", "context ranks"), lambda shape, context: math.prod(shape) * context <= NUM_RANKS),
    Rule(("shape", "pipeline ranks", "data ranks"), lambda shape, *others: math.prod((*shape, *others)) <= NUM_RANKS),
    Rule(
        ("shape", "pipeline ranks", "data ranks", "context ranks"),
        lambda shape, *others: math.prod((*shape, *others)) <= NUM_RANKS,
    ),
    Rule(("pipeline ranks", "schedule"), lambda ranks, schedule: (ranks == 1) == (schedule == NO_PIPELINE)),
    Rule(("pipeline ranks", "layers"), lambda ranks, layers: ranks > 1 or layers == "by cost"),
    Rule(
        ("pipeline ranks", "schedule", "layers"),
        lambda ranks, schedule, layers: layers != "by cost" or has_stage_per_layer(ranks, schedule),
    ),
    Rule(("data ranks", "context ranks", "ZeRO"), lambda data, context, stage: data * context > 1 or stage == 0),
    Rule(("context ranks", "exchange"), has_ranks_of_exchange),
    Rule(("data ranks", "replicas"), lambda data, replicas: data % replicas == 0),
    Rule(("form", "shape", "overlap"), has_overlap),
    Rule(("form", "shape", "pipeline ranks", "data ranks", "batch"), has_batch),
    Rule(("model", "folding"), lambda model, folding: (model in WITH_EXPERTS) == (folding != DENSE)),
    Rule(("model", "recompute"), lambda model, recompute: model in WITH_MODULES.get(recompute, MODELS)),
    Rule(("folding", "dispatcher"), lambda folding, by: (folding in DISTRIBUTED) == (by is not None)),
    Rule(("form", "shape", "data ranks", "context ranks", "folding"), has_folding),
]


def aspects(name: str, value: Any, other: str) -> list[tuple[str, Any]]:
    """Return the aspects of a shape: all of it against mode and form, the size of each axis against other factors.

    Exchanges and documents have none against factors that they need not meet.
    """
    if other not in MEETS.get(name, {other}) or name not in MEETS.get(other, {name}):
        return []
    if name == "shape" and other != "form":
        return [(f"axis {place}", size) for place, size in enumerate(value)]
    return [(name, value)]


def cost(row: Row) -> float:
    """Return the cost of running a row, in layers times microbatches."""
    num_ranks = math.prod(row.get("shape", (1,))) * row.get("data ranks", 1) * row.get("context ranks", 1)
    pipeline = row.get("pipeline ranks", 1)
    return float(num_ranks * (DEPTHS[pipeline] + pipeline))


FEW_KEY_VALUE_HEADS = "fewer key/value heads than ranks, QK-norm, tied"


def heads_on_two_axes() -> Iterator[Row]:
    """Yield, for each form that can shard heads over two axes, a shape in which key/value heads are gathered over one.

    Form, shape and model decide this together, which pairs of factors do not reach.
    """
    for form in FORMS:
        for shape in shapes(len(MODES[form[0]].axis_names), 4):
            spec = RunSpec(configure(MODELS[FEW_KEY_VALUE_HEADS], tensor_keys(form, shape)), 4, VOCAB_SIZE)
            if len(spec.mesh.nontrivial(spec.mode.inner[1])) > 1:
                yield {"form": form, "shape": shape, "model": FEW_KEY_VALUE_HEADS}
                break


def packed_contexts() -> Iterator[Row]:
    """Yield every exchange with packed documents and every model, on 2 and on 4 context ranks: windows, few heads.

    Models with the attention of others are left out.
    """
    packed = [documents for documents, keys in DOCUMENTS.items() if keys]
    models = [model for model in MODELS if model not in SIMILAR_ATTENTION]
    for exchange, (place, model), documents in product(CONTEXT_EXCHANGES, enumerate(models), packed):
        ranks = 4 if exchange == BOTH or (place + packed.index(documents)) % 2 else 2
        yield {"context ranks": ranks, "exchange": exchange, "model": model, "documents": documents}


TABLE = Table(FACTORS, RULES, aspects, cost)
ROWS = TABLE.covering_rows([*heads_on_two_axes(), *packed_contexts()])
# Rows that cover the pairs of these factors (see `step_pairs`) train two steps and skip one between them.
STEP_FACTORS = ("form", "schedule", "ZeRO", "replicas", "overlap", "recompute", "folding")


def pick(wanted: Sequence[frozenset[Any]]) -> list[int]:
    """Return the indices of few sets that have all elements of `wanted`: each time the one with the most new ones."""
    missing, found = set().union(*wanted), []
    while missing:
        found.append(max(range(len(wanted)), key=lambda place: len(wanted[place] & missing)))
        missing -= wanted[found[-1]]
    return found


def step_pairs(row: Row) -> frozenset[Any]:
    """Return a row's pairs of step factors, except modes with schedules, and either with layouts of experts."""
    pairs = TABLE.pairs({name: row[name] for name in STEP_FACTORS})
    return frozenset(pair for pair in pairs if len({name for name, _ in pair} & {"form", "schedule", "folding"}) < 2)


TWO_STEP_ROWS = frozenset(pick([step_pairs(row) for row in ROWS]))
TWO_STEP_RULES = (
    "adam in groups",
    "muon",
    "soap",
    "muon in groups",
    "lion",
    "muon",
    "soap in groups",
    "muon in groups",
)
PROCESS_ROWS = pick([frozenset(row.items()) for row in ROWS])
NORM_FACTORS = ("form", "model", "dispatcher")
_NORM_PAIRS = [frozenset((name, row[name]) for name in NORM_FACTORS if row["model"] in WITH_NORMS) for row in ROWS]
_WITH_NORMS = {"recompute": next(iter(OF_NORMS)), "documents": next(iter(DOCUMENTS))}
NORM_ROWS: list[Row] = [{**ROWS[place], **_WITH_NORMS} for place in pick(_NORM_PAIRS)]


class Case(NamedTuple):
    """A row of the covering array as a configuration on a number of ranks."""

    model: str
    config: Config
    num_ranks: int


def context_keys(ranks: int, exchange: str) -> dict[str, Any]:
    """Return the keys of context ranks and of their exchange."""
    keys: dict[str, Any] = {"context_parallel_size": ranks, "cp_comm_type": exchange}
    return keys | ({"hierarchical_context_parallel_sizes": (2, ranks // 2)} if exchange == BOTH else {})


def balancer_keys(row: Row) -> dict[str, Any]:
    """Return the key that balances documents, which about half of the rows have whose attention knows documents."""
    packs = DOCUMENTS[row["documents"]].get("reset_attention_mask") and row["context ranks"] > 1
    is_chosen = packs and random.Random(f"balancer of {row}").random() < 0.5
    return {"context_parallel_load_balancer": "documents"} if is_chosen else {}


def folding_keys(row: Row, spec: RunSpec) -> dict[str, Any]:
    """Return the keys of a folding of a row's class that its ranks have, chosen at random."""
    if row["folding"] == DENSE:
        return {}
    found = foldings(stage_axes(spec.mode, spec.sizes.shards, spec.sizes.replicas), row["folding"])
    size, split = random.Random(f"folding {row}").choice(found)
    keys = {"expert_model_parallel_size": size, "expert_tensor_parallel_size": split}
    return keys | ({"moe_token_dispatcher_type": row["dispatcher"]} if row["dispatcher"] else {})


def rule_of(place: int) -> str:
    """Return the update rule of a row: of two steps, most rows have one that exchanges matrices."""
    return TWO_STEP_RULES[sorted(TWO_STEP_ROWS).index(place) % 8] if place in TWO_STEP_ROWS else "adam"


def build(row: Row, folder: Path, rule: str = "adam") -> Case:
    """Return the configuration of a row; write the file of its schedule, if it has one, to `folder`."""
    choose = random.Random(str(row))
    ranks, (schedule, virtual) = row["pipeline ranks"], row["schedule"]
    tensor = tensor_keys(row["form"], row["shape"]) | context_keys(row["context ranks"], row["exchange"])
    num_inner = math.prod(row["shape"]) * row["data ranks"] * row["context ranks"]
    alone = small_batches(row["model"], tensor, num_inner, BATCHES[row["batch"]], least=2 if ranks == 1 else 3)
    train = alone.train.model_dump(exclude_defaults=True) | ALL_RECOMPUTATIONS[row["recompute"]]
    parallel = tensor | OVERLAPS[row["overlap"]] | {"zero_stage": row["ZeRO"]} | balancer_keys(row)
    parallel["num_distributed_optimizer_instances"] = row["replicas"]
    model = {**MODELS[row["model"]], "num_layers": DEPTHS[ranks]}
    if ranks > 1:
        parallel |= {"pipeline_model_parallel_size": ranks, "pipeline_schedule": schedule}
        parallel["virtual_pipeline_model_parallel_size"] = virtual
        if schedule == FROM_FILE:
            path = folder / "schedule.csv"
            num_microbatches = RunSpec(alone, num_inner).num_microbatches
            write_schedule(any_schedule(choose, random_owners(ranks, choose), num_microbatches), path)
            parallel["pipeline_schedule_file"] = str(path)
        where = RunSpec(configure(model, parallel, **train), ranks * num_inner).stage_owners
        parallel["pipeline_model_parallel_layout"] = divisions(where, DEPTHS[ranks], choose)[row["layers"]]
    parallel |= folding_keys(row, RunSpec(configure(model, parallel, **train), ranks * num_inner, VOCAB_SIZE))
    return Case(row["model"], configure(model, parallel, row["documents"], rule, **train), ranks * num_inner)


def name_of(place: int) -> str:
    """Return a short name of a row."""
    row = ROWS[place]
    shape, (schedule, _) = "x".join(map(str, row["shape"])), row["schedule"]
    exchange = row["exchange"] if row["context ranks"] > 1 else ""
    ranks = f"cp{row['context ranks']}{exchange}-pp{row['pipeline ranks']}"
    return f"{place}-{'-'.join(row['form'])}-{shape}-{ranks}-{schedule}-zero{row['ZeRO']}"


def problems(place: int, folder: Path, run: Callable[..., list[Any]]) -> str:
    """Return what is wrong with a row; `run(fn, num_ranks, *args)` returns the results of all ranks."""
    model, config, num_ranks = build(ROWS[place], folder, rule_of(place))
    if place not in TWO_STEP_ROWS:
        return wrong([(model, config)], [run(run_trace, num_ranks, config, 1)[0]], num_steps=1)
    ranks = run(run_trace_and_skip, num_ranks, config)
    found = wrong([(model, config)], [ranks[0][0]])
    return "\n".join(filter(None, [found, *(f"{describe(config)}: {text}" for _, texts in ranks for text in texts)]))
