"""One microbatch on one rank: local sizes, what is computed again, how matmuls are carried out, and which kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron3d.model.architecture import GATED, Architecture
from megatron3d.model.recompute_spec import KEEP_ALL, Recompute
from megatron3d.parallel.attention_heads import HeadSplit
from megatron3d.parallel.layout import span
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes.mode import Mode
from megatron3d.parallel.tp_overlap import OVERLAP_ALL, TPOverlap


@dataclass(frozen=True)
class KernelMemory:
    """What torch itself keeps, which differs between devices; all else is ours and the same everywhere.

    Attributes:
        narrow_statistics: LayerNorm's mean and scale are of its input's dtype, not fp32.
        fused_rms_norm: RMSNorm keeps its input and a number per row; else what each of its operations keeps.
        num_leaving: most shards that were sent and are not known to be gone; gloo does not say when they are.
        num_received: whole pieces beside those that are reduced: gloo receives what all ranks have and then adds.
        update_piece: elements that AdamW updates at one time where its moments are narrower than the weights.
    """

    narrow_statistics: bool
    fused_rms_norm: bool
    num_leaving: int
    num_received: int
    update_piece: int


KERNELS: Mapping[str, KernelMemory] = {
    "cpu": KernelMemory(
        narrow_statistics=True, fused_rms_norm=False, num_leaving=4, num_received=1, update_piece=2**18
    ),
    "gpu": KernelMemory(
        narrow_statistics=False, fused_rms_norm=True, num_leaving=1, num_received=0, update_piece=2**22
    ),
}


@dataclass(frozen=True)
class LocalSizes:
    """A microbatch of `micro_batch_size` sequences over all ranks that share it, as this rank of the mesh sees it.

    Attributes:
        keeps_apart: documents in a sequence do not see each other; `begins_anew`: their positions begin at 0.
    """

    arch: Architecture
    mode: Mode
    mesh: Mesh
    micro_batch_size: int
    itemsize: int
    recompute: Recompute = KEEP_ALL
    overlap: TPOverlap = OVERLAP_ALL
    kernels: KernelMemory = KERNELS["cpu"]
    keeps_apart: bool = False
    begins_anew: bool = False

    def part(self, size: int, axes: Axes) -> int:
        """My share of a dimension that `axes` split."""
        low, high = span(size, axes, self.mesh)
        return high - low

    @property
    def sequences_read(self) -> int:
        """Sequences that this rank reads."""
        return self.part(self.micro_batch_size, self.mode.batch_axes)

    @property
    def wide(self) -> int:
        """Bytes of a number in fp32 or better."""
        return max(self.itemsize, 4)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole microbatch."""
        return self.micro_batch_size * self.arch.seq_length

    @property
    def tokens(self) -> int:
        """My tokens of the residual stream."""
        return self.part(self.num_tokens, self.mode.residual[0])

    @property
    def hidden(self) -> int:
        """My features of the residual stream."""
        return self.part(self.arch.hidden_size, self.mode.residual[1])

    @property
    def residual(self) -> int:
        """Bytes of my shard of the residual stream."""
        return self.tokens * self.hidden * self.itemsize

    @property
    def splits_features(self) -> bool:
        """Whether norms combine their statistics over ranks."""
        return bool(self.mesh.nontrivial(self.mode.residual[1]))

    @property
    def inner_tokens(self) -> int:
        """My tokens of the inner stream: whole sequences."""
        return self.part(self.num_tokens, self.mode.inner[0])

    @property
    def sequences(self) -> int:
        """My sequences of the inner stream."""
        return self.inner_tokens // self.arch.seq_length

    @cached_property
    def heads(self) -> HeadSplit:
        """My attention heads."""
        arch, axes = self.arch, self.mesh.nontrivial(self.mode.inner[1])
        return HeadSplit(arch.num_attention_heads, arch.num_query_groups, arch.kv_channels, axes, self)

    @property
    def num_queries(self) -> int:
        """My query heads."""
        low, high = self.heads.query_span
        return high - low

    @property
    def num_groups(self) -> int:
        """The key/value heads that my query heads read."""
        low, high = self.heads.group_span
        return high - low

    @property
    def keys_width(self) -> int:
        """My features of the keys before they are gathered; values have as many."""
        return self.part(self.arch.num_query_groups * self.arch.kv_channels, self.mode.inner[1])

    @property
    def ffn(self) -> int:
        """My inner features of the MLP."""
        return self.part(self.arch.ffn_hidden_size, self.mode.inner[1])

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.arch.activation in GATED

    def inner(self, width: int) -> int:
        """Bytes of so many features for my tokens of the inner stream."""
        return self.inner_tokens * width * self.itemsize
