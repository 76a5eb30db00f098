"""Update rules of the optimizer by name: the state that each keeps, how it groups parameters, and what a step costs.

What stores, reshards, counts or predicts optimizer state reads these declarations.  A new rule is an entry in `RULES`,
a file with its update, which `optimizer.UPDATES` names, and a value of `optimizer.optimizer` in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron3d.config.schema import ITEMSIZES, OptimizerConfig
from megatron3d.parallel.layout import ParamSpec


@dataclass(frozen=True)
class StateTensor:
    """Optimizer state in the shape of the parameter, sharded like its master weights.

    Attributes:
        name: checkpoints store it as `optimizer.<name>.<logical tensor>`.
        dtype_key: key of the optimizer's configuration with its dtype; without a key or a value, it has that of the
            master weights.
    """

    name: str
    dtype_key: str | None = None

    def dtype(self, config: OptimizerConfig) -> str | None:
        """Return the name of the configured dtype, None for that of the master weights."""
        return None if self.dtype_key is None else getattr(config, self.dtype_key)


@dataclass(frozen=True)
class GroupSpec:
    """Parameters with the same weight decay; a parameter is in the first group of its rule that matches.

    Attributes:
        decays: whether `optimizer.weight_decay` applies.
        matches: pattern over the path and the spec of a parameter.
    """

    decays: bool
    matches: Callable[[str, ParamSpec], bool]


BY_WEIGHT_DECAY = (GroupSpec(True, lambda path, spec: spec.decay), GroupSpec(False, lambda path, spec: True))


@dataclass(frozen=True)
class UpdateRule:
    """How weights are updated by their gradients.

    Attributes:
        moved_bytes: bytes that a step reads and writes per parameter, in fp32.
        flops: FLOPs of a step per parameter.
        scales_grads: kernels of the update clip and unscale gradients; otherwise a pass before them does.
        is_elementwise: an update sees flat shards; otherwise whole logical tensors, which no rank may shard.
        chunk_bytes: bytes per element of a chunk that the update allocates if state is narrower than the weights.
    """

    name: str
    states: tuple[StateTensor, ...]
    moved_bytes: float
    flops: float
    scales_grads: bool = False
    is_elementwise: bool = True
    chunk_bytes: int = 0
    groups: tuple[GroupSpec, ...] = BY_WEIGHT_DECAY

    def state_itemsizes(self, config: OptimizerConfig, main_itemsize: int) -> tuple[int, ...]:
        """Return the bytes of an element of each state tensor, given those of the master weights."""
        names = [state.dtype(config) for state in self.states]
        return tuple(main_itemsize if name is None else ITEMSIZES[name] for name in names)


_ADAM = UpdateRule(
    "adam",
    (StateTensor("exp_avg", "exp_avg_dtype"), StateTensor("exp_avg_sq", "exp_avg_sq_dtype")),
    moved_bytes=16 + 12,  # read gradient, weight and moments; write weight and moments
    flops=14,
    scales_grads=True,
    chunk_bytes=20,  # what the update holds when it computes, and when it rounds a moment
)
RULES: Mapping[str, UpdateRule] = {rule.name: rule for rule in (_ADAM,)}


def rule_of(config: OptimizerConfig) -> UpdateRule:
    """Return the configured rule."""
    return RULES[config.optimizer]
