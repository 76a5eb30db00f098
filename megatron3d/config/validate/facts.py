"""What the rules are held against, and the words in which they name it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron3d.config.derive import tensor_shape, tensor_size
from megatron3d.config.schema import Config, ParallelConfig
from megatron3d.config.yaml_origins import show
from megatron3d.parallel.modes import MODES


@dataclass(frozen=True)
class Facts:
    """A configuration, where its values came from, and what is known beside it."""

    config: Config
    world_size: int
    vocab_size: int | None = None
    origins: Mapping[str, str] = field(default_factory=dict)

    def named(self, key: str) -> str:
        """`section.key=value (origin)`."""
        origin = f" ({self.origins[key]})" if key in self.origins else ""
        return plain(self.config, key) + origin

    @property
    def shape_key(self) -> str:
        """The key that decides the tensor axes' sizes."""
        given = self.config.parallel.tensor_parallel_shape
        return "parallel.tensor_model_parallel_size" if given is None else "parallel.tensor_parallel_shape"


def plain(config: Config, key: str) -> str:
    """`section.key=value`."""
    section, name = key.split(".")
    return f"{key}={show(getattr(getattr(config, section), name))}"


def describe_mode(parallel: ParallelConfig) -> str:
    """`2d: r 2 x c 4`."""
    names, shape = MODES[parallel.tensor_parallel_mode].axis_names, tensor_shape(parallel)
    axes = " x ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))
    return f"{parallel.tensor_parallel_mode}: {axes}"


def describe_tensor(parallel: ParallelConfig) -> str:
    """`TP 8 (2d: r 2 x c 4)`, or `TP 1`."""
    size = tensor_size(parallel)
    return f"TP {size} ({describe_mode(parallel)})" if size > 1 else "TP 1"


def near_divisors(number: int, wrong: int) -> Sequence[int]:
    """Up to five divisors of `number`, those nearest to `wrong`, in order."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    divisors = {*low, *(number // d for d in low)}
    return sorted(sorted(divisors, key=lambda d: abs(d - wrong))[:5])


def near_multiples(step: int, wrong: int) -> Sequence[int]:
    """The multiples of `step` on either side of `wrong`."""
    below = wrong // step * step
    return (below, below + step) if below else (step,)
