"""The resolved configuration as text: batch and rank arithmetic, sizes that are slow, and every value with its origin.

Tensor cores read tiles of 64 columns, and fused attention heads of multiples of 8; published runs with other sizes take
up to 1.5 times as long (NVIDIA, Matrix Multiplication Background User's Guide, "requirements to use tensor cores").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path

import yaml

from megatron3d import __version__
from megatron3d.config.read import SECTIONS, Resolved
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.validate.facts import describe_tensor
from megatron3d.config.yaml_origins import is_plain, show
from megatron3d.errors import UserError, one_line
from megatron3d.model.linear_spec import layer_linears
from megatron3d.model.spec import Architecture
from megatron3d.model.stage_plan import divide
from megatron3d.parallel.layout import span
from megatron3d.pipeline.schedules import FROM_FILE, Pipeline, stage_flops
from megatron3d.pipeline.simulate import simulate_durations
from megatron3d.runtime.files import write_text

COLUMNS, HEAD = 64, 8
# Precisions that tensor cores compute in tiles.
_NARROW = ("bf16", "fp16")


def slow_shapes(spec: RunSpec) -> Iterator[str]:
    """Yield a line for each size of a valid run that is slow on GPUs, with the next size that is not."""
    if spec.config.train.precision not in _NARROW:
        return
    head = spec.arch.kv_channels
    if head % HEAD:
        yield (
            f"slow on GPUs: heads of {head} channels are not a multiple of {HEAD}; "
            f"model.kv_channels={_up(head, HEAD)} is the next that is"
        )
    sizes: dict[int, list[str]] = {}
    for name, linear in layer_linears(spec.arch).items():
        plan = linear.plan(spec.mode).on(spec.mesh)
        for features, axes in ((linear.num_inputs, plan.k), (linear.num_outputs, plan.n)):
            low, high = span(features, axes, spec.mesh)
            if (high - low) % COLUMNS:
                sizes.setdefault(high - low, []).append(name)
    for size, names in sizes.items():
        less = f"{size // COLUMNS * COLUMNS:,} or " if size > COLUMNS else ""
        yield (
            f"slow on GPUs: a rank's {size:,} features of {', '.join(dict.fromkeys(names))} are not a multiple of "
            f"{COLUMNS}, as {less}{_up(size, COLUMNS):,} would be"
        )


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def batch_arithmetic(spec: RunSpec) -> str:
    """Return lines with the factors of the world size and of the global batch and, if there is one, the pipeline.

    The configuration must be valid.
    """
    train, sizes = spec.config.train, spec.sizes
    num_empty = spec.num_microbatches * sizes.data - train.global_batch_size // train.micro_batch_size
    empty = f", of which {num_empty} are empty" if num_empty else ""
    lines = [
        f"world_size {spec.world_size} = {describe_tensor(spec)} x {sizes.factors} x DP {sizes.data}",
        f"global_batch_size {train.global_batch_size} = micro_batch_size {train.micro_batch_size}"
        f" x data parallel {sizes.data} x microbatches {spec.num_microbatches}{empty}",
    ]
    if (samples := train.train_samples) is not None:
        used = spec.batches.consumed_samples(spec.train_iters)
        rest = f"{used - samples} more" if used > samples else f"{samples - used} left over"
        lines.append(f"train_samples {samples} = {spec.train_iters} iterations of {used} samples, {rest}")
    if sizes.pipeline > 1:
        lines.append(f"pipeline: {describe_pipeline(spec)}")
    return "\n".join(lines)


def describe_pipeline(spec: RunSpec) -> str:
    """Describe the schedule, the layers of its stages, and its expected bubble."""
    parallel = spec.config.parallel
    name = f"{FROM_FILE} {parallel.pipeline_schedule_file}" if spec.has_schedule_file else parallel.pipeline_schedule
    try:
        pipeline = spec.pipeline
    except UserError:  # the file is on another machine
        return f"{name}, {parallel.pipeline_model_parallel_size} ranks; stages and bubble are not known here"
    layers = join_runs([len(stage.layers) for stage in pipeline.stages])
    without = "" if spec.arch.vocab_size else ", without the head, whose vocabulary is not known yet"
    return (
        f"{name}, {len(pipeline.stages)} stages on {pipeline.num_ranks} ranks, "
        f"layers {layers}, expected bubble {100 * expected_bubble(pipeline, spec.arch):.1f} %{without}"
    )


def join_runs(counts: Sequence[int]) -> str:
    """Return counts as `3+3+2`, or as `15x3+2` where more than four in a row are equal."""
    runs = [list(group) for _, group in groupby(counts)]
    return "+".join(f"{len(run)}x{run[0]}" if len(run) > 4 else "+".join(map(str, run)) for run in runs)


def expected_bubble(pipeline: Pipeline, arch: Architecture) -> float:
    """Return the fraction of a step that ranks wait in, if the time of an action is proportional to its FLOPs."""
    flops = [stage_flops(arch, stage) for stage in pipeline.stages]
    return simulate_durations(pipeline.schedule, lambda action: flops[action.stage][action.kind]).idle_rate


def render(resolved: Resolved, vocab_size: int | None = None) -> str:
    """Return YAML that read_config reads back as an equal configuration; the comment of each line is its origin.

    `vocab_size` is the tokenizer's, on which the division of layers into stages depends (None: not known).
    """
    config = resolved.config
    spec = RunSpec(config, vocab_size=vocab_size or 0)
    derived = _derived(spec) | _derived_pipeline(spec)
    lines = [f"# The configuration of a run, resolved by megatron3d {__version__}; each value with its origin."]
    for section, names in SECTIONS.items():
        lines += ["", f"{section}:"]
        for name in names:
            key, value = f"{section}.{name}", getattr(getattr(config, section), name)
            origin = f"derived: {show(derived[key])}" if value is None and key in derived else resolved.origins[key]
            lines.append(f"  {f'{name}: {_scalar(value)}':<48} # {one_line(' '.join(origin.split()))}")
    return "\n".join(lines) + "\n"


def write_resolved(resolved: Resolved, path: Path, vocab_size: int | None = None) -> None:
    """Write `render` to a file atomically; its folder must exist."""
    write_text(path, render(resolved, vocab_size))


def _derived(spec: RunSpec) -> dict[str, object]:
    """Return the derived values of keys that are null."""
    null_keys = set(SECTIONS["model"]) & {each.name for each in fields(Architecture)} - {"vocab_size"}
    unit = "samples" if spec.lr_phases.counts_samples else "iters"
    return {f"model.{name}": getattr(spec.arch, name) for name in null_keys} | {
        "parallel.tensor_model_parallel_size": spec.tensor_size,
        "parallel.tensor_parallel_shape": spec.tensor_shape,
        "train.train_iters": spec.train_iters,
        f"optimizer.lr_decay_{unit}": spec.lr_phases.end,
    }


def _derived_pipeline(spec: RunSpec) -> dict[str, object]:
    """Return derived pipeline values that depend neither on a schedule file nor on an unknown vocabulary."""
    if spec.has_schedule_file:
        return {}
    derived: dict[str, object] = {"parallel.virtual_pipeline_model_parallel_size": spec.num_virtual_stages}
    owners = spec.stage_owners
    if spec.arch.vocab_size and len(owners) <= spec.arch.num_layers:
        derived["parallel.pipeline_model_parallel_layout"] = divide(spec.arch, len(owners), owners)
    return derived


def _scalar(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value, default=lambda each: each.model_dump(exclude_defaults=True))
    return value if is_plain(value) else yaml.safe_dump(value, default_style='"', width=math.inf).strip()
