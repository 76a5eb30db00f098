"""Rules of fp8: blocks that share a scale lie within shards, and what linears with fp8 operands are not used with."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from megatron3d.attention.context.plan import DOCUMENTS
from megatron3d.config.read import one_of
from megatron3d.config.validate.facts import Facts, plain
from megatron3d.config.yaml_origins import show
from megatron3d.experts.plan import expert_plan
from megatron3d.linear.fp8_plan import RECIPES, Fp8
from megatron3d.model.linear_spec import EXPERT_LINEARS, LinearSize, linears_of_model
from megatron3d.model.spec import LAYERNORM, MLP_ACT, MOE_ACT
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes.mode import Mode

RECIPE = "train.fp8_recipe"


def fp8_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key that contradicts `train.fp8`, and per pattern that fits no linear."""
    config, fp8 = facts.config, facts.spec.fp8
    if fp8 is None:
        return
    where, parallel, recompute = facts.named("train.fp8"), config.parallel, facts.spec.recompute
    if parallel.tp_comm_overlap:
        rounds = plain(config, "parallel.tp_comm_overlap")
        yield f"{where}: the rounds of {rounds} do not multiply fp8; leave one of the two out"
    if parallel.tp_keep_gathered_weights:
        kept = plain(config, "parallel.tp_keep_gathered_weights")
        yield f"{where}: backward multiplies another form of W than {kept} keeps; leave one of the two out"
    if again := [
        name for name in (LAYERNORM, MLP_ACT, MOE_ACT) if name in recompute.chosen and recompute.recomputes(name)
    ]:
        yield (
            f"{where}: the linear after a module of train.recompute_modules={show(again)} keeps its input in fp8, so "
            "that nothing is saved; use other modules, or recompute_granularity full"
        )
    if config.logging.fp8_stats_interval is not None and config.train.compile is True:
        yield (
            f"{facts.named('logging.fp8_stats_interval')}: no element is counted with train.compile=true; use "
            "train.compile=auto"
        )
    if config.logging.fp8_loss_interval is not None:
        yield from _fp8_loss_problems(facts)
    if config.train.fp8_param_gather and not fp8.recipe.w.is_square:
        square = one_of([name for name, recipe in RECIPES.items() if recipe.w.is_square])
        yield (
            f"{facts.named('train.fp8_param_gather')}: backward multiplies W^T, whose blocks with "
            f"{plain(config, RECIPE)} are not those of W, and whose values are not stored; use fp8_recipe {square}"
        )
    paths = linears_of_model(facts.arch)
    for pattern in config.train.fp8_exclude:
        if not any(fnmatchcase(path, pattern) for path in paths):
            yield f"{facts.named('train.fp8_exclude')}: {show(pattern)} fits no linear; use {one_of(list(paths)[:3])}"
    if not any(map(fp8.takes, paths)):
        yield f"{where}: no linear is left that multiplies in fp8; leave it out, or exclude fewer"


def _fp8_loss_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key with which a forward of its own in precision has not the loss of the step."""
    config, where = facts.config, facts.named("logging.fp8_loss_interval")
    reasons = {
        "train.fp8_param_gather": (config.train.fp8_param_gather, "ranks have no weights in precision with"),
        "model.moe_expert_capacity_factor": (
            config.model.moe_expert_capacity_factor is not None,
            "forward alone drops no tokens, as a step does with",
        ),
    }
    for key, (is_on, why) in reasons.items():
        if is_on:
            yield f"{where}: {why} {plain(config, key)}; leave one of the two out"


def block_problems(facts: Facts, mode: Mode) -> Iterator[str]:
    """Yield a message per linear, and for the tokens, whose shards are no multiple of the recipe's blocks."""
    fp8 = facts.spec.fp8
    if fp8 is None or fp8.recipe.block is None:
        return
    sizes = {path.split(".", 2)[-1]: size for path, size in linears_of_model(facts.arch).items() if fp8.takes(path)}
    for name, size in sizes.items():
        yield from _linear_problems(facts, fp8, mode, name, size)
    yield from _token_problems(facts, fp8, mode)


def _linear_problems(facts: Facts, fp8: Fp8, mode: Mode, name: str, size: LinearSize) -> Iterator[str]:
    plan, mesh, block = size.plan(mode), Mesh(mode.axes), fp8.recipe.block or 1
    if name.removeprefix("layer.") in EXPERT_LINEARS:
        etensor = facts.config.parallel.expert_tensor_parallel_size
        plan, mesh = expert_plan(size.expands, ("etensor",)), Mesh((("etensor", etensor),))
    outputs = _ranks((*plan.w_layout[0], *plan.y_layout[1]), mesh)
    inputs = _ranks((*plan.w_layout[1], *plan.x_layout[1]), mesh)
    for what, features, ranks in [
        *((part, n, outputs) for part, n in size.outputs.items()),
        ("input", size.num_inputs, inputs),
    ]:
        if features % (block * ranks):
            among = f" among {ranks} ranks" if ranks > 1 else ""
            yield (
                f"{facts.named(RECIPE)}: blocks of {block} features share a scale, but the {features} features of "
                f"{what} of {name} are divided{among} into shards of {features / ranks:g}; "
                f"use a multiple of {block * ranks}, {_others()}"
            )


def _token_problems(facts: Facts, fp8: Fp8, mode: Mode) -> Iterator[str]:
    config, block, mesh = facts.config, fp8.recipe.block or 1, Mesh(mode.axes)
    rows, length, where = config.train.micro_batch_size, config.model.seq_length, facts.named(RECIPE)
    context = config.parallel.context_parallel_size
    split = _ranks([axis for axis in (*mode.residual[0], *mode.inner[0]) if axis not in mode.context], mesh)
    if context > 1 and config.parallel.context_parallel_load_balancer == DOCUMENTS:
        yield (
            f"{where}: blocks of {block} tokens share a scale, but "
            f"{plain(config, 'parallel.context_parallel_load_balancer')} divides sequences anywhere; use another "
            f"balancer, {_others()}"
        )
    elif context > 1 and length % (2 * context * block):
        yield (
            f"{where}: blocks of {block} tokens share a scale, but {2 * context} chunks of model.seq_length={length} "
            f"have {length / (2 * context):g}; use a multiple of {2 * context * block}, {_others()}"
        )
    elif rows * length % (context * split * block):
        yield (
            f"{where}: blocks of {block} tokens share a scale, but each rank has "
            f"{rows * length / (context * split):g} of train.micro_batch_size={rows} sequences of "
            f"model.seq_length={length}; use lengths whose share is a multiple of {block}, {_others()}"
        )
    elif config.train.seq_length_warmup is not None and any(
        rows * size % (context * split * block) for size in config.train.seq_length_warmup[:2]
    ):
        yield (
            f"{where}: blocks of {block} tokens share a scale, which lengths of "
            f"{plain(config, 'train.seq_length_warmup')} are no multiple of; use multiples of {block}, {_others()}"
        )


def _ranks(axes: Axes | list[str], mesh: Mesh) -> int:
    return mesh.size(dict.fromkeys(axes))


def _others() -> str:
    """Return the recipes without blocks, as the end of a sentence."""
    return f"or fp8_recipe {one_of([name for name, recipe in RECIPES.items() if recipe.block is None])}"
