"""Metadata of one launch of a run: the `start` line of metrics.jsonl, which programs read."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch

from megatron3d import __version__
from megatron3d.analysis.cost_model.forecast import Forecast
from megatron3d.analysis.memory_model.rank import rank_memory
from megatron3d.analysis.memory_model.step_spec import StepSpec
from megatron3d.analysis.memory_model.table import stage_summaries
from megatron3d.metrics.throughput import StepWork
from megatron3d.model.flops import num_parameters
from megatron3d.train.run import Run


def run_metadata(
    run: Run, job: StepSpec, work: StepWork, devices: Sequence[str], forecast: Forecast | str
) -> Mapping[str, Any]:
    """Return versions, mesh, devices, model, work per step, and the estimated memory and step time.

    Args:
        devices: host and device of each rank.
        forecast: the predicted step, or the reason for having none.
    """
    arch, peak = run.state.model.arch, run.peak
    ranks = [job.on_pipeline_rank(coord) for coord in range(job.pipeline.num_ranks)]
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "megatron3d": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "world_size": run.runtime.world_size,
        "mesh": dict(run.comm.mesh.axes),
        "ranks": {name: [rank for rank, at in enumerate(devices) if at == name] for name in dict.fromkeys(devices)},
        "train_iters": run.config.train.train_iters,
        "model": {**asdict(arch), "num_parameters": num_parameters(arch)},
        "work": asdict(work),
        "peak": None if peak is None else asdict(peak),
        "stages": [asdict(stage) for stage in stage_summaries(job)],
        "memory_bytes": [rank_memory(rank).categories for rank in ranks],
        "step_s": _predicted_step(forecast),
    }


def _predicted_step(forecast: Forecast | str) -> Mapping[str, Any]:
    """Return the predicted step time by parts, or why it is unknown."""
    if isinstance(forecast, str):
        return {"unknown": forecast}
    return {"cluster": forecast.cluster, "total": forecast.step.step_s, "parts": dict(forecast.parts)}
