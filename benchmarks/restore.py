"""Restore of a training state from the memory of a peer, compared with a checkpoint on disk.

Ranks hold equal rows of the fp32 master weights and both moments of a GPT, of which each one's peer has a copy.  All
restore them, as rows or as columns of another layout, through the same function: from the copies of the peers, from the
files in the page cache, and from the files after they were dropped from it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint import COLUMNS, ROWS, Compared, State, run, slowest, timed
from common.report import Row

from megatron3d.checkpoint.held import Held, HeldBoxes, HeldStep, complete_steps
from megatron3d.checkpoint.index import Index
from megatron3d.checkpoint.pieces import Piece
from megatron3d.checkpoint.read import BoxSource, CheckpointFolder, load_on_all_ranks, read_index_on_all_ranks
from megatron3d.checkpoint.store import resolve, save
from megatron3d.comm.interface import Comm
from megatron3d.comm.objects import broadcast_bytes
from megatron3d.comm.peer_link import GlooPeerLink
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.parallel.peers import kept_by, peer_of

META = {"iteration": 1, "consumed_samples": 1, "cursors": {}}
CPU = torch.device("cpu")


def copy_of_peer(state: State) -> Held:
    """Return the rows of the rank that sends its copy to this one."""
    hosts = [""] * state.mesh.world_size
    peer, source = peer_of(state.mesh.rank, hosts), kept_by(state.mesh.rank, hosts)
    other = State.__new__(State)
    other.mesh, other.shapes = state.mesh.at(source), state.shapes
    other.memory = {name: torch.empty_like(tensor) for name, tensor in state.memory.items()}
    GlooPeerLink(peer, source).swap(list(state.memory.values()), list(other.memory.values()))
    return [HeldStep(META, list(other.pieces(ROWS)))]


def fill(state: State, pieces: Sequence[Piece], source: BoxSource, comm: Comm) -> None:
    """Fill the pieces of all ranks, each of which has its own."""
    damage = load_on_all_ranks(source, pieces, state.memory.values(), comm, ())
    assert not damage, damage


def from_memory(state: State, by: tuple[Any, ...], comm: Comm, held: Held) -> None:
    """Restore from the copies of the peers."""
    pieces = list(state.pieces(by))
    listings = comm.gather_object([step.listing() for step in held])
    index = next(complete_steps(listings, state.shapes)) if listings else None
    packed = broadcast_bytes(comm, b"" if index is None else index.packed(), CPU)
    fill(state, pieces, HeldBoxes(Index.unpacked(packed), held), comm)


def from_disk(state: State, by: tuple[Any, ...], comm: Comm, root: Path) -> None:
    """Restore from the newest checkpoint."""
    folder = resolve(root)
    index = read_index_on_all_ranks(folder, comm, state.shapes)
    fill(state, list(state.pieces(by)), CheckpointFolder(folder, index), comm)


def drop_cache(root: Path) -> None:
    """Drop all files of a folder from the page cache."""
    for path in (path for path in root.rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure(state: State, root: Path, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Return the seconds of every round, of the slowest rank, by name; contestants rotate within a round."""
    comm = ProcessComm(state.mesh, [("data",)])
    state.fill()
    held = copy_of_peer(state)
    save(root, 1, state.pieces(ROWS), {}, comm)
    found: dict[str, list[float]] = {}
    sources = ("memory", "page cache", "disk")
    for number in range(-warmup, rounds):
        for what, by in (("rows", ROWS), ("columns", COLUMNS)):
            for name in sources[number % 3 :] + sources[: number % 3]:
                if name == "disk" and state.mesh.rank == 0:
                    drop_cache(root)
                acts = {"memory": partial(from_memory, state, by, comm, held)}
                seconds = timed(acts.get(name, partial(from_disk, state, by, comm, root)))
                state.check(by)
                for worst in slowest({name: seconds}).values():
                    found.setdefault(f"{what} {name}", []).extend([worst] if number >= 0 else [])
    return found


def table(size: str, ranks: int, num_bytes: int, found: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return medians, and medians of each round's ratio of the disk's time to that of memory."""
    rows: list[Row] = []
    for what in ("rows", "columns"):
        ours = found[f"{what} memory"]
        for peer in ("page cache", "disk"):
            others = found[f"{what} {peer}"]
            ratio = statistics.median(b / a for a, b in zip(ours, others, strict=True))
            mine, theirs = statistics.median(ours), statistics.median(others)
            labels = {"size": size, "ranks": ranks, "restored as": what, "peer": peer}
            speeds = {"memory_GB/s": num_bytes / 1e9 / mine, "peer_GB/s": num_bytes / 1e9 / theirs}
            rows.append({**labels, "memory_s": mine, "peer_s": theirs, "speed-up": ratio, **speeds})
    return rows


if __name__ == "__main__":
    run(Compared(measure, table), __doc__, "100M")
