"""Measure the kernel rates and links of this machine's GPUs: the numbers of the `local_gpu` accelerator and cluster.

    rate of GEMMs, and ramp-up as additional K     two GEMMs of different K
    memory bandwidth, attention, launches          the same kernels as on a CPU, larger
    latency of a ring's step, bandwidth of a link  all-gathers of few and of many bytes

All GPUs compute at the same time and without a pause, since a training step has them share power and cooling.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median

import torch
import yaml

from megatron3d.comm.interface import Comm
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.schema import ITEMSIZES
from megatron3d.errors import UserError
from megatron3d.forecast.time.hardware import Accelerator, Cluster, NetworkLevel, device_model, load_cluster
from megatron3d.hardware.devices import device_name, published_peak
from megatron3d.linear.gemm import product
from megatron3d.metrics.timers import clock
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime import process
from tools.calibrate_cpu import (
    LAUNCHES,
    PASSES,
    Measured,
    attention,
    attention_and_gradients,
    medians,
    memory_bound_kernels,
    small_step,
    write_sheets,
)

NAME = "local_gpu"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Of a collective's mean, and how often it is repeated.
CALLS, ROUNDS = 20, 5
GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured: far above the caches and launch times of a GPU.

    Attributes:
        rows: of square outputs of GEMMs; `depths` are their K.
        heads, head, length: attention of `batch` sequences.
        gathered: elements that an all-gather collects from each rank.
    """

    rows: int = 8192
    depths: tuple[int, int] = (1024, 8192)
    batch: int = 2
    heads: int = 32
    head: int = 128
    length: int = 4096
    gathered: int = 2**23


LARGE = Sizes()


def call_s(function: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the mean seconds of a call, of as many one after another as fill half of the budget."""
    at = clock(device)
    function()
    count = 1
    while True:
        begin = at.stamp()
        for _ in range(count):
            function()
        seconds = at.elapsed_ms(begin, at.stamp()) / 1e3
        if seconds >= budget_s / 2:
            return seconds / count
        count *= 2


def kernel_seconds(device: torch.device, dtype: torch.dtype, sizes: Sizes, budget_s: float) -> Measured:
    """Return the seconds of each kernel that is measured, for about `budget_s` each."""
    random = partial(torch.randn, device=device, dtype=dtype)
    seconds = Measured()

    def measure(name: str, function: Callable[[], object]) -> None:
        seconds[name] = call_s(function, device, budget_s)

    for name, depth in zip(("shallow", "deep"), sizes.depths, strict=True):
        measure(name, partial(product, random(sizes.rows, depth), random(sizes.rows, depth)))
    x, dy = random(sizes.rows, sizes.rows, requires_grad=True), random(sizes.rows, sizes.rows)
    measure("memory", partial(memory_bound_kernels, x, dy, random(sizes.rows, requires_grad=True)))
    shape = sizes.batch, sizes.heads, sizes.length, sizes.head
    q, k, v = (random(shape, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        measure("attention", partial(attention, q, k, v))
    measure("attention_both", partial(attention_and_gradients, q, k, v, random(shape)))
    measure("launches", partial(small_step, random(1, 8, requires_grad=True), random(8, 8, requires_grad=True)))
    return seconds


def link_seconds(comm: Comm, device: torch.device, gathered: int) -> Measured:
    """Return the seconds of all-gathers over all ranks: of one element of each, and of `gathered`.

    Every rank calls as many, so that none waits for another in vain; each time is a median of rounds on this rank.
    """
    at, axes = clock(device), comm.mesh.names

    def mean_s(numel: int) -> float:
        x = torch.zeros(numel, device=device)
        comm.barrier()
        begin = at.stamp()
        for _ in range(CALLS):
            comm.all_gather(x, axes, 0).wait()
        return at.elapsed_ms(begin, at.stamp()) / 1e3 / CALLS

    rounds = [(mean_s(1), mean_s(gathered)) for _ in range(ROUNDS + 1)][1:]  # the first sets up links
    small, large = (median(each) for each in zip(*rounds, strict=True))
    return {"small": small, "large": large}


def held_gib(device: torch.device) -> float:
    """Return the GiB of a GPU that torch's allocator does not have: contexts, libraries and other programs."""
    if device.type == "cpu":
        return 0.0
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return float(total - free - module.memory_reserved(device)) / GIB


def properties(device: torch.device) -> Measured:
    """Return a device's memory in GiB and number of multiprocessors; a CPU has a nominal 8 GiB, and one core."""
    if device.type == "cpu":
        return {"memory_gib": 8.0, "units": 1}
    found = torch.get_device_module(device).get_device_properties(device)
    return {"memory_gib": found.total_memory / GIB, "units": found.multi_processor_count}


def measure_rank(precision: str, sizes: Sizes, budget_s: float, on_cpu: bool = False) -> tuple[Measured, str]:
    """Measure with all ranks of this machine; return medians over ranks, and the device's name, on rank 0."""
    with process.start(on_cpu=on_cpu) as here:
        comm = ProcessComm(Mesh((("all", here.world_size),), here.rank), [("all",)])
        found = properties(here.device) | kernel_seconds(here.device, DTYPES[precision], sizes, budget_s)
        found["context_gib"] = held_gib(here.device)
        if here.world_size > 1:
            found |= link_seconds(comm, here.device, sizes.gathered)
        found["communicator_gib"] = max(held_gib(here.device) - found["context_gib"], 0.0)
        every = comm.gather_object(found)
        return medians(every or [found]), device_name(here.device)


def kernel_rates(n: Measured, sizes: Sizes, precision: str, peak: float | None) -> Measured:
    """Return the rates of an accelerator's file from `kernel_seconds`; `peak` [FLOP/s] is measured where not known."""
    shallow, deep = sizes.depths
    mean_s = n["deep"] / deep
    # Of one K; noise of small GEMMs may put the slope anywhere.
    each_s = min(max((n["deep"] - n["shallow"]) / (deep - shallow), mean_s / 2), mean_s)
    peak = peak or 2 * sizes.rows**2 / each_s
    flops = 4 * sizes.batch * sizes.heads * sizes.length**2 * sizes.head / 2
    backward_s = max(n["attention_both"] - n["attention"], n["attention"])
    return {
        "peak_tflops": peak / 1e12,
        "ramp_k": max(0.0, n["shallow"] / each_s - shallow),
        "stream_gb_s": PASSES * sizes.rows**2 * ITEMSIZES[precision] / n["memory"] / 1e9,
        "attention_forward": min(1.0, flops / n["attention"] / peak),
        "attention_backward": min(1.0, 2.5 * flops / backward_s / peak),
        "launch_us": n["launches"] / LAUNCHES * 1e6,
    }


def accelerator_sheet(n: Measured, sizes: Sizes, precision: str, name: str, where: str) -> str:
    """Return the YAML of the accelerator `name`; `where` says how its numbers were measured."""
    published = {kind: found.flops / 1e12 for kind in ITEMSIZES if (found := published_peak(name, kind))}
    peak = published.get(precision)
    rates = kernel_rates(n, sizes, precision, peak and peak * 1e12)
    peaks = published if peak else {precision: rates["peak_tflops"]}
    of_peak = "of the data sheet's peak" if peak else "of the peak, which is the rate that it measures itself"
    text = f"""device_names: '{NAME}'
peak_tflops: {{{", ".join(f"{kind}: {tflops:.6g}" for kind, tflops in peaks.items())}}}
source: {name}, {where}
kernels:
  # What torch calls the total capacity.
  memory_gib: {n["memory_gib"]:.2f}
  # Device memory outside torch's allocator, before the first collective; other programs on the GPU count as well.
  context_gib: {n["context_gib"]:.3f}
  # Its growth with one communicator of all GPUs; a machine with one GPU shows none.
  communicator_gib: {n["communicator_gib"]:.3f}
  # A norm, an addition and an activation with their gradients, {PASSES} accesses per element.
  stream_gb_s: {rates["stream_gb_s"]:.4g}
  # What was measured is what is reached.
  stream_fraction: 1.0
  # A GEMM with {sizes.rows} rows and columns and K of {sizes.depths[1]}, {of_peak}.
  matmul_fraction: FRACTION
  # Not measured: as on the other parts (h100_sxm.yaml).
  tile_fractions: {{256x128: 1.0, 128x256: 1.0, 128x128: 0.92, 128x64: 0.75, 64x64: 0.55}}
  # Multiprocessors, as the driver reports them.
  num_units: {n["units"]:.0f}
  # From GEMMs with K of {sizes.depths[0]} and {sizes.depths[1]}.
  ramp_k: {rates["ramp_k"]:.2f}
  # Causal attention of {sizes.heads} heads of {sizes.head} and length {sizes.length}, forward and backward.
  attention_fractions: [{rates["attention_forward"]:.4g}, {rates["attention_backward"]:.4g}]
  # A small GEMM, activation and sum with their gradients, eager.
  launch_us: {rates["launch_us"]:.2f}
  # Not measured: NCCL's rings run 16 channels on 8 H100.
  comm_units: {min(16, int(n["units"]) - 1)}
"""
    return text.replace("FRACTION", f"{_matmul_fraction(n, sizes, text, precision):.6g}")


def _matmul_fraction(n: Measured, sizes: Sizes, text: str, precision: str) -> float:
    """Return the fraction of the peak with which the model of a sheet takes as long as the measured deep GEMM."""
    ideal = Accelerator.model_validate(yaml.safe_load(text.replace("FRACTION", "1.0")))
    model = device_model(ideal, precision, ITEMSIZES[precision])
    return min(1.0, model.gemm_s(sizes.rows, sizes.rows, sizes.depths[1]) / n["deep"])


def levels(n: Measured, num_gpus: int, sizes: Sizes, network: Cluster | None) -> Sequence[NetworkLevel]:
    """Return the measured level of `num_gpus`, and the larger ones of another cluster."""
    measured = []
    if num_gpus > 1:
        latency_us = n["small"] / (num_gpus - 1) * 1e6
        bytes_s = max(n["large"] - n["small"], 1e-9)
        sent = (num_gpus - 1) * sizes.gathered * 4
        measured = [NetworkLevel(name="node", ranks=num_gpus, gb_s=sent / bytes_s / 1e9, latency_us=latency_us)]
    return [*measured, *(level for level in (network.levels if network else ()) if level.ranks > num_gpus)]


def cluster_sheet(found: Sequence[NetworkLevel], num_gpus: int, network: str | None, where: str) -> str:
    """Return the YAML of the cluster of these levels, of which those above `num_gpus` ranks are of a `network`."""
    lines = []
    for level in found:
        how = f"as of {network}" if level.ranks > num_gpus else "all-gathers of all GPUs of the machine"
        pairs = ", is_pairwise: true" if level.is_pairwise else ""
        rates = f"gb_s: {level.gb_s:.5g}{pairs}, latency_us: {level.latency_us:.4g}"
        lines += [f"  # {how}", f"  - {{name: {level.name}, ranks: {level.ranks}, {rates}}}"]
    return "\n".join([f"name: {NAME}", f"accelerator: ../{NAME}.yaml", "levels:", *lines, f"source: {where}", ""])


def calibrate_gpus(
    folder: Path,
    num_gpus: int,
    precision: str = "bf16",
    network: str | None = None,
    *,
    budget_s: float = 1.0,
    sizes: Sizes = LARGE,
    on_cpu: bool = False,
) -> tuple[Path, Path]:
    """Measure all GPUs of this machine, write `local_gpu.yaml` of the accelerator and of the cluster, and return both.

    Args:
        network: cluster whose levels are used for more ranks than this machine has.
        on_cpu: let CPU processes do what GPUs do, to test this.

    Raises UserError if there is one GPU and no network, so that no link is known.
    """
    other = load_cluster(network) if network else None
    if num_gpus == 1 and not other:
        raise UserError("one GPU has no links to measure: give --network, a cluster with the links meant, such as eos")
    n, name = process.launch(num_gpus, measure_rank, precision, sizes, budget_s, on_cpu)
    when = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    where = f"measured by tools/calibrate.py on {num_gpus} of {platform.node()} in {precision}, {when}"
    cluster = cluster_sheet(levels(n, num_gpus, sizes, other), num_gpus, network, where)
    return write_sheets(folder, NAME, accelerator_sheet(n, sizes, precision, name, where), cluster)
