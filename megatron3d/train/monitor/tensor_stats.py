"""Tensor statistics by layer: mean, rms and largest magnitude of parameters, gradients and activations.

The numbers are the same in every layout: each element counts once, however many ranks hold a copy.  An activation is
a layer's output for all tokens of the global batch.  Gradients are those before clipping.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron3d.checkpoint.pieces import ranges_to_write
from megatron3d.comm.interface import Comm
from megatron3d.model.params import part_views
from megatron3d.parallel.layout import num_copies
from megatron3d.parallel.mesh import DATA
from megatron3d.pipeline.actions import Action, ActionKind
from megatron3d.pipeline.engine import Observer
from megatron3d.train.state import TrainState
from megatron3d.train.step import StepResult
from megatron3d.zero import Buffers

Table = Mapping[str, Mapping[str, float]]


def layer_of(name: str) -> str:
    """Return the layer or module of a logical tensor: `layers.3` of `layers.3.mlp.fc1.weight`."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first in ("layers", "mtp") else first


def written_tensors(buffers: Buffers, which: str) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of what this rank writes to checkpoints, so that each element counts once.

    `which` is main, the parameters, or grad.
    """
    mine, mesh = ranges_to_write(buffers), buffers.comm.mesh
    for name, start, values in buffers.shards(which):
        _, spec, low, high = mine[name]
        for part, _, view in part_views(spec, values[low - start : high - start], mesh, low):
            yield part.name, view


class TensorStatistics:
    """Accumulator by layer on this rank: sum, sum of squares, number of elements, and largest magnitude."""

    def __init__(self, num_layers: int, device: torch.device, num_ahead: int = 0) -> None:
        ahead = (f"mtp.{index}" for index in range(num_ahead))
        names = "embedding", *(f"layers.{index}" for index in range(num_layers)), "final_norm", "head", *ahead
        self._rows = {name: row for row, name in enumerate(names)}
        self._sums = torch.zeros(len(names), 3, dtype=torch.float64, device=device)
        self._largest = torch.zeros(len(names), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, layer: str, x: Tensor, copies: int = 1) -> None:
        """Add the elements of `x`, of which `copies` ranks hold the same."""
        if x.numel() == 0:
            return
        row, wide = self._rows[layer], torch.float64
        square = torch.linalg.vector_norm(x, dtype=wide).square()
        self._sums[row] += torch.stack((x.sum(dtype=wide), square, square.new_tensor(x.numel()))) / copies
        self._largest[row] = torch.maximum(self._largest[row], torch.linalg.vector_norm(x, torch.inf).to(wide))

    def reduce(self, comm: Comm, factor: float = 1.0) -> Table:
        """Return the statistics over all ranks, the elements multiplied by `factor`; the same on every rank."""
        sums = comm.all_reduce(self._sums, comm.mesh.names).wait().tolist()
        largest = comm.all_reduce(self._largest, comm.mesh.names, "max").wait().tolist()
        return {
            name: {
                "mean": factor * sums[row][0] / count,
                "rms": factor * (sums[row][1] / count) ** 0.5,
                "max": factor * largest[row],
            }
            for name, row in self._rows.items()
            if (count := sums[row][2]) > 0
        }


class StepTensorStatistics:
    """Tensor statistics of one step; every rank creates one for the same steps, since `finish` communicates."""

    KEY = "moments"

    def __init__(self, state: TrainState, device: torch.device) -> None:
        model, mesh = state.model, state.model.comm.mesh
        self._state, self._device = state, device
        self._is_forward = False
        tokens, features = model.mode.residual
        self._copies = num_copies(((*DATA, *tokens), features), mesh, (*DATA, *dict(model.mode.axes)))
        self._activations = self._new()
        model.set_activation_hook(self._add_activation)

    def _new(self) -> TensorStatistics:
        arch = self._state.model.arch
        return TensorStatistics(arch.num_layers, self._device, arch.mtp_num_layers)

    def _add_activation(self, layer: str, x_MH: Tensor) -> None:
        """Add a layer's output, unless backward recomputes it, which forward has added."""
        if self._is_forward:
            self._activations.add(layer, x_MH.detach(), self._copies)

    def observe(self, inner: Observer) -> Observer:
        """Return `inner`, which also keeps track of whether a forward runs."""

        @contextlib.contextmanager
        def observe(what: Action | str) -> Iterator[None]:
            self._is_forward = isinstance(what, Action) and what.kind is ActionKind.F
            with inner(what):
                yield
            self._is_forward = False

        return observe

    def finish(self, result: StepResult) -> Mapping[str, Any]:
        """Return statistics of parameters after the step, gradients and activations, the same on every rank."""
        state, comm = self._state, self._state.model.comm
        state.model.set_activation_hook(None)
        norm, clip_grad = result.grad_norm.item(), state.spec.config.optimizer.clip_grad
        clip_factor = min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0
        unclip_factor = 1 / clip_factor if clip_factor > 0 else math.nan
        return {
            "params": self._of_buffers("main").reduce(comm),
            "grads": self._of_buffers("grad").reduce(comm, unclip_factor),
            "activations": self._activations.reduce(comm),
        }

    def _of_buffers(self, which: str) -> TensorStatistics:
        statistics = self._new()
        for name, values in written_tensors(self._state.buffers, which):
            statistics.add(layer_of(name), values)
        return statistics
