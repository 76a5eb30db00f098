"""Softmax of attention's scores: a cap of the scores, and sinks, logits that join the denominators of their heads.

    weight_j = exp(c tanh(s_j / c)) / (exp(sink) + sum over k of exp(c tanh(s_k / c)))

Cap: Gemma Team 2024 (arXiv:2408.00118), section 2.  Learned sinks: OpenAI 2025 (arXiv:2508.10925), section 2.2; of 0
(off by one): Miller 2023, "Attention is off by one".

A sink is one more key, whose value is 0.  Merged into the output and the log-sum-exp of the others by

    out <- out sigmoid(lse - sink)      lse <- log(exp(lse) + exp(sink))

these are what a kernel's backward needs for exact gradients of queries, keys and values, so that every kernel and every
exchange between context ranks has sinks.  Letters: B sequences, N query heads, L query rows, D features of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

VANILLA, OFF_BY_ONE, LEARNABLE = SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class Softmax(NamedTuple):
    """How scores become weights.

    Attributes:
        softcap: c of c tanh(score / c), before the mask; None: scores are not capped.
        sink_N: logit of each query head of this rank that joins the denominators; None: none does.
    """

    softcap: float | None = None
    sink_N: Tensor | None = None

    @property
    def is_vanilla(self) -> bool:
        """Whether it is the softmax of the scores alone."""
        return self.softcap is None and self.sink_N is None


PLAIN_SOFTMAX = Softmax()


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Return c tanh(scores / c), or the scores themselves without a cap."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def cap_slope(scores: Tensor, softcap: float) -> Tensor:
    """Return the derivative of the cap, given capped scores, 0 where they are masked: 1 - tanh^2."""
    return 1 - (scores.clamp(min=-softcap) / softcap).square()


def add_sink(out_BNLD: Tensor, lse: Tensor, sink_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over the keys and the sink, each in its dtype.

    The log-sum-exp is [B, N, L], or [N, B * L] as variable-length kernels have it.
    """
    if sink_N is None:
        return out_BNLD, lse
    sink = sink_N.to(lse.dtype).unsqueeze(-1)
    share_BNL = _by_sequence(torch.sigmoid(lse - sink), len(out_BNLD))
    return (out_BNLD * share_BNL.unsqueeze(-1)).to(out_BNLD.dtype), torch.logaddexp(lse, sink)


def sink_grad(dy_BNLD: Tensor, out_BNLD: Tensor, lse: Tensor, sink_N: Tensor | None) -> Tensor | None:
    """Return the gradient of the sinks [N], given the output and the log-sum-exp with them: -weight (dy . out)."""
    if sink_N is None:
        return None
    weight_BNL = _by_sequence((sink_N.to(lse.dtype).unsqueeze(-1) - lse).exp(), len(out_BNLD))
    along_BNL = (dy_BNLD.to(lse.dtype) * out_BNLD).sum(-1)
    return -(weight_BNL * along_BNL).sum((0, 2)).to(sink_N.dtype)


def _by_sequence(x: Tensor, num_sequences: int) -> Tensor:
    """Return [B, N, L] from itself or from [N, B * L]."""
    return x if x.dim() == 3 else x.unflatten(1, (num_sequences, -1)).transpose(0, 1)
