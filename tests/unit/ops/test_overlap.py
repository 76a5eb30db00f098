"""Fact: a linear's W is gathered under its neighbour's product and its dW is reduced under the next products; each is
gathered and reduced just once, what is kept is shared by microbatches, and changed weights are never met again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.ops.matmul import Matmul
from megatron3d.ops.recompute import repeated
from megatron3d.ops.weight_prefetch import GatheredWeight, WeightGrads, gather_ahead
from megatron3d.parallel.tp_overlap import TPOverlap
from tests.support.shards import plan_comm, pretended_world
from tests.unit.ops.test_matmul import CUBE, MESH, Diary

NUM_LINEARS = 3
W_GATHER, W_REDUCE = "gather a", "scatter a"


class Chain:
    """Linears one after another on the first rank of a cube; W moves over a, and nothing else does."""

    def __init__(self, overlap: TPOverlap) -> None:
        self.diary: Any = Diary(plan_comm(MESH, CUBE, CUBE.swapped()))
        self.weights = [torch.ones(8, 4, requires_grad=True) for _ in range(NUM_LINEARS)]
        self.grads = WeightGrads(are_late=overlap.weight_grad)
        self.made_whole = list[int]()
        self.matmuls: list[Matmul] = []
        ahead = []
        for index in range(NUM_LINEARS):
            plan = CUBE.swapped() if index % 2 else CUBE
            weight = GatheredWeight(lambda index=index: self.weights[index], plan, self.diary, overlap)
            ahead.append((weight, lambda index=index: self.made_whole.append(index)))
            self.matmuls.append(Matmul(plan, self.diary, overlap, self.grads, weight))
        if overlap.weight_gather:
            gather_ahead(ahead)

    def forward(self, x: Tensor) -> Tensor:
        for w, matmul in zip(self.weights, self.matmuls, strict=True):
            x = matmul(x, w)
        return x

    def x(self) -> Tensor:
        return torch.ones(4, 8, requires_grad=True)

    @contextmanager
    def noted(self) -> Iterator[list[str]]:
        """What happens in the body."""
        self.diary.events.clear()
        with self.diary:
            yield self.diary.events


@pytest.fixture
def chain(request: pytest.FixtureRequest) -> Iterator[Chain]:
    with pretended_world(0, 8):
        yield Chain(getattr(request, "param", TPOverlap()))


def open_at_products(events: list[str], name: str) -> list[int]:
    """How many of a collective had begun and not ended at each product."""
    found, now = [], 0
    for event in events:
        now += {f"begin {name}": 1, f"end {name}": -1}.get(event, 0)
        if event == "multiply":
            found.append(now)
    return found


def test_weights_are_gathered_under_their_neighbours(chain: Chain) -> None:
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


def test_gradients_are_reduced_under_the_next_products(chain: Chain) -> None:
    y = chain.forward(chain.x())
    with chain.noted() as events:
        y.sum().backward()
        assert open_at_products(events, W_REDUCE) == [0, 0, 1, 1, 1, 1]
        assert [w.grad is None for w in chain.weights] == [True, False, False]
        chain.grads.flush()
    assert all(w.grad is not None for w in chain.weights)
    assert events.count(f"begin {W_REDUCE}") == events.count(f"end {W_REDUCE}") == NUM_LINEARS


def test_gradients_that_were_put_off_are_reduced_under_the_next_products(chain: Chain) -> None:
    y = chain.forward(chain.x())
    with chain.noted() as events, chain.grads.put_off() as late:
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


@pytest.mark.parametrize("chain", [TPOverlap(1, False, False, False)], indirect=True)
def test_without_overlaps_everything_ends_before_the_next_product(chain: Chain) -> None:
    with chain.noted() as events:
        y = chain.forward(chain.x())
        y.sum().backward()
        assert all(w.grad is not None for w in chain.weights)
    for name in (W_GATHER, W_REDUCE, "scatter b", "scatter c"):
        assert not any(open_at_products(events, name)), f"{name} runs under a product"


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
def test_a_repeated_forward_gathers_nothing_in_vain(chain: Chain) -> None:
    y = repeated(chain.forward, chain.x())
    with chain.noted() as events:
        y.sum().backward()
        chain.grads.flush()
        assert events.count(f"begin {W_GATHER}") == events.count(f"end {W_GATHER}")
    with chain.noted() as events:
        chain.forward(chain.x())
        assert events.count(f"begin {W_GATHER}") == NUM_LINEARS


@pytest.mark.parametrize("chain", [TPOverlap(), TPOverlap(keep_gathered_weights=True)], indirect=True)
def test_what_was_gathered_before_weights_changed_is_forgotten(chain: Chain) -> None:
    """Neither what a backward that stopped had gathered ahead, nor what was kept for one that never came."""
    first, second = chain.matmuls[:2]
    y = first(chain.x(), chain.weights[0])
    for matmul in chain.matmuls:
        assert matmul.weight is not None
        matmul.weight.forget()
    with chain.noted() as events:
        second(y, chain.weights[1])
        assert events.count(f"begin {W_GATHER}") == 2
