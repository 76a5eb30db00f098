"""Rules of the tensor-parallel modes, derived from their plans: each dimension is divisible by the axes that shard it.

No mode is named here: a plan gives the layouts of X[M, K], W[N, K] and Y[M, N], and the model gives M, K and N.
Tensors are stored in shards at least as fine as those of the matmul, so it is enough to check how they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts, describe_mode, near_divisors, near_multiples
from megatron3d.config.validate.rampup import ramp_length_problems
from megatron3d.config.yaml_origins import show
from megatron3d.model.architecture import Architecture
from megatron3d.parallel.async_plan import async_plan
from megatron3d.parallel.matmul_plan import MatmulPlan, traffic
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.parallel.modes.mode import Mode


def form_problems(facts: Facts) -> Iterator[str]:
    """Yield the contradictions between mode, form, shape and size of the tensor axes."""
    parallel = facts.config.parallel
    name, entry = parallel.tensor_parallel_mode, MODES[parallel.tensor_parallel_mode]
    form, shape = parallel.tensor_parallel_form, parallel.tensor_parallel_shape
    size = parallel.tensor_model_parallel_size
    if form is not None and form not in entry.forms:
        where = facts.named("parallel.tensor_parallel_form")
        yield f"{where}: mode {name} has no such form; use {one_of(entry.forms)}"
    if parallel.sequence_parallel and "sequence_parallel" not in entry.forms:
        able = [mode for mode, other in MODES.items() if "sequence_parallel" in other.forms]
        where = facts.named("parallel.sequence_parallel")
        yield f"{where}: mode {name} already splits the tokens; use false, or tensor_parallel_mode {one_of(able)}"
    elif parallel.sequence_parallel and form not in (None, "sequence_parallel"):
        where = facts.named("parallel.sequence_parallel")
        yield f"{where}: contradicts parallel.tensor_parallel_form={form}; give only one of the two"
    if shape is None:
        return
    where = facts.named("parallel.tensor_parallel_shape")
    if len(shape) != len(entry.axis_names):
        example = show(entry.default_shape(math.prod(shape)))
        axes = ", ".join(entry.axis_names)
        yield (
            f"{where}: mode {name} has {len(entry.axis_names)} axes ({axes}), not {len(shape)}; "
            f"use for example {example}"
        )
    elif size is not None and math.prod(shape) != size:
        product = f"{' x '.join(map(str, shape))} = {math.prod(shape)}"
        example = show(entry.default_shape(size))
        yield (
            f"{where}: {product} is not parallel.tensor_model_parallel_size={size}; "
            f"use {example}, or tensor_model_parallel_size {math.prod(shape)} or none"
        )


@dataclass(frozen=True)
class Dimension:
    """A dimension of the model, and the sets of axes whose product must divide it."""

    label: str
    size: int
    splits: tuple[Axes, ...]


def feature_dimensions(arch: Architecture, mode: Mode) -> Iterator[Dimension]:
    """Yield the feature dimensions that the mode shards; heads stay whole in the inner stream and in the QKV weight.

    Key/value groups may be sharded: where there are fewer groups than ranks, they are all-gathered before use.
    """
    up, down = mode.expand, mode.contract
    embed = mode.embed
    hidden = (up.x_layout[1], up.w_layout[1], down.w_layout[0], down.y_layout[1], embed.w_layout[0], embed.y_layout[1])
    into, out_of = (up.w_layout[0], up.y_layout[1]), (down.x_layout[1], down.w_layout[1])
    heads, groups = arch.num_attention_heads, arch.num_query_groups
    channels = arch.kv_channels
    yield Dimension(f"model.hidden_size={arch.hidden_size}", arch.hidden_size, hidden)
    yield Dimension(f"model.ffn_hidden_size={arch.ffn_hidden_size}", arch.ffn_hidden_size, into + out_of)
    yield Dimension(f"model.num_attention_heads={heads}", heads, into)
    yield from _latent_dimensions(arch, mode)
    values = f"v_head_dim {arch.value_size}" if arch.is_latent else f"kv_channels {channels}"
    product = f"{heads * arch.value_size}, model.num_attention_heads={heads} x {values}"
    yield Dimension(product, heads * arch.value_size, out_of)
    if groups != heads:
        product = f"{groups * channels}, model.num_query_groups={groups} x kv_channels {channels}"
        yield Dimension(product, groups * channels, into)


def _latent_dimensions(arch: Architecture, mode: Mode) -> Iterator[Dimension]:
    """Yield the latents of attention, which are sharded as the residual stream, and their parts of a weight as well."""
    stored, inputs = mode.latent.y_layout[1], (mode.expand.x_layout[1], mode.expand.w_layout[1])
    for key, splits in (("q_lora_rank", inputs), ("kv_lora_rank", inputs), ("qk_pos_emb_head_dim", ())):
        if size := getattr(arch, key):
            yield Dimension(f"model.{key}={size}", size, (stored, *splits))


def feature_problems(facts: Facts, mode: Mode) -> Iterator[str]:
    """Yield a message per feature dimension and set of axes that does not divide it."""
    given = facts.config.parallel.tensor_parallel_shape is not None or len(facts.spec.tensor_shape) == 1
    for dimension in feature_dimensions(facts.arch, mode):
        for axes in _smallest_failing(mode, dimension):
            size, names = _size(mode, axes), "*".join(axes)
            lead = "" if given else "a parallel.tensor_parallel_shape with "
            lead += "" if given and len(axes) == 1 else f"{names} = "
            yield (
                f"{facts.named(facts.shape_key)}: {names} = {size} does not divide {dimension.label}; "
                f"use {lead}{one_of(near_divisors(dimension.size, size))}"
            )


def token_problems(facts: Facts, mode: Mode) -> Iterator[str]:
    """Yield a message if a microbatch is not evenly divisible: into sequences in attention, into tokens elsewhere."""
    rows, length = facts.config.train.micro_batch_size, facts.config.model.seq_length
    how = f"over which {describe_mode(facts.spec)} splits"
    step, axes = _common_step(mode, (mode.sequence_axes,))
    if rows % step:
        yield (
            f"{facts.named('train.micro_batch_size')}: not a multiple of {axes}, {how} whole sequences; "
            f"use {one_of(near_multiples(step, rows))}"
        )
    plans = (mode.expand, mode.contract, mode.embed)
    splits = tuple(part for plan in plans for part in (plan.x_layout[0], plan.y_layout[0]))
    step, axes = _common_step(mode, (*splits, mode.home) if facts.arch.experts else splits)
    if rows * length % step:
        lengths = near_multiples(step // math.gcd(step, rows), length)
        yield (
            f"{facts.named('model.seq_length')}: micro_batch_size {rows} x {length} = {rows * length} tokens are not "
            f"a multiple of {axes}, {how} them; use {one_of(lengths)}"
        )
    yield from ramp_length_problems(facts, step)


def execution_problems(facts: Facts, mode: Mode) -> Iterator[str]:
    """Yield a message per communication option that has no communication to act on."""
    parallel, mesh = facts.config.parallel, Mesh(mode.axes)
    plans = [plan.on(mesh) for plan in (mode.expand, mode.contract)]
    able = [name for name, entry in MODES.items() if build_mode(name, None, entry.default_shape(8)).expand.w]
    train = facts.config.train
    if train.tp_grad_reduce_in_bf16 and train.precision == "bf16" and not any(plan.w for plan in plans):
        where = facts.named("train.tp_grad_reduce_in_bf16")
        yield f"{where}: {describe_mode(facts.spec)} reduces no weight gradients; use false, or mode {one_of(able)}"
    if parallel.tp_keep_gathered_weights and not any(plan.w for plan in plans):
        where = facts.named("parallel.tp_keep_gathered_weights")
        yield f"{where}: {describe_mode(facts.spec)} all-gathers no weights; use false, or mode {one_of(able)}"
    if parallel.tp_num_panels > 1 and not any(traffic(plan, mesh, 1, 1, 1, 1) for plan in plans):
        where = facts.named("parallel.tp_num_panels")
        yield f"{where}: no tensor-parallel communication to overlap; use 1, or tensor_model_parallel_size 2 or more"
    if parallel.tp_comm_overlap:
        yield from _async_problems(facts, plans)


def _async_problems(facts: Facts, plans: Sequence[MatmulPlan]) -> Iterator[str]:
    """Yield a message where nothing could run in rounds with its GEMM, and where panels move the operands."""
    where, panels = facts.named("parallel.tp_comm_overlap"), facts.config.parallel.tp_num_panels
    if facts.spec.tensor_size == 1:
        yield f"{where}: no tensor-parallel communication; use false, or tensor_model_parallel_size 2 or more"
    elif all(async_plan(plan).is_empty for plan in plans):
        yield (
            f"{where}: {describe_mode(facts.spec)} neither all-gathers tokens before a GEMM nor reduce-scatters after "
            f"one; use false, or {one_of(tuple(_forms_in_rounds()))}"
        )
    elif panels > 1:
        yield f"{where}: contradicts parallel.tp_num_panels={panels}; use false, or tp_num_panels 1"


def _forms_in_rounds() -> Iterator[str]:
    """Yield the modes and forms with collectives that can run in rounds, on their default shape of 8 ranks."""
    for name, entry in MODES.items():
        for form in entry.forms:
            mode = build_mode(name, form, entry.default_shape(8))
            if not all(async_plan(plan).is_empty for plan in (mode.expand, mode.contract)):
                yield f"{name} {form}"


def _common_step(mode: Mode, splits: tuple[Axes, ...]) -> tuple[int, str]:
    """Return the least common multiple of the sizes of these sets of axes, and the sets as text."""
    sizes = dict(mode.axes)
    cuts = {tuple(axis for axis in axes if sizes[axis] > 1): _size(mode, axes) for axes in splits}
    words = " and ".join(f"{'*'.join(axes)} = {size}" for axes, size in cuts.items() if axes)
    return math.lcm(*cuts.values()), words


def _size(mode: Mode, axes: Axes) -> int:
    sizes = dict(mode.axes)
    return math.prod(sizes[axis] for axis in axes)


def _smallest_failing(mode: Mode, dimension: Dimension) -> list[Axes]:
    """Return the smallest sets of axes that do not divide the size, in mesh order."""
    names = tuple(name for name, size in mode.axes if size > 1)
    failing: list[Axes] = []
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            together = any(set(axes) <= set(split) for split in dimension.splits)
            known = any(set(smaller) <= set(axes) for smaller in failing)
            if together and not known and dimension.size % _size(mode, axes):
                failing.append(axes)
    return failing
