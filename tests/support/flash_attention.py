"""Stand-ins for torch's flash attention on GPUs: the same arguments and shapes, any dtype, by plain matmuls.

Queries and keys are aligned at their last rows; rows that see nothing have the log-sum-exp +inf, as on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.attention.pairs import PLAIN, PairInputs


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the stand-ins in the place of torch's operations; return the list of calls."""
    calls: list[str] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **sides: int) -> tuple[Any, ...]:
        calls.append("forward")
        outs, lses = [], []
        for rows, keys in _documents(q, k, rest[0], rest[1]):
            out, lse = PLAIN.forward(_pair(q[rows], k[keys], v[keys], rest[5], sides))
            outs.append(out.transpose(1, 2))
            lses.append(torch.where(lse.isneginf(), math.inf, lse))
        if rest[0] is None:
            return outs[0], lses[0], None, None, None
        return torch.cat(outs, dim=1)[0], torch.cat(lses, dim=2)[0], None, None, None

    def backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **sides: int
    ) -> Any:
        calls.append("backward")
        assert lse.is_contiguous(), "the kernel reads rows without strides"
        grads = [torch.zeros_like(each) for each in (q, k, v)]
        for rows, keys in _documents(q, k, rest[0], rest[1]):
            dy_rows, out_rows = (_heads(each[rows]) for each in (dy, out))
            seen = lse if rest[0] is None else lse[None, :, rows]
            found = PLAIN.backward(_pair(q[rows], k[keys], v[keys], rest[5], sides), dy_rows, (out_rows, seen))
            for grad, part, at in zip(grads, found, (rows, keys, keys), strict=True):
                grad[at] = part.transpose(1, 2).view(grad[at].shape)
        return tuple(grads)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    return calls


def _documents(q: Tensor, k: Tensor, bounds_q: Tensor | None, bounds_k: Tensor | None) -> Iterator[tuple[slice, slice]]:
    if bounds_q is None or bounds_k is None:
        yield slice(None), slice(None)
        return
    for rows, keys in zip(*(pairwise(bounds.tolist()) for bounds in (bounds_q, bounds_k)), strict=True):
        yield slice(*rows), slice(*keys)


def _heads(x: Tensor) -> Tensor:
    """Return [B, N, L, D] from [B, L, N, D], or from the rows of one document."""
    return (x if x.dim() == 4 else x.unsqueeze(0)).transpose(1, 2)


def _pair(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, sides: dict[str, int]) -> PairInputs:
    q, k, v = _heads(q), _heads(k), _heads(v)
    behind, ahead = sides.get("window_size_left", -1), 0 if is_causal else sides.get("window_size_right", -1)
    diagonal = torch.arange(q.shape[2]).unsqueeze(1) + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2])
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if behind >= 0:
        mask &= keys >= diagonal - behind
    if ahead >= 0:
        mask &= keys <= diagonal + ahead
    return PairInputs(q, k, v, False, mask)
