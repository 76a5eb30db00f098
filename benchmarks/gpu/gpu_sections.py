"""Sections of gpu_day.py, each in a process of its own: `gpu_sections.py NAME [--cpu] [--quick]` prints JSON lines."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpu import gpu_fp8, gpu_kernels, gpu_runs, gpu_steps
from gpu.gpu_timing import Place, Row, power

from megatron3d.hardware.devices import describe_attention, device_name
from megatron3d.runtime.machine import backend_of
from megatron3d.runtime.process import flight_recorder

ROOT = Path(__file__).parents[2]


def hardware(place: Place) -> Iterator[Row]:
    """Yield device, versions, attention kernel, the bandwidth of a copy and the rate of the largest GEMM."""
    cuda = torch.backends.cuda.is_built() and torch.version.cuda
    yield {"device": device_name(place.device), "torch": torch.__version__, "cuda_version": cuda or "none", **power()}
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "--query"], check=False, timeout=20, stdout=sys.stderr)
    yield {"line": describe_attention(place.device, torch.bfloat16, (32, 8, 128), 128 if place.quick else 4096)}
    yield next(gpu_kernels.stream_rows(place))
    yield next(gpu_kernels.gemm_rows(place))


def nccl(place: Place) -> Iterator[Row]:
    """Yield what a world of one shows of process groups: start, timeout of a subgroup, barrier, flight recorder."""
    begin = time.perf_counter()
    backend = backend_of(place.device.type)
    dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0], timeout=timedelta(seconds=77))
    x = torch.ones(2**20, device=place.device)
    dist.all_reduce(x, group=group)
    place.synchronize()
    started_s = time.perf_counter() - begin
    options = getattr(group._get_backend(place.device), "options", None)
    timeout = getattr(options, "_timeout", None)
    dist.barrier(group=group)
    recorded = flight_recorder(backend)()
    (place.output / "flight_recorder.pickle").write_bytes(recorded)
    dist.destroy_process_group()
    names = [name for name in ("all_reduce", "barrier") if name.encode() in recorded]
    yield {"backend": backend, "started_s": started_s, "subgroup_timeout": str(timeout), "sum": float(x[0])}
    yield {"recorded_bytes": len(recorded), "recorded": names, "is_right": names == ["all_reduce", "barrier"]}


SECTIONS: Mapping[str, Callable[[Place], Iterator[Row]]] = {
    "hardware": hardware,
    "numbers": gpu_runs.numbers,
    "layouts": gpu_runs.layouts,
    "nccl": nccl,
    **{name: partial(gpu_steps.preset, name=name) for name in gpu_steps.PRESETS},
    "ranks": gpu_steps.ranks,
    "kernels": gpu_kernels.kernels,
    "profile": gpu_steps.profiled,
    "fp8": gpu_fp8.fp8,
    "program": gpu_runs.program,
    "switches": gpu_steps.switches,
    "overlap": gpu_kernels.overlap,
}


def main() -> int:
    """Run one section and print its rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu_day")
    args = parser.parse_args()
    has_gpu = torch.accelerator.is_available() and not args.cpu
    if not (has_gpu or args.cpu):
        print("torch sees no GPU; --cpu computes on the CPU")
        return 2
    kind = str(torch.accelerator.current_accelerator()) if has_gpu else "cpu"
    place = Place(torch.device(kind, 0) if has_gpu else torch.device("cpu"), args.quick, args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    failed = False
    for row in SECTIONS[args.section](place):
        print(json.dumps(row), flush=True)
        failed = failed or "error" in row or row.get("equal") is False or row.get("is_right") is False
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
