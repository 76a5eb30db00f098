"""Time of one kernel: a GEMM as waves of tiles over the multiprocessors, any other kernel as bytes over the bandwidth.

    GEMM           max(waves (K + ramp) tile / (share of the peak of a unit), bytes / bandwidth)
    memory-bound   bytes / bandwidth

The best tile size is assumed, as a library would choose it.  (Williams, Waterman and Patterson 2009 for the roofline;
"Matrix Multiplication Background User's Guide" of NVIDIA for tiles and waves.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron3d.analysis.cost_model.fitted_terms import NEUTRAL, FittedTerms
from megatron3d.analysis.cost_model.hardware import Accelerator, KernelRates
from megatron3d.errors import UserError


@dataclass(frozen=True)
class DeviceModel:
    """Kernel times of an accelerator in one precision.

    Attributes:
        peak: FLOP/s.
        slowdown: factor by which ranks that share its units are slower than one alone.
        fitted: fitted factors of the framework whose kernels run.
    """

    kernels: KernelRates
    peak: float
    itemsize: int
    slowdown: float = 1.0
    fitted: FittedTerms = NEUTRAL

    def gemm_s(self, m: float, n: float, k: float, batch: float = 1) -> float:
        """Return the seconds of `batch` GEMMs Y[m, n] = X[m, k] W[k, n]."""
        if not min(m, n, k, batch):
            return 0.0
        kernels = self.kernels
        unit = self.peak * kernels.matmul_fraction / kernels.num_units
        compute = min(
            _waves(math.ceil(m / rows) * math.ceil(n / columns) * batch, kernels.num_units)
            * (2 * rows * columns * (k + kernels.ramp_k) / (unit * fraction))
            for rows, columns, fraction in kernels.tiles
        )
        moved = (m * k + k * n + m * n) * batch * self.itemsize / kernels.bytes_per_s
        return self.launched(max(self.fitted.products * compute, moved))

    def memory_bound_s(self, num_bytes: float, kernels: int = 1) -> float:
        """Return the seconds of `kernels` memory-bound kernels that move `num_bytes` in all."""
        seconds = self.fitted.memory * num_bytes / self.kernels.bytes_per_s
        return self.launched(seconds, kernels) if num_bytes else 0.0

    def attention_s(self, flops: float, backward: bool) -> float:
        """Return the seconds of fused attention of `flops`."""
        if not flops:
            return 0.0
        seconds = flops / (self.peak * self.kernels.attention_fractions[backward])
        return self.launched(self.fitted.attention * seconds)

    def launched(self, seconds: float, kernels: int = 1) -> float:
        """Return `seconds` of `kernels` kernels with their launch times."""
        launch = kernels * self.kernels.launch_us * 1e-6
        return self.slowdown * (seconds + launch if self.kernels.adds_launch else max(seconds, launch))

    @property
    def comm_tax(self) -> float:
        """Slowdown of computation per second of communication that it overlaps with."""
        return self.kernels.comm_units / self.kernels.num_units + self.fitted.hidden_tax


def _waves(num_tiles: float, num_units: int) -> int:
    return math.ceil(num_tiles / num_units)


def device_model(accelerator: Accelerator, precision: str, itemsize: int, slowdown: float = 1.0) -> DeviceModel:
    """Return an accelerator's kernel times in a training precision.  Raises UserError if it lacks that precision."""
    if precision not in accelerator.peak_tflops:
        known = ", ".join(accelerator.peak_tflops)
        raise UserError(f"train.precision={precision}: {accelerator.device_names} does not compute in it; use {known}")
    assert accelerator.kernels is not None, "load_accelerator gives accelerators whose kernels are known"
    return DeviceModel(accelerator.kernels, accelerator.peak_tflops[precision] * 1e12, itemsize, slowdown)
