"""Keys that the planner must leave at given values: `--fix tensor_model_parallel_size=4`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron3d.analysis.planner.options import LayoutChoice, LayoutFields
from megatron3d.config.read import read_values
from megatron3d.config.suggest import nearest, one_of
from megatron3d.config.yaml_origins import parse_value
from megatron3d.errors import UserError
from megatron3d.runtime.limits import shorten

# Values of a layout by the keys of a configuration.
VALUES: Mapping[str, Callable[[LayoutChoice], object]] = {
    "parallel.tensor_parallel_mode": lambda layout: layout.tensor.mode,
    "parallel.tensor_model_parallel_size": lambda layout: layout.tensor.size,
    "parallel.context_parallel_size": lambda layout: layout.context.size,
    "parallel.cp_comm_type": lambda layout: layout.context.exchange,
    "parallel.expert_model_parallel_size": lambda layout: layout.experts.size,
    "parallel.expert_tensor_parallel_size": lambda layout: layout.experts.split,
    "parallel.pipeline_model_parallel_size": lambda layout: layout.pipeline,
    "parallel.pipeline_schedule": lambda layout: layout.schedule,
    "parallel.virtual_pipeline_model_parallel_size": lambda layout: layout.virtual,
    "parallel.zero_stage": lambda layout: layout.zero_stage,
    "train.micro_batch_size": lambda layout: layout.micro_batch_size,
    "train.recompute_granularity": lambda layout: layout.recompute,
}


@dataclass(frozen=True)
class FixedKeys:
    """Values that layouts must have, by key."""

    values: tuple[tuple[str, object], ...] = ()

    def allow(self, fields: LayoutFields) -> bool:
        """Return whether a layout of these fields has all values."""
        if not self.values:
            return True
        layout = LayoutChoice(*fields)
        return all(VALUES[key](layout) == value for key, value in self.values)


NOTHING = FixedKeys()


def read_fixed(texts: Sequence[str]) -> FixedKeys:
    """Return the values of texts such as `tensor_model_parallel_size=4`.

    Raises UserError with every problem: a key that is not the planner's or is given twice, a value that it cannot have.
    """
    names = {name: key for key in VALUES for name in (key, key.partition(".")[2])}
    values, problems = dict[str, object](), list[str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in names:
            use = nearest(name, names) or one_of(key.partition(".")[2] for key in VALUES)
            problems.append(f"--fix {shorten(text)}: not a key that the planner chooses; use {use}=VALUE")
            continue
        if names[name] in values:
            problems.append(f"--fix {shorten(text)}: given twice; give each key once")
            continue
        try:
            values[names[name]] = parse_value(value)
        except (ValueError, RecursionError) as error:
            problems.append(f"--fix {shorten(text)}: the value is not YAML ({error})")
    UserError.collect(problems)
    read_values(values, "--fix")
    return FixedKeys(tuple(values.items()))
