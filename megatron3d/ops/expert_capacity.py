"""Capacity of experts: how many tokens of a sequence an expert takes at most (Lepikhin et al. 2020, arXiv:2006.16668).

The capacity is that of whole sequences, so that the choices which are dropped do not depend on the layout.
Letters: M tokens of this rank, N tokens of all ranks that hold parts of the same sequences, K experts of a token,
C choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.ops.router import Routes
from megatron3d.parallel.mesh import Axes


def choices_kept(routes: Routes, row_M: Tensor, seq_length: int, capacity: int, axes: Axes, comm: Comm) -> Tensor:
    """Return for each choice of this rank's tokens whether its expert takes it, bool [M, K].

    Of each sequence an expert takes the tokens of the largest weights, of equal ones those that come first.

    Args:
        row_M: index in the global batch of each token.
        axes: axes that split sequences over ranks.
    """
    num_experts, weights_MK = routes.scores_ME.shape[1], routes.weights_MK.detach()
    experts_NK, weights_NK, row_N = routes.experts_MK, weights_MK, row_M
    if axes:
        parts = [comm.all_gather(each, axes, 0) for each in (experts_NK, weights_NK, row_N)]
        experts_NK, weights_NK, row_N = (part.wait() for part in parts)
    group_NK = (row_N // seq_length).unsqueeze(1) * num_experts + experts_NK
    kept_NK = _best_of_groups(group_NK.flatten(), weights_NK.flatten(), row_N, capacity).view_as(group_NK)
    first = comm.mesh.index(axes) * len(row_M)
    return kept_NK[first : first + len(row_M)]


def _best_of_groups(group_C: Tensor, weight_C: Tensor, row_N: Tensor, capacity: int) -> Tensor:
    """Return whether each choice is among the `capacity` largest weights of its group; of equal ones the first rows."""
    place_C = torch.arange(len(group_C), device=group_C.device)
    order_C = place_C.view(len(row_N), -1)[row_N.argsort()].flatten()
    order_C = order_C[weight_C[order_C].argsort(descending=True, stable=True)]
    sorted_C, by_group_C = group_C[order_C].sort(stable=True)
    rank_C = place_C - torch.searchsorted(sorted_C, sorted_C)
    return torch.empty_like(group_C, dtype=torch.bool).scatter_(0, order_C[by_group_C], rank_C < capacity)
