"""Predicted step time of a run on its cluster, and its comparison with the measured time after 20 steps.

Each part rests on one assumption: computation on the accelerator's kernel rates, exposed communication on the links
that it crosses and on overlap, the bubble on equally fast ranks.  A wrong part names the assumption to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.memory.table import align_columns
from megatron3d.forecast.time.breakdown import (
    BUBBLE,
    COMPUTATION,
    LOADING,
    UPDATE,
    TimeBreakdown,
    TimePrediction,
    exposed_axes,
    is_exposed,
)
from megatron3d.forecast.time.hardware import CLUSTERS
from megatron3d.forecast.time.layer import Machine
from megatron3d.forecast.time.step import load_machine, predict_time
from megatron3d.optim.rule_spec import UpdateRule, rule_of
from megatron3d.parallel.mesh import Mesh

# Steps to measure before the comparison; errors below this fraction of the step are not explained.
STEPS, NEAR = 20, 0.1
# Clusters that tools/calibrate.py writes.
LOCAL = "local"
CALIBRATED = (LOCAL, "local_gpu")


@dataclass(frozen=True)
class Forecast:
    """A time prediction for a cluster, and the machine that it assumes."""

    cluster: str
    step: TimePrediction
    machine: Machine
    mesh: Mesh
    rule: UpdateRule

    @property
    def parts(self) -> TimeBreakdown:
        """Seconds of the parts that can be measured separately; the next batch is expected to be prefetched."""
        step = self.step
        return TimeBreakdown(
            {COMPUTATION: step.compute_s, **step.exposed, BUBBLE: step.bubble_s, UPDATE: step.optimizer_s}
        )

    def line(self) -> str:
        """Return the line that a run prints at its start."""
        shown = ", ".join(f"{kind} {seconds:.4g}" for kind, seconds in self.step.breakdown.items() if seconds > 0)
        return f"step time by arithmetic on {self.cluster}: {self.step.step_s:.4g} s = {shown}"

    def compare(self, measured_s: float, measured: Mapping[str, float]) -> list[str]:
        """Return lines that compare the prediction with mean measured seconds, in all and by `parts`, and explain
        errors."""
        expected, predicted = self.parts, self.step.step_s
        told = f"step time predicted {predicted:.4g} s, measured {measured_s:.4g} s: "
        told += f"{100 * (measured_s / predicted - 1):+.0f} %"
        rows: list[tuple[str, ...]] = [("", "predicted s", "measured s", "difference s", "")]
        missing: dict[str, float] = {}
        for kind in {**expected, **measured} if measured else ():
            numbers = expected.get(kind, 0.0), measured.get(kind, 0.0)
            missing[kind] = numbers[1] - numbers[0]
            if max(numbers) > 0:
                rows.append(("", *(f"{number:.4g}" for number in numbers), f"{missing[kind]:+.4g}", kind))
        off = [kind for kind, seconds in missing.items() if abs(seconds) > NEAR * predicted]
        off.sort(key=lambda kind: -abs(missing[kind]))
        return [told, *(align_columns(rows) if measured else ()), *(self._assumption(k, missing[k]) for k in off)]

    def _assumption(self, kind: str, missing_s: float) -> str:
        """Return which assumption of the hardware files a part that is `missing_s` off rests on."""
        kernels, device = self.machine.device.kernels, self.machine.device
        sheet = f"{Path(self.machine.network.cluster.accelerator).stem}.yaml"
        update_bytes = self.machine.profile.optimizer_bytes + self.rule.moved_bytes
        memory = f"memory at {kernels.bytes_per_s / 1e9:,.0f} GB/s"
        gemms = f"GEMMs at {device.peak * kernels.matmul_fraction / 1e12:.3g} TFLOP/s"
        reasons = {
            COMPUTATION: f"{gemms} and {memory} ({sheet}), and no other program on this machine",
            UPDATE: f"{memory} ({sheet}) and {update_bytes:.0f} bytes for each parameter",
            BUBBLE: "that all ranks are as fast as each other; logging.trace_iterations draws which is not",
            LOADING: "that the next batch is read while the step runs; the file system or the tokenizer is slower",
        }
        reason = self._link(kind) if is_exposed(kind) else reasons[kind]
        again = "; run tools/calibrate.py again" if self.cluster in CALIBRATED and kind != LOADING else ""
        return f"{kind} is {missing_s:+.4g} s off: it assumes {reason}{again}"

    def _link(self, kind: str) -> str:
        rate, level = self.machine.network.bottleneck(self.mesh, exposed_axes(kind))
        where = f"{rate / 1e9:.3g} GB/s through {level.name} ({self.machine.network.cluster.name})"
        return f"{where}, transfers that overlap where the layout allows it, and ranks that arrive together"


def forecast(spec: RunSpec, is_cpu: bool) -> Forecast | str:
    """Predict the step time of a run, or return why it cannot.  Raises UserError for a wrong cluster file."""
    config = spec.config
    cluster = config.logging.cluster or (LOCAL if is_cpu and (CLUSTERS / f"{LOCAL}.yaml").is_file() else None)
    if cluster is None:
        how = "run tools/calibrate.py" if is_cpu else "set logging.cluster"
        return f"step time is not predicted, since this machine is not known: {how} (docs/planner.md)"
    if is_cpu and config.train.precision != "fp32" and config.logging.cluster is None:
        return "step time is not predicted: tools/calibrate.py measures CPUs in fp32 only"
    machine = load_machine(cluster, config.train.precision, spec.world_size)
    return Forecast(cluster, predict_time(spec, machine), machine, spec.mesh, rule_of(config.optimizer))
