"""What fp8 loses of the operands of each linear: saturated and underflowed elements, and the range of scales.

    saturated     elements that are stored as the format's largest number, to which all above are clamped or rounded
    underflowed   elements that are not 0 and are stored as 0

Both are shares of the elements that are not 0, so that rows of zeros, as experts with a capacity have, change neither.

Scales follow from the largest value of each block, so that few are saturated: those that round to the largest number.
Blocks of zeros, and those with a value that is not finite, have no scale here; the latter let the step be skipped.

Operands are those of Y and dX: the form of X and dY along tokens is quantized once more, for dW.  Shares are those of
the global tensors of all microbatches of a step.  Ranks that hold copies, and backward that recomputes a forward, count
all elements of a tensor equally often, which changes no share: of equal operands shares are equal bit by bit in every
layout.  An element that is 0 but for rounding, as the gradient of the first query of a sequence, may be 0 in one layout
and underflow in another.

Weights that are stored in fp8 are counted where a rank updates them, before the step that multiplies them.  Of the
experts' linears all W are counted, with rows or not, and X of fc1 where tokens are at home, once for each token;
other rows are counted once for each expert of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.linear.fp8 import LARGEST_EXPONENT, SMALLEST
from megatron3d.linear.gemm import Operand
from megatron3d.linear.scaled_mm import E4M3, E5M2
from megatron3d.model.linear_spec import linears_of_model
from megatron3d.pipeline.engine import Observer
from megatron3d.train.state import TrainState
from megatron3d.train.step import StepResult

OPERANDS = ("X", "W", "dY")
# Bits of an fp8 element without its sign, and those of the largest numbers, 448 and 57344.
_SIZE, _LARGEST = 0x7F, {E4M3: 0x7E, E5M2: 0x7B}
Table = Mapping[str, Mapping[str, Mapping[str, float | None]]]


class Fp8Statistics:
    """Accumulator by linear and operand on this rank.

    Args:
        paths: linears of the whole model, the same on every rank.
    """

    def __init__(self, paths: Sequence[str], device: torch.device) -> None:
        self._rows = {(path, name): row for row, (path, name) in enumerate((p, o) for p in paths for o in OPERANDS)}
        # Elements, saturated ones, those that are not 0, and those of them that are stored as 0.
        self._counts = torch.zeros(len(self._rows), 4, dtype=torch.int64, device=device)
        # Minus the smallest scale, and the largest.
        self._scales = torch.full((len(self._rows), 2), -math.inf, device=device)

    @torch.no_grad()
    def add(self, path: str, name: str, t: Tensor, operand: Operand) -> None:
        """Add the elements of a tensor, and of its operand in the same form."""
        assert operand.scales is not None, "the operand is quantized"
        row, fp8 = self._rows[path, name], operand.data.dtype
        bits, is_value = operand.data.view(torch.uint8) & _SIZE, t != 0
        saturated, underflowed = bits == _LARGEST[fp8], is_value & (bits == 0)
        self._counts[row, 0] += t.numel()
        self._counts[row, 1:] += torch.stack([each.sum() for each in (saturated, is_value, underflowed)])
        scales = operand.scales.float()
        has_scale = scales > SMALLEST / 2 ** LARGEST_EXPONENT[fp8]  # the scale of zeros; nor NaN
        ends = torch.stack([torch.where(has_scale, each, -math.inf).amax() for each in (-scales, scales)])
        self._scales[row] = torch.maximum(self._scales[row], ends)

    def reduce(self, comm: Comm) -> Table:
        """Return shares and scales over all ranks, of the operands that were added; the same on every rank."""
        counts = comm.all_reduce(self._counts, comm.mesh.names).wait().tolist()
        ends = comm.all_reduce(self._scales, comm.mesh.names, "max").wait().tolist()
        table: dict[str, dict[str, Mapping[str, float | None]]] = {}
        for (path, name), row in self._rows.items():
            total, saturated, values, underflowed = counts[row]
            smallest, largest = ends[row]
            if total:
                table.setdefault(path, {})[name] = {
                    "saturated": saturated / values if values else 0.0,
                    "underflowed": underflowed / values if values else 0.0,
                    "smallest_scale": -smallest if math.isfinite(smallest) else None,
                    "largest_scale": largest if math.isfinite(largest) else None,
                }
        return table


class StepFp8Statistics:
    """Fp8 statistics of one step; every rank creates one for the same steps, since `finish` communicates."""

    KEY = "fp8"

    def __init__(self, state: TrainState, device: torch.device) -> None:
        fp8, self._model = state.spec.fp8, state.model
        assert fp8 is not None, "linears multiply in fp8"
        paths = [path for path in linears_of_model(state.spec.arch) if fp8.takes(path)]
        self._statistics = Fp8Statistics(paths, device)
        self._model.set_fp8_hook(self._statistics.add)
        for name, t, operand in state.buffers.operands():
            self._statistics.add(name.removesuffix(".weight"), "W", t, operand)

    def observe(self, inner: Observer) -> Observer:
        """Return `inner`, since linears call the statistics themselves."""
        return inner

    def finish(self, result: StepResult) -> Table:
        """Return the statistics of the step, the same on every rank."""
        self._model.set_fp8_hook(None)
        return self._statistics.reduce(self._model.comm)
