"""Plan of a sharded matmul Y[M, N] = X[M, K] W[K, N]: the axes that split M, K and N, and the communication.

M are tokens, K and N features.  A plan names the mesh axes that split M, K and N in the GEMM, and the dim along which
each operand is sharded further where it is stored:

    forward     all-gather X over axes of n and W over axes of m; GEMM; reduce-scatter or all-reduce the partial sums Y
                over the axes of k
    backward    all-gather dY; dgrad and wgrad GEMMs; reduce dX over n and dW over m
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from megatron3d.parallel.layout import Layout
from megatron3d.parallel.mesh import PIPELINE, Axes, Mesh

_SWAP = {"M": "M", "K": "N", "N": "K", None: None}


class Move(NamedTuple):
    """One collective: axes fused into a group, and the dim that is gathered or scattered; None: an all-reduce."""

    axes: Axes
    dim: str | None


@dataclass(frozen=True)
class MatmulPlan:
    """Axes that split M, K and N in the GEMM, and how each operand is sharded where it is stored.

    `x` and `w` map an axis to the dim that is all-gathered before the GEMM; `y` maps each axis of `k` to the dim along
    which partial sums are reduce-scattered, or to None where they are all-reduced.
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

    def __hash__(self) -> int:
        return hash((self.m, self.k, self.n, *(tuple(table.items()) for table in (self.x, self.w, self.y))))

    def swapped(self) -> MatmulPlan:
        """Return the plan of the next matmul: K and N are exchanged, and so are X's gathers and Y's scatters."""
        gathers = {axis: str(_SWAP[dim]) for axis, dim in self.dy.items()}
        return MatmulPlan(self.m, self.n, self.k, gathers, self.w, {axis: _SWAP[self.x.get(axis)] for axis in self.n})

    def transposed(self) -> MatmulPlan:
        """Return the swapped plan over the same stored matrix (W[N, K] read as W[K, N]), for a tied embedding."""
        swap = self.swapped()
        return MatmulPlan(swap.m, swap.k, swap.n, swap.x, {a: str(_SWAP[d]) for a, d in self.w.items()}, swap.y)

    def on(self, mesh: Mesh) -> MatmulPlan:
        """Return the plan without the axes that have size 1 on this mesh."""

        def keep(table: Mapping[str, str]) -> dict[str, str]:
            return {axis: dim for axis, dim in table.items() if mesh.sizes[axis] > 1}

        y = {axis: dim for axis, dim in self.y.items() if mesh.sizes[axis] > 1}
        m, k, n = (mesh.nontrivial(axes) for axes in (self.m, self.k, self.n))
        return MatmulPlan(m, k, n, keep(self.x), keep(self.w), y)

    @property
    def x_layout(self) -> Layout:
        """Layout of X[M, K] as stored."""
        return _stored(self.m, self.k, self.x, "M", "K")

    @property
    def w_layout(self) -> Layout:
        """Layout of W as stored, in PyTorch's order of dims [N, K]."""
        return _stored(self.n, self.k, self.w, "N", "K")

    @property
    def y_layout(self) -> Layout:
        """Layout of the result Y[M, N]."""
        return _stored(self.m, self.n, self.y, "M", "N")

    @property
    def dy(self) -> dict[str, str]:
        """Axes over which Y is scattered, and dY gathered, with the dim."""
        return {axis: dim for axis, dim in self.y.items() if dim}

    @property
    def dx_moves(self) -> tuple[Move, ...]:
        """Reductions of the partial dX to the gradient of the stored X."""
        return moves({axis: self.x.get(axis) for axis in self.n})


def moves(table: Mapping[str, str] | Mapping[str, str | None]) -> tuple[Move, ...]:
    """Return the collectives of a table in order; neighbouring axes of the same dim are fused into one group."""
    runs = groupby(table.items(), key=lambda item: item[1])
    return tuple(Move(tuple(axis for axis, _ in run), dim) for dim, run in runs)


def _stored(
    first: Axes, second: Axes, extra: Mapping[str, str] | Mapping[str, str | None], first_dim: str, second_dim: str
) -> Layout:
    def also(dim: str) -> Axes:
        return tuple(axis for axis, moved in extra.items() if moved == dim)

    return first + also(first_dim), second + also(second_dim)


class Traffic(NamedTuple):
    """One collective of a plan, and the bytes that each rank sends over a ring."""

    collective: str
    axes: Axes
    wire_bytes: float


def ring(collective: str, axes: Axes, num_bytes: float, mesh: Mesh) -> Traffic:
    """Return a collective over a ring: all but a rank's part of `num_bytes` is sent, by an all-reduce twice."""
    ranks = mesh.size(axes)
    return Traffic(collective, axes, (2 if collective == "all_reduce" else 1) * num_bytes * (ranks - 1) / ranks)


class Flows(NamedTuple):
    """Collectives of one matmul by operand; backward all-gathers X and W again, since only shards are saved.

    Attributes:
        x_again, w_again: all-gathers of X for dW, and of W for dX.
        scales, scales_back: all-reduces by which forward and backward find scales of their operands.
    """

    gather_x: list[Traffic]
    gather_w: list[Traffic]
    reduce_y: list[Traffic]
    gather_dy: list[Traffic]
    reduce_dx: list[Traffic]
    reduce_dw: list[Traffic]
    x_again: list[Traffic]
    w_again: list[Traffic]
    scales: Sequence[Traffic] = ()
    scales_back: Sequence[Traffic] = ()


def flows(
    plan: MatmulPlan, mesh: Mesh, m: int, n: int, k: int, itemsize: int, *, wgrad_itemsize: int | None = None
) -> Flows:
    """Return the collectives of one matmul for global sizes m, n, k; `wgrad_itemsize`: of dW, if it has another dtype.

    A ring all-gather or reduce-scatter over p ranks sends (p-1)/p of the whole tensor, an all-reduce twice that (Thakur
    et al. 2005).
    """
    plan = plan.on(mesh)
    x, w, y = whole_bytes(plan, mesh, m, n, k, itemsize)
    gather_x, gather_w = gathers(moves(plan.x), x, mesh), gathers(moves(plan.w), w, mesh)
    return Flows(
        gather_x,
        gather_w,
        reductions(moves(plan.y), y, mesh),
        gathers(moves(plan.dy), y, mesh),
        reductions(plan.dx_moves, x, mesh),
        reductions(moves(plan.w), w / itemsize * (wgrad_itemsize or itemsize), mesh),
        gather_x,
        gather_w,
    )


def whole_bytes(plan: MatmulPlan, mesh: Mesh, m: int, n: int, k: int, itemsize: int) -> tuple[float, float, float]:
    """Return the bytes of X, W and Y as a rank multiplies them: after all-gathers, before reductions."""
    x = m * k / mesh.size(plan.m + plan.k)
    w = n * k / mesh.size(plan.n + plan.k)
    y = m * n / mesh.size(plan.m + plan.n)
    return x * itemsize, w * itemsize, y * itemsize


def traffic(plan: MatmulPlan, mesh: Mesh, m: int, n: int, k: int, itemsize: int) -> list[Traffic]:
    """Return the collectives of one matmul, forward and then backward, for global sizes m, n, k."""
    flow = flows(plan, mesh, m, n, k, itemsize)
    forward = flow.gather_x + flow.gather_w + flow.reduce_y
    return forward + flow.gather_dy + flow.w_again + flow.x_again + flow.reduce_dx + flow.reduce_dw


def crossing(stored: Layout, copies: Axes, mesh: Mesh, m: int, n: int, itemsize: int) -> list[Traffic]:
    """Return the traffic of sending X[m, n] to the next pipeline rank, or its gradient back.

    Ranks along `copies` hold the same shard: each sends a part of it, and the receivers all-gather the parts (Narayanan
    et al. 2021, arXiv:2104.04473, section 4.1); uneven parts are padded.
    """
    ranks = mesh.size(copies)
    part = -(-m * n // (mesh.size(sum(stored, ())) * ranks)) * itemsize
    sent = Traffic("send", (PIPELINE,), part)
    return [sent, Traffic("all_gather", mesh.nontrivial(copies), part * (ranks - 1))] if ranks > 1 else [sent]


def gathers(steps: tuple[Move, ...], whole_bytes: float, mesh: Mesh) -> list[Traffic]:
    """Return the all-gathers that end at `whole_bytes`; the axes that were split last are gathered first."""
    out = []
    for axes, _ in steps:
        out.append(ring("all_gather", axes, whole_bytes, mesh))
        whole_bytes /= mesh.size(axes)
    return out[::-1]


def reductions(steps: tuple[Move, ...], whole_bytes: float, mesh: Mesh) -> list[Traffic]:
    """Return successive reductions that start at `whole_bytes`; each reduce-scatter leaves less for the next."""
    out = []
    for axes, dim in steps:
        out.append(ring("reduce_scatter" if dim else "all_reduce", axes, whole_bytes, mesh))
        whole_bytes /= mesh.size(axes) if dim else 1
    return out
