"""Fact: both dispatchers give the numbers of a loop over tokens, whatever the load is, and send what is foretold."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.comm.interface import Pending
from megatron3d.comm.recording import Recorder
from megatron3d.experts.dispatch import DISPATCH, ExpertRanks
from megatron3d.experts.plan import (
    DispatchSizes,
    RowsSent,
    backward_traffic,
    balanced_exchange,
    balanced_rows,
    fewest_bytes,
    forward_traffic,
)
from megatron3d.experts.router import Routes
from megatron3d.experts.rows import Rows, padded_to, ranges
from megatron3d.linear.fp8 import dequantized
from megatron3d.linear.fp8_plan import RECIPES, Fp8, packed_bytes
from megatron3d.linear.fp8_rows import Fp8RowsGemm
from megatron3d.ops.recompute import KeptResults
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes.mode import ALLGATHER, ALLTOALL, DISPATCHERS
from tests.support.turn_ranks import make_comm, run_turns

RANKS, E, K, M, H = 4, 8, 2, 6, 5
WIDTH = 256  # of tokens that are sent in fp8
AXES = (("data", 2), ("t", 2))
NAMES = tuple(name for name, _ in AXES)
LOADS: dict[str, Any] = {
    "all tokens on one rank": lambda rank: torch.tensor([[2, 3]]).repeat(M, 1),
    "one rank's tokens on another, and none": lambda rank: torch.tensor([[0, 7]]).repeat(M, 1) if rank else none(),
    "any": lambda rank: torch.stack([torch.randperm(E, generator=seeded(rank))[:K].sort().values for _ in range(M)]),
}


def none() -> Tensor:
    """Return choices of which the second has no row, as where a token is dropped."""
    return torch.stack((torch.arange(M) % E, torch.full((M,), E)), dim=1)


def seeded(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


def inputs(rank: int, load: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, choices and weights of a rank."""
    x, weights = (
        torch.randn(M, H, generator=seeded(rank)).double(),
        torch.rand(M, K, generator=seeded(9 + rank)).double(),
    )
    return x, LOADS[load](rank), weights


def matrices() -> Tensor:
    return torch.randn(E, H, H, generator=seeded(99)).double()


def loop(rank: int, load: str) -> list[Tensor]:
    """Return the output and the gradients of tokens and weights of a loop over tokens and slots."""
    x, chosen, weights = inputs(rank, load)
    x, weights, w = x.requires_grad_(), weights.requires_grad_(), matrices()
    rows = []
    for token in range(M):
        slots = [weights[token, k] * (w[e] @ x[token]) for k in range(K) if (e := int(chosen[token, k])) < E]
        rows.append(torch.stack(slots).sum(0))
    y = torch.stack(rows)
    y.square().sum().backward()
    assert x.grad is not None and weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


def exchanged(rank: int, world_size: int, dispatcher: str, load: str) -> tuple[list[Tensor], Any, list[int]]:
    """Return the same by a dispatcher, what it sent, and the rows of this rank's experts."""
    mesh = Mesh(AXES, rank)
    recorder = Recorder(make_comm(mesh, [NAMES]))
    ranks = ExpertRanks(E, NAMES, recorder)
    x, chosen, weights = inputs(rank, load)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    routes = Routes(chosen, weights, weights)
    sent = DISPATCH[dispatcher](Rows(x), routes, ranks, partial(KeptResults().once, "rows"))
    rows, weights_R, (counts, ends_E) = sent.rows()
    mine = matrices()[rank * ranks.num_local :]
    y = torch.cat([rows.values[part] @ w.T for part, w in zip(ranges(counts), mine, strict=False)])
    out = sent.combine(y * weights_R.unsqueeze(1))
    assert [part.stop for part in ranges(counts)] == ends_E.tolist() and ends_E.dtype == torch.int32
    out.square().sum().backward()
    assert x.grad is not None and weights.grad is not None
    return [out.detach(), x.grad, weights.grad], recorder.calls, list(counts)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_dispatcher_gives_the_numbers_of_a_loop(dispatcher: str, load: str) -> None:
    results = run_turns(exchanged, RANKS, dispatcher, load)
    sizes = DispatchSizes(M, H, K, E, 8, 8)
    for rank, (got, calls, counts) in enumerate(results):
        for one, other in zip(got, loop(rank, load), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        chosen, size = [LOADS[load](other).flatten() for other in range(RANKS)], E // RANKS
        assert counts == [int((torch.cat(chosen) == expert).sum()) for expert in range(rank * size, (rank + 1) * size)]
        leave = int(((chosen[rank] // size != rank) & (chosen[rank] < E)).sum())
        there = RowsSent(leave, sum(counts) - int((chosen[rank] // size == rank).sum()))
        args = NAMES, sizes, RANKS, there
        assert calls == forward_traffic(dispatcher, *args) + backward_traffic(dispatcher, *args)


def test_both_dispatchers_order_rows_alike() -> None:
    """Rows of every expert are those of tokens in their order, with the same bits in every GEMM."""

    def rows(rank: int, world_size: int, dispatcher: str) -> Tensor:
        x, chosen, weights = inputs(rank, "any")
        ranks = ExpertRanks(E, NAMES, make_comm(Mesh(AXES, rank), [NAMES]))
        return (
            DISPATCH[dispatcher](Rows(x), Routes(chosen, weights, weights), ranks, lambda count: count())
            .rows()[0]
            .values
        )

    both = [run_turns(rows, RANKS, dispatcher) for dispatcher in DISPATCHERS]
    assert all(one.equal(other) for one, other in zip(*both, strict=True))


def test_tokens_are_in_flight_until_their_rows_are_needed() -> None:
    """Between start and rows nothing is sent or waited for, nor in backward between the same moments.

    A collective of the same group that is waited for there would wait for the tokens as well.
    """

    def events(rank: int, world_size: int, dispatcher: str) -> list[str]:
        found, comm = list[str](), make_comm(Mesh(AXES, rank), [NAMES])

        def noted(verb: str) -> Any:
            original = getattr(comm, verb)

            def call(tensor: Tensor, *args: Any) -> Pending:
                is_tokens = tensor.is_floating_point() and tensor.shape[1] == H
                pending = original(tensor, *args)
                found.append("start" if is_tokens else "other")
                return Pending(lambda: (found.append("wait" if is_tokens else "other"), pending.wait())[1])

            return call

        for verb in ("all_gather", "reduce_scatter", "all_to_all_rows"):
            setattr(comm, verb, noted(verb))
        x, chosen, weights = inputs(rank, "any")
        x, weights = x.requires_grad_(), weights.requires_grad_()
        sent = DISPATCH[dispatcher](
            Rows(x), Routes(chosen, weights, weights), ExpertRanks(E, NAMES, comm), lambda call: call()
        )
        shared = x * 2
        shared.register_hook(lambda grad: found.append("shared, backward"))
        found.append("shared")
        rows, weights_R, _ = sent.rows()
        y = sent.combine(rows.values * weights_R.unsqueeze(1))
        (y + shared).sum().backward()
        return found

    for dispatcher in DISPATCHERS:
        for found in run_turns(events, RANKS, dispatcher):
            first, last = found.index("start"), len(found) - found[::-1].index("start") - 1
            assert found[first : first + 3] == ["start", "shared", "wait"]
            assert found[last : last + 3] == ["start", "shared, backward", "wait"]


def test_counts_are_kept_for_the_recomputation() -> None:
    """The second pass asks other ranks for no numbers of rows."""

    def calls(rank: int, world_size: int) -> int:
        recorder, kept = Recorder(make_comm(Mesh(AXES, rank), [NAMES])), KeptResults()
        x, chosen, weights = inputs(rank, "any")
        for _ in range(2):
            once = partial(kept.once, "rows")
            DISPATCH[ALLTOALL](Rows(x), Routes(chosen, weights, weights), ExpertRanks(E, NAMES, recorder), once).rows()
        return len(recorder.calls)

    assert run_turns(calls, RANKS) == [5] * RANKS


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_the_rule_takes_what_sends_fewer_bytes(ranks: int) -> None:
    for topk in (1, 2, 4, 8, 16):
        assert fewest_bytes(ranks, 1024, topk, 2) == (ALLTOALL if topk <= ranks else ALLGATHER)


def test_balanced_rows_are_those_that_come() -> None:
    for total, ranks in ((10, 4), (7, 3), (8, 2), (3, 5)):
        table = [balanced_rows(total, ranks, rank) for rank in range(ranks)]
        assert [list(row) for row in zip(*table, strict=True)] == table and {sum(row) for row in table} == {total}
    stays = balanced_rows(10, 4, 1)[1]
    assert balanced_exchange(DispatchSizes(5, H, 2, E, 8, 8), 4, 1) == RowsSent(10 - stays, 10 - stays)


def packed_exchange(rank: int, world_size: int, dispatcher: str, load: str, recipe: str) -> tuple[list[Any], Any]:
    """Return what experts get of tokens that are sent in fp8, the tokens' gradients, and what was sent."""
    mesh = Mesh(AXES, rank)
    recorder, gemm = Recorder(make_comm(mesh, [NAMES])), rows_gemm(recipe)
    ranks = ExpertRanks(E, NAMES, recorder)
    x, chosen, weights = tokens_of(rank), LOADS[load](rank), torch.rand(M, K, generator=seeded(9 + rank)).double()
    x, weights = x.requires_grad_(), weights.requires_grad_()
    tokens = Rows(x, gemm.packed(x.detach()))
    sent = DISPATCH[dispatcher](tokens, Routes(chosen, weights, weights), ranks, partial(KeptResults().once, "rows"))
    (rows, weights_R, groups), restored = padded_to(4 * M * K, *sent.rows())
    assert rows.packed is not None and rows.values.untyped_storage().nbytes() == x.element_size()
    got = gemm.unpacked(rows.packed, rows.values)
    y = rows.values * weights_R.unsqueeze(1)  # its gradients are those of the rows
    sent.combine(restored(y)).sum().backward()
    return [dequantized(got), groups.counts, x.grad], recorder.calls


def rows_gemm(recipe: str) -> Fp8RowsGemm:
    return Fp8RowsGemm(Fp8(recipe, "e4m3"), MatmulPlan(), make_comm(Mesh((("x", 1),)), []))


def tokens_of(rank: int) -> Tensor:
    return torch.randn(M, WIDTH, generator=seeded(rank)).double() * torch.logspace(-3, 3, M).unsqueeze(1)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_tokens_are_sent_in_fp8(dispatcher: str, recipe: str) -> None:
    """Experts get the bits of each token that its home has; only tokens are fewer bytes, and only forward."""
    load, gemm = "any", rows_gemm(recipe)
    chosen = [LOADS[load](rank) for rank in range(RANKS)]
    sizes = DispatchSizes(M, WIDTH, K, E, 8, 8, packed_bytes(RECIPES[recipe], WIDTH))
    for rank, ((got, counts, dx), calls) in enumerate(run_turns(packed_exchange, RANKS, dispatcher, load, recipe)):
        values = [dequantized(gemm.x(tokens_of(other))) for other in range(RANKS)]
        for place, count in enumerate(counts):
            expert = rank * (E // RANKS) + place
            mine = torch.cat([x[(slots == expert).any(1)] for x, slots in zip(values, chosen, strict=True)])
            rows = got[place * count : (place + 1) * count]
            assert torch.equal(rows[: len(mine)], mine) and not rows[len(mine) :].any()
        weights = torch.rand(M, K, generator=seeded(9 + rank)).double()
        torch.testing.assert_close(dx, weights.sum(1, keepdim=True).expand(M, WIDTH))
        leave = int((chosen[rank] // (E // RANKS) != rank).sum())
        come = sum(int((chosen[other] // (E // RANKS) == rank).sum()) for other in range(RANKS) if other != rank)
        args = NAMES, sizes, RANKS, RowsSent(leave, come)
        assert calls == forward_traffic(dispatcher, *args) + backward_traffic(dispatcher, *args)
    plain = DispatchSizes(M, WIDTH, K, E, 2, 4)
    assert sizes.sent_row < 0.6 * plain.row
