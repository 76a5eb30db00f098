"""Loading of a checkpoint by all ranks of a run: the index is parsed once, and every byte is read and verified once.

    rank 0                  index.json -> parsed, checked -> broadcast as tuples
    replica 0 of 2          | a a a . . . |   reads half of the boxes that both need, and verifies them
    replica 1 of 2          | . . . b b b |   reads the other half
    both, after the sum     | a a a b b b |   the elements that a rank has not read are 0

The sum is one of integers, so that the bits of each element stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megatron3d.checkpoint.index import Index, PlainIndex, read_index
from megatron3d.checkpoint.piece import Piece
from megatron3d.checkpoint.read import BoxSource, find_index_damage, load_share, raise_if_damaged
from megatron3d.comm.interface import Comm, ObjectCollectives
from megatron3d.comm.run_on_all_ranks import on_rank_0, run_on_all_ranks
from megatron3d.parallel.mesh import Axes

# Integers that NCCL and gloo add, by the bytes of an element; others are added byte by byte.
_WORDS = {4: torch.int32, 8: torch.int64}


def read_index_on_all_ranks(
    folder: Path,
    comm: ObjectCollectives,
    names: Iterable[str],
    prefix: str = "",
    read: Callable[[Path], Index] | None = None,
) -> Index:
    """Return the index of the tensors `names`, which rank 0 reads, perhaps with `read`, and broadcasts.

    All ranks raise UserError if the index is missing or damaged, for tensors whose names start with `prefix`.
    """

    def parse() -> PlainIndex:
        index = (read or read_index)(folder)
        raise_if_damaged(folder, find_index_damage(index.with_prefix(prefix)))
        return index.plain()

    return Index.of_plain(on_rank_0(comm, parse), names)


def load_on_all_ranks(
    source: BoxSource, pieces: Sequence[Piece], memory: Iterable[Tensor], comm: Comm, replicas: Axes
) -> list[str]:
    """Fill the pieces of all ranks and return each damage, on all ranks; after damage the values are undefined.

    All ranks raise UserError with all differences between the pieces and the index.

    Args:
        memory: contiguous tensors of which the pieces are views; what no piece covers becomes 0.
        replicas: axes along which all ranks have the same pieces, of which each reads a part; each axis has a group.
    """
    tensors, mesh = list(memory), comm.mesh

    def read() -> list[str]:
        for tensor in tensors:
            tensor.zero_()
        return load_share(source, pieces, (mesh.index(replicas), mesh.size(replicas)))

    damage = distinct_on_all_ranks(comm, read)
    for tensor in tensors if not damage else ():
        words = tensor.view(-1).view(_WORDS.get(tensor.element_size(), torch.int8))
        for axis in mesh.nontrivial(replicas):
            comm.all_reduce(words, (axis,)).wait()
    return damage


def distinct_on_all_ranks(comm: ObjectCollectives, find: Callable[[], Sequence[str]]) -> list[str]:
    """Return the distinct sentences that `find` returns on all ranks, on every rank; errors as `run_on_all_ranks`."""
    found = run_on_all_ranks(comm, find)
    sentences: list[str] = comm.broadcast_object(found and list(dict.fromkeys(chain(*found))))
    return sentences
