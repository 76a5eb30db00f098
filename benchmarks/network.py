"""Bandwidth and first use of the network in a node and between nodes, against what the cost model predicts.

    srun --nodes=2 --ntasks-per-node=8 python benchmarks/network.py --cluster dgx_h200 --output network.jsonl
    torchrun --nproc-per-node 4 benchmarks/network.py --cluster local --node-ranks 2 --cpu --quick

Ranks form a mesh `outer` x `inner` of nodes and their GPUs.  Each row is one collective of one size along an axis, as
all groups along it run it at once: seconds of the slowest rank, GB/s that each rank sends, and the predicted seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.forecast.time.hardware import Cluster, Network, load_cluster
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Axes, Link, Mesh
from megatron3d.runtime import process

SIZES_MIB = (1, 16, 256)
QUICK_MIB = (1,)
# Bytes that each rank of n sends in a ring, as a multiple of the whole tensor.
SENT: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the rows on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True, help="a file of megatron3d/hardware/clusters, or a path")
    parser.add_argument("--node-ranks", type=int, help="ranks of a node; default: as in the cluster's file")
    parser.add_argument("--output", type=Path, help="JSON lines; default: only the table")
    parser.add_argument("--json", action="store_true", help="print JSON lines in the place of the table")
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU")
    parser.add_argument("--quick", action="store_true", help="small tensors, which only show that it works")
    args = parser.parse_args(argv)
    cluster = load_cluster(args.cluster)
    with process.start(on_cpu=args.cpu) as here:
        inner = min(args.node_ranks or cluster.node_ranks, here.world_size)
        assert here.world_size % inner == 0, f"{here.world_size} ranks are not whole nodes of {inner}"
        mesh = Mesh((("outer", here.world_size // inner), ("inner", inner)), here.rank)
        rows = list(measure(mesh, here.device, cluster, QUICK_MIB if args.quick else SIZES_MIB))
    if here.rank == 0:
        print("\n".join(map(json.dumps if args.json else shown, rows)))
        if args.output:
            args.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


def measure(mesh: Mesh, device: torch.device, cluster: Cluster, sizes_mib: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of all axes; they hold the times of the slowest rank on rank 0, and this rank's elsewhere."""
    sets: tuple[Axes, ...] = (("inner",), ("outer",), ("outer", "inner"))
    axis_sets = [axes for axes in sets if mesh.nontrivial(axes) == axes]
    axis_names = mesh.nontrivial(mesh.names)
    links = [Link(axis, at, at + 1) for axis in axis_names for at in range(mesh.size((axis,)) - 1)]
    begin = time.perf_counter()
    comm = ProcessComm(mesh, axis_sets, links)
    yield {"what": "make all groups", "seconds": slowest(comm, time.perf_counter() - begin)}
    for name, seconds in comm.warm_up():
        yield {"what": f"first use of {name}", "seconds": seconds}
    network = Network(cluster, cluster.slowdown(mesh.world_size))
    for axes in axis_sets:
        for mib in sizes_mib:
            yield from collectives(comm, network, device, axes, mib * 2**20)
    for axis in axis_names:
        for mib in sizes_mib:
            yield transfer(comm, network, device, axis, mib * 2**20)


def collectives(comm: ProcessComm, network: Network, device: torch.device, axes: Axes, num_bytes: int) -> Iterator[Row]:
    """Yield a row for each collective of a bf16 tensor along axes."""
    mesh, ranks = comm.mesh, comm.mesh.size(axes)
    whole = torch.randn(num_bytes // 2 // ranks * ranks, device=device).bfloat16()
    shard = whole.chunk(ranks)[mesh.index(axes)].clone()
    calls: dict[str, Callable[[], Tensor]] = {
        "all_gather": lambda: comm.all_gather(shard, axes, 0).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, axes, 0).wait(),
        "all_reduce": lambda: comm.all_reduce(whole, axes).wait(),
    }
    for name, call in calls.items():
        sent = SENT[name](ranks) * num_bytes
        predicted_s = network.seconds(Traffic(name, axes, sent), mesh)
        yield row_of(f"{name} over {' x '.join(axes)}", num_bytes, sent, seconds_of(comm, device, call), predicted_s)


def transfer(comm: ProcessComm, network: Network, device: torch.device, axis: str, num_bytes: int) -> Row:
    """Return the row of sends from every rank to its neighbour along an axis, and receives from the other one."""
    mesh, at = comm.mesh, comm.mesh.coord(axis)
    x = torch.randn(num_bytes // 2, device=device).bfloat16()
    out = torch.empty_like(x)

    def exchange() -> Tensor:
        pending = [comm.receive(out, Link(axis, at - 1, at))] if at > 0 else []
        if at + 1 < mesh.size((axis,)):
            pending.append(comm.send(x, Link(axis, at, at + 1)))
        return [each.wait() for each in pending][-1]

    predicted_s = network.transfer_s(num_bytes, mesh, (axis,))
    return row_of(f"send along {axis}", num_bytes, num_bytes, seconds_of(comm, device, exchange), predicted_s)


def seconds_of(comm: ProcessComm, device: torch.device, call: Callable[[], Tensor], num_calls: int = 5) -> float:
    """Return the mean seconds of a call on the slowest rank, after a first one."""
    call()
    wait_for(device)
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(num_calls):
        call()
    wait_for(device)
    return slowest(comm, (time.perf_counter() - begin) / num_calls)


def slowest(comm: ProcessComm, seconds: float) -> float:
    """Return the largest of all ranks' seconds on rank 0, and this rank's elsewhere."""
    everyone: list[float] = comm.gather_object(seconds) or [seconds]
    return max(everyone)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def row_of(what: str, num_bytes: int, sent: float, seconds: float, predicted_s: float) -> Row:
    """Return one row: the measurement, and its ratio to the prediction."""
    ratio = seconds / predicted_s if predicted_s else None
    gb_s = sent / seconds / 1e9
    return {"what": what, "mib": num_bytes / 2**20, "seconds": seconds, "gb_s": gb_s, "predicted_s": predicted_s} | {
        "measured / predicted": ratio
    }


def shown(row: Row) -> str:
    """Return a row as a line of the table."""
    values = "  ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
    return f"{row['what']:36} {values}"


if __name__ == "__main__":
    sys.exit(main())
