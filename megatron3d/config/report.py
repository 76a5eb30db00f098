"""The resolved configuration as text: the arithmetic with its numbers, and every value with its origin."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import yaml

from megatron3d import __version__
from megatron3d.config.derive import (
    Pipeline,
    make_mesh,
    make_pipeline,
    num_microbatches,
    stage_owners,
    tensor_shape,
    tensor_size,
    virtual_size,
)
from megatron3d.config.read import Resolved
from megatron3d.config.schema import Config
from megatron3d.config.suggest import SECTIONS
from megatron3d.config.validate.facts import describe_tensor
from megatron3d.config.yaml_origins import is_plain, show
from megatron3d.errors import UserError
from megatron3d.model.architecture import Architecture, architecture
from megatron3d.model.stages import divide, stage_flops
from megatron3d.parallel.mesh import DATA, Mesh
from megatron3d.pipeline.schedules import FILE
from megatron3d.pipeline.simulate import Timeline, run
from megatron3d.runtime.files import write_text


def batch_arithmetic(config: Config, world_size: int, vocab_size: int | None = None) -> str:
    """How the ranks are arranged, what the global batch is made of and, with several pipeline ranks, their pipeline.

    The configuration must be valid.  `vocab_size` is the tokenizer's, which the pipeline depends on (None: not known).
    """
    mesh = make_mesh(config.parallel, world_size)
    train, data, pipeline = config.train, mesh.size(DATA), mesh.sizes["pipeline"]
    lines = [
        f"world_size {world_size} = {describe_tensor(config.parallel)} x PP {pipeline} x DP {data}",
        f"global_batch_size {train.global_batch_size} = micro_batch_size {train.micro_batch_size}"
        f" x data parallel {data} x microbatches {num_microbatches(config, mesh)}",
    ]
    if pipeline > 1:
        lines.append(f"pipeline: {describe_pipeline(config, mesh, config.model.vocab_size or vocab_size)}")
    return "\n".join(lines)


def describe_pipeline(config: Config, mesh: Mesh, vocab_size: int | None) -> str:
    """The schedule, the stages, their layers, and the idle time that is expected of them."""
    arch = architecture(config.model, vocab_size or 0)
    name, file = config.parallel.pipeline_schedule, config.parallel.pipeline_schedule_file
    try:
        pipeline = make_pipeline(config, arch, mesh)
    except UserError:  # the file is on another machine
        return f"{name} {file}, {mesh.sizes['pipeline']} ranks; stages and bubble are not known here"
    layers = join_runs([len(stage.layers) for stage in pipeline.stages])
    without = "" if vocab_size else ", without the head, whose vocabulary is not known yet"
    return (
        f"{f'{name} {file}' if name == FILE else name}, {len(pipeline.stages)} stages on {pipeline.num_ranks} ranks, "
        f"layers {layers}, expected bubble {100 * expected_bubble(pipeline, arch):.1f} %{without}"
    )


def join_runs(counts: Sequence[int]) -> str:
    """`3+3+2`, or `15x3+2` where more than four are equal."""

    def parts() -> Iterator[str]:
        for count, group in groupby(counts):
            times = len(list(group))
            yield from [f"{times}x{count}"] if times > 4 else [str(count)] * times

    return "+".join(parts())


def expected_bubble(pipeline: Pipeline, arch: Architecture) -> float:
    """The part of a step's forwards and backwards in which a rank waits, going by the stages' operations alone."""
    flops = [stage_flops(arch, stage) for stage in pipeline.stages]
    return Timeline(tuple(run(pipeline.schedule, lambda action: flops[action.stage][action.kind], 0.0))).idle_rate


def render(resolved: Resolved, vocab_size: int | None = None) -> str:
    """YAML that read_config reads back as an equal configuration; each line's comment tells its origin.

    `vocab_size` is the tokenizer's, on which the layers of a pipeline's stages depend (None: not known).
    """
    config = resolved.config
    derived = _derived(config) | _derived_pipeline(config, config.model.vocab_size or vocab_size)
    lines = [f"# The configuration of a run, resolved by megatron3d {__version__}; each value with its origin."]
    for section, names in SECTIONS.items():
        lines += ["", f"{section}:"]
        for name in names:
            key, value = f"{section}.{name}", getattr(getattr(config, section), name)
            origin = f"derived: {show(derived[key])}" if value is None and key in derived else resolved.origins[key]
            lines.append(f"  {f'{name}: {_scalar(value)}':<48} # {' '.join(origin.split())}")
    return "\n".join(lines) + "\n"


def write_resolved(resolved: Resolved, path: Path, vocab_size: int | None = None) -> None:
    """Write `render` to a file atomically; its folder must exist."""
    write_text(path, render(resolved, vocab_size))


def _derived(config: Config) -> dict[str, object]:
    """What stands for the values that were left open."""
    arch = architecture(config.model, config.model.vocab_size or 0)
    open_values = set(SECTIONS["model"]) & set(Architecture.__annotations__) - {"vocab_size"}
    decay = config.optimizer.lr_decay_iters or config.train.train_iters
    return {f"model.{name}": getattr(arch, name) for name in open_values} | {
        "parallel.tensor_model_parallel_size": tensor_size(config.parallel),
        "parallel.tensor_parallel_shape": tensor_shape(config.parallel),
        "optimizer.lr_decay_iters": decay,
    }


def _derived_pipeline(config: Config, vocab_size: int | None) -> dict[str, object]:
    """The same of the pipeline, as far as it does not depend on a file or an unknown vocabulary."""
    if config.parallel.pipeline_schedule == FILE:
        return {}
    derived: dict[str, object] = {"parallel.virtual_pipeline_model_parallel_size": virtual_size(config.parallel)}
    where = stage_owners(config.parallel)
    if vocab_size and len(where) <= config.model.num_layers:
        derived["parallel.pipeline_model_parallel_layout"] = divide(
            architecture(config.model, vocab_size), len(where), where
        )
    return derived


def _scalar(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    return value if is_plain(value) else yaml.safe_dump(value, default_style='"', width=math.inf).strip()
