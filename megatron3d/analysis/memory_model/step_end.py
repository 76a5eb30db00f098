"""Peaks of memory after the last backward of a step, when its activations are freed."""

from __future__ import annotations

from collections.abc import Iterable

from megatron3d.analysis.memory_model.step_spec import StepSpec

# Of an element: what AdamW holds when it computes, and when it rounds a moment.
_UPDATE_BYTES = 20


def step_end_peaks(step: StepSpec, buffers: Iterable[tuple[int, int]], is_over: int) -> dict[str, int]:
    """Return the bytes of the peaks after the last backward, less those of activations, which other peaks add to.

    Args:
        buffers: elements of each flat buffer of this rank, and of this rank's shard of it.
        is_over: bytes of the activations that are freed.
    """
    wide, kernels, found = step.local.wide, step.local.kernels, {}
    sizes = list(buffers)
    sharded = [kernels.num_received * size + shard for size, shard in sizes if shard < size]
    if sharded and not step.shards(2):  # the last buffer is reduced when nothing else is left to do
        found["reduction of gradients"] = max(sharded) * wide - is_over
    if min(step.moment_itemsizes) < wide:
        updated = max((min(shard, kernels.update_piece) for _, shard in sizes), default=0)
        found["update"] = _UPDATE_BYTES * updated - is_over
    return found
