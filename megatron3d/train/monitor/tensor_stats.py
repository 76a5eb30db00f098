"""Mean, root mean square and largest magnitude of each layer's parameters, gradients and activations, the same numbers
in every layout: each element counts once, whoever holds copies of it.

An activation is what a layer hands on, of all tokens of the global batch.  Gradients are those before clipping.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron3d.checkpoint.param_pieces import ranges_to_write
from megatron3d.comm.interface import Comm
from megatron3d.parallel.layout import num_copies
from megatron3d.parallel.logical_views import part_views
from megatron3d.parallel.mesh import DATA
from megatron3d.pipeline.actions import Action, ActionKind
from megatron3d.train.state import TrainState
from megatron3d.train.step import StepResult, Watch

Table = Mapping[str, Mapping[str, float]]


def layer_of(name: str) -> str:
    """`layers.3` of `layers.3.mlp.fc1.weight`, `embedding` of `embedding.position`: of a logical tensor."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "layers" else first


class Sums:
    """Of what this rank has seen of each layer: sum, sum of squares, number of elements, and the largest magnitude."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        names = "embedding", *(f"layers.{index}" for index in range(num_layers)), "final_norm", "head"
        self._places = {name: place for place, name in enumerate(names)}
        self._sums = torch.zeros(len(names), 3, dtype=torch.float64, device=device)
        self._largest = torch.zeros(len(names), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, layer: str, x: Tensor, copies: int = 1) -> None:
        """Count the elements of `x`, of which so many ranks hold copies."""
        if x.numel() == 0:
            return
        place, wide = self._places[layer], torch.float64
        square = torch.linalg.vector_norm(x, dtype=wide).square()
        self._sums[place] += torch.stack((x.sum(dtype=wide), square, square.new_tensor(x.numel()))) / copies
        self._largest[place] = torch.maximum(self._largest[place], torch.linalg.vector_norm(x, torch.inf).to(wide))

    def over_all(self, comm: Comm, factor: float = 1.0) -> Table:
        """Moments of each layer that anybody has seen, of its elements times `factor`; the same on every rank."""
        sums = comm.all_reduce(self._sums, comm.mesh.names).wait().tolist()
        largest = comm.all_reduce(self._largest, comm.mesh.names, "max").wait().tolist()
        return {
            name: {
                "mean": factor * sums[place][0] / count,
                "rms": factor * (sums[place][1] / count) ** 0.5,
                "max": factor * largest[place],
            }
            for name, place in self._places.items()
            if (count := sums[place][2]) > 0
        }


class Moments:
    """Sees one step of a state.  Every rank makes one for the same steps."""

    def __init__(self, state: TrainState, device: torch.device) -> None:
        model, mesh = state.model, state.model.comm.mesh
        self._state, self._device, self._is_forward = state, device, False
        tokens, features = model.mode.residual
        self._copies = num_copies(((*DATA, *tokens), features), mesh, (*DATA, *dict(model.mode.axes)))
        self._activations = self._sums()
        model.set_activation_hook(self._see)

    def _sums(self) -> Sums:
        return Sums(self._state.model.arch.num_layers, self._device)

    def _see(self, layer: str, x_MH: Tensor) -> None:
        """Layers that backward computes again were seen in forward."""
        if self._is_forward:
            self._activations.add(layer, x_MH.detach(), self._copies)

    def watch(self, inner: Watch) -> Watch:
        """`inner`, which also tells what is a forward."""

        @contextlib.contextmanager
        def watch(what: Action | str) -> Iterator[None]:
            self._is_forward = isinstance(what, Action) and what.kind is ActionKind.F
            with inner(what):
                yield
            self._is_forward = False

        return watch

    def finish(self, result: StepResult, clip_grad: float) -> Mapping[str, Any]:
        """Moments of parameters after the step, of gradients and of activations, the same on every rank."""
        state, comm = self._state, self._state.model.comm
        state.model.set_activation_hook(None)
        norm = result.grad_norm.item()
        clipped = min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0
        undone = 1 / clipped if clipped > 0 else math.nan
        return {
            "params": self._held("main").over_all(comm),
            "grads": self._held("grad").over_all(comm, undone),
            "activations": self._activations.over_all(comm),
        }

    def _held(self, which: str) -> Sums:
        """Of the elements of parameters or gradients that the save rule gives to this rank."""
        buffers, sums = self._state.buffers, self._sums()
        mine, mesh = ranges_to_write(buffers), buffers.comm.mesh
        for name, start, values in buffers.held(which):
            _, spec, low, high = mine[name]
            for part, _, view in part_views(spec, values[low - start : high - start], mesh, low):
                sums.add(layer_of(part.name), view)
        return sums
