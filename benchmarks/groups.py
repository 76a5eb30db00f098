"""Start-up time of a layout's process groups: 64 ranks over gloo on this machine, and one rank of 4096 with the fake
back end, which measures everything but the connections.

python benchmarks/groups.py --output benchmarks/results/groups.json
"""

from __future__ import annotations

import argparse
import math
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.report import Row, show, write

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.runtime import process
from megatron3d.train.state import connect

VOCAB_SIZE = 2048
MODEL = {"num_layers": 32, "hidden_size": 256, "num_attention_heads": 16, "seq_length": 64}
# All axes above 1, in 3-D.
LAYOUTS: Mapping[int, Mapping[str, Any]] = {
    8: {"tensor_parallel_shape": [1, 2, 1], "pipeline_model_parallel_size": 2},
    64: {"tensor_parallel_shape": [2, 2, 2], "pipeline_model_parallel_size": 2},
    4096: {"tensor_parallel_shape": [2, 2, 2], "pipeline_model_parallel_size": 16},
}


class Start(NamedTuple):
    """Seconds until the rendezvous of all ranks, and to create their groups."""

    meet_s: float
    groups_s: float


def config_of(num_ranks: int) -> Config:
    """Return a model that the layout can shard."""
    parallel = {"tensor_parallel_mode": "3d", "zero_stage": 1, **LAYOUTS[num_ranks]}
    data = num_ranks // math.prod(parallel["tensor_parallel_shape"]) // parallel["pipeline_model_parallel_size"]
    train = {"micro_batch_size": 8, "global_batch_size": 8 * 16 * data}
    return Config.model_validate({"model": MODEL, "parallel": parallel, "train": train})


def start_rank(rank: int, num_ranks: int, store: str, results: Any) -> None:
    """Start one of many ranks over gloo, as a run does."""
    import torch.distributed as dist

    begin = time.perf_counter()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    dist.barrier()
    met = time.perf_counter()
    comm = connect(RunSpec(config_of(num_ranks), num_ranks, VOCAB_SIZE, rank))
    comm.barrier()
    results.put(Start(met - begin, time.perf_counter() - met))
    results.close()
    results.join_thread()  # a thread sends the queued results
    comm.barrier()
    os._exit(0)  # 64 ranks that leave in order would take longer than they took to come


def gloo(num_ranks: int) -> Start:
    """Return the times of the slowest rank; ranks come from a process that has imported torch."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["megatron3d.train.state", "torch.distributed"])
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        ranks = [
            context.Process(target=start_rank, args=(rank, num_ranks, store, results)) for rank in range(num_ranks)
        ]
        for each in ranks:
            each.start()
        found = [results.get(timeout=600) for _ in ranks]
        for each in ranks:
            each.join()
    return Start(*map(max, zip(*found, strict=True)))


def fake(num_ranks: int) -> Start:
    """Return the times of the last rank alone."""
    begin = time.perf_counter()
    with process.fake_world(num_ranks - 1, num_ranks):
        met = time.perf_counter()
        connect(RunSpec(config_of(num_ranks), num_ranks, VOCAB_SIZE, num_ranks - 1))
        return Start(met - begin, time.perf_counter() - met)


def main(argv: Sequence[str] | None = None) -> int:
    """Start several times; report medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gloo-ranks", type=int, nargs="*", default=[8, 64], choices=[*LAYOUTS])
    parser.add_argument("--fake-ranks", type=int, nargs="*", default=[4096], choices=[*LAYOUTS])
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.gloo_ranks, args.fake_ranks = 1, [8], [64]
    cases = [("gloo", gloo, ranks) for ranks in args.gloo_ranks] + [("fake", fake, ranks) for ranks in args.fake_ranks]
    rows: list[Row] = []
    for name, start, ranks in cases:
        starts = [start(ranks) for _ in range(args.rounds)]
        layout = config_of(ranks).parallel
        axes = f"PP {layout.pipeline_model_parallel_size}, 3d {layout.tensor_parallel_shape}, ZeRO 1, the rest DP"
        meet, groups = (statistics.median(values) for values in zip(*starts, strict=True))
        rows.append({"back end": name, "ranks": ranks, "layout": axes, "meet_s": meet, "groups_s": groups})
    show("time to start the groups of a run", rows)
    if args.output:
        write(args.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
