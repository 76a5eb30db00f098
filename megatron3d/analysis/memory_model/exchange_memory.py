"""Memory that exchanges between context ranks keep for backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.parallel.context_exchange import BOTH, GATHER, HEADS, RING, head_axes, key_copies


def kept_by_exchange(local: LocalSizes) -> Mapping[str, int]:
    """Return the bytes of what attention keeps in the place of its keys and values; with heads, of queries as well."""
    return _KEPT[local.mode.exchange](local)


def keeps_queries(local: LocalSizes) -> bool:
    """Return whether attention keeps the queries of this rank's positions, and not those of some heads."""
    return not head_axes(local.mode.exchange, local.mode.context)


def _gathered(local: LocalSizes) -> Mapping[str, int]:
    """Return the keys and values of all ranks; with dropout each head's are apart where groups are uneven."""
    is_apart = local.drops_whole_keys and not local.heads.are_even
    heads = local.num_queries / local.num_groups if is_apart else 1
    return {"keys and values gathered": round(local.whole_keys * heads) * local.itemsize}


def _stacked(local: LocalSizes) -> Mapping[str, int]:
    return {"keys and values": _num_keys(local) * local.itemsize}


def _moved_heads(local: LocalSizes) -> Mapping[str, int]:
    """Return queries as received, keys and values as a ring moves them, and attention's output."""
    queries, keys = round(local.exchange.queries) * local.itemsize, _num_keys(local) * local.itemsize
    return {"queries received": queries, "keys and values": keys, "output of these heads": queries}


def _num_keys(local: LocalSizes) -> int:
    """Return the elements of a rank's keys and values, whose heads are copied where ranks exchange heads."""
    sizes, ranks = local.exchange, local.mesh.size(head_axes(local.mode.exchange, local.mode.context))
    return round(2 * sizes.keys * key_copies(sizes.num_groups, ranks))


_KEPT: Mapping[str, Callable[[LocalSizes], Mapping[str, int]]] = {
    GATHER: _gathered,
    RING: _stacked,
    HEADS: _moved_heads,
    BOTH: _moved_heads,
}
