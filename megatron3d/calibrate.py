"""What this machine's processors and links reach, measured: the numbers of a `local` accelerator and cluster.

A product as a function of its depth, passes over memory as the network makes them, fused attention, the start of a
kernel, and an all-reduce of two sizes between two ranks.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron3d import runtime
from megatron3d.comm import ProcessComm
from megatron3d.mesh import Mesh
from megatron3d.ops.product import product

Measured = dict[str, float]
ROWS, WIDTH = 1024, 256
# Of a norm, an addition and an activation, forward and backward, as `cost.practice` counts passes: 5, 6 and 5.
PASSES = 16


def best_s(function: Callable[[], object], budget_s: float) -> float:
    """Seconds of the fastest of many calls, by this process's own clock: other programs do not count."""
    function()
    best, end = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end or best == float("inf"):
        begin = time.process_time()
        function()
        best = min(best, time.process_time() - begin)
    return best


def products(budget_s: float) -> Measured:
    """The rate of deep products, and the depth that starting one costs."""

    def seconds(rows: int, columns: int, depth: int) -> float:
        a, b = torch.randn(rows, depth), torch.randn(columns, depth)
        return best_s(lambda: product(a, b), budget_s)

    shallow, deep = seconds(ROWS, WIDTH, 64), seconds(ROWS, WIDTH, 1024)
    rate = (deep - shallow) / (1024 - 64)
    return {"peak_tflops": 2 * ROWS * WIDTH / rate / 1e12, "ramp_k": max(0.0, shallow / rate - 64)}


def passes(budget_s: float) -> Measured:
    """Bytes per second of a norm, an addition and an activation with their gradients."""
    x = torch.randn(ROWS, 4 * WIDTH, requires_grad=True)
    weight, dy = torch.ones(4 * WIDTH, requires_grad=True), torch.randn(ROWS, 4 * WIDTH)

    def network() -> None:
        (F.silu(F.rms_norm(x, weight.shape, weight)) + x).backward(dy)
        x.grad = weight.grad = None

    return {"stream_gb_s": PASSES * x.nbytes / best_s(network, budget_s) / 1e9}


def attention(budget_s: float, peak_tflops: float) -> tuple[float, float]:
    """Fractions of the peak of causal attention, forward and backward."""
    q, k, v = (torch.randn(1, 8, WIDTH, 32, requires_grad=True) for _ in range(3))
    flops = 4 * 8 * WIDTH * WIDTH * 32 / 2
    dy = torch.randn(1, 8, WIDTH, 32)
    with torch.no_grad():
        forward = best_s(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), budget_s)

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(dy)

    backward = max(best_s(both, budget_s) - forward, forward)
    return flops / forward / 1e12 / peak_tflops, 2.5 * flops / backward / 1e12 / peak_tflops


def launch_us(budget_s: float) -> float:
    """Microseconds to start a kernel, with what surrounds it in a training step: six of them on a row each."""
    x, w = torch.randn(1, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def step() -> None:
        F.silu(F.linear(x, w)).sum().backward()
        x.grad = w.grad = None

    return best_s(step, budget_s) / 6 * 1e6


def exchange(budget_s: float) -> Measured:
    """Latency and bandwidth between two ranks; on rank 0."""
    with runtime.start(on_cpu=True) as here:
        torch.set_num_threads(1)
        comm = ProcessComm(Mesh((("t", here.world_size),), here.rank), [("t",)])
        found = []
        for numel in (16, 2**19):
            x, seconds = torch.zeros(numel), []
            for _ in range(max(20, int(100 * budget_s))):
                comm.barrier()
                begin = time.perf_counter()
                comm.all_reduce(x, ("t",)).wait()
                seconds.append(time.perf_counter() - begin)
            found.append(min(seconds))
        small, large = found
        return {"latency_us": small / 2 * 1e6, "gb_s": 4 * 2**19 / (large - small) / 1e9}


def calibrate(folder: Path, budget_s: float = 1.0) -> tuple[Path, Path]:
    """Measure, and write `local.yaml` of the accelerator and of the cluster; returns their paths."""
    torch.set_num_threads(1)
    core, memory = products(budget_s), passes(budget_s)
    fractions = attention(budget_s, core["peak_tflops"])
    links: Measured = runtime.launch(2, exchange, budget_s)
    start, when = launch_us(budget_s), f"{datetime.now(timezone.utc):%Y-%m-%d}"
    where = f"measured by tools/calibrate.py on {platform.machine()} with one thread, {when}"
    sheet = f"""device_names: 'local'
peak_tflops: {{fp32: {core["peak_tflops"]:.6f}}}
source: {where}
kernels:
  # Not measured: what a process may use is the machine's to say; this is a nominal 8 GiB.
  memory_gib: 8
  # A norm, an addition and an activation with their gradients, {PASSES} passes, {where}.
  stream_gb_s: {memory["stream_gb_s"]:.4f}
  # What was measured is what is reached.
  stream_fraction: 1.0
  # The peak is that of the measured product.
  matmul_fraction: 1.0
  # One size: a processor has no waves of tiles.
  tile_fractions: {{16x16: 1.0}}
  # One core.
  num_units: 1
  # From products of depth 64 and 1024, {where}.
  ramp_k: {core["ramp_k"]:.2f}
  # Causal attention of 8 heads of 32 and length {WIDTH}, {where}.
  attention_fractions: [{min(fractions[0], 1):.4f}, {min(fractions[1], 1):.4f}]
  # A small product, activation and sum with their gradients, {where}.
  launch_us: {start:.2f}
  # A processor starts a kernel when the one before is done.
  adds_launch: true
"""
    cluster = f"""name: local
accelerator: local
levels:
  # An all-reduce of 64 bytes and of 2 MiB between two ranks over gloo, {where}.
  - {{name: node, ranks: 4096, gb_s: {links["gb_s"]:.4f}, latency_us: {links["latency_us"]:.2f}}}
source: {where}
# Cores that this process may use, of which each rank needs one.
cores: {runtime.num_cores()}
"""
    paths = folder / "local.yaml", folder / "clusters" / "local.yaml"
    for path, text in zip(paths, (sheet, cluster), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return paths
