"""What a start of a run is, in numbers that programs read: the first line of its part of metrics.jsonl."""

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
from megatron3d.analysis.memory_model.step_spec import Job
from megatron3d.analysis.memory_model.table import stage_facts
from megatron3d.metrics.throughput import Work
from megatron3d.model.flops import num_parameters
from megatron3d.train.run import Run


def describe_start(run: Run, job: Job, work: Work, names: Sequence[str], expected: Forecast | str) -> Mapping[str, Any]:
    """Everything that is known before the first step.

    Args:
        names: host and device of each rank.
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
        "mesh": run.comm.mesh.sizes,
        "ranks": {name: [rank for rank, at in enumerate(names) if at == name] for name in dict.fromkeys(names)},
        "train_iters": run.config.train.train_iters,
        "model": {**asdict(arch), "num_parameters": num_parameters(arch)},
        "work": asdict(work),
        "peak": None if peak is None else asdict(peak),
        "stages": [asdict(stage) for stage in stage_facts(job)],
        "memory_bytes": [rank_memory(rank).categories for rank in ranks],
        "step_s": _expected(expected),
    }


def _expected(forecast: Forecast | str) -> Mapping[str, Any]:
    """The predicted step by parts, or why it is not known."""
    if isinstance(forecast, str):
        return {"unknown": forecast}
    return {"cluster": forecast.cluster, "total": forecast.step.step_s, "parts": dict(forecast.parts)}
