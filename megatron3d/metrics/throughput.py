"""How fast a run trains, and what part of its devices' peak that is.

MFU = model FLOPs of a step / (time * ranks * peak)          Chowdhery et al. 2022 (arXiv:2204.02311, appendix B)
HFU = the same with what is really multiplied: what is computed again, and padding, included
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """Of one step; shares of the peak are None where that is not known."""

    tokens_per_s: float
    tokens_per_s_per_rank: float
    tflops_per_s_per_rank: float
    mfu: float | None
    hfu: float | None


@dataclass(frozen=True)
class Work:
    """What a step is.

    Attributes:
        num_tokens: of the global batch.
        flops_per_token: of the model, forward and backward.
        rank_flops: what a rank multiplies in a step, the mean over ranks.
        peak_flops: of one device, None where unknown.
    """

    num_tokens: int
    num_ranks: int
    flops_per_token: float
    rank_flops: float
    peak_flops: float | None

    def speed(self, step_s: float) -> Speed:
        """Of a step that takes so long."""
        tokens_per_s = self.num_tokens / step_s
        per_rank = tokens_per_s / self.num_ranks
        flops, peak = per_rank * self.flops_per_token, self.peak_flops
        hardware_flops = self.rank_flops / step_s
        return Speed(
            tokens_per_s,
            per_rank,
            flops / 1e12,
            flops / peak if peak else None,
            hardware_flops / peak if peak else None,
        )
