"""Index of a checkpoint of 135,000 boxes (DeepSeek-V3's): seconds to load it on all ranks, and to make it on rank 0.

Ranks are processes over gloo.  `store` is what passes through the rendezvous store of rank 0, `collectives` what a rank
sends in collectives of tensors.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.report import Row, show, write
from torch.multiprocessing.spawn import spawn

from megatron3d.checkpoint.index import FILE_NAME, Index, StoredBox, StoredTensor, merge_tensors, pack, unpack
from megatron3d.checkpoint.read import read_index_on_all_ranks
from megatron3d.comm.objects import StoreObjects
from megatron3d.comm.process_comm import ProcessComm
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


def make(boxes: int, folder: Path) -> list[Row]:
    """Write the index and return the CPU seconds of each part of the work."""
    parts, rows = written(boxes), list[Row]()

    def took(what: str, begin: float) -> None:
        rows.append({"what": what, "ranks": 1, "s": time.process_time() - begin})

    begin = time.process_time()
    packed = [pack(part) for part in parts]
    took("pack, all ranks together", begin)
    begin = time.process_time()
    tensors = merge_tensors(map(unpack, packed))
    took("unpack, merge and check coverage", begin)
    begin = time.process_time()
    (folder / FILE_NAME).write_text(Index(iteration=1, meta={}, tensors=tensors).to_json())
    took("write JSON with its checksum", begin)
    return rows


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
    """Load the index on one of the ranks, each of which needs every 64th tensor."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=ranks)
    mesh = Mesh((("data", ranks),), rank)
    comm = ProcessComm(mesh, [("data",)])
    store = CountingStore(dist.distributed_c10d._get_default_store())
    comm._objects = StoreObjects(mesh, store)
    names = [f"optimizer.exp_avg_sq.layers.{n // 256}.mlp.experts.{n % 256}.fc1" for n in range(rank % 64, 45000, 64)]
    dist.barrier()
    begin = time.perf_counter()
    index = read_index_on_all_ranks(Path(folder), comm, names)
    dist.barrier()
    seconds = time.perf_counter() - begin
    assert rank % 64 or index.tensors, "no tensor was found"
    counts = torch.tensor([store.num_bytes])
    dist.all_reduce(counts)
    if rank == 0:
        rows.append({"what": "load", "ranks": ranks, "s": seconds, "store_MB": counts.item() / 2 / 1e6})
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
        rows: Any = torch.multiprocessing.Manager().list(make(boxes, Path(folder)))
        for number in ranks:
            spawn(load_rank, (number, f"{folder}/store_{number}", folder, rows), nprocs=number)
        show(f"index of {boxes} boxes", list(rows))
        if options.output:
            write(options.output, list(rows))


if __name__ == "__main__":
    main()
