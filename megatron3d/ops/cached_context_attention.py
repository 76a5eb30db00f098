"""Attention of new tokens to a KV cache whose positions are divided among context ranks.

    position p     context rank p mod c, slot p // c of its cache

New queries, keys and values are gathered over the context ranks; each rank keeps the keys of its positions, attends all
new queries to all that it keeps, and sends each rank the partial outputs of its tokens, which are merged by their
log-sum-exp (Dao et al. 2022, arXiv:2205.14135).  So a prompt's keys are stored once, prefill and decode are one path
for every exchange of training, and every rank computes the same number of scores.

Letters: B sequences, W new tokens of each, L those of this rank, T slots of this rank's cache, N query heads,
G key/value heads, D features of a head, C context ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron3d.ops.attention_pairs import PlainKernel
from megatron3d.ops.attention_softmax import add_sink
from megatron3d.ops.capped_attention import InPieces
from megatron3d.ops.context_attention import ContextAttention
from megatron3d.ops.context_gather import gather_positions
from megatron3d.ops.kv_cache import CacheView

# Queries whose scores are in memory at once.
PIECE = 256


def cached_context_attention(
    q_BLND: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, at: ContextAttention, cached: CacheView, site: str
) -> Tensor:
    """Return causal attention of this rank's new tokens, [M, N * D], after extending the cache of a layer by them."""
    order = at.order
    q_BNWD = gather_positions(q_BLND, order.context, at.all_positions, at.comm)
    kv = gather_positions(torch.cat((k_BLGD, v_BLGD), dim=2), order.context, at.all_positions, at.comm)
    k_BWGD, v_BWGD = (t.transpose(1, 2) for t in kv.chunk(2, dim=1))
    rank, ranks = at.comm.mesh.index(order.context), order.num_ranks
    k, v, mask_BWT = cached.extend(site, k_BWGD, v_BWGD, at.visible.window, rank, ranks)
    k_BGTD, v_BGTD = k.transpose(1, 2), v.transpose(1, 2)
    if not at.heads.are_even:
        k_BGTD, v_BGTD = (t[:, at.heads.group_of_query] for t in (k_BGTD, v_BGTD))
    kernel = InPieces(PlainKernel(at.softmax.softcap), PIECE)
    out, lse = kernel.forward(q_BNWD, k_BGTD, v_BGTD, False, mask_BWT[:, None, None])
    out_BNLD, lse_BNL = _merged(torch.cat((out.to(lse.dtype), lse.unsqueeze(-1)), dim=-1), at)
    y_BNLD, _ = add_sink(out_BNLD, lse_BNL, at.softmax.sink_N)
    return y_BNLD.to(q_BLND.dtype).transpose(1, 2).flatten(0, 1).flatten(1)


def _merged(parts: Tensor, at: ContextAttention) -> tuple[Tensor, Tensor]:
    """Return output [B, N, L, D] and log-sum-exp of this rank's tokens, from what every rank has of all, [B, N, W, E].

    The last of E features is the log-sum-exp.
    """
    by_rank = at.all_positions.scattered(parts)
    axes = at.comm.mesh.nontrivial(at.order.context)
    received = at.comm.all_to_all(by_rank, axes).wait()  # [C, B, N, L, E]
    out, lse = received[..., :-1], received[..., -1]
    total = lse.logsumexp(0)
    return (out * (lse - total).exp().unsqueeze(-1)).sum(0), total
