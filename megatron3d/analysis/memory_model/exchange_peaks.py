"""Transient memory of attention's backward on context ranks.

    part by part    gradients that have arrived | dy of this part | the largest moment of this part
    at the end      gradients of all parts | the same, heads of a position together

The moments of a part follow the code, line by line: an all-gather's in `ops/context_gather.py`, a ring's in
`ops/ring_attention.py`, those of heads in `ops/head_exchange.py`.  Numbers per row of scores are left out.

Letters: q and kv are the elements of queries, and of keys and values together, that a part attends; e and w are the
bytes of an element in the model's dtype and in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.parallel.attention_pairs import LONGEST, Kind, Pair
from megatron3d.parallel.context_exchange import (
    BOTH,
    GATHER,
    HEADS,
    RING,
    exchange_ring,
    gathered_pairs,
    head_axes,
    key_copies,
)
from megatron3d.parallel.context_ring import RingPlan, Starts

# Bytes of a mask while it is made: distances in int64, and what is compared.
_MASK_BYTES = 8 + 3


class _Part(NamedTuple):
    """Heads that a rank attends at once, and how many parts there are.

    Attributes:
        heads: query heads; groups: key/value heads.
    """

    heads: int
    groups: int
    positions: int
    num_parts: int

    def q(self, local: LocalSizes) -> int:
        """Return the elements of its queries."""
        return local.sequences * self.positions * self.heads * local.arch.kv_channels

    def kv(self, local: LocalSizes) -> int:
        """Return the elements of its keys and values at as many positions as queries."""
        return 2 * local.sequences * self.positions * self.groups * local.arch.kv_channels


def exchange_peak(local: LocalSizes, starts: Starts = None) -> int:
    """Return the most bytes that attention's backward has at once on context ranks, beyond what forward kept.

    The gradient of its output is counted, and so are those that it returns.

    Args:
        starts: first positions of the documents of each sequence; None: one document.
    """
    return round(local.exchange.queries) * local.itemsize + _PEAKS[local.mode.exchange](local, starts)


def _gathered(local: LocalSizes, starts: Starts) -> int:
    """Return the peak of an all-gather: gradients of whole sequences' keys, and again in the order of ranks."""
    count, ranks = local.exchange.num_parts(GATHER, 1), local.mesh.size(local.mode.context)
    part = _Part(-(-local.num_queries // count), local.num_groups // count, local.positions, count)
    apart = part if local.heads.are_even else part._replace(groups=part.heads)
    e, w, q, kv = local.itemsize, local.wide, part.q(local), ranks * part.kv(local)
    copied = 0 if apart is part else ranks * apart.kv(local)
    pairs = gathered_pairs(local.order, local.arch.seq_length, starts, local.window)
    own = apart.kv(local) * (w + e * (len(pairs.chunks) > 1)) if pairs.own else 0
    moments = [
        w * (q + (copied or kv))
        + e * copied
        + max(own + _largest(local, pairs.own, apart), _largest(local, pairs.others, apart)),
        w * (q + kv + copied) + e * copied,
        (w + _narrow(local)) * (q + kv),
        e * (q + 2 * kv + kv // ranks),
    ]
    before, whole = e * (count - 1) * (q + kv // ranks), e * count * (q + kv // ranks)
    return max(before + max(moments), (1 + (count > 1)) * whole)


def _ring(local: LocalSizes, starts: Starts) -> int:
    """Return the peak of a ring, whose heads are not in parts."""
    part = _part(local)
    return _ring_moment(local, starts, part, part.q(local), part.kv(local))


def _heads(local: LocalSizes, starts: Starts) -> int:
    """Return the peak of an exchange of heads, with or without a ring: gradients are sent home in blocks."""
    part, e = _part(local), local.itemsize
    q, kv = part.q(local), part.kv(local)
    in_part = q * e + max(_ring_moment(local, starts, part, q, kv), 3 * e * (q + kv))
    copies = key_copies(local.exchange.num_groups, local.mesh.size(head_axes(local.mode.exchange, local.mode.context)))
    summed = round(2 * local.exchange.keys) if copies > 1 else 0
    return e * max((part.num_parts - 1) * (q + kv) + in_part // e, 2 * part.num_parts * (q + kv) + summed)


def _part(local: LocalSizes) -> _Part:
    """Return a part of the heads that a rank has for the positions of all ranks of `a2a`."""
    sizes, ranks = local.exchange, local.mesh.size(head_axes(local.mode.exchange, local.mode.context))
    count, groups = sizes.num_parts(local.mode.exchange, ranks), sizes.num_groups * key_copies(sizes.num_groups, ranks)
    return _Part(local.num_queries // ranks // count, groups // ranks // count, local.positions * ranks, count)


def _ring_moment(local: LocalSizes, starts: Starts, part: _Part, q: int, kv: int) -> int:
    """Return the largest moment of a ring of one rank or more.

    It has gradients of its own keys; from the second step on those of a block, those which it sends and those which it
    receives; and the keys and values of a step and of the next one.
    """
    plan, e, w = _plan(local, starts), local.itemsize, local.wide
    last = len(plan.steps) - 1
    first, second = plan.own_parts
    moments = [w * (q + kv) + e * kv * (last >= 0) + _largest(local, first, part)]
    for place, step in enumerate(plan.steps):
        blocks, before = e * (1 + (place < last)) * kv, 2 * bool(place)
        moments.append(w * (q + (2 + before) * kv) + blocks + _largest(local, step.pairs, part))
        moments.append(w * (q + 3 * kv) + blocks)  # sent
    moments.append(w * (q + (3 if plan.steps else 1) * kv) + _largest(local, second, part))
    return max(*moments, (w + _narrow(local)) * (q + kv))


def _plan(local: LocalSizes, starts: Starts) -> RingPlan:
    """Return the ring as attention computes it."""
    plan = exchange_ring(local.mode.exchange, local.order, local.arch.seq_length, starts, local.window)
    is_cut = local.arch.attention_dropout and local.longest_piece
    return plan.in_pieces(local.longest_piece) if is_cut and local.longest_piece else plan


def _narrow(local: LocalSizes) -> int:
    """Return the bytes of an element where gradients are copied to the model's dtype."""
    return local.itemsize if local.itemsize < local.wide else 0


def _largest(local: LocalSizes, pairs: Iterable[Pair], part: _Part) -> int:
    """Return the bytes of the pair that needs most: its gradients, its mask, and what its kernel works with."""
    return max((_pair(local, pair, part) for pair in pairs), default=0)


def _pair(local: LocalSizes, pair: Pair, part: _Part) -> int:
    rows, keys = pair.queries[1] - pair.queries[0], pair.keys[1] - pair.keys[0]
    sequences = local.sequences if pair.sequences is None else pair.sequences[1] - pair.sequences[0]
    size = sequences * local.arch.kv_channels
    grads = size * (rows * part.heads + 2 * keys * part.groups) * local.itemsize
    is_masked, on_gpu = pair.kind is Kind.MASKED, local.kernels.on_gpu
    has_scores = bool(local.arch.attention_dropout) or local.arch.attention_softcap is not None
    mask = rows * keys * (1 + local.itemsize * (not has_scores and not on_gpu)) * is_masked
    work = 0
    if has_scores or (on_gpu and is_masked):
        at_once = min(rows, LONGEST)
        kept = 5 if local.arch.attention_softcap is not None else 4  # in fp32; the other two have the model's dtype
        work = sequences * part.heads * at_once * keys * (kept * local.wide + (6 - kept) * local.itemsize)
        work += 2 * size * keys * part.groups * local.wide * (at_once < rows)
    elif local.kernels.sdpa_workspace and local.itemsize < local.wide:
        work = size * rows * part.heads * local.wide
        work += size * 4 * keys * part.heads * local.itemsize * (part.groups != part.heads)
    return max(grads + mask + work, _MASK_BYTES * rows * keys * is_masked)


_PEAKS: Mapping[str, Callable[[LocalSizes, Starts], int]] = {
    GATHER: _gathered,
    RING: _ring,
    HEADS: _heads,
    BOTH: _heads,
}
