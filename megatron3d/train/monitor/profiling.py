"""torch.profiler for the configured iterations and ranks, written to `profiles` in the run's folder.

iter_0000010_rank0.json.gz      a Chrome trace, with the phases of the step and the pipeline's actions by name
iter_0000010_rank0.pickle       with record_memory_history: every allocation, for pytorch.org/memory_viz
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron3d.config.io_schema import LoggingConfig
from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.pipeline.actions import Action
from megatron3d.pipeline.engine import Observer

FOLDER = "profiles"


def profile_folder(save: Path) -> Path:
    """Return the folder of a run's profiles."""
    return save / FOLDER


def check_memory_history(logging: LoggingConfig, device: torch.device) -> None:
    """Raise UserError if `logging.record_memory_history` is set and the device is a CPU, which has no such history."""
    if logging.record_memory_history and device.type == "cpu":
        raise UserError(
            "logging.record_memory_history=true: this run computes on the CPU, whose allocator keeps no history; "
            "use false, or a GPU"
        )


class Profiler:
    """Profiler of one rank; does nothing unless `logging.profile` and `logging.profile_ranks` select the rank."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        logging, save = config.logging, config.checkpoint.save
        self._rank, self._device = rank, device
        self._has_memory_history = logging.record_memory_history
        is_selected = logging.profile and rank in logging.profile_ranks
        self._folder = profile_folder(Path(save)) if save and is_selected else None
        self._iterations = range(logging.profile_step_start, logging.profile_step_end)
        self._profile: profile | None = None

    def begin_step(self, iteration: int, observer: Observer) -> Observer:
        """Return `observer`, which also names phases and actions in the profile if this iteration is profiled."""
        if self._folder is None or iteration not in self._iterations:
            return observer
        if self._profile is None:
            self._start()
        return _with_names(observer)

    def end_step(self, iteration: int) -> None:
        """Write the profile if this was the last profiled iteration."""
        if self._profile is not None and iteration + 1 not in self._iterations:
            self._write(self._profile, iteration)
            self._profile = None

    def _start(self) -> None:
        if self._has_memory_history:
            torch.get_device_module(self._device).memory._record_memory_history()
        on_device = [] if self._device.type == "cpu" else [ProfilerActivity.CUDA]
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
        self._profile.start()

    def _write(self, recorded: profile, iteration: int) -> None:
        """Write the profile; if that fails, print a warning and go on training."""
        recorded.stop()
        assert self._folder is not None, "a profiled run has a folder"
        path = self._folder / f"iter_{iteration:07d}_rank{self._rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
            if self._has_memory_history:
                memory = torch.get_device_module(self._device).memory
                memory._dump_snapshot(str(path.with_suffix("").with_suffix(".pickle")))
                memory._record_memory_history(enabled=None)
            print(f"> profile of the iterations up to {iteration} on rank {self._rank}: {path}", flush=True)
        except (OSError, RuntimeError) as error:
            print(f"> WARNING: rank {self._rank}: {path} cannot be written: {error}", flush=True)


def _with_names(inner: Observer) -> Observer:
    """Return `inner`, which also records the name of each phase and action in the profile."""

    @contextlib.contextmanager
    def observe(what: Action | str) -> Iterator[None]:
        with record_function(str(what)), inner(what):
            yield

    return observe
