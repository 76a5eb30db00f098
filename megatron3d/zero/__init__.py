"""ZeRO and FSDP: flat buffers of parameters, gradients and master weights, and their communication over data ranks."""

from megatron3d.parallel.layout import Sharding
from megatron3d.zero.buffers import Buffers, square_sum
from megatron3d.zero.flat_buffer import FlatBuffer, FsdpUnit
from megatron3d.zero.fp8_shard import StoredWeight

__all__ = ["Buffers", "FlatBuffer", "FsdpUnit", "Sharding", "StoredWeight", "square_sum"]
