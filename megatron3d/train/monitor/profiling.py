"""torch.profiler for the iterations and ranks that are asked for, into `profiles` of the run's folder.

iter_0000010_rank0.json.gz      a Chrome trace, with the phases of the step and the pipeline's actions by name
iter_0000010_rank0.pickle       with record_memory_history: every allocation, for pytorch.org/memory_viz
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron3d.config.schema import Config, LoggingConfig
from megatron3d.errors import UserError
from megatron3d.pipeline.actions import Action
from megatron3d.train.step import Watch

FOLDER = "profiles"


def profile_folder(save: Path) -> Path:
    """Where the profiles of a run are."""
    return save / FOLDER


def check_history(logging: LoggingConfig, device: torch.device) -> None:
    """Raises UserError where a history of memory is asked for that this device does not have."""
    if logging.record_memory_history and device.type == "cpu":
        raise UserError(
            "logging.record_memory_history=true: this run computes on the host, whose allocator keeps no history; "
            "use false, or a GPU"
        )


class Profiling:
    """The window of one rank; does nothing where `logging.profile` does not ask for this rank."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        logging, save = config.logging, config.checkpoint.save
        self._rank, self._device, self._keeps_history = rank, device, logging.record_memory_history
        is_mine = logging.profile and rank in logging.profile_ranks
        self._folder = profile_folder(Path(save)) if save and is_mine else None
        self._iterations = range(logging.profile_step_start, logging.profile_step_end)
        self._profile: profile | None = None

    def begin_step(self, iteration: int, watch: Watch) -> Watch:
        """What the step of this iteration tells of itself, beside what `watch` is told."""
        if self._folder is None or iteration not in self._iterations:
            return watch
        if self._profile is None:
            self._start()
        return _named(watch)

    def end_step(self, iteration: int) -> None:
        """Write what was recorded, if this was the last iteration of the window."""
        if self._profile is not None and iteration + 1 not in self._iterations:
            self._write(self._profile, iteration)
            self._profile = None

    def _start(self) -> None:
        if self._keeps_history:
            torch.get_device_module(self._device).memory._record_memory_history()
        on_device = [] if self._device.type == "cpu" else [ProfilerActivity.CUDA]
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
        self._profile.start()

    def _write(self, recorded: profile, iteration: int) -> None:
        """What cannot be written is told, and training goes on."""
        recorded.stop()
        assert self._folder is not None, "a profiled run has a folder"
        path = self._folder / f"iter_{iteration:07d}_rank{self._rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
            if self._keeps_history:
                memory = torch.get_device_module(self._device).memory
                memory._dump_snapshot(str(path.with_suffix("").with_suffix(".pickle")))
                memory._record_memory_history(enabled=None)
            print(f"> profile of the iterations up to {iteration} on rank {self._rank}: {path}", flush=True)
        except (OSError, RuntimeError) as error:
            print(f"> WARNING: rank {self._rank}: {path} cannot be written: {error}", flush=True)


def _named(inner: Watch) -> Watch:
    """`inner`, with the name of everything in the trace."""

    @contextlib.contextmanager
    def watch(what: Action | str) -> Iterator[None]:
        with record_function(str(what)), inner(what):
            yield

    return watch
