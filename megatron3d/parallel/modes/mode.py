"""What a tensor-parallel mode is: mesh axes with sizes, and two plans that fit each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron3d.parallel.layout import Layout, layout_axes
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Axes


@dataclass(frozen=True)
class Mode:
    """A mode: `expand` leads from the residual to the inner stream (qkv, up, head), `contract` back (proj, down)."""

    name: str
    axes: tuple[tuple[str, int], ...]
    expand: MatmulPlan
    contract: MatmulPlan

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
        """Axes along which ranks hold the same shard of the residual stream."""
        split = layout_axes(self.residual)
        return tuple(name for name, _ in self.axes if name not in split)

    @property
    def inner(self) -> Layout:
        """Layout of the inner stream [tokens, heads or ffn]; its token axes split whole sequences."""
        return self.expand.y_layout

    @property
    def embed(self) -> MatmulPlan:
        """Plan of the embedding, a product with one-hot tokens over the head's own stored matrix."""
        return self.expand.transposed()

    @property
    def batch_axes(self) -> Axes:
        """Axes that split the sequences of a microbatch before they are read."""
        return self.expand.m

    @property
    def vocab_multiple(self) -> int:
        """Divisor of the padded vocabulary: the head (an expand) and the embedding split it evenly in every layout."""
        sizes, head, embed = dict(self.axes), self.expand, self.embed
        splits = (head.w_layout[0], head.y_layout[1], embed.w_layout[1], embed.x_layout[1])
        return math.lcm(*(math.prod(sizes[axis] for axis in axes) for axes in splits))
