"""Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values move round the context ranks during attention.

    forward     kv of the next step in flight | pairs of this step, merged by log-sum-exp
    backward    kv of the next step and the gradients of the step before in flight | gradients of this step's pairs

The gradients of a block of keys and values travel with it, in fp32 or wider, and are sent home after the last step.
Half of a rank's own pairs are computed while the first block comes, the other half while its own gradients come home.
On one rank there is no other step, and this is attention in chunks, whose memory grows with the length of sequences.

Letters: B sequences, N query heads, G key/value heads, L positions of this rank, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm, Pending, completed
from megatron3d.ops.attention_pairs import KernelOf, Merged, MergedGrads, PairKernel
from megatron3d.parallel.context_ring import RingPlan
from megatron3d.parallel.mesh import Axes

OfStep = Callable[[int], KernelOf | None]


def ring_attention(
    q_BNLD: Tensor,
    kv: Tensor,
    plan: RingPlan,
    axes: Axes,
    comm: Comm,
    kernel: PairKernel | None,
    of_step: OfStep = lambda behind: None,
) -> tuple[Tensor, Tensor]:
    """Return attention [B, N, L, D] of this rank's positions to those that all ranks over `axes` hold, and its
    log-sum-exp, given keys and values [2, B, G, L, D].

    Args:
        kernel: kernel of all pairs; None: the one of each kind on this device.
        of_step: returns the kernels of the pairs with keys of the rank that many places back; None: `kernel`.
    """
    merged, blocks = Merged(q_BNLD, plan.window, kernel), _Blocks(kv, plan, axes, comm)
    merged.add(kv, plan.own, of_step(0))
    for step in plan.steps:
        merged.add(blocks.next(), step.pairs, of_step(step.behind))
    return merged.result()


def ring_gradients(
    dy: Tensor,
    operands: tuple[Tensor, Tensor],
    merged: tuple[Tensor, Tensor],
    plan: RingPlan,
    axes: Axes,
    comm: Comm,
    kernel: PairKernel | None,
    of_step: OfStep = lambda behind: None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries, and of keys and values, in fp32 or wider, given the final output and lse."""
    q, kv = operands
    grads, blocks = MergedGrads(dy, q, merged, plan.window, kernel), _Blocks(kv, plan, axes, comm)
    own = torch.zeros_like(kv, dtype=grads.dq.dtype)
    grads.add(kv, own, plan.own_parts[0], of_step(0))
    travelling = _travel_home(grads, blocks, plan, axes, comm, of_step) if plan.steps else None
    grads.add(kv, own, plan.own_parts[1], of_step(0))
    if travelling is not None:
        own += travelling.wait()
    return grads.dq, own


def _travel_home(
    grads: MergedGrads, blocks: _Blocks, plan: RingPlan, axes: Axes, comm: Comm, of_step: OfStep
) -> Pending:
    """Compute the steps of other ranks' keys and values; return the gradients of this rank's that they computed."""
    before: Pending | None = None
    sent: Tensor | None = None
    homeward = plan.size - plan.steps[-1].behind
    for step, move in zip(plan.steps, (*plan.moves[1:], homeward), strict=True):
        kv = blocks.next()
        dkv = torch.zeros_like(kv, dtype=grads.dq.dtype)
        grads.add(kv, dkv, step.pairs, of_step(step.behind))
        if before is not None:
            dkv += before.wait()
        before, sent = comm.shift(dkv, torch.empty_like(dkv), axes, move), dkv
    assert before is not None and sent is not None, "a ring has a step"
    last, kept = before, sent  # what is sent must live until the wait
    return Pending(lambda: (last.wait(), kept)[0])


class _Blocks:
    """Keys and values of the steps of a plan, in order, each in flight while the one before is used."""

    def __init__(self, kv: Tensor, plan: RingPlan, axes: Axes, comm: Comm) -> None:
        self._axes, self._comm = axes, comm
        self._moves = list(plan.moves)
        self._sent: Tensor | None = None  # must live until the wait, and no longer
        self._pending = completed(kv)
        self._start(kv)

    def _start(self, kv: Tensor) -> None:
        self._sent = None
        if self._moves:
            self._sent, out = kv, torch.empty_like(kv)
            self._pending = self._comm.shift(kv, out, self._axes, self._moves.pop(0))

    def next(self) -> Tensor:
        """Wait for the block of the next step, and start to move it on to the step after it."""
        kv = self._pending.wait()
        self._start(kv)
        return kv
