"""Order of the ranks' shards: torch sorts the ranks of a group, and axes that are named in another order differ."""

from __future__ import annotations

from torch import Tensor

from megatron3d.parallel.mesh import Axes, Mesh


def group_order(mesh: Mesh, axes: Axes) -> list[int] | None:
    """Return the position of each shard of `axes` in the group's order; None where the orders are equal."""
    place = {rank: index for index, rank in enumerate(sorted(mesh.ranks(axes)))}
    order = [place[rank] for rank in mesh.ranks(axes)]
    return None if order == sorted(order) else order


def joined(x: Tensor, ranks: int, order: list[int] | None, dim: int) -> Tensor:
    """Return shards, one below the other in the group's order, concatenated along `dim` in the order of the axes."""
    if dim == 0 and order is None:
        return x
    shards: Tensor = x.unflatten(0, (ranks, -1))
    shards = shards if order is None else shards[order]
    return shards.movedim(0, dim).flatten(dim, dim + 1)


def below_one_another(x: Tensor, ranks: int, order: list[int] | None, dim: int) -> Tensor:
    """Return the shards of `x` along `dim`, contiguous and one below the other in the group's order."""
    if dim != 0 or order is not None:
        shards = x.unflatten(dim, (ranks, -1)).movedim(dim, 0)
        shards = shards if order is None else shards[[order.index(place) for place in range(ranks)]]
        x = shards.flatten(0, 1)
    return x.contiguous()
