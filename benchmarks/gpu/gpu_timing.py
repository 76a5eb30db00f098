"""Timing on a device, and training steps of one rank of any layout with random tokens and weights.

Weights are random: with zeros the GPU needs less power, and measures 13 % too fast.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common.loopback import LoopbackComm
from gpu.gpu_program import SMALL

from megatron3d.comm.interface import Comm
from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.validate.facts import Facts
from megatron3d.config.validate.rules import layout_problems
from megatron3d.forecast.memory.rank import predict_memory
from megatron3d.hardware.devices import device_peak
from megatron3d.metrics.step_record import peak_memory_bytes
from megatron3d.model.linear_spec import flops_per_token
from megatron3d.model.local_sizes import KERNELS
from megatron3d.pipeline.actions import Action
from megatron3d.pipeline.engine import Observer, no_observer
from megatron3d.train.state import TrainState, build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.dry_run import microbatches

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where and how a section measures.

    Attributes:
        quick: small sizes and few repetitions, which only show that it works.
        output: folder for files such as traces.
    """

    device: torch.device
    quick: bool
    output: Path

    def synchronize(self) -> None:
        """Wait until the device has done all that was enqueued."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, function: Callable[[], object], budget_s: float = 0.3) -> float:
        """Return the mean seconds of a call, many of which are enqueued one after another."""
        function()
        once = self.once_s(function)
        count = 1 if self.quick else max(1, min(1000, int(budget_s / max(once, 1e-6))))
        return self._elapsed_s(function, count) / count

    def once_s(self, function: Callable[[], object]) -> float:
        """Return the seconds of one call."""
        return self._elapsed_s(function, 1)

    def _elapsed_s(self, function: Callable[[], object], count: int) -> float:
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            function()
        self.synchronize()
        return time.perf_counter() - begin

    def peak_tflops(self, precision: str) -> float | None:
        """Return the published peak; None where it is not known, as on CPUs."""
        peak = None if self.device.type == "cpu" else device_peak(self.device, precision)
        return None if peak is None else peak.flops / 1e12

    def free(self) -> None:
        """Collect cycles of modules and hooks, give cached memory back and start a new peak."""
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(self.device)


def spec_of(
    place: Place, preset: str, overrides: Sequence[str], world_size: int = 1, last: Sequence[str] = ()
) -> RunSpec:
    """Return the run of a preset; its small form where the place is quick, with overrides `last` in any case."""
    small = SMALL if place.quick else ()
    config = read_config(ROOT / "configs" / f"{preset}.yaml", [*overrides, *small, *last]).config
    assert config.model.vocab_size is not None, f"{preset} names its vocabulary"
    return RunSpec(config, world_size, config.model.vocab_size)


class Steps:
    """Training steps of one rank on one device.

    Args:
        comm: default: a communicator of the rank with itself.
        has_initial_values: the weights are those of a run; otherwise random numbers, which are drawn faster.

    Raises ValueError where no run has such a layout.
    """

    def __init__(self, place: Place, spec: RunSpec, comm: Comm | None = None, has_initial_values: bool = False) -> None:
        self.place, self.spec = place, spec
        if problems := [*layout_problems(Facts(spec.config, spec.world_size, spec.vocab_size))]:
            raise ValueError("; ".join(problems))
        comm = comm or LoopbackComm(spec.mesh)
        self.state: TrainState = build_state(spec, comm, place.device, initializes=has_initial_values)
        if not has_initial_values:
            self._randomize()
        generator = torch.Generator().manual_seed(1)
        vocab_size, train = spec.arch.vocab_size, spec.config.train
        self.batch = [
            replace(each, tokens=torch.randint(vocab_size, each.tokens.shape, generator=generator).to(place.device))
            for each in microbatches(spec)
        ]
        self.settings = StepSettings(1, train.global_batch_size * spec.arch.seq_length, train.global_batch_size)

    def _randomize(self) -> None:
        """Draw all weights on the device, which is faster than their initial values."""
        buffers = self.state.buffers
        buffers.settle()
        with torch.no_grad():
            for flat in buffers.flat_buffers:
                flat.main.normal_(0, 0.02)
        buffers.publish()

    def read(self, tokens: torch.Tensor) -> None:
        """Take the tokens [samples, length + 1] of the next steps, which are on the device."""
        rows = tokens.split(len(self.batch[0].tokens))
        self.batch = [replace(each, tokens=mine) for each, mine in zip(self.batch, rows, strict=True)]

    def __call__(self, observer: Observer = no_observer) -> torch.Tensor:
        """Make a step; return the loss."""
        return train_step(self.state, self.batch, 1e-4, self.settings, observer=observer).loss

    def measured(self, count: int = 5) -> Row:
        """Return step time, enqueueing time, tokens per second, MFU and memory, after two steps to warm up.

        The first step also compiles.
        """
        place, spec = self.place, self.spec
        first_s = place.once_s(self)
        if not place.quick:
            self()
        steps, enqueued = [], []
        for _ in range(1 if place.quick else count):
            place.synchronize()
            begin = time.perf_counter()
            self()
            enqueued.append(time.perf_counter() - begin)
            place.synchronize()
            steps.append(time.perf_counter() - begin)
        step_s, num_tokens = median(steps), len(self.batch) * self.batch[0].tokens.shape[0] * spec.arch.seq_length
        peak = place.peak_tflops(spec.config.train.precision)
        tflops = flops_per_token(spec.arch) * num_tokens / step_s / 1e12
        alone = spec.world_size == 1
        return {
            "step_ms": 1e3 * step_s,
            "first_s": first_s,
            "enqueue_ms": 1e3 * median(enqueued),
            "tokens_per_s": num_tokens / step_s,
            **({"mfu": tflops / peak} if peak and alone else {}),
            **self.memory(),
            **self._power(),
        }

    def _power(self) -> Row:
        """Return clock and power while a step runs."""
        self()
        found = power()
        self.place.synchronize()
        return found

    def memory(self) -> Row:
        """Return the peak in GiB and, on a GPU, how far the prediction is from it."""
        peak = peak_memory_bytes(self.place.device)
        kind = "cpu" if self.place.device.type == "cpu" else "gpu"
        predicted = predict_memory(self.spec, KERNELS[kind]).total
        error = {} if kind == "cpu" else {"memory_error": predicted / peak - 1}
        return {"peak_gib": peak / 2**30, "predicted_gib": predicted / 2**30, **error}

    def action_ms(self) -> dict[str, float]:
        """Return the median milliseconds of each kind of action, each waited for."""
        took: dict[str, list[float]] = {}

        @contextlib.contextmanager
        def observe(what: Action | str) -> Iterator[None]:
            self.place.synchronize()
            begin = time.perf_counter()
            yield
            self.place.synchronize()
            kind = what if isinstance(what, str) else f"{what.kind.name}{what.stage}"
            took.setdefault(kind, []).append(1e3 * (time.perf_counter() - begin))

        self(observe)
        return {kind: round(median(each), 3) for kind, each in took.items()}


def power() -> Row:
    """Return clock, power and temperature of the first GPU, where nvidia-smi tells."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.splitlines()
    if not found:
        return {}
    names = ("clock_mhz", "power_w", "temperature_c")
    return {name: value.strip() for name, value in zip(names, found[0].split(","), strict=False)}
