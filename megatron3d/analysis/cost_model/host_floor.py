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
    third_s = 1e-6 * _host_us(local, machine) / 3
    thirds = 1, 1 + repeats, 1, 2 + repeats

    def floored(phase: TimeBreakdown, least_s: float) -> TimeBreakdown:
        return phase.plus(TimeBreakdown({HOST: least_s - phase.total})) if phase.total < least_s else phase

    return LayerTimes(*(floored(phase, count * third_s) for phase, count in zip(times, thirds, strict=True)))


def _host_us(local: LocalSizes, machine: Machine) -> float:
    """Return the microseconds that the hosts of a tensor-parallel group need for a layer."""
    fitted, sizes = machine.profile.fitted, dict(local.mode.axes)
    others = math.prod(sizes.values()) - 1
    host_us = fitted.host_layer_us + others * fitted.host_tensor_us
    if others and local.mesh.sizes["pipeline"] > 1:
        host_us += fitted.host_pipeline_us + others * fitted.host_pipeline_tensor_us
    return host_us * float(machine.network.num_nodes(local.mesh, tuple(sizes)) ** fitted.host_nodes)
