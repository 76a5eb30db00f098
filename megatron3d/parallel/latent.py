"""Narrow features of the residual stream made whole for attention: the rotary key that all heads share, and in
generation the latents of keys and values (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

They are [tokens, features] in the residual layout.  Attention of a rank needs all of them for its inner tokens:

    forward     all-gather as X of an `expand` matmul; all-gather features over k; keep own rows where k splits tokens
    backward    all-gather the rows again; reduce-scatter over k where it splits heads, else keep the own features;
                reduce as dX of an `expand` matmul

So the gradient is summed over exactly the axes that split heads.
"""

from __future__ import annotations

from megatron3d.parallel.matmul_plan import MatmulPlan, Traffic, flows, moves
from megatron3d.parallel.mesh import Axes, Mesh


def row_axes(plan: MatmulPlan) -> Axes:
    """Return the axes of k that split the tokens of the inner stream."""
    return tuple(axis for axis, dim in plan.y.items() if dim == "M")


def latent_axes(plan: MatmulPlan) -> tuple[Axes, ...]:
    """Return the sets of axes that these collectives use besides those of the matmul."""
    return (plan.k, row_axes(plan), *(step.axes for step in moves(plan.y) if step.dim == "N"))


def latent_traffic(
    plan: MatmulPlan, mesh: Mesh, tokens: int, size: int, itemsize: int, backward: bool
) -> list[Traffic]:
    """Return the collectives that make `size` features of all `tokens` whole, or those of their gradient."""
    sent, plan = flows(plan, mesh, tokens, 1, size, itemsize), plan.on(mesh)
    whole_bytes = tokens / mesh.size(plan.m) * size * itemsize

    def part(collective: str, axes: Axes) -> list[Traffic]:
        ranks = mesh.size(axes)
        return [Traffic(collective, axes, whole_bytes * (ranks - 1) / ranks)] if axes else []

    if not backward:
        return [*sent.gather_x, *part("all_gather", plan.k)]
    calls = part("all_gather", row_axes(plan))
    for step in moves(plan.y):
        calls += part("reduce_scatter", step.axes) if step.dim == "N" else []
        whole_bytes /= mesh.size(step.axes)
    return [*calls, *sent.reduce_dx]
