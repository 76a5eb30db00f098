"""Index of a checkpoint of 135,000 boxes (DeepSeek-V3's): seconds to load it on all ranks, and to make it on rank 0.

Ranks are processes over gloo.  The baseline sends the whole index through the rendezvous store, a server on rank 0, and
has every rank parse it where it needs it.  `store_MB` is what this server receives and sends, `collectives_MB` what
rank 0 sends in collectives of tensors.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.report import show, write
from torch.multiprocessing.spawn import start_processes

from megatron3d.checkpoint.index import (
    FILE_NAME,
    Index,
    StoredBox,
    StoredTensor,
    merge_tensors,
    pack,
    read_index,
    unpack,
)
from megatron3d.checkpoint.read import read_index_on_all_ranks
from megatron3d.comm.objects import StoreObjects, on_rank_0
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.parallel.matmul_plan import ring
from megatron3d.parallel.mesh import Mesh

WRITERS = 2048


def written(boxes: int) -> list[dict[str, StoredTensor]]:
    """Return what each of 2,048 ranks has written: a tensor for every three boxes."""
    parts: list[dict[str, StoredTensor]] = [{} for _ in range(WRITERS)]
    for number in range(boxes // 3):
        name = f"optimizer.exp_avg_sq.layers.{number // 256}.mlp.experts.{number % 256}.fc1"
        for third in range(3):
            rank, rows = (3 * number + third) % WRITERS, (2048 * third, 2048 * third + 2048)
            key = f"{name}[{rows[0]}:{rows[1]},0:7168]"
            box = StoredBox((rows, (0, 7168)), f"rank_{rank:05d}.safetensors", key, "62f2ef4a9a2b4b9d")
            parts[rank][name] = StoredTensor((6144, 7168), "float32", (box,))
    return parts


def make(_: int, boxes: int, folder: str, rows: Any) -> None:
    """Write the index and add a row with the CPU seconds of each part of the work."""
    parts = written(boxes)

    def took(what: str, begin: float) -> None:
        rows.append(
            {"what": what, "ranks": 1, "s": time.process_time() - begin, "store_MB": 0.0, "collectives_MB": 0.0}
        )

    begin = time.process_time()
    packed = [pack(part) for part in parts]
    took("pack, all ranks together", begin)
    begin = time.process_time()
    tensors = merge_tensors(map(unpack, packed))
    took("unpack, merge and check coverage", begin)
    begin = time.process_time()
    (Path(folder) / FILE_NAME).write_text(Index(iteration=1, meta={}, tensors=tensors).to_json())
    took("write JSON with its checksum", begin)


def through_store(folder: Path, comm: ProcessComm, names: Sequence[str]) -> Index:
    """Return the index of `names`, which rank 0 reads and broadcasts whole as an object."""
    whole: str = on_rank_0(comm, lambda: read_index(folder).packed().decode())
    return Index.unpacked(whole.encode(), names)


# What loads an index, and whether its content travels in collectives of tensors.
LOADS = {"load, whole through the store": (through_store, False), "load": (read_index_on_all_ranks, True)}


class CountingStore:
    """Counts the bytes that a rank takes from a store or puts into it."""

    def __init__(self, store: Any) -> None:
        self._store, self.num_bytes = store, 0

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self.num_bytes += len(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value."""
        value: bytes = self._store.get(key)
        self.num_bytes += len(value)
        return value

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return bool(self._store.delete_key(key))


def load_rank(rank: int, ranks: int, port_file: str, folder: str, rows: Any) -> None:
    """Load the index on one of the ranks, each of which needs every 64th tensor, in both ways."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=ranks)
    mesh = Mesh((("data", ranks),), rank)
    comm = ProcessComm(mesh, [("data",)])
    names = [f"optimizer.exp_avg_sq.layers.{n // 256}.mlp.experts.{n % 256}.fc1" for n in range(rank % 64, 45000, 64)]
    for what, (load, in_collectives) in LOADS.items():
        store = CountingStore(dist.distributed_c10d._get_default_store())
        comm._objects = StoreObjects(mesh, store)
        dist.barrier()
        begin = time.perf_counter()
        index = load(Path(folder), comm, names)
        dist.barrier()
        seconds = time.perf_counter() - begin
        assert rank % 64 or index.tensors, "no tensor was found"
        counts = torch.tensor([store.num_bytes])
        dist.all_reduce(counts)
        if rank == 0:
            size = len(read_index(Path(folder)).packed()) if in_collectives else 0
            sent = ring("all_reduce", mesh.names, size, mesh).wire_bytes / 1e6
            row = {"what": what, "ranks": ranks, "s": seconds}
            rows.append(row | {"store_MB": counts.item() / 1e6, "collectives_MB": sent})
    dist.destroy_process_group()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boxes", type=int, default=135_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 16, 64])
    parser.add_argument("--quick", action="store_true", help="300 boxes on 2 ranks: only to see that it runs")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    boxes, ranks = (300, [2]) if options.quick else (options.boxes, options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        rows: Any = torch.multiprocessing.Manager().list()
        # Forked processes share the memory of the imported modules, of which 64 copies would have many gigabytes.
        start_processes(make, (boxes, folder, rows), nprocs=1, start_method="fork")
        for number in ranks:
            arguments = number, f"{folder}/store_{number}", folder, rows
            start_processes(load_rank, arguments, nprocs=number, start_method="fork")
        show(f"index of {boxes} boxes", list(rows))
        if options.output:
            write(options.output, list(rows))


if __name__ == "__main__":
    main()
