"""The resolved configuration as text: the arithmetic with its numbers, and every value with its origin."""

from __future__ import annotations

import json
import math
from pathlib import Path

import yaml

from megatron3d import __version__
from megatron3d.config.derive import Architecture, architecture, make_mesh, num_microbatches, tensor_shape, tensor_size
from megatron3d.config.document import is_plain, show
from megatron3d.config.facts import describe_tensor
from megatron3d.config.read import Resolved
from megatron3d.config.schema import Config
from megatron3d.config.suggest import SECTIONS


def batch_arithmetic(config: Config, world_size: int) -> str:
    """Two lines: how the ranks are arranged, and what the global batch is made of.  The configuration must be valid."""
    mesh = make_mesh(config.parallel, world_size)
    train, data, pipeline = config.train, mesh.sizes["data"], mesh.sizes["pipeline"]
    return (
        f"world_size {world_size} = {describe_tensor(config.parallel)} x PP {pipeline} x DP {data}\n"
        f"global_batch_size {train.global_batch_size} = micro_batch_size {train.micro_batch_size}"
        f" x data parallel {data} x microbatches {num_microbatches(config, mesh)}"
    )


def render(resolved: Resolved) -> str:
    """YAML that read_config reads back as an equal configuration; each line's comment tells its origin."""
    derived = _derived(resolved.config)
    lines = [f"# The configuration of a run, resolved by megatron3d {__version__}; each value with its origin."]
    for section, names in SECTIONS.items():
        lines += ["", f"{section}:"]
        for name in names:
            key, value = f"{section}.{name}", getattr(getattr(resolved.config, section), name)
            origin = f"derived: {show(derived[key])}" if value is None and key in derived else resolved.origins[key]
            lines.append(f"  {f'{name}: {_scalar(value)}':<48} # {' '.join(origin.split())}")
    return "\n".join(lines) + "\n"


def write_resolved(resolved: Resolved, path: Path) -> None:
    """Write `render` to a file; its folder must exist."""
    path.write_text(render(resolved), encoding="utf-8")


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


def _scalar(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    return value if is_plain(value) else yaml.safe_dump(value, default_style='"', width=math.inf).strip()
