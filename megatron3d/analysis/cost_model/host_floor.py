"""Floor under the times of a layer: the host launches its kernels one after another, and small ones wait for it."""

from __future__ import annotations

import math

from megatron3d.analysis.cost_model.breakdown import HOST, TimeBreakdown
from megatron3d.analysis.cost_model.layer import LayerTimes, Machine
from megatron3d.analysis.memory_model.local_sizes import LocalSizes


def host_floor(times: LayerTimes, local: LocalSizes, machine: Machine, repeats: bool = False) -> LayerTimes:
    """Return a layer's times, none shorter than the host needs to launch its kernels.

    A forward is a third of them; `repeats` says whether the backward also recomputes the forward.
    """
    fitted, doublings = machine.profile.fitted, math.log2(math.prod(size for _, size in local.mode.axes))
    tensor_us = fitted.host_tensor_us + (fitted.host_pipeline_us if local.mesh.sizes["pipeline"] > 1 else 0.0)
    third_s = 1e-6 * (fitted.host_layer_us + doublings * tensor_us) / 3
    thirds = 1, 1 + repeats, 1, 2 + repeats

    def floored(phase: TimeBreakdown, least_s: float) -> TimeBreakdown:
        return phase.plus(TimeBreakdown({HOST: least_s - phase.total})) if phase.total < least_s else phase

    return LayerTimes(*(floored(phase, count * third_s) for phase, count in zip(times, thirds, strict=True)))
