"""Change the layout of an activation: gather the axes that the new layout lacks, keep the shard of those that it adds.

Both layouts describe the same tensor, which ranks along other axes hold as copies.  So backward is the change back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.parallel.layout import Layout, span
from megatron3d.parallel.relayouts import dim_changes


def relayout(x_MF: Tensor, source: Layout, target: Layout, comm: Comm) -> Tensor:
    """Return [M, F] in layout `target` from the same tensor in layout `source`; axes divide both dims evenly."""
    if not any(dim_changes(source, target, comm.mesh)):
        return x_MF
    y_MF: Tensor = _Relayout.apply(x_MF, source, target, comm)
    return y_MF


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MF: Tensor, source: Layout, target: Layout, comm: Comm) -> Tensor:
        ctx.layouts, ctx.comm = (source, target), comm
        return _changed(x_MF, source, target, comm)

    @staticmethod
    def backward(ctx: Any, dy_MF: Tensor) -> tuple[Tensor | None, ...]:
        source, target = ctx.layouts
        return _changed(dy_MF, target, source, ctx.comm), None, None, None


def _changed(x_MF: Tensor, source: Layout, target: Layout, comm: Comm) -> Tensor:
    """Gather all dims before any is cut: an axis that moves between dims cuts each rank differently."""
    changes = dim_changes(source, target, comm.mesh)
    for change in changes:
        x_MF = comm.all_gather(x_MF.contiguous(), change.gathered, change.dim).wait()
    for change in changes:
        low, high = span(x_MF.shape[change.dim], change.kept, comm.mesh)
        x_MF = x_MF.narrow(change.dim, low, high - low)
    return x_MF.contiguous()
