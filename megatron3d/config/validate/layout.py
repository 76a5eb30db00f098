"""Rules of the layout, derived from plans and schedules: what must be divisible by which axes, stages and microbatches.

No tensor-parallel mode is named here: a plan gives the layouts of X[M, K], W[N, K] and Y[M, N], and the model gives M,
K and N.  Tensors are stored in shards at least as fine as those of the matmul, so it is enough to check how they are
stored.  Every length of a sequence is a whole number of chunks, two per context rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path

from megatron3d.attention.context.plan import BOTH, CONTEXT_EXCHANGES, DOCUMENTS, ZIGZAG, head_axes
from megatron3d.config.read import one_of
from megatron3d.config.validate.facts import Facts, describe_mode, near_divisors, near_multiples, plain, unreadable
from megatron3d.config.yaml_origins import show
from megatron3d.data.ramp_plan import Ramp
from megatron3d.errors import UserError
from megatron3d.linear.overlap_plan import async_plan
from megatron3d.model.option_table import MAX_LAYERS
from megatron3d.model.param_spec import param_specs
from megatron3d.model.spec import Architecture
from megatron3d.model.stage_plan import divide
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.parallel.modes.mode import Mode
from megatron3d.pipeline.actions import stage_to_rank
from megatron3d.pipeline.schedules import FROM_FILE, ONE_F_ONE_B, SCHEDULES, num_microbatches, schedules_with
from megatron3d.pipeline.validate import read_schedule
from megatron3d.runtime.arguments import shorten

BATCH, LENGTH = "train.rampup_batch_size", "train.seq_length_warmup"
MAX_STEPS = 10_000
ENDS = {BATCH: "train.global_batch_size", LENGTH: "model.seq_length"}


def group_problems(facts: Facts, mode: Mode) -> Iterator[str]:
    """Yield a message per pattern of parameter groups that fits no parameter, or only a part of what one stores."""
    optimizer, where = facts.config.optimizer, facts.named("optimizer.param_groups")
    specs = param_specs(facts.spec.arch, mode).values() if optimizer.param_groups else ()
    tensors = [[part.name for part in spec.parts] for spec in specs]
    for number, group in enumerate(optimizer.param_groups, 1):
        if group.optimizer is not None and not optimizer.needs_matrices:
            rule = plain(facts.config, "optimizer.optimizer")
            yield f"{where}: entry {number} asks for {group.optimizer}, but {rule} updates all; leave optimizer out"
        for pattern in group.patterns:
            if not any(fnmatchcase(name, pattern) for names in tensors for name in names):
                some = one_of(names[0] for names in tensors[:3])
                yield f"{where}: {show(pattern)} fits no parameter; use names such as {some}"
        for names in tensors:
            left = [name for name in names if not group.names([name])]
            if left and len(left) < len(names):
                named = next(name for name in names if name not in left)
                yield (
                    f"{where}: entry {number} names {named}, but not {left[0]}, which is stored in the same "
                    "parameter; name all of its parts or none"
                )
                break


def ramp_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per ramp whose steps do not reach the final value exactly."""
    batches = facts.spec.batches
    for key, ramp in ((BATCH, batches.size), (LENGTH, batches.length)):
        way, end = ramp.end - ramp.start, plain(facts.config, ENDS[key])
        if way // ramp.increment > MAX_STEPS:
            yield (
                f"{facts.named(key)}: {way // ramp.increment} steps of {ramp.increment} to {end}, more than "
                f"{MAX_STEPS}; use steps of {-(-way // MAX_STEPS)} or more"
            )
        elif way < 0:
            yield f"{facts.named(key)}: starts above {end}; use a start of 1 to {ramp.end}"
        elif way % ramp.increment:
            where, use = facts.named(key), f"steps of {one_of(near_divisors(way, ramp.increment))}"
            yield f"{where}: from {ramp.start} in steps of {ramp.increment} it does not reach {end}; use {use}"


def ramp_batch_problems(facts: Facts, step: int) -> Iterator[str]:
    """Yield a message if a batch size on the ramp is not a multiple of `step` sequences, a microbatch per data rank."""
    train = facts.config.train
    if train.rampup_batch_size is not None and train.global_batch_size % step == 0:
        rows = train.micro_batch_size
        rule = f"micro_batch_size {rows} x data parallel {step // rows} = {step}"
        yield from _uneven_steps(facts, BATCH, facts.spec.batches.size, step, rule)


def ramp_length_problems(facts: Facts, step: int) -> Iterator[str]:
    """Yield a message if, for a length on the ramp, the tokens of a microbatch are not a multiple of `step`."""
    train, rows = facts.config.train, facts.config.train.micro_batch_size
    if train.seq_length_warmup is not None and rows * facts.config.model.seq_length % step == 0:
        least = step // math.gcd(step, rows)
        why = f"so that micro_batch_size {rows} x length is a multiple of the {step} ranks that split tokens"
        yield from _uneven_steps(facts, LENGTH, facts.spec.batches.length, least, f"{least}, {why}")


def _uneven_steps(facts: Facts, key: str, ramp: Ramp, step: int, rule: str) -> Iterator[str]:
    """Yield a message if start and increment of a ramp are not multiples of `step`, which `rule` explains."""
    if ramp.start % step or ramp.increment % step:
        first = min(max(ramp.start // step, 1) * step, ramp.end)
        use = f"for example [{first},{step},{ramp.num_samples}]"
        yield f"{facts.named(key)}: start and increment must be multiples of {rule}; use {use}"


SIZE = "parallel.context_parallel_size"
EXCHANGE, SIZES = "parallel.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"
BALANCER = "parallel.context_parallel_load_balancer"
ANY = CONTEXT_EXCHANGES[0]


def has_chunks(facts: Facts) -> bool:
    """Return whether the length of sequences is a whole number of chunks, two for each context rank."""
    size = facts.config.parallel.context_parallel_size
    return size == 1 or facts.config.model.seq_length % (2 * size) == 0


def context_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per length that the context ranks cannot split, and where there are no documents to balance."""
    size, model = facts.config.parallel.context_parallel_size, facts.config.model
    if size == 1:
        return
    balancer = facts.config.parallel.context_parallel_load_balancer
    if balancer == DOCUMENTS and not facts.config.data.reset_attention_mask:
        yield (
            f"{facts.named(BALANCER)}: without data.reset_attention_mask every sequence is one document, of which "
            f"{ZIGZAG} gives all ranks the same work; use data.reset_attention_mask=true, or {ZIGZAG}"
        )
    step = 2 * size
    if not has_chunks(facts):
        yield (
            f"{facts.named(SIZE)}: model.seq_length={model.seq_length} is not a multiple of {step}, two chunks for "
            f"each of {size} ranks; use model.seq_length {one_of(near_multiples(step, model.seq_length))}, or another "
            "context_parallel_size"
        )
        return
    if facts.config.train.seq_length_warmup is not None:
        rule = f"{step}, two chunks of a sequence for each of the {size} context ranks"
        yield from _uneven_steps(facts, LENGTH, facts.spec.batches.length, step, rule)


def hierarchy_problems(facts: Facts) -> Iterator[str]:
    """Yield what is wrong with the sizes of the two context axes, which `a2a+p2p` needs and no other exchange has."""
    parallel = facts.config.parallel
    size, sizes = parallel.context_parallel_size, parallel.hierarchical_context_parallel_sizes
    if parallel.cp_comm_type != BOTH:
        if sizes is not None:
            yield f"{facts.named(SIZES)}: only parallel.cp_comm_type={BOTH} has two sizes; remove it"
        return
    divisors = [inner for inner in range(2, size) if size % inner == 0]
    example = f"[{divisors[0]},{size // divisors[0]}]" if divisors else None
    use = f"for example {example}" if example else f"a context_parallel_size such as 4, or cp_comm_type {ANY}"
    if sizes is None:
        yield f"{facts.named(EXCHANGE)}: needs {SIZES}, the ranks of a2a and of p2p; use {use}"
    elif sizes[0] * sizes[1] != size or 1 in sizes:
        yield f"{facts.named(SIZES)}: must be two sizes above 1 whose product is {SIZE}={size}; use {use}"


def exchange_problems(facts: Facts) -> Iterator[str]:
    """Yield heads that the ranks of an exchange do not divide."""
    arch, mode = facts.arch, facts.spec.mode
    if not mode.context or mode.exchange == ANY:
        return
    mesh = Mesh(mode.axes)
    heads = arch.num_attention_heads // mesh.size(mode.inner[1])
    ranks = mesh.size(head_axes(mode.exchange, mode.context))
    if heads % ranks:
        yield (
            f"{facts.named(EXCHANGE)}: {heads} query heads on each rank, of model.num_attention_heads="
            f"{arch.num_attention_heads}, do not divide by the {ranks} ranks that exchange heads; "
            f"use p2p or {ANY}, or another context_parallel_size"
        )


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
        use = f"for example {example}"
        yield f"{where}: mode {name} has {len(entry.axis_names)} axes ({axes}), not {len(shape)}; use {use}"
    elif size is not None and math.prod(shape) != size:
        product = f"{' x '.join(map(str, shape))} = {math.prod(shape)}"
        example = show(entry.default_shape(size))
        use = f"{example}, or tensor_model_parallel_size {math.prod(shape)} or none"
        yield f"{where}: {product} is not parallel.tensor_model_parallel_size={size}; use {use}"


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
            use = f"{lead}{one_of(near_divisors(dimension.size, size))}"
            yield f"{facts.named(facts.shape_key)}: {names} = {size} does not divide {dimension.label}; use {use}"


def token_problems(facts: Facts, mode: Mode) -> Iterator[str]:
    """Yield a message if a microbatch is not evenly divisible: into sequences in attention, into tokens elsewhere."""
    rows, length = facts.config.train.micro_batch_size, facts.config.model.seq_length
    how = f"over which {describe_mode(facts.spec)} splits"
    step, axes = _common_step(mode, (mode.sequence_axes,))
    if rows % step:
        use = one_of(near_multiples(step, rows))
        yield f"{facts.named('train.micro_batch_size')}: not a multiple of {axes}, {how} whole sequences; use {use}"
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
    if facts.spec.tensor_size == 1:
        return
    if train.tp_grad_reduce_in_bf16 and train.precision == "bf16" and not any(plan.w for plan in plans):
        where = facts.named("train.tp_grad_reduce_in_bf16")
        yield f"{where}: {describe_mode(facts.spec)} reduces no weight gradients; use false, or mode {one_of(able)}"
    if parallel.tp_keep_gathered_weights and not any(plan.w for plan in plans):
        where = facts.named("parallel.tp_keep_gathered_weights")
        yield f"{where}: {describe_mode(facts.spec)} all-gathers no weights; use false, or mode {one_of(able)}"
    if parallel.tp_comm_overlap:
        yield from _async_problems(facts, plans)


def _async_problems(facts: Facts, plans: Sequence[MatmulPlan]) -> Iterator[str]:
    """Yield a message where nothing could run in rounds with its GEMM."""
    where = facts.named("parallel.tp_comm_overlap")
    if all(async_plan(plan).is_empty for plan in plans):
        yield (
            f"{where}: {describe_mode(facts.spec)} neither all-gathers tokens before a GEMM nor reduce-scatters after "
            f"one; use false, or {one_of(tuple(_forms_in_rounds()))}"
        )


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


SCHEDULE, FILE_KEY = "parallel.pipeline_schedule", "parallel.pipeline_schedule_file"
RANKS, VIRTUAL = "parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_model_parallel_size"
LAYOUT = "parallel.pipeline_model_parallel_layout"
MAKE_ONE = "a CSV with a row of actions per rank, as tools/plot_schedule.py writes"


def pipeline_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of the schedule's name, the stages per rank, and the layers per stage."""
    parallel = facts.config.parallel
    name, virtual = parallel.pipeline_schedule, parallel.virtual_pipeline_model_parallel_size
    if name == FROM_FILE:
        if parallel.pipeline_schedule_file is None:
            yield f"{facts.named(SCHEDULE)}: no {FILE_KEY}; name {MAKE_ONE}"
        if virtual is not None:
            yield (
                f"{facts.named(VIRTUAL)}: not used with {plain(facts.config, SCHEDULE)}, whose file determines it; "
                "leave it out"
            )
        return
    if parallel.pipeline_schedule_file is not None:
        other = plain(facts.config, SCHEDULE)
        yield f"{facts.named(FILE_KEY)}: not used with {other}; use {FROM_FILE}, or leave it out"
    entry = SCHEDULES[name]
    if virtual is not None and not entry.supports(virtual):
        takes = f"{entry.min_virtual}{' or more' if entry.max_virtual is None else ''}"
        use = f"{entry.min_virtual}, or pipeline_schedule {one_of(schedules_with(virtual))}"
        yield f"{facts.named(VIRTUAL)}: {plain(facts.config, SCHEDULE)} takes {takes} on each rank; use {use}"
        return
    layout = parallel.pipeline_model_parallel_layout
    num_stages = parallel.pipeline_model_parallel_size * facts.spec.num_virtual_stages
    if num_stages > (MAX_LAYERS if layout is not None else facts.config.model.num_layers):
        yield _too_many_stages(facts)
    elif layout is not None:
        yield from layout_problems(facts, facts.spec.stage_owners)


def _too_many_stages(facts: Facts) -> str:
    """Return the message for more stages than layers, with every single change that fixes it."""
    parallel, layers = facts.config.parallel, facts.config.model.num_layers
    name, ranks = parallel.pipeline_schedule, parallel.pipeline_model_parallel_size
    virtual = facts.spec.num_virtual_stages
    remedies = []
    others = facts.world_size // facts.spec.tensor_size
    if fitting := [n for n in range(1, layers // virtual + 1) if others % n == 0]:
        remedies.append(f"{max(fitting)}")
    if virtual > 1 and ranks <= layers:
        fewer = layers // ranks
        fits = SCHEDULES[name].supports(fewer)
        # 1F1B of a given number of stages is the interleaved schedule again.
        single = [
            each
            for each in schedules_with(1)
            if each != ONE_F_ONE_B or parallel.virtual_pipeline_model_parallel_size is None
        ]
        change = f"{VIRTUAL} {fewer}" if fits else f"{SCHEDULE} {one_of(single)}"
        remedies.append(change.removeprefix("parallel."))
    if ranks * virtual <= MAX_LAYERS or not remedies:
        remedies.append(f"model.num_layers {ranks * virtual} or more")
    product = f"{ranks} rank{'s' * (ranks > 1)} x {virtual} stages = {ranks * virtual}"
    stages = f"{ranks} stages are" if virtual == 1 else f"{product} are"
    return f"{facts.named(RANKS)}: {stages} more than model.num_layers={layers}; use {', or '.join(remedies)}"


def layout_problems(facts: Facts, where: Sequence[int]) -> Iterator[str]:
    """Yield the problems of a given layout: one number per stage, layers in total, no rank without parameters."""
    layout, layers = facts.config.parallel.pipeline_model_parallel_layout, facts.config.model.num_layers
    assert layout is not None, "only a given layout is checked"
    between = sorted(set(where) - {where[0], where[-1]})
    if len(between) > layers:
        most = len(set(where)) - len(between) + layers
        yield (
            f"{facts.named(RANKS)}: {len(between)} ranks have neither the first nor the last stage, more than "
            f"model.num_layers={layers}; use at most {most}, or model.num_layers {len(between)} or more"
        )
        return
    example = show(_example(facts, where, between))
    holders = {owner for owner, count in zip(where, layout, strict=False) if count}
    if len(layout) != len(where):
        many = f"{len(layout)} number{'s' * (len(layout) != 1)} for {len(where)} stage{'s' * (len(where) != 1)}"
        without = ", or leave it out" if layers >= len(where) else ""
        yield f"{facts.named(LAYOUT)}: {many} that hold model.num_layers={layers}; use for example {example}{without}"
    elif sum(layout) != layers:
        total = " = ".join(dict.fromkeys((shorten("+".join(map(str, layout))), str(sum(layout)))))
        yield f"{facts.named(LAYOUT)}: {total} is not model.num_layers={layers}; use for example {example}"
    elif empty := [rank for rank in between if rank not in holders]:
        ranks = shorten(f"rank{'s' * (len(empty) > 1)} {', '.join(map(str, empty))}")
        yield f"{facts.named(LAYOUT)}: {ranks} of the pipeline would hold no parameter; use for example {example}"


def _example(facts: Facts, where: Sequence[int], between: Sequence[int]) -> tuple[int, ...]:
    """Return a valid layout, balanced by cost; if layers are too few, ranks `between` the ends get them first."""
    layers = facts.config.model.num_layers
    if layers >= len(where):
        return divide(facts.arch, len(where), where)
    first = {rank: stage for stage, rank in reversed(list(enumerate(where)))}
    needed = dict.fromkeys(first[rank] for rank in between)
    chosen = {*list(needed | dict.fromkeys(range(len(where))))[:layers]}
    return tuple(int(stage in chosen) for stage in range(len(where)))


def file_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of a schedule file: deadlocks, and sizes that are not those of this run."""
    parallel, where = facts.config.parallel, facts.named(FILE_KEY)
    if parallel.pipeline_schedule != FROM_FILE or parallel.pipeline_schedule_file is None:
        return
    path = Path(parallel.pipeline_schedule_file)
    if problem := unreadable(path, may_be_empty=True):
        yield type(problem)(f"{where}: {problem}; use {MAKE_ONE}")
        return
    try:
        schedule = read_schedule(path)
    except UserError as error:
        yield from (f"{where}: {problem.removeprefix(f'{path}: ')}" for problem in error.problems)
        return
    ranks = parallel.pipeline_model_parallel_size
    if (there := len(schedule)) != ranks:
        rule = f"is for {there} rank{'s' * (there > 1)}, not {plain(facts.config, RANKS)}"
        yield f"{where}: {rule}; use {there}, or a file for {ranks}"
    yield from _microbatch_problems(facts, num_microbatches(schedule))
    stages, layers = tuple(stage_to_rank(schedule).values()), facts.config.model.num_layers
    if parallel.pipeline_model_parallel_layout is not None:
        yield from layout_problems(facts, stages)
    elif len(stages) > layers:
        use = f"num_layers {len(stages)} or more, or a file of at most {layers} stages"
        yield f"{where}: has {len(stages)} stages, more than model.num_layers={layers}; use {use}"


def _microbatch_problems(facts: Facts, microbatches: int) -> Iterator[str]:
    """Yield a message if the file is for another number of microbatches; batch_problems reports a fractional one."""
    train, sizes = facts.config.train, facts.spec.sizes
    step = train.micro_batch_size * sizes.data
    if sizes.mismatch or train.global_batch_size % step:
        return
    if (asked := train.global_batch_size // step) != microbatches:
        yield (
            f"{facts.named(FILE_KEY)}: is for {microbatches} microbatches, and train.global_batch_size="
            f"{train.global_batch_size} / (micro_batch_size {train.micro_batch_size} x data parallel {sizes.data}) is "
            f"{asked}; use global_batch_size {microbatches * step}, or a file for {asked}"
        )
