"""Throughput of a run, and its fraction of the devices' peak.

MFU = model FLOPs of a step / (time * ranks * peak)          Chowdhery et al. 2022 (arXiv:2204.02311, appendix B)
HFU = the same with all FLOPs of the hardware: activation recomputation and padding included
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """Throughput of a step; `mfu` and `hfu` are None if the peak is unknown."""

    tokens_per_s: float
    tokens_per_s_per_rank: float
    tflops_per_s_per_rank: float
    mfu: float | None
    hfu: float | None


@dataclass(frozen=True)
class StepWork:
    """Work of a training step.

    Attributes:
        num_tokens: tokens of the global batch.
        flops_per_token: FLOPs of the model, forward and backward.
        rank_flops: FLOPs of a rank in a step, the mean over ranks.
        peak_flops: peak FLOP/s of one device, None if unknown.
    """

    num_tokens: int
    num_ranks: int
    flops_per_token: float
    rank_flops: float
    peak_flops: float | None

    def throughput(self, step_s: float) -> Throughput:
        """Return the throughput of a step that takes `step_s` seconds."""
        tokens_per_s = self.num_tokens / step_s
        per_rank = tokens_per_s / self.num_ranks
        model_flops = per_rank * self.flops_per_token
        hardware_flops = self.rank_flops / step_s
        return Throughput(
            tokens_per_s,
            per_rank,
            model_flops / 1e12,
            model_flops / self.peak_flops if self.peak_flops else None,
            hardware_flops / self.peak_flops if self.peak_flops else None,
        )
