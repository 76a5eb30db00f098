"""Check that data-parallel replicas hold the same weights: memory and CPUs fail silently (Hochschild et al. 2021,
"Cores that don't count"), and one corrupt replica spoils the all-reduced gradients of all.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron3d.parallel.mesh import DATA
from megatron3d.train.state import TrainState

_PIECE = 2**20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(values: Tensor) -> int:
    """Return a checksum of `values` [n], equal for equal bits: the sum of word * (2 index + 1) modulo 2^64."""
    words, total = values.view(_WORDS[values.element_size()]), torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        places = torch.arange(start, start + len(piece), device=values.device)
        total += (piece * (2 * places + 1)).sum()
    return int(total)


def check_replicas(state: TrainState) -> None:
    """Compare the weights of data-parallel replicas bit by bit; raise RuntimeError on all ranks if some differ.

    With ZeRO 3 only the replicas of HSDP hold copies.
    """
    buffers, comm = state.buffers, state.model.comm
    buffers.settle()
    mode = state.model.mode
    copies = DATA[:1] if buffers.sharding.params else (*DATA, *mode.context)
    axes = comm.mesh.without(copies, (*mode.experts, *mode.etensor))
    weights = [flat.main if buffers.sharding.params else flat.params for flat in buffers.flat_buffers]
    mine = [digest(values.detach()) for values in weights]
    place = tuple(comm.mesh.coord(axis) for axis in comm.mesh.without(comm.mesh.names, axes))
    notes = comm.gather_object((place, mine, socket.gethostname()))
    problems = comm.broadcast_object(notes and list(_differing(dict(enumerate(notes)))))
    if problems:
        raise RuntimeError(f"iteration {state.iteration}: " + "; ".join(problems))


def _differing(notes: Mapping[int, tuple[tuple[int, ...], list[int], str]]) -> Iterator[str]:
    places: dict[tuple[int, ...], list[int]] = {}
    for rank, (place, _, _) in notes.items():
        places.setdefault(place, []).append(rank)
    for ranks in places.values():
        counts = Counter(tuple(notes[rank][1]) for rank in ranks)
        common, count = counts.most_common(1)[0]
        odd = ranks if 2 * count <= len(ranks) else [rank for rank in ranks if tuple(notes[rank][1]) != common]
        if len(counts) > 1:
            named = ", ".join(f"rank {rank} (host {notes[rank][2]})" for rank in odd)
            others = [rank for rank in ranks if rank not in odd]
            against = f"not those of ranks {', '.join(map(str, others))}" if others else "not the same"
            yield f"the weights of {named} are {against}, which are replicas: a device corrupted bits"
