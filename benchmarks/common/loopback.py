"""`Comm` of one rank whose other ranks do not exist: any rank of any layout computes at real sizes on one device.

    all-gather      repeats this rank's shard          reduce-scatter   takes this rank's chunk
    all-reduce      leaves its operand as it is        receive          gives random values
    shift           returns what this rank sends

Shapes, kernels and memory are those of a real rank; values are not, and communication takes no time but that of the
copies on this device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron3d.comm import matmul_rounds
from megatron3d.comm.interface import Counts, GatheredProduct, Pending, PutProduct, completed
from megatron3d.parallel.mesh import Axes, Link, Mesh


def _sent(x: Tensor, result: Callable[[], Tensor]) -> Pending:
    """Return a `Pending` of a result that keeps what is sent alive until it is waited for, as process groups do."""

    def finish(x: Tensor = x) -> Tensor:
        return result()

    return Pending(finish)


class LoopbackComm:
    """Collectives of a rank with itself.

    Args:
        mesh: the mesh of the whole world, with this rank's coordinates.
        seed: of the values that receives give.
    """

    def __init__(self, mesh: Mesh, seed: int = 0) -> None:
        self.mesh, self._seed = mesh, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        ranks = self.mesh.size(axes)
        if ranks == 1:
            return completed(x)
        out = x.new_empty((ranks, *x.shape)).copy_(x)
        return _sent(x, lambda: out.flatten(0, 1) if dim == 0 else out.movedim(0, dim).flatten(dim, dim + 1))

    @torch.no_grad()
    def all_gather_into(self, whole: Tensor, axes: Axes) -> Pending:
        ranks = self.mesh.size(axes)
        if ranks == 1:
            return completed(whole)
        shards = list(whole.chunk(ranks))
        mine = shards.pop(self.mesh.index(axes))
        for shard in shards:
            shard.copy_(mine)
        return completed(whole)

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        ranks = self.mesh.size(axes)
        if ranks == 1:
            return completed(x)
        assert x.shape[dim] % ranks == 0, f"{tuple(x.shape)} along {dim} does not divide by {axes}={ranks} ranks"
        whole = x if dim == 0 else x.unflatten(dim, (ranks, -1)).movedim(dim, 0).flatten(0, 1)
        whole = whole.contiguous()
        mine = whole.chunk(ranks)[self.mesh.index(axes)].clone()
        return _sent(whole, lambda: mine)

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        return completed(x.contiguous() if self.mesh.size(axes) > 1 else x)

    def all_to_all(self, x: Tensor, axes: Axes) -> Pending:
        return self._cloned(x, axes)

    def all_to_all_rows(self, x: Tensor, sent: Counts, received: Counts, axes: Axes) -> Pending:
        assert sum(sent) == sum(received) == len(x), f"{list(sent)} sent, {list(received)} received of {len(x)} rows"
        return self._cloned(x, axes)

    def _cloned(self, x: Tensor, axes: Axes) -> Pending:
        if self.mesh.size(axes) == 1:
            return completed(x)
        out = x.clone()
        return _sent(x, lambda: out)

    def all_to_all_bytes(self, blocks: Sequence[Tensor], memory: Tensor | None = None) -> list[Tensor]:
        return [block.clone() for block in blocks]

    @torch.no_grad()
    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        out.copy_(x)
        return _sent(x, lambda: out)

    def all_gather_matmul(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
        return matmul_rounds.all_gather_matmul(self, a_MK, b_NK, axes, put)

    def matmul_reduce_scatter(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
        return matmul_rounds.matmul_reduce_scatter(self, a_MK, b_NK, axes, dim, put)

    def send(self, x: Tensor, link: Link) -> Pending:
        x = x.contiguous()
        return Pending(lambda: x, lambda: False)  # as on a GPU, where the CPU has long gone on when a send is done

    @torch.no_grad()
    def receive(self, out: Tensor, link: Link) -> Pending:
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        if out.device not in self._generators:
            self._generators[out.device] = torch.Generator(out.device).manual_seed(self._seed)
        return completed(out.normal_(generator=self._generators[out.device]))

    def all_reduce_pair(self, x: Tensor, link: Link) -> Pending:
        return completed(x)

    def barrier(self) -> None:
        """Wait for nobody."""

    def gather_object(self, value: Any) -> list[Any] | None:
        return [value] * self.mesh.world_size if self.mesh.rank == 0 else None

    def broadcast_object(self, value: Any) -> Any:
        return value
