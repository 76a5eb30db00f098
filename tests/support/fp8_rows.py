"""Covering array of layouts with fp8 linears: rows that together contain every feasible pair of choices.

Scales of tensorwise and rowwise are those of a microbatch, so that a row is compared with one process that computes the
same microbatches one after another.  Sizes are the smallest whose shards hold a recipe's blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron3d.config.schema import Config
from megatron3d.linear.fp8_plan import FORMATS, RECIPES, Blocks, Recipe
from megatron3d.parallel.modes import MODES
from megatron3d.verify.layouts import StepTrace
from tests.support.covering import Row, Rule, Table
from tests.support.equality import FORMS, RECOMPUTATIONS, configure, run_trace, tensor_keys

NUM_RANKS = 8
LARGE = 128  # blocks that make a row dear
_BASE = {"num_attention_heads": 4, "make_vocab_size_divisible_by": 1}
MODELS: Mapping[str, dict[str, Any]] = {
    "gpt2": {**_BASE, "family": "gpt2", "hidden_dropout": 0.1, "num_query_groups": 4},
    "llama": {**_BASE, "family": "llama", "num_query_groups": 4, "mtp_num_layers": 1},
    "latent attention": {**_BASE, "family": "llama", "multi_latent_attention": True},
}
PIPELINES: Mapping[str, dict[str, Any]] = {
    "none": {},
    "1f1b": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b"},
    "zb1": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
}
CONTEXTS: Mapping[str, dict[str, Any]] = {
    "none": {},
    **{name: {"context_parallel_size": 2, "cp_comm_type": name} for name in ("p2p", "all_gather", "a2a")},
}
RECOMPUTED = ("nothing", "attention core", "every two layers")

FACTORS: dict[str, Sequence[Any]] = {
    "form": FORMS,
    "recipe": list(RECIPES),
    "formats": list(FORMATS),
    "model": list(MODELS),
    "data ranks": (1, 2),
    "pipeline": list(PIPELINES),
    "context": list(CONTEXTS),
    "ZeRO": (0, 1, 2, 3),
    "recompute": RECOMPUTED,
}


def tensor_ranks(data: int, pipeline: str, context: str) -> int:
    """Return the ranks that are left for tensor axes, of which four are enough."""
    others = data * (1 if pipeline == "none" else 2) * (1 if context == "none" else 2)
    return min(4, NUM_RANKS // others)


def is_large(recipe: str) -> bool:
    """Return whether a recipe's blocks need large sizes."""
    return RECIPES[recipe].block == LARGE


RULES = [
    Rule(("data ranks", "context", "ZeRO"), lambda data, context, stage: stage == 0 or data > 1 or context != "none"),
    Rule(("form", "data ranks", "pipeline", "context"), lambda form, *others: tensor_ranks(*others) > 1),
    # A chunk of a context rank has a block, and some modes ask for four sequences.
    Rule(
        ("form", "recipe", "context"),
        lambda form, recipe, context: context == "none" or form[0] == "1d" or not is_large(recipe),
    ),
    Rule(("recipe", "model"), lambda recipe, model: model != "latent attention" or not is_large(recipe)),
]


def cost(row: Row) -> float:
    """Return the cost of a row: large blocks, and then microbatches."""
    return 10.0 * is_large(row.get("recipe", "rowwise")) + (row.get("pipeline", "none") != "none")


ROWS = Table(FACTORS, RULES, cost=cost).covering_rows()


class Case(NamedTuple):
    """A row as a configuration on a number of ranks, and the configuration of one process with the same numbers."""

    config: Config
    num_ranks: int
    alone: Config
    num_steps: int


def sizes(recipe: str, model: str, is_split: bool) -> dict[str, Any]:
    """Return the sizes of a model that every layout cuts at blocks; `is_split`: context ranks split its sequences."""
    block = RECIPES[recipe].block or 8
    width, length = (8 if block == 8 else 4) * block, (4 if is_split else 1) * block
    found: dict[str, Any] = {"num_layers": 2, "hidden_size": width, "ffn_hidden_size": width, "seq_length": length}
    if model == "latent attention":
        halves = {"qk_head_dim": width // 4, "v_head_dim": width // 4, "kv_lora_rank": width, "q_lora_rank": width}
        return found | halves | {"qk_pos_emb_head_dim": width}
    return found | {"kv_channels": width // 4} | ({"mtp_num_layers": 0} if is_large(recipe) else {})


def build(row: Row) -> Case:
    """Return the case of a row."""
    ranks = tensor_ranks(row["data ranks"], row["pipeline"], row["context"])
    shape = MODES[row["form"][0]].default_shape(ranks)
    outer = {**PIPELINES[row["pipeline"]], **CONTEXTS[row["context"]]}
    parallel = {**tensor_keys(row["form"], shape), **outer, "zero_stage": row["ZeRO"]}
    microbatches = row["data ranks"] * (1 if row["pipeline"] == "none" else 2)
    rows = 1 if is_large(row["recipe"]) and row["context"] != "none" else 4
    train = {
        "fp8": row["formats"],
        "fp8_recipe": row["recipe"],
        "micro_batch_size": rows,
        "global_batch_size": rows * microbatches,
    }
    model = {**MODELS[row["model"]], **sizes(row["recipe"], row["model"], row["context"] != "none")}
    num_ranks = ranks * row["data ranks"] * math.prod(v for k, v in outer.items() if k.endswith("_parallel_size"))
    config = configure(model, parallel, "one", "adam", **train, **RECOMPUTATIONS[row["recompute"]])
    return Case(config, num_ranks, configure(model, {}, "one", "adam", **train), 1 if is_large(row["recipe"]) else 2)


_references = dict[str, StepTrace]()


def reference(case: Case) -> StepTrace:
    """Return the trace of one process with the microbatches of a case."""
    key = f"{case.alone.model_dump()} {case.num_steps}"
    if key not in _references:
        found = run_trace(0, 1, case.alone, case.num_steps)
        assert found is not None, "one process is rank 0"
        _references[key] = found
    return _references[key]


def name_of(row: Row) -> str:
    """Return a short name of a row."""
    return "-".join((*row["form"], row["recipe"], row["formats"], row["model"], row["pipeline"], row["context"]))


def small_recipes(size: int) -> dict[str, Recipe]:
    """Return the recipes with blocks of `size`, so that a small model has several of them."""

    def smaller(blocks: Blocks) -> Blocks:
        return Blocks(*(each if each in (None, 1) else size for each in blocks))

    return {name: replace(recipe, x=smaller(recipe.x), w=smaller(recipe.w)) for name, recipe in RECIPES.items()}
