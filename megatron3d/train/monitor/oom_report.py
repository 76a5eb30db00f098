"""Memory that is predicted, beside what the first step has needed; and what to change when there is too little."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron3d.analysis.memory_model.local_sizes import KERNELS
from megatron3d.analysis.memory_model.step_spec import Job, make_job
from megatron3d.analysis.memory_model.suggestions import cheaper
from megatron3d.analysis.memory_model.table import memory_table
from megatron3d.comm.interface import Comm
from megatron3d.config.run_spec import RunSpec

# What torch's allocator for the CPU says, in a RuntimeError.
_CPU_MESSAGES = ("can't allocate memory", "not enough memory")


def job_of(spec: RunSpec, device: torch.device) -> Job:
    """Return this rank's part of a step, from which its memory follows."""
    return make_job(spec, KERNELS["cpu" if device.type == "cpu" else "gpu"])


def measured(comm: Comm, num_bytes: int) -> list[int]:
    """The most bytes that any rank of each part of the pipeline has needed; on rank 0, empty elsewhere."""
    gathered = comm.gather_object((comm.mesh.coord("pipeline"), num_bytes)) or []
    ranks = range(comm.mesh.sizes["pipeline"] if gathered else 0)
    return [max(held for coord, held in gathered if coord == rank) for rank in ranks]


@contextlib.contextmanager
def explained(job: Job) -> Iterator[None]:
    """Says of an out-of-memory error in the body what the rank needs, and which changes need less for least time."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and not any(text in str(error) for text in _CPU_MESSAGES):
            raise
        advice = [f"    {change}" for change in cheaper(job)] or ["    a smaller model, or more ranks"]
        lines = ["out of memory. What each rank of the pipeline needs by arithmetic:", *memory_table(job)]
        raise RuntimeError("\n".join([*lines, "What needs less, the cheapest first:", *advice])) from error
