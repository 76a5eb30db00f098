"""Report on an out-of-memory error: estimated memory of each pipeline rank, and the cheapest changes that need less."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron3d.analysis.memory_model.kernel_memory import KERNELS
from megatron3d.analysis.memory_model.step_spec import StepSpec, make_step_spec
from megatron3d.analysis.memory_model.suggestions import suggest
from megatron3d.analysis.memory_model.table import memory_table
from megatron3d.comm.interface import Comm
from megatron3d.config.run_spec import RunSpec
from megatron3d.parallel.parallel_state import ParallelState

# Messages of the RuntimeError that torch's CPU allocator raises.
_CPU_MESSAGES = ("can't allocate memory", "not enough memory")


def job_of(spec: RunSpec, device: torch.device) -> StepSpec:
    """Return the description of this rank's step from which its memory is estimated."""
    return make_step_spec(spec, KERNELS["cpu" if device.type == "cpu" else "gpu"])


def max_by_pipeline_rank(state: ParallelState, comm: Comm, num_bytes: int) -> list[int]:
    """Return the largest `num_bytes` among the ranks of each pipeline rank, on rank 0; an empty list elsewhere."""
    gathered = comm.gather_object((state.pipeline_parallel_rank, num_bytes)) or []
    ranks = range(state.pipeline_parallel_size if gathered else 0)
    return [max(held for coord, held in gathered if coord == rank) for rank in ranks]


@contextlib.contextmanager
def oom_report(job: StepSpec) -> Iterator[None]:
    """Turn an out-of-memory error of the body into a RuntimeError with the report."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and not any(text in str(error) for text in _CPU_MESSAGES):
            raise
        changes = [f"    {change}" for change in suggest(job)] or ["    a smaller model, or more ranks"]
        lines = ["out of memory. Estimated memory of each pipeline rank:", *memory_table(job)]
        raise RuntimeError("\n".join([*lines, "Changes that need less, cheapest first:", *changes])) from error
