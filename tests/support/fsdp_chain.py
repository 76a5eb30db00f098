"""A chain of elementwise scales whose parameters lie in flat buffers, and a communicator that logs its collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron3d.comm.interface import Pending
from megatron3d.parallel.layout import ParamSpec, Part
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.zero import Buffers, FsdpUnit, Sharding

CPU = torch.device("cpu")
MESH = Mesh((("pipeline", 1), ("replica", 1), ("data", 2), ("x", 2)))
HYBRID = Mesh((("pipeline", 1), ("replica", 2), ("data", 2), ("x", 1)))


class Echo:
    """Communicator that assumes equal values on all ranks and logs when each collective starts and is waited for."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.events: list[Any] = []

    def _pending(self, what: str, axes: Axes, numel: int, result: Any) -> Pending:
        live = self.mesh.nontrivial(axes)
        if not live:
            return Pending(result)
        self.events.append((f"begin {what}", live, numel))

        def finish() -> Tensor:
            self.events.append((f"end {what}", live, numel))
            total: Tensor = result()
            return total

        return Pending(finish)

    def all_reduce(self, x: Tensor, axes: Axes) -> Pending:
        return self._pending("sum", axes, x.numel(), lambda: x.mul_(self.mesh.size(axes)))

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        ranks = self.mesh.size(axes)
        mine = x.chunk(ranks)[self.mesh.index(axes)] * ranks
        return self._pending("scatter", axes, x.numel(), lambda: mine)

    def all_gather_into(self, whole: Tensor, axes: Axes) -> Pending:
        ranks = self.mesh.size(axes)
        mine = whole.chunk(ranks)[self.mesh.index(axes)].clone()

        def result() -> Tensor:
            for part in whole.chunk(ranks):
                part.copy_(mine)
            return whole

        return self._pending("gather", axes, whole.numel(), result if ranks > 1 else lambda: whole)


class Scale(nn.Module):
    """Module that computes x * weight, or x + weight whose backward does not need it; logs forward and backward."""

    def __init__(self, size: int, name: str, events: list[Any], adds: bool = False) -> None:
        super().__init__()
        self.adds = adds
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        self.name, self.events = name, events

    def forward(self, x: Tensor) -> Tensor:
        self.events.append(f"forward of {self.name}")
        y = x + self.weight if self.adds else x * self.weight
        if y.requires_grad:
            y.register_hook(lambda dy: self.events.append(f"backward of {self.name}"))
        return y


def spec(name: str, *shape: int, layout: tuple[Axes, ...] | None = None, **fields: Any) -> ParamSpec:
    values = {"token_axes": ("replica", "data"), "layout": layout or ((),) * len(shape)} | fields
    return ParamSpec((Part(name, shape, shape),), **values)


def sharding(zero_stage: int) -> Sharding:
    return Sharding.of_stage(zero_stage, ("data",))


def chain(
    count: int,
    size: int,
    zero_stage: int = 0,
    mesh: Mesh = MESH,
    bucket_bytes: float = 1,
    dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[nn.Sequential, Buffers, Echo]:
    """Return a chain of `count` scales, each an FSDP unit whose backward needs its weight."""
    comm: Any = Echo(mesh)
    model = nn.Sequential(*(Scale(size, str(i), comm.events) for i in range(count)))
    blocks = [FsdpUnit(str(i), module, 0, in_backward=True) for i, module in enumerate(model)]
    specs = {0: {f"{i}.weight": spec(str(i), size) for i in range(count)}}
    options: Any = {"sharding": sharding(zero_stage), "units": blocks, "reduce_dtype": reduce_dtype}
    return model, Buffers(model, specs, comm, dtype, CPU, bucket_bytes, **options), comm


def parameters(count: int) -> nn.ParameterDict:
    """Return parameters on the meta device, named by their number."""
    return nn.ParameterDict({str(i): nn.Parameter(torch.empty(0, device="meta")) for i in range(count)})


def fill_main(buffers: Buffers, value: float) -> None:
    """Set every master weight that this rank holds to `value` and publish it to the model."""
    for _, _, values in buffers.shards("main"):
        values.fill_(value)
    buffers.publish()
