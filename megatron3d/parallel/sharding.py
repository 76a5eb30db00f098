"""Sharding of training state over the data axis by ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).

stage  optimizer state   gradients   parameters
0      replicated        replicated  replicated
1      sharded           replicated  replicated
2      sharded           sharded     replicated
3      sharded           sharded     sharded
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron3d.parallel.mesh import Axes


@dataclass(frozen=True)
class Sharding:
    """State that is sharded, and the axes it is sharded over; without axes it is replicated (ZeRO stage 0).

    Attributes:
        axes: mesh axes over which the optimizer state is sharded.
        grads: gradients are sharded over them, too.
        params: parameters are sharded over them, too.
    """

    axes: Axes = ()
    grads: bool = False
    params: bool = False

    @staticmethod
    def of_stage(zero_stage: int, axes: Axes) -> Sharding:
        """Return what a ZeRO stage shards over `axes`; nothing at stage 0 and without axes."""
        is_sharded = bool(axes) and zero_stage > 0
        return Sharding(axes if is_sharded else (), is_sharded and zero_stage >= 2, is_sharded and zero_stage >= 3)
