"""Capacity of experts: each takes the tokens of the largest weights of a sequence, of equal ones the first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron3d.experts.plan import Experts, capacity_of
from megatron3d.experts.router import Capacity, Routes, choices_kept
from megatron3d.parallel.mesh import Mesh
from tests.support.turn_ranks import make_comm, run_turns

SEQUENCES, LENGTH, EXPERTS, TOPK = 3, 8, 4, 2


def routes_of(num_weights: int) -> Routes:
    """Return random routes of a batch, with weights of `num_weights` values, so that many tie."""
    torch.manual_seed(0)
    tokens = SEQUENCES * LENGTH
    experts_MK = torch.rand(tokens, EXPERTS).argsort(1)[:, :TOPK].sort(1).values
    weights_MK = torch.randint(1, num_weights + 1, (tokens, TOPK)).double() / num_weights
    return Routes(experts_MK, weights_MK, torch.rand(tokens, EXPERTS).double())


def expected(routes: Routes, capacity: int) -> Tensor:
    """Return which choices are kept, found expert by expert from a sorted list."""
    kept = torch.zeros(routes.experts_MK.shape, dtype=torch.bool)
    for sequence in range(SEQUENCES):
        for expert in range(EXPERTS):
            rows = range(sequence * LENGTH, (sequence + 1) * LENGTH)
            slots = [(row, slot) for row in rows for slot in range(TOPK) if routes.experts_MK[row, slot] == expert]
            slots.sort(key=lambda place: (-routes.weights_MK[place].item(), place[0]))
            for place in slots[:capacity]:
                kept[place] = True
    return kept


@pytest.mark.parametrize("capacity", [1, 3, LENGTH])
def test_by_position_experts_take_the_first_tokens_of_a_sequence(capacity: int) -> None:
    """The choices are those of equal weights, whatever the weights are."""
    routes = routes_of(10**6)
    wanted = expected(routes._replace(weights_MK=torch.ones_like(routes.weights_MK)), capacity)
    assert capacity == LENGTH or not torch.equal(wanted, expected(routes, capacity))
    parts = run_turns(kept_of_rank, 2, routes, Capacity(capacity, "position"))
    assert all(torch.equal(part, wanted[rank::2]) for rank, part in enumerate(parts))


@pytest.mark.parametrize("num_weights", [1, 2, 10**6])
@pytest.mark.parametrize("capacity", [1, 3, LENGTH])
def test_experts_take_the_largest_weights_of_a_sequence(num_weights: int, capacity: int) -> None:
    routes = routes_of(num_weights)
    parts = run_turns(kept_of_rank, 2, routes, Capacity(capacity))
    assert all(torch.equal(part, expected(routes, capacity)[rank::2]) for rank, part in enumerate(parts))
    (alone,) = run_turns(kept_of_rank, 1, routes, Capacity(capacity))
    assert torch.equal(alone, expected(routes, capacity))
    assert bool(alone.all()) == (capacity == LENGTH)


def kept_of_rank(rank: int, world_size: int, routes: Routes, capacity: Capacity) -> Tensor:
    """Return the kept choices of a rank that holds every other position, or every one, the last ones first."""
    comm = make_comm(Mesh((("context", world_size),), rank), [("context",)])
    row_M = torch.arange(SEQUENCES * LENGTH)[rank::world_size].flip(0)
    mine = Routes(*(each[row_M] for each in routes))
    axes = ("context",) if world_size > 1 else ()
    return choices_kept(mine, row_M, LENGTH, capacity, axes, comm).flip(0)


def test_capacity_is_the_even_load_times_the_factor_rounded_up() -> None:
    experts = Experts(EXPERTS, TOPK, 8)
    assert capacity_of(1.0, LENGTH, experts) == LENGTH * TOPK // EXPERTS
    assert capacity_of(1.1, LENGTH, experts) == math.ceil(1.1 * LENGTH * TOPK / EXPERTS) == 5
    assert capacity_of(1.0, 3, experts) == 2
