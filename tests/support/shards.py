"""Shards of global tensors, and communicators to move them, for tests that compare shards with the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron3d.comm.interface import Comm
from megatron3d.parallel.layout import Layout, box
from megatron3d.parallel.matmul_plan import MatmulPlan, traffic
from megatron3d.parallel.mesh import Axes, Mesh
from tests.support.turn_ranks import make_comm


def cut(whole: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Return this rank's shard of a global tensor, in its own memory."""
    part = box(tuple(whole.shape), layout, mesh)
    return whole[tuple(slice(low, high) for low, high in part)].clone()


def plan_comm(mesh: Mesh, *plans: MatmulPlan, also: tuple[Axes, ...] = ()) -> Comm:
    """Return a communicator with the groups that the plans' closed forms name, plus `also`."""
    return make_comm(mesh, [*also, *(step.axes for plan in plans for step in traffic(plan, mesh, 1, 1, 1, 1))])


def every_group(mesh: Mesh) -> Comm:
    """Return a communicator with every possible group."""
    return make_comm(mesh, [axes for n in range(1, len(mesh.names) + 1) for axes in combinations(mesh.names, n)])


def normal(*shape: int, seed: int) -> Tensor:
    """Return standard normal float64 values, equal on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def error(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value."""
    assert got.shape == expected.shape, f"{tuple(got.shape)} is not {tuple(expected.shape)}"
    return ((got - expected).abs().max() / expected.abs().max()).item() if expected.numel() else 0.0


@contextmanager
def pretended_world(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a world without other ranks: collectives have real shapes, but no real values."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
