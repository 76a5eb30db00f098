"""From a parameter, and whatever is shaped like it, to the pieces of logical tensors that a checkpoint holds.

Names are `model.<part>`, `optimizer.exp_avg.<part>` and `optimizer.exp_avg_sq.<part>`.
"""

from __future__ import annotations

from torch import Tensor

from megatron3d.checkpoint.store import Piece
from megatron3d.layout import ParamSpec, layout_axes
from megatron3d.mesh import Axes, Mesh
from megatron3d.shard import part_views


def param_pieces(prefix: str, spec: ParamSpec, local: Tensor, mesh: Mesh, start: int = 0) -> list[Piece]:
    """The pieces of `<prefix>.<part name>` that `local` holds, without padding; their tensors are views of `local`.

    `local` is the local tensor, or a range of its elements from `start` on.
    """
    views = part_views(spec, local, mesh, start)
    return [Piece(f"{prefix}.{part.name}", part.shape, box, view) for part, box, view in views]


def writes(spec: ParamSpec, mesh: Mesh, shared_out: Axes = ()) -> bool:
    """Save rule: of the ranks that hold the same box, the one at coordinate 0 on every axis that is not in the layout,
    and of the pipeline's ranks that hold the parameter the first.  ZeRO's axes, `shared_out`, are in the layout.
    """
    split = layout_axes(spec.layout) | {"pipeline", *shared_out}
    others = all(mesh.coord(axis) == 0 for axis in mesh.names if axis not in split)
    return others and mesh.coord("pipeline") == spec.holders[0]
