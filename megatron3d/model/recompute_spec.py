"""What backward computes again instead of keeping it, in Megatron's words (Korthikanti et al. 2022, arXiv:2205.05198).

selective   some modules of every layer: "core_attn" from the output of qkv to the input of proj, "mlp_act" from the
            output of fc1 to the input of fc2
full        whole layers, of which the input alone is kept: all of a stage in runs of `num_layers` ("uniform"), or
            the first `num_layers` of each stage one by one ("block")

What is kept may lie in the host's memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

GRANULARITIES = ("none", "selective", "full")
CORE_ATTN, MLP_ACT = MODULES = ("core_attn", "mlp_act")
UNIFORM, BLOCK = METHODS = ("uniform", "block")


class Run(NamedTuple):
    """Layers one after another; where they are computed again, all of them at one time."""

    layers: range
    is_repeated: bool
    is_offloaded: bool = False


@dataclass(frozen=True)
class Recompute:
    """What is computed again, and whether what is kept is offloaded."""

    granularity: str = "none"
    modules: frozenset[str] = frozenset({CORE_ATTN})
    method: str = UNIFORM
    num_layers: int = 1
    offloads: bool = False

    def __post_init__(self) -> None:
        assert self.granularity in GRANULARITIES, f"granularity {self.granularity} is none of {GRANULARITIES}"
        assert self.modules <= set(MODULES), f"modules {set(self.modules)} are not all among {MODULES}"
        assert self.method in METHODS, f"method {self.method} is none of {METHODS}"

    def repeats(self, module: str) -> bool:
        """Whether a module of a layer is computed again on its own."""
        return self.granularity == "selective" and module in self.modules

    def runs(self, layers: range) -> Sequence[Run]:
        """The layers of a stage, in order."""
        repeated, rest = list[range](), layers
        if self.granularity == "full" and self.method == UNIFORM:
            repeated, rest = [layers[i : i + self.num_layers] for i in range(0, len(layers), self.num_layers)], range(0)
        elif self.granularity == "full":
            repeated, rest = [range(n, n + 1) for n in layers[: self.num_layers]], layers[self.num_layers :]
        return [*(Run(each, True, self.offloads) for each in repeated), Run(rest, False, self.offloads)]


KEEP_ALL = Recompute()
