"""Prediction of the step time, compared once with the measured parts of a step, after 20 steps."""

from __future__ import annotations

from collections.abc import Mapping

from megatron3d.analysis.cost_model.breakdown import (
    BUBBLE,
    COMPUTATION,
    DATA,
    UPDATE,
    TimeBreakdown,
    exposed_axes,
    is_exposed,
)
from megatron3d.analysis.cost_model.forecast import STEPS, Forecast, forecast
from megatron3d.metrics import timers
from megatron3d.metrics.timers import Spread
from megatron3d.train.run import Run


class PredictionCheck:
    """Compares the predicted with the measured step time, once, after enough steps.

    Attributes:
        forecast: the prediction, or the reason for having none.
    """

    def __init__(self, run: Run) -> None:
        on_cpu = run.runtime.device.type == "cpu"
        self.forecast = forecast(run.spec, on_cpu)
        self._num_steps, self._sum_s = 0, 0.0
        self._parts = TimeBreakdown()

    def add(self, step_s: float, num_steps: int, phases_ms: Mapping[str, Spread]) -> None:
        """Add `num_steps` measured steps: mean seconds of one, and milliseconds of its phases over all ranks."""
        if self._num_steps >= STEPS or not isinstance(self.forecast, Forecast):
            return
        self._sum_s += step_s * num_steps
        self._num_steps += num_steps
        parts = parts_of({name: 1e-3 * spread.mean for name, spread in phases_ms.items()})
        self._parts = self._parts.plus(parts.scaled(num_steps))
        if self._num_steps >= STEPS:
            lines = self.forecast.compare(self._sum_s / self._num_steps, self._parts.scaled(1 / self._num_steps))
            print("\n".join(f"> {line}" for line in lines), flush=True)


def parts_of(phases: Mapping[str, float]) -> TimeBreakdown:
    """Convert seconds by timed phase to seconds by predicted part; empty if phases were not timed.

    Waiting for pipeline neighbours counts as bubble, which is all the time of the schedule outside computations.
    """
    if timers.SCHEDULE not in phases:
        return TimeBreakdown()
    waits = {name: s for name, s in phases.items() if is_exposed(name) and exposed_axes(name) != ("pipeline",)}
    computes = sum(phases.get(name, 0.0) for name in timers.COMPUTES)
    own = computes + phases.get(timers.GRADS, 0.0) - sum(waits.values())
    bubble, update = phases[timers.SCHEDULE] - computes, phases.get(timers.UPDATE, 0.0)
    rest = {BUBBLE: max(bubble, 0.0), UPDATE: update, DATA: phases.get(timers.BATCH, 0.0)}
    return TimeBreakdown({COMPUTATION: max(own, 0.0), **waits, **rest})
