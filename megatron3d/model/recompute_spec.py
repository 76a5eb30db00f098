"""Activation recomputation as Megatron defines it (Korthikanti et al. 2022, arXiv:2205.05198).

selective   some modules of every layer: "core_attn" from the output of qkv to the input of proj, "mlp_act" from the
            output of fc1 to the input of fc2; with "core_attn", "mla_up_proj" from the latents of attention on
full        whole layers, of which only the input is saved: all of a stage in runs of `num_layers` ("uniform"), or
            the first `num_layers` of each stage one by one ("block"); "uniform" includes multi-token prediction

Saved activations may be offloaded to host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

GRANULARITIES = ("none", "selective", "full")
CORE_ATTN, MLP_ACT, MLA_UP_PROJ = MODULES = ("core_attn", "mlp_act", "mla_up_proj")
UNIFORM, BLOCK = METHODS = ("uniform", "block")


class LayerRun(NamedTuple):
    """Consecutive layers that are recomputed together, if they are recomputed; a single one if it is only offloaded."""

    layers: range
    is_recomputed: bool
    is_offloaded: bool = False


@dataclass(frozen=True)
class Recompute:
    """Layers and modules that are recomputed in backward, and whether saved activations are offloaded."""

    granularity: str = "none"
    modules: frozenset[str] = frozenset({CORE_ATTN})
    method: str = UNIFORM
    num_layers: int = 1
    offloads: bool = False

    def __post_init__(self) -> None:
        assert self.granularity in GRANULARITIES, f"granularity {self.granularity} is none of {GRANULARITIES}"
        assert self.modules <= set(MODULES), f"modules {set(self.modules)} are not all among {MODULES}"
        assert self.method in METHODS, f"method {self.method} is none of {METHODS}"

    def recomputes(self, module: str) -> bool:
        """Return whether a module of each layer is recomputed on its own."""
        return self.granularity == "selective" and module in self.modules

    @property
    def recomputes_ahead(self) -> bool:
        """Whether each module of multi-token prediction is recomputed as a whole."""
        return self.granularity == "full" and self.method == UNIFORM

    def runs(self, layers: range) -> Sequence[LayerRun]:
        """Return the layers of a stage as runs, in order."""
        recomputed, rest = list[range](), layers
        if self.granularity == "full" and self.method == UNIFORM:
            recomputed, rest = (
                [layers[i : i + self.num_layers] for i in range(0, len(layers), self.num_layers)],
                range(0),
            )
        elif self.granularity == "full":
            recomputed, rest = [range(n, n + 1) for n in layers[: self.num_layers]], layers[self.num_layers :]
        others = [range(n, n + 1) for n in rest] if self.offloads else [rest]
        return [
            *(LayerRun(each, True, self.offloads) for each in recomputed),
            *(LayerRun(each, False, self.offloads) for each in others),
        ]


NO_RECOMPUTE = Recompute()
