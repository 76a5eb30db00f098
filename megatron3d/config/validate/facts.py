"""Inputs of all rules, and how their messages write keys, values and sizes."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.yaml_origins import show
from megatron3d.errors import is_machine_fault
from megatron3d.model.spec import Architecture
from megatron3d.parallel.modes import MODES
from megatron3d.runtime.files import retried

WORLD_SIZE = "--world-size"


@dataclass(frozen=True)
class Facts:
    """A configuration, the origin of each value, the number of ranks, and the tokenizer's size if it is known.

    Attributes:
        counted_by: what the user types to have another number of ranks.
    """

    config: Config
    world_size: int
    vocab_size: int | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    counted_by: str = WORLD_SIZE

    def named(self, key: str) -> str:
        """Return `section.key=value (origin)`."""
        origin = f" ({self.origins[key]})" if key in self.origins else ""
        return plain(self.config, key) + origin

    def is_set(self, key: str) -> bool:
        """Return whether a key has another value than its default."""
        section, name = key.split(".")
        values = getattr(self.config, section)
        return bool(getattr(values, name) != type(values).model_fields[name].default)

    @cached_property
    def spec(self) -> RunSpec:
        """Derived values of the run; a rule may only read those that the rules before it have validated."""
        return RunSpec(self.config, self.world_size, self.vocab_size or 0)

    @cached_property
    def arch(self) -> Architecture:
        """Architecture without vocabulary padding, which would need a valid tensor-parallel mode."""
        return resolve_architecture(self.config.model, self.config.model.vocab_size or self.vocab_size or 0)

    @property
    def shape_key(self) -> str:
        """Key that determines the sizes of the tensor axes."""
        given = self.config.parallel.tensor_parallel_shape
        return "parallel.tensor_model_parallel_size" if given is None else "parallel.tensor_parallel_shape"


def plain(config: Config, key: str) -> str:
    """Return `section.key=value`."""
    section, name = key.split(".")
    return f"{key}={show(getattr(getattr(config, section), name))}"


def describe_mode(spec: RunSpec) -> str:
    """Return mode and axis sizes as `2d: r 2 x c 4`."""
    name = spec.config.parallel.tensor_parallel_mode
    sizes = zip(MODES[name].axis_names, spec.tensor_shape, strict=True)
    return f"{name}: {' x '.join(f'{axis} {size}' for axis, size in sizes)}"


def describe_tensor(spec: RunSpec) -> str:
    """Return the tensor-parallel size as `TP 8 (2d: r 2 x c 4)`, or `TP 1`."""
    return f"TP {spec.tensor_size} ({describe_mode(spec)})" if spec.tensor_size > 1 else "TP 1"


class MissingHere(str):
    """A problem of this machine's files, which another machine need not have: what a run needs is not here."""

    __slots__ = ()


def unreadable(path: Path, may_be_folder: bool = False, may_be_empty: bool = False) -> str | None:
    """Return why a file cannot be used, a `MissingHere` where it is not there, or None.

    Raises OSError for a fault of the machine, which is not the user's.
    """
    try:
        status = retried(path, path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return MissingHere(f"{path} does not exist")
    except OSError as error:
        if is_machine_fault(error):
            raise
        return f"{path}: {error.strerror}"
    if stat.S_ISDIR(status.st_mode) and may_be_folder:
        return None
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a file"
    if not os.access(path, os.R_OK):
        return f"{path} cannot be read"
    return None if status.st_size or may_be_empty else f"{path} is empty"


def near_divisors(number: int, wrong: int) -> Sequence[int]:
    """Return the divisors of `number` closest to `wrong`, at most five, in ascending order."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    divisors = {*low, *(number // d for d in low)}
    return sorted(sorted(divisors, key=lambda d: abs(d - wrong))[:5])


def near_multiples(step: int, wrong: int) -> Sequence[int]:
    """Return the positive multiples of `step` just below and just above `wrong`."""
    below = wrong // step * step
    return (below, below + step) if below else (step,)
