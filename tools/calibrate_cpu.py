"""Measure the compute and link rates of this machine: the numbers of the `local` accelerator and cluster.

It measures GEMMs as a function of K, memory-bound kernels of the model, fused attention, kernel launches, and
all-reduces of two ranks that alternate with GEMMs.  As in a training step, operands are not in the caches.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.linear.gemm import product
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime import process
from megatron3d.runtime.files import write_text
from megatron3d.runtime.machine import keep_freed_memory

Measured = dict[str, float]
ROWS, WIDTH = 1024, 256
# Accesses of a norm, an addition and an activation, forward and backward, as in `execution_profile`: 5, 6 and 5.
PASSES = 16
# Kernels of `small_step`.
LAUNCHES = 6
# More than the caches of a CPU hold.
CACHE_BYTES = 2**26
# Elements of the small and of the large all-reduce, and calls per round.
SMALL, LARGE = 16, 2**19
CALLS = 10


def median_call_s(function: Callable[[], object], budget_s: float) -> float:
    """Return the median seconds of a call in this process's CPU time, which other programs do not affect."""
    function()
    took, end = list[float](), time.perf_counter() + budget_s
    while time.perf_counter() < end or not took:
        begin = time.process_time()
        function()
        took.append(time.process_time() - begin)
    return median(took)


def cold_cache_s(function: Callable[..., object], operands: Callable[[], tuple[Tensor, ...]], budget_s: float) -> float:
    """Return the seconds of a call whose operands other calls have evicted from the caches."""
    first = operands()
    count = max(1, CACHE_BYTES // sum(x.nbytes for x in first))
    sets = [first, *(operands() for _ in range(count - 1))]
    return median_call_s(lambda: [function(*each) for each in sets], budget_s) / count


def gemm_rates(budget_s: float) -> Measured:
    """Measure the rate of GEMMs with large K, and the ramp-up of a GEMM, expressed as additional K."""

    def seconds(depth: int) -> float:
        return cold_cache_s(product, lambda: (torch.randn(ROWS, depth), torch.randn(WIDTH, depth)), budget_s)

    shallow, deep = seconds(64), seconds(1024)
    rate = (deep - shallow) / (1024 - 64)
    return {"peak_tflops": 2 * ROWS * WIDTH / rate / 1e12, "ramp_k": max(0.0, shallow / rate - 64)}


def memory_bandwidth(budget_s: float) -> Measured:
    """Measure the memory bandwidth of a norm, an addition and an activation with their gradients."""
    weight = torch.ones(4 * WIDTH, requires_grad=True)

    def operands() -> tuple[Tensor, Tensor]:
        return torch.randn(ROWS, 4 * WIDTH, requires_grad=True), torch.randn(ROWS, 4 * WIDTH)

    def kernels(x: Tensor, dy: Tensor) -> None:
        memory_bound_kernels(x, dy, weight)

    num_bytes = 4 * ROWS * 4 * WIDTH
    return {"stream_gb_s": PASSES * num_bytes / cold_cache_s(kernels, operands, budget_s) / 1e9}


def memory_bound_kernels(x: Tensor, dy: Tensor, weight: Tensor) -> None:
    """Run a norm, an activation and an addition, forward and backward: `PASSES` accesses to each element of x."""
    (F.silu(F.rms_norm(x, weight.shape, weight)) + x).backward(dy)
    x.grad = weight.grad = None


def attention(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Return causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_and_gradients(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> None:
    """Run causal attention forward and backward."""
    attention(q, k, v).backward(dy)
    q.grad = k.grad = v.grad = None


def small_step(x: Tensor, w: Tensor) -> None:
    """Run a linear layer, an activation and a sum, forward and backward: `LAUNCHES` kernels."""
    F.silu(F.linear(x, w)).sum().backward()
    x.grad = w.grad = None


def attention_fractions(budget_s: float, peak_tflops: float) -> Measured:
    """Measure causal attention forward and backward, as fractions of the peak."""
    shape, flops = (1, 8, WIDTH, 32), 4 * 8 * WIDTH * WIDTH * 32 / 2

    def operands() -> tuple[Tensor, ...]:
        return (*(torch.randn(shape, requires_grad=True) for _ in range(3)), torch.randn(shape))

    with torch.no_grad():
        forward_s = cold_cache_s(attention, operands, budget_s)
    backward_s = max(cold_cache_s(attention_and_gradients, operands, budget_s) - forward_s, forward_s)
    rates = {"attention_forward": flops / forward_s, "attention_backward": 2.5 * flops / backward_s}
    return {name: min(1.0, rate / 1e12 / peak_tflops) for name, rate in rates.items()}


def launch_us(budget_s: float) -> float:
    """Measure the microseconds to launch a kernel in a training step, the framework's overhead included."""
    x, w = torch.randn(1, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    return median_call_s(lambda: small_step(x, w), budget_s) / LAUNCHES * 1e6


class Elapsed(NamedTuple):
    """Wall-clock seconds, and CPU seconds of this process."""

    wall_s: float
    busy_s: float


def measure_all_reduces(budget_s: float) -> dict[str, Elapsed]:
    """Measure all-reduces of two ranks: a small one alone, its extra time among GEMMs, and a large one's over it.

    Each time is the median over interleaved rounds of the mean of a round's calls, measured on rank 0.
    """
    with process.start(on_cpu=True) as here:
        torch.set_num_threads(1)
        comm = ProcessComm(Mesh((("t", 2),), here.rank), [("t",)])
        a, b = torch.randn(4 * ROWS, WIDTH), torch.randn(4 * WIDTH, WIDTH)

        def mean(numel: int, multiplies: bool = True) -> Elapsed:
            sent = [torch.zeros(numel) for _ in range(CALLS)]
            comm.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            for x in sent:
                if multiplies:
                    product(a, b)
                if numel:
                    comm.all_reduce(x, ("t",)).wait()
            return Elapsed((time.perf_counter() - begin) / CALLS, (time.process_time() - worked) / CALLS)

        rounds: dict[str, list[Elapsed]] = {"alone": [], "call": [], "bytes": []}
        for _ in range(max(3, int(15 * budget_s))):
            alone, without = mean(SMALL, multiplies=False), mean(0)
            small, large = mean(SMALL), mean(LARGE)
            for kind, more, less in (("alone", alone, (0, 0)), ("call", small, without), ("bytes", large, small)):
                rounds[kind].append(Elapsed(more[0] - less[0], more[1] - less[1]))
        return {kind: Elapsed(*map(median, zip(*each, strict=True))) for kind, each in rounds.items()}


def link_rates(budget_s: float) -> Measured:
    """Return the numbers of a cluster of one level, from all-reduces between two ranks."""
    took = process.launch(2, measure_all_reduces, budget_s)
    call_s, bytes_s = (max(took[kind].wall_s, 1e-6) for kind in ("call", "bytes"))
    alone_s = min(took["alone"].wall_s, call_s)
    return {
        "latency_us": alone_s / 2 * 1e6,
        "call_us": (call_s - alone_s) * 1e6,
        "gb_s": 1e-9 * 4 * LARGE / bytes_s,
        # Among GEMMs its own CPU time is below the noise of theirs.
        "call_busy": min(took["alone"].busy_s / call_s, 1.0),
        "bytes_busy": min(max(took["bytes"].busy_s, 0.0) / bytes_s, 1.0),
    }


def measure(budget_s: float = 1.0) -> Measured:
    """Measure all numbers, each for about `budget_s` seconds."""
    torch.set_num_threads(1)
    keep_freed_memory()
    core = gemm_rates(budget_s)
    return {
        **core,
        **memory_bandwidth(budget_s),
        **attention_fractions(budget_s, core["peak_tflops"]),
        **link_rates(budget_s),
        "launch_us": launch_us(budget_s),
    }


def medians(rounds: Sequence[Measured]) -> Measured:
    """Return the median over rounds of each number."""
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def calibrate(folder: Path, budget_s: float = 1.0) -> tuple[Path, Path]:
    """Measure in three rounds, write `local.yaml` of the accelerator and of the cluster, and return their paths."""
    return write_files(folder, medians([measure(budget_s / 3) for _ in range(3)]))


def write_files(folder: Path, n: Measured) -> tuple[Path, Path]:
    """Write the files of the accelerator and of the cluster, and return their paths."""
    when = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    where = f"measured by tools/calibrate.py on {platform.machine()} with one thread, {when}"
    return write_sheets(folder, "local", accelerator_sheet(n, where), cluster_sheet(n, where))


def write_sheets(folder: Path, name: str, accelerator: str, cluster: str) -> tuple[Path, Path]:
    """Write the YAML texts of an accelerator and of its cluster into a folder, and return their paths."""
    paths = folder / f"{name}.yaml", folder / "clusters" / f"{name}.yaml"
    for path, text in zip(paths, (accelerator, cluster), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return paths


def accelerator_sheet(n: Measured, where: str) -> str:
    """Return the YAML of the accelerator; `where` says how its numbers were measured."""
    return f"""device_names: 'local'
peak_tflops: {{fp32: {n["peak_tflops"]:.6f}}}
source: {where}
kernels:
  # Not measured: what a process may use is the machine's to say; this is a nominal 8 GiB.
  memory_gib: 8
  # A norm, an addition and an activation with their gradients, {PASSES} accesses per element, {where}.
  stream_gb_s: {n["stream_gb_s"]:.4f}
  # What was measured is what is reached.
  stream_fraction: 1.0
  # The peak is that of the measured GEMM.
  matmul_fraction: 1.0
  # One size: a CPU has no waves of tiles.
  tile_fractions: {{16x16: 1.0}}
  # One core.
  num_units: 1
  # From GEMMs with K of 64 and 1024, {where}.
  ramp_k: {n["ramp_k"]:.2f}
  # Causal attention of 8 heads of 32 and length {WIDTH}, {where}.
  attention_fractions: [{n["attention_forward"]:.4f}, {n["attention_backward"]:.4f}]
  # A small GEMM, activation and sum with their gradients, {where}.
  launch_us: {n["launch_us"]:.2f}
  # A CPU starts a kernel when the one before has ended.
  adds_launch: true
  # A core that sends does not compute.
  comm_units: 1
"""


def cluster_sheet(n: Measured, where: str) -> str:
    """Return the YAML of the cluster of one machine."""
    return f"""name: local
accelerator: ../local.yaml
levels:
  # An all-reduce of 64 bytes between two ranks over gloo, and the extra time of 2 MiB, {where}.
  - {{name: node, ranks: 4096, gb_s: {n["gb_s"]:.4f}, latency_us: {n["latency_us"]:.2f}}}
source: {where}
# Its extra time among GEMMs, where each waits for the other, {where}.
call_us: {n["call_us"]:.2f}
# CPU time over wall time of a small one among GEMMs, and of the extra time of a large one, {where}.
call_busy: {n["call_busy"]:.3f}
bytes_busy: {n["bytes_busy"]:.3f}
# Cores that this process may use, of which each rank needs one.
cores: {process.num_cores()}
"""
