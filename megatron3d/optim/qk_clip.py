"""QK-clip (Kimi Team 2025, arXiv:2507.20534, section 2.1): queries and keys with too large logits shrink by weights.

    gamma_h = min(1, threshold / S_h)          W_q,h *= gamma_h^alpha          W_k,h *= gamma_h^(1 - alpha)

S_h is the largest logit of a head over all microbatches and ranks, so that each layout clips alike.  Query heads that
share a key head have the least of their factors.  In latent attention the rotary key is that of all heads: rotated
queries shrink by gamma_h, and it stays.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron3d.attention.largest_logits import LargestLogits
from megatron3d.config.schema import OptimizerConfig
from megatron3d.model.params import part_views
from megatron3d.model.spec import Architecture
from megatron3d.parallel.mesh import PIPELINE
from megatron3d.zero import Buffers


class QKClip:
    """Clips the master weights of a rank after an update.

    Attributes:
        largest: largest logit of all heads and layers before the last clip, a scalar; None before the first one.
    """

    def __init__(self, logits: LargestLogits, buffers: Buffers, arch: Architecture, config: OptimizerConfig) -> None:
        self._logits, self._arch, self._buffers, self._config = logits, arch, buffers, config
        self.largest: Tensor | None = None

    @torch.no_grad()
    def apply(self, skipped: Tensor) -> None:
        """Scale the weights by the logits since the last call; nothing changes where the update was `skipped`."""
        comm, found = self._buffers.comm, self._logits.take()
        names, mesh = list(self._logits.heads), comm.mesh
        shape, dtype = (len(names), self._arch.num_attention_heads), self._buffers.flat_buffers[0].main.dtype
        largest = torch.full(shape, -math.inf, dtype=dtype, device=skipped.device)
        for row, name in enumerate(names):
            if name in found:
                largest[row, slice(*self._logits.heads[name].query_span)] = found[name]
        if names:
            largest = comm.all_reduce(largest, mesh.without(mesh.names, (PIPELINE,)), "max").wait()
        ends = largest.amax() if names else largest.new_tensor(-math.inf)
        self.largest = comm.all_reduce(ends.view(1), mesh.names, "max").wait().view(())
        threshold = self._config.qk_clip_threshold
        gamma = torch.where((largest > threshold) & (skipped == 0), threshold / largest, 1.0)
        factors: dict[str, Tensor] = {}
        for name, of_heads in zip(names, gamma, strict=True):
            factors |= self._factors(name, of_heads)
        self._scale(factors)

    def _factors(self, name: str, gamma_N: Tensor) -> dict[str, Tensor]:
        """Return factors of the rows of logical tensors."""
        arch, alpha = self._arch, self._config.qk_clip_alpha
        if arch.is_latent:
            rotated = gamma_N.unsqueeze(1).expand(-1, arch.qk_pos_emb_head_dim)
            plain = gamma_N.unsqueeze(1).expand(-1, arch.qk_head_dim)
            queries = "q" if arch.q_lora_rank is None else "q_up"
            of_queries = torch.cat((plain**alpha, rotated), dim=1)
            return {f"{name}.{queries}": of_queries.flatten(), f"{name}.k_up": (plain ** (1 - alpha)).flatten()}
        gamma_G = gamma_N.view(arch.num_query_groups, -1).amin(1)
        of_heads = gamma_G.repeat_interleave(len(gamma_N) // len(gamma_G))
        size = arch.kv_channels
        return {
            f"{name}.q": (of_heads**alpha).repeat_interleave(size),
            f"{name}.k": (gamma_G ** (1 - alpha)).repeat_interleave(size),
        }

    def _scale(self, factors: dict[str, Tensor]) -> None:
        specs, mesh = self._buffers.specs, self._buffers.comm.mesh
        for path, start, values in self._buffers.shards("main"):
            if not any(part.name.rpartition(".")[0] in factors for part in specs[path].parts):
                continue
            for part, ((low, high), *columns), view in part_views(specs[path], values, mesh, start):
                rows = factors.get(part.name.rpartition(".")[0])
                if rows is not None:
                    scale = rows[low:high].to(view.dtype)
                    view.mul_(scale.unsqueeze(1) if columns else scale)
