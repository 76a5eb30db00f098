"""Sharding of training state over the data axis by ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).

stage  optimizer state   gradients   parameters
0      replicated        replicated  replicated
1      sharded           replicated  replicated
2      sharded           sharded     replicated
3      sharded           sharded     sharded
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron3d.parallel.mesh import Axes, Mesh

# MiB of a bucket of gradients by default.  On GPUs the time of smaller ones is their ring's latency, which grows with
# its ranks; Megatron-LM's default is as large (40M parameters, or 1M per data-parallel rank, of 4 bytes each).
_CPU_BUCKET_MB = 25.0
_GPU_BUCKET_MB, _GPU_BUCKET_MB_PER_RANK = 160.0, 4.0


def bucket_bytes(bucket_mb: float | None, data_ranks: int, on_gpu: bool) -> float:
    """Return the least bytes of gradients that are reduced together, with the default of the device for None."""
    if bucket_mb is None:
        bucket_mb = max(_GPU_BUCKET_MB, _GPU_BUCKET_MB_PER_RANK * data_ranks) if on_gpu else _CPU_BUCKET_MB
    return bucket_mb * 2**20


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

    def without(self, axes: Iterable[str], mesh: Mesh) -> Sharding:
        """Return the sharding over the other axes, of parameters that `axes` shard themselves."""
        return replace(self, axes=mesh.without(self.axes, axes))

    @staticmethod
    def of_stage(zero_stage: int, axes: Axes) -> Sharding:
        """Return what a ZeRO stage shards over `axes`; nothing at stage 0 and without axes."""
        is_sharded = bool(axes) and zero_stage > 0
        return Sharding(axes if is_sharded else (), is_sharded and zero_stage >= 2, is_sharded and zero_stage >= 3)
