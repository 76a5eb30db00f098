"""Largest logit of each attention head, by which QK-clip scales queries and keys (Kimi Team 2025, arXiv:2507.20534).

    S_h = max over sequences, queries i and the keys j that they see of q_i k_j / sqrt(D)

Attention kernels keep no logits, so that this is a matmul of its own, half of attention's forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron3d.attention.packed import Visible
from megatron3d.attention.plan import HeadSplit, logit_pieces


class LargestLogits:
    """Largest logits since the last update, of the heads that this rank has.

    Attributes:
        heads: heads of each attention by the name of its module.
    """

    def __init__(self) -> None:
        self.heads: dict[str, HeadSplit] = {}
        self._found: dict[str, Tensor] = {}

    def record(self, name: str, logits_N: Tensor) -> None:
        """Add the largest logits of a microbatch."""
        before = self._found.get(name)
        self._found[name] = logits_N if before is None else torch.maximum(before, logits_N)

    def take(self) -> dict[str, Tensor]:
        """Return the largest logits by name, and forget them."""
        found, self._found = self._found, {}
        return found


@torch.no_grad()
def largest_logits(q_BNLD: Tensor, k_BNSD: Tensor, positions: Sequence[Sequence[int]], visible: Visible) -> Tensor:
    """Return the largest logit [N] of each head, in fp32 or wider, before a softcap.

    Args:
        k_BNSD: keys of each query head, of whole sequences in the order of positions.
        positions: those of the queries of each sequence, ascending; of all sequences, where there is one list.
        visible: documents and window of the sequences.
    """
    batch, num_heads, _, size = q_BNLD.shape
    wide = torch.promote_types(q_BNLD.dtype, torch.float32)
    found = torch.full((num_heads,), -math.inf, dtype=wide, device=q_BNLD.device)
    is_alike = len(positions) == 1 and visible.starts is None
    for row in range(1 if is_alike else batch):
        rows, places = slice(None) if is_alike else slice(row, row + 1), positions[row % len(positions)]
        for (low, high), keys in logit_pieces(places, visible.window):
            logits = q_BNLD[rows, :, low:high] @ k_BNSD[rows, :, keys.start : keys.stop].mT
            hidden = visible.mask(row, places[low:high], keys, q_BNLD.device).logical_not_()
            torch.maximum(found, logits.masked_fill_(hidden, -math.inf).amax((0, 2, 3)).to(wide), out=found)
            del logits, hidden  # before those of the next piece
    scaled: Tensor = found * size**-0.5
    return scaled
