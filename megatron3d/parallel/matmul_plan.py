"""One matmul for every tensor-parallel mode: Y[M, N] = X[M, K] W[K, N], and who holds what.

M are tokens, K and N features.  A plan names the mesh axes that split M, K and N while multiplying, and the dimension
along which each operand is split further where it is stored:

    X is gathered over axes in n, W over axes in m; Y, a partial sum over each axis in k, is scattered or all-reduced.

Backward is the same sentence with the roles turned: gather dY, multiply twice, reduce dX over n and dW over w.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from megatron3d.parallel.layout import Layout
from megatron3d.parallel.mesh import Axes, Mesh

_SWAP = {"M": "M", "K": "N", "N": "K", None: None}


class Move(NamedTuple):
    """Axes that together gather or scatter one dimension; `dim` None means an all-reduce."""

    axes: Axes
    dim: str | None


@dataclass(frozen=True)
class MatmulPlan:
    """Which axes split M, K, N while multiplying, and how each operand is stored split.

    `x` and `w` map an axis to the dimension that is gathered before the product; `y` maps each axis of `k` to the
    dimension over which partial sums are scattered, or None where they are all-reduced.
    """

    m: Axes = ()
    k: Axes = ()
    n: Axes = ()
    x: Mapping[str, str] = field(default_factory=dict)
    w: Mapping[str, str] = field(default_factory=dict)
    y: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        used = (*self.m, *self.k, *self.n)
        assert len(used) == len(set(used)), f"an axis splits two of M{self.m}, K{self.k} and N{self.n}"
        assert set(self.x) <= set(self.n), f"X is whole along {set(self.x) - set(self.n)}: nothing to gather"
        assert tuple(self.x) == tuple(a for a in self.n if a in self.x), (
            f"X{tuple(self.x)} is not in the order of N{self.n}"
        )
        assert set(self.w) <= set(self.m), f"W is whole along {set(self.w) - set(self.m)}: nothing to gather"
        assert set(self.y) == set(self.k), f"Y is partial over {self.k}, but the plan reduces it over {tuple(self.y)}"

    def swapped(self) -> MatmulPlan:
        """The plan of the next matmul: K and N trade places, and so do X's gathers and Y's scatters."""
        gathers = {axis: str(_SWAP[dim]) for axis, dim in self.dy.items()}
        return MatmulPlan(self.m, self.n, self.k, gathers, self.w, {axis: _SWAP[self.x.get(axis)] for axis in self.n})

    def transposed(self) -> MatmulPlan:
        """The swapped plan over the same stored matrix (W[N, K] read as W[K, N]): an embedding tied to its head."""
        swap = self.swapped()
        return MatmulPlan(swap.m, swap.k, swap.n, swap.x, {a: str(_SWAP[d]) for a, d in self.w.items()}, swap.y)

    def on(self, mesh: Mesh) -> MatmulPlan:
        """The plan without the axes that have size 1 on this mesh."""

        def keep(table: Mapping[str, str]) -> dict[str, str]:
            return {axis: dim for axis, dim in table.items() if mesh.sizes[axis] > 1}

        y = {axis: dim for axis, dim in self.y.items() if mesh.sizes[axis] > 1}
        m, k, n = (mesh.nontrivial(axes) for axes in (self.m, self.k, self.n))
        return MatmulPlan(m, k, n, keep(self.x), keep(self.w), y)

    @property
    def x_layout(self) -> Layout:
        """How X[M, K] is stored."""
        return _stored(self.m, self.k, self.x, "M", "K")

    @property
    def w_layout(self) -> Layout:
        """How W is stored, in torch's order of dimensions [N, K]."""
        return _stored(self.n, self.k, self.w, "N", "K")

    @property
    def y_layout(self) -> Layout:
        """How Y[M, N] is left."""
        return _stored(self.m, self.n, self.y, "M", "N")

    @property
    def dy(self) -> dict[str, str]:
        """What Y was scattered over, and dY is gathered over."""
        return {axis: dim for axis, dim in self.y.items() if dim}

    @property
    def dx_moves(self) -> tuple[Move, ...]:
        """Reductions that turn the partial dX into the gradient of the stored X."""
        return moves({axis: self.x.get(axis) for axis in self.n})


def moves(table: Mapping[str, str] | Mapping[str, str | None]) -> tuple[Move, ...]:
    """The table's collectives in order; neighbouring axes that move the same dimension are fused into one."""
    runs = groupby(table.items(), key=lambda item: item[1])
    return tuple(Move(tuple(axis for axis, _ in run), dim) for dim, run in runs)


def _stored(
    first: Axes, second: Axes, extra: Mapping[str, str] | Mapping[str, str | None], first_dim: str, second_dim: str
) -> Layout:
    def also(dim: str) -> Axes:
        return tuple(axis for axis, moved in extra.items() if moved == dim)

    return first + also(first_dim), second + also(second_dim)


class Traffic(NamedTuple):
    """One collective of a plan: what moves, and the bytes that each rank sends over a ring."""

    collective: str
    axes: Axes
    wire_bytes: float


class Flows(NamedTuple):
    """One matmul's collectives by what they move; backward gathers X and W again, since only shards are kept."""

    gather_x: list[Traffic]
    gather_w: list[Traffic]
    reduce_y: list[Traffic]
    gather_dy: list[Traffic]
    reduce_dx: list[Traffic]
    reduce_dw: list[Traffic]


def flows(plan: MatmulPlan, mesh: Mesh, m: int, n: int, k: int, itemsize: int) -> Flows:
    """Closed form of one matmul's collectives for global sizes m, n, k.

    A gather or a scatter over p ranks sends (p-1)/p of the whole, an all-reduce twice that (Thakur et al. 2005).
    """
    plan = plan.on(mesh)
    x, w, y = whole_bytes(plan, mesh, m, n, k, itemsize)
    return Flows(
        _gathers(moves(plan.x), x, mesh),
        _gathers(moves(plan.w), w, mesh),
        reductions(moves(plan.y), y, mesh),
        _gathers(moves(plan.dy), y, mesh),
        reductions(plan.dx_moves, x, mesh),
        reductions(moves(plan.w), w, mesh),
    )


def whole_bytes(plan: MatmulPlan, mesh: Mesh, m: int, n: int, k: int, itemsize: int) -> tuple[float, float, float]:
    """Of X, W and Y as a rank multiplies them, all pieces gathered and none scattered."""
    x = m * k / mesh.size(plan.m + plan.k)
    w = n * k / mesh.size(plan.n + plan.k)
    y = m * n / mesh.size(plan.m + plan.n)
    return x * itemsize, w * itemsize, y * itemsize


def traffic(plan: MatmulPlan, mesh: Mesh, m: int, n: int, k: int, itemsize: int) -> list[Traffic]:
    """Closed form of one matmul's collectives, forward and then backward, for global sizes m, n, k."""
    flow = flows(plan, mesh, m, n, k, itemsize)
    forward = flow.gather_x + flow.gather_w + flow.reduce_y
    return forward + flow.gather_dy + flow.gather_w + flow.gather_x + flow.reduce_dx + flow.reduce_dw


def crossing(stored: Layout, copies: Axes, mesh: Mesh, m: int, n: int, itemsize: int) -> list[Traffic]:
    """Closed form of X[m, n] on its way to another rank of the pipeline, and back from it as a gradient.

    Ranks along `copies` hold the same shard, send a part of it each, and join the parts at the other end (Narayanan et
    al. 2021, arXiv:2104.04473, section 4.1); parts that do not come out even are filled up.
    """
    ranks = mesh.size(copies)
    part = -(-m * n // (mesh.size(sum(stored, ())) * ranks)) * itemsize
    sent = Traffic("send", ("pipeline",), part)
    return [sent, Traffic("all_gather", mesh.nontrivial(copies), part * (ranks - 1))] if ranks > 1 else [sent]


def _gathers(steps: tuple[Move, ...], whole_bytes: float, mesh: Mesh) -> list[Traffic]:
    """All-gathers that end at `whole_bytes`; the axes that were split last are gathered first."""
    out = []
    for axes, _ in steps:
        ranks = mesh.size(axes)
        out.append(Traffic("all_gather", axes, whole_bytes * (ranks - 1) / ranks))
        whole_bytes /= ranks
    return out[::-1]


def reductions(steps: tuple[Move, ...], whole_bytes: float, mesh: Mesh) -> list[Traffic]:
    """Reductions in turn that start at `whole_bytes`; each scatter leaves less for the next."""
    out = []
    for axes, dim in steps:
        ranks = mesh.size(axes)
        once = whole_bytes * (ranks - 1) / ranks
        out.append(Traffic("reduce_scatter", axes, once) if dim else Traffic("all_reduce", axes, 2 * once))
        whole_bytes /= ranks if dim else 1
    return out
