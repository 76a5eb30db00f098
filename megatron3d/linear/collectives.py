"""All-gathers of a planned matmul's operands and reductions of its partial sums, as the plan's tables say.

Letters: M tokens, K input features, N output features; each means the global dimension, shard or not.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron3d.comm.interface import Comm, Pending, completed
from megatron3d.linear.gemm import Operand
from megatron3d.parallel.matmul_plan import MatmulPlan, Move, moves

X_DIMS, W_DIMS = {"M": 0, "K": 1}, {"N": 0, "K": 1}
Y_DIMS = {"M": 0, "N": 1}


def gather(t: Tensor, table: Mapping[str, str], dims: Mapping[str, int], comm: Comm) -> Pending:
    """Start to all-gather the dims that the table says are sharded further; the last sharded first."""
    steps = moves(table)[::-1]
    if not steps:
        return completed(t)
    pending = comm.all_gather(t, steps[0].axes, dims[str(steps[0].dim)])

    def finish() -> Tensor:
        out = pending.wait()
        for axes, dim in steps[1:]:
            out = comm.all_gather(out, axes, dims[str(dim)]).wait()
        return out

    return Pending(finish)


def gather_operand(operand: Operand, table: Mapping[str, str], dims: Mapping[str, int], comm: Comm) -> Pending[Operand]:
    """Start to all-gather an operand of a GEMM, its data and then its scales, along the same dims."""
    if not table:
        return completed(operand)
    data = gather(operand.data, table, dims, comm)
    if operand.scales is None:
        return Pending(lambda: Operand(data.wait()))
    scales = gather(operand.scales, table, dims, comm)
    return Pending(lambda: Operand(data.wait(), scales.wait()))


def reduce(t: Tensor, steps: tuple[Move, ...], dims: Mapping[str, int], comm: Comm) -> Pending:
    """Start to reduce partial sums: reduce-scatter where a step names a dim, else all-reduce."""
    if not steps:
        return completed(t)

    def begin(t: Tensor, step: Move) -> Pending:
        return comm.reduce_scatter(t, step.axes, dims[step.dim]) if step.dim else comm.all_reduce(t, step.axes)

    pending = begin(t, steps[0])

    def finish() -> Tensor:
        out = pending.wait()
        for step in steps[1:]:
            out = begin(out, step).wait()
        return out

    return Pending(finish)


def gather_dy(dy_MN: Tensor, plan: MatmulPlan, comm: Comm) -> Pending:
    """Start to all-gather dY over the axes that Y was scattered over."""
    return gather(dy_MN, plan.dy, Y_DIMS, comm)
