"""Fact: W is prefetched during the neighbour's GEMM and dW is reduced during the next GEMMs, each exactly once.

Microbatches in flight share kept weights, which are dropped when weights change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.linear.collectives import PrefetchedWeight, prefetch_in_order
from megatron3d.linear.gemm import NATIVE
from megatron3d.linear.main_grad import MainGrads, WgradQueue
from megatron3d.linear.matmul import Matmul
from megatron3d.linear.overlap_plan import TPOverlap
from megatron3d.ops.recompute import recomputed
from tests.support.shards import plan_comm, pretended_world
from tests.unit.linear.test_matmul import CUBE, MESH, Diary

NUM_LINEARS = 3
W_GATHER, W_REDUCE = "gather a", "scatter a"


class Chain:
    """Chain of linears on the first rank of a 3-D grid; only W is all-gathered, over a."""

    def __init__(self, overlap: TPOverlap) -> None:
        self.diary: Any = Diary(plan_comm(MESH, CUBE, CUBE.swapped()))
        self.weights = [torch.ones(8, 4, requires_grad=True) for _ in range(NUM_LINEARS)]
        self.grads = WgradQueue(MainGrads(), overlap.weight_grad)
        self.made_whole = list[int]()
        self.matmuls: list[Matmul] = []
        in_order = []
        for index in range(NUM_LINEARS):
            plan = CUBE.swapped() if index % 2 else CUBE
            shard = partial(NATIVE.w, self.weights[index].detach())
            weight = PrefetchedWeight(shard, plan, self.diary, overlap)
            in_order.append((weight, lambda index=index: self.made_whole.append(index)))
            self.matmuls.append(Matmul(plan, self.diary, overlap, wgrads=self.grads, weight=weight))
        if overlap.weight_gather:
            prefetch_in_order(in_order)

    def forward(self, x: Tensor) -> Tensor:
        for w, matmul in zip(self.weights, self.matmuls, strict=True):
            x = matmul(x, w)
        return x

    def x(self) -> Tensor:
        return torch.ones(4, 8, requires_grad=True)

    @contextmanager
    def noted(self) -> Iterator[list[str]]:
        """Yield the events of the body."""
        self.diary.events.clear()
        with self.diary:
            yield self.diary.events


@pytest.fixture
def chain(request: pytest.FixtureRequest) -> Iterator[Chain]:
    with pretended_world(0, 8):
        yield Chain(getattr(request, "param", TPOverlap()))


def open_at_products(events: list[str], name: str) -> list[int]:
    """Return how many of a collective were in flight at each GEMM."""
    found, now = [], 0
    for event in events:
        now += {f"begin {name}": 1, f"end {name}": -1}.get(event, 0)
        if event == "multiply":
            found.append(now)
    return found


def test_weights_are_prefetched_during_the_neighbours_gemms(chain: Chain) -> None:
    with chain.noted() as events:
        y = chain.forward(chain.x())
        assert open_at_products(events, W_GATHER) == [1, 1, 0]
        assert events.count(f"begin {W_GATHER}") == events.count(f"end {W_GATHER}") == NUM_LINEARS
    assert chain.made_whole == [1, 2]
    with chain.noted() as events:
        y.sum().backward()
        assert open_at_products(events, W_GATHER) == [1, 1, 1, 1, 0, 0]
        assert events.count(f"begin {W_GATHER}") == events.count(f"end {W_GATHER}") == NUM_LINEARS
    assert chain.made_whole == [1, 2, 1, 0]


def test_gradients_are_reduced_during_the_next_gemms(chain: Chain) -> None:
    y = chain.forward(chain.x())
    with chain.noted() as events:
        y.sum().backward()
        assert open_at_products(events, W_REDUCE) == [0, 0, 1, 1, 1, 1]
        assert [w.grad is None for w in chain.weights] == [True, False, False]
        chain.grads.flush()
    assert all(w.grad is not None for w in chain.weights)
    assert events.count(f"begin {W_REDUCE}") == events.count(f"end {W_REDUCE}") == NUM_LINEARS


def test_deferred_gradients_are_reduced_during_the_next_gemms(chain: Chain) -> None:
    y = chain.forward(chain.x())
    with chain.noted() as events, chain.grads.defer() as late:
        y.sum().backward()
        chain.grads.flush()
        assert f"begin {W_REDUCE}" not in events
    with chain.noted() as events, torch.no_grad():
        for compute in late:
            compute()
        assert open_at_products(events, W_REDUCE) == [0, 1, 1]
        assert [w.grad is None for w in chain.weights] == [True, False, False]
        chain.grads.flush()
    assert all(w.grad is not None for w in chain.weights)


@pytest.mark.parametrize("chain", [TPOverlap(False, False, False)], indirect=True)
def test_without_overlaps_communication_ends_before_the_next_gemm(chain: Chain) -> None:
    with chain.noted() as events:
        y = chain.forward(chain.x())
        y.sum().backward()
        assert all(w.grad is not None for w in chain.weights)
    for name in (W_GATHER, W_REDUCE, "scatter b", "scatter c"):
        assert not any(open_at_products(events, name)), f"{name} overlaps a GEMM"


@pytest.mark.parametrize("chain", [TPOverlap(keep_gathered_weights=True)], indirect=True)
def test_kept_weights_are_gathered_once_for_all_in_flight(chain: Chain) -> None:
    for _ in range(2):
        with chain.noted() as events:
            first, second = chain.forward(chain.x()), chain.forward(chain.x())
            first.sum().backward()
            second.sum().backward()
            chain.grads.flush()
            assert events.count(f"begin {W_GATHER}") == events.count(f"end {W_GATHER}") == NUM_LINEARS
    with torch.no_grad(), chain.noted() as events:
        chain.forward(chain.x())
        chain.forward(chain.x())
        assert events.count(f"begin {W_GATHER}") == 2 * NUM_LINEARS


@pytest.mark.parametrize("chain", [TPOverlap(), TPOverlap(keep_gathered_weights=True)], indirect=True)
def test_a_recomputed_forward_prefetches_nothing(chain: Chain) -> None:
    y = recomputed(chain.forward, chain.x())
    with chain.noted() as events:
        y.sum().backward()
        chain.grads.flush()
        assert events.count(f"begin {W_GATHER}") == events.count(f"end {W_GATHER}")
    with chain.noted() as events:
        chain.forward(chain.x())
        assert events.count(f"begin {W_GATHER}") == NUM_LINEARS


@pytest.mark.parametrize("chain", [TPOverlap(), TPOverlap(keep_gathered_weights=True)], indirect=True)
def test_gathered_weights_are_dropped_when_weights_change(chain: Chain) -> None:
    """Drop weights that an aborted backward had prefetched, and weights kept for a backward that never ran."""
    first, second = chain.matmuls[:2]
    y = first(chain.x(), chain.weights[0])
    for matmul in chain.matmuls:
        assert matmul.weight is not None
        matmul.weight.drop()
    with chain.noted() as events:
        second(y, chain.weights[1])
        assert events.count(f"begin {W_GATHER}") == 2
