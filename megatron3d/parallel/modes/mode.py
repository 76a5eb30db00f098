"""A tensor-parallel mode: mesh axes with sizes, and the plans of its two kinds of linears."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron3d.parallel.layout import Layout, layout_axes
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Axes, Sizes

ALLGATHER, ALLTOALL = DISPATCHERS = ("allgather", "alltoall")  # how tokens reach experts: `experts/plan.py`


@dataclass(frozen=True)
class Mode:
    """A tensor-parallel mode.

    `expand` is the plan of linears from the residual to the inner stream (qkv, fc1, head; column-parallel in Megatron),
    `contract` that of linears back to the residual stream (proj, fc2; row-parallel).  `context` names the axes that
    split positions inside sequences; they split the tokens of both plans, `exchange` is how their ranks exchange keys
    and values, and `load_balancer` how positions are divided among them (`attention/context/plan.py`).  `experts` names
    the axes over which the experts of a layer are distributed, `etensor` those that split each expert, `pieces` the
    axes that have pieces for them, and `dispatcher` is how tokens reach them (`experts/plan.py`).
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    expand: MatmulPlan
    contract: MatmulPlan
    context: Axes = ()
    exchange: str = ""
    load_balancer: str = ""
    experts: Axes = ()
    etensor: Axes = ()
    pieces: tuple[tuple[str, Sizes], ...] = ()
    dispatcher: str = ALLGATHER

    def __post_init__(self) -> None:
        there, back = self.expand.y_layout, self.contract.x_layout
        assert there == back, f"mode {self.name}: expand leaves Y as {there}, contract expects X as {back}"
        there, back = self.contract.y_layout, self.expand.x_layout
        assert there == back, f"mode {self.name}: contract leaves Y as {there}, expand expects X as {back}"
        assert self.embed.y_layout == self.residual, f"mode {self.name}: the embedding does not fit the residual"
        assert self.expand.m == self.contract.m, f"mode {self.name}: expand and contract split tokens differently"

    @property
    def residual(self) -> Layout:
        """Layout of the residual stream [tokens, hidden]."""
        return self.expand.x_layout

    @property
    def copies(self) -> Axes:
        """Axes over which the residual stream is replicated."""
        split = layout_axes(self.residual)
        return tuple(name for name, _ in self.axes if name not in split)

    @property
    def home(self) -> Axes:
        """Axes that split the tokens where each rank has whole rows of its own: those of the residual stream's tokens,
        then those of its features, then those of its copies."""
        tokens, features = self.residual
        return tokens + features + self.copies

    @property
    def inner(self) -> Layout:
        """Layout of the inner stream [tokens, heads or ffn]; `sequence_axes` of its tokens shard whole sequences."""
        return self.expand.y_layout

    @property
    def embed(self) -> MatmulPlan:
        """Plan of the embedding: a matmul of one-hot tokens with the matrix that the head stores."""
        return self.expand.transposed()

    @property
    def latent(self) -> MatmulPlan:
        """Plan of linears from the residual stream to narrow features in the same layout, the latents of attention.

        Their output is smaller than their input, which therefore stays: no token is gathered, partial sums are
        reduce-scattered over the axes of the features, and where no axis splits features nothing is communicated.
        """
        tokens, features = self.residual
        return MatmulPlan(tokens, features, w=self.expand.w, y=dict.fromkeys(features, "N"))

    @property
    def batch_axes(self) -> Axes:
        """Axes that shard the sequences of a microbatch when they are read."""
        return tuple(axis for axis in self.expand.m if axis not in self.context)

    @property
    def sequence_axes(self) -> Axes:
        """Axes that shard whole sequences in attention."""
        return tuple(axis for axis in self.inner[0] if axis not in self.context)

    @property
    def vocab_multiple(self) -> int:
        """Divisor of the padded vocabulary: the head (an expand) and the embedding split it evenly in every layout."""
        sizes, head = dict(self.axes), self.expand
        embed = self.embed
        splits = (head.w_layout[0], head.y_layout[1], embed.w_layout[1], embed.x_layout[1])
        return math.lcm(*(math.prod(sizes[axis] for axis in axes) for axes in splits))
