"""The step time that a run expects of its cluster, and after 20 steps what it took instead.

A part that is wrong by itself cannot be told from the time of whole steps; what is said is which parts are large enough
to explain the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron3d.config.architecture import Architecture
from megatron3d.config.schema import Config
from megatron3d.cost.hardware import CLUSTERS
from megatron3d.cost.step import Prediction, machine_of, make_step, predict

STEPS, NEAR = 20, 0.15
LOCAL = "local"


@dataclass(frozen=True)
class Forecast:
    """A prediction for a cluster."""

    cluster: str
    step: Prediction

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds by kind, the largest first."""
        parts = {**self.step.parts, "bubble": self.step.bubble_s, "update": self.step.optimizer_s}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    def line(self) -> str:
        """What is expected."""
        shown = ", ".join(f"{kind} {seconds:.4g}" for kind, seconds in self.parts.items() if seconds > 0)
        return f"step time by arithmetic on {self.cluster}: {self.step.step_s:.4g} s = {shown}"

    def verdict(self, measured_s: float) -> list[str]:
        """The prediction beside the mean of some steps."""
        predicted = self.step.step_s
        off = measured_s / predicted - 1
        told = f"step time predicted {predicted:.4g} s, measured {measured_s:.4g} s: {100 * off:+.0f} %"
        if abs(off) <= NEAR:
            return [told]
        missing = measured_s - predicted
        able = [kind for kind, seconds in self.parts.items() if missing > 0 or seconds > -missing / 2][:2]
        cause = f"first suspects, the largest parts: {' and '.join(able)}; " if able else ""
        advice = "run tools/calibrate.py again" if self.cluster == LOCAL else "compare the cluster's file with this one"
        return [told, f"{cause}{advice} while nothing else runs, or trace a pipeline with logging.trace_iterations"]


def forecast(config: Config, arch: Architecture, world_size: int, is_cpu: bool) -> Forecast | str:
    """Of a run; where the cluster is not known, how to say it.  Raises UserError where its file is wrong."""
    cluster = config.logging.cluster or (LOCAL if is_cpu and (CLUSTERS / f"{LOCAL}.yaml").is_file() else None)
    if cluster is None:
        how = "run tools/calibrate.py" if is_cpu else "set logging.cluster"
        return f"step time is not predicted, since this machine is not known: {how} (docs/planner.md)"
    if is_cpu and config.train.precision != "fp32" and config.logging.cluster is None:
        return "step time is not predicted: tools/calibrate.py measures processors in fp32 only"
    machine = machine_of(cluster, config.train.precision, world_size)
    return Forecast(cluster, predict(make_step(config, arch, world_size, machine)))
