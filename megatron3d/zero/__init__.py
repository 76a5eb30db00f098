"""The data axis: where parameters, gradients and the optimizer's state live, and how they are summed and gathered."""

from megatron3d.parallel.sharding import Sharding
from megatron3d.zero.buffers import Buffers, square_sum
from megatron3d.zero.flat_buffer import Block, Flat, Kind

__all__ = ["Block", "Buffers", "Flat", "Kind", "Sharding", "square_sum"]
