"""Experts as values: their sizes, a second factorization of the ranks of a stage, and what each dispatcher sends.

    dense     pipeline | replica . data . context . tensor axes         split tokens and matrices
    experts   pipeline | edata . expert . etensor                       the last varies fastest

`etensor` splits each expert, `expert` distributes whole ones, and `edata` is what remains.  The two factorizations have
a common refinement: where the boundary of a factor falls inside a dense axis, that axis is split into pieces.

    8 ranks, data 4, t 2          data=0      1       2       3
                                  t=0  1   0  1    0  1    0  1
    EP 4: axes (data.1, t)          0  1   2  3    0  1    2  3         experts' coordinate
    EP 2, ETP 2: (data.1), (t)      0  0   1  1    0  0    1  1

So the ranks of an expert group are neighbours (parallel folding, Liu et al. 2025, arXiv:2504.14960).

`moe_token_dispatcher_type`, of n ranks with m tokens of width h each, k experts per token, in elements that each sends:

                 forward                      backward
    allgather    2 m h (n - 1)                2 m h (n - 1)           MegaScale-MoE, arXiv:2505.11432
    alltoall     2 m h k (n - 1) / n          as forward              GShard, arXiv:2006.16668, for a balanced load

`allgather` all-gathers tokens, choices (8 bytes each) and weights, and reduce-scatters outputs; `alltoall` sends a row
for each choice, and its weight, to the rank of its expert and its output back, and its number of rows for each expert.
Tokens whose experts multiply in fp8 are sent so, as h bytes and scales; all else is sent in the network's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from megatron3d.parallel.matmul_plan import MatmulPlan, Traffic
from megatron3d.parallel.mesh import DATA, Axes, Sizes
from megatron3d.parallel.modes.mode import ALLGATHER, DISPATCHERS, Mode


def expert_plan(expands: bool, etensor: Axes) -> MatmulPlan:
    """Return the plan of fc1 or fc2 of an expert's rows, where axes of more than one rank split each expert."""
    return MatmulPlan(n=etensor) if expands else MatmulPlan(k=etensor, y=dict.fromkeys(etensor))


SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
SEQUENCE, GLOBAL, MICROBATCH, Z_LOSS = "seq_aux_loss", "global_aux_loss", "aux_loss", "z_loss"


@dataclass(frozen=True)
class Experts:
    """Mixture of experts in place of a layer's MLP.

    Attributes:
        topk: experts that each token is sent to.
        ffn_hidden_size: inner features of each expert.
        shared_ffn_hidden_size: inner features of the shared experts, which every token is sent to; 0: none.
        has_shared_gate: the shared experts' output is multiplied by a sigmoid of the token.
        layers: pattern that repeats over depth, 1 for a layer with experts; empty: every layer.
        score_function: what makes scores of logits, one of `SCORES`.
        pre_softmax: softmax over all experts before the choice, without normalization; else over the chosen ones.
        num_groups, group_topk: experts are in groups, of which only the best are chosen from; None: no groups.
        group_score_topk: best scores of a group whose sum is its score; None: topk / group_topk.
        scaling_factor: factor of the weights of the chosen experts.
        has_router_bias: the router's logits have a bias, a parameter.
        has_expert_bias: the choice has a bias, which is no parameter: it moves towards an even load at each step.
        applies_probs_on_input: the weights of the chosen experts multiply their inputs, not their outputs.
    """

    num_experts: int
    topk: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    has_shared_gate: bool = False
    layers: tuple[int, ...] = ()
    score_function: str = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float = 1.0
    has_router_bias: bool = False
    has_expert_bias: bool = False
    group_score_topk: int | None = None
    applies_probs_on_input: bool = False

    @property
    def num_group_scores(self) -> int:
        """Number of scores whose sum is the score of a group."""
        return self.group_score_topk or max(self.topk // (self.group_topk or self.topk), 1)


def capacity_of(factor: float, seq_length: int, experts: Experts) -> int:
    """Return the most tokens that an expert takes of one sequence: `factor` times those of an even load, rounded up."""
    return math.ceil(factor * seq_length * experts.topk / experts.num_experts)


PROBS, POSITION = "probs", "position"


@dataclass(frozen=True)
class Balance:
    """What balances the experts' load in training, which no parameter depends on.

    Attributes:
        loss: `SEQUENCE`, `GLOBAL`, `MICROBATCH` or "none", or several of them.
        coeff: factor of that loss, or of each.
        z_coeff: factor of the router's z-loss (Zoph et al. 2022, arXiv:2202.08906, equation 5).
        bias_update_rate: step of the choice's bias.
        capacity_factor: most tokens of a sequence that an expert takes, in multiples of an even load; None: all that
            choose it.
        drop_policy: which tokens an expert takes then: `PROBS`, those of the largest weights, or `POSITION`, the first.
        pads_to_capacity: rows of zeros fill each expert up to its capacity.
        forces_even_load: a token's place in the global batch alone chooses its experts.
    """

    loss: str | tuple[str, ...] = "none"
    coeff: float | tuple[float, ...] = 0.0
    z_coeff: float = 0.0
    bias_update_rate: float = 0.0
    capacity_factor: float | None = None
    drop_policy: str = PROBS
    pads_to_capacity: bool = False
    forces_even_load: bool = False

    @property
    def losses(self) -> dict[str, float]:
        """Balance losses, each with its factor."""
        names = (self.loss,) if isinstance(self.loss, str) else self.loss
        coeffs = self.coeff if isinstance(self.coeff, tuple) else (self.coeff,)
        return {name: coeff for name, coeff in zip(names, coeffs, strict=False) if name != "none"}

    @property
    def logged(self) -> tuple[str, ...]:
        """Names of the losses that metrics have: those of the balance, and the z-loss where it has a factor."""
        return *self.losses, *((Z_LOSS,) if self.z_coeff else ())


def padded_rows(balance: Balance, experts: Experts, num_tokens: int, seq_length: int) -> int:
    """Return the rows of an expert that is padded to its capacity, of all sequences that have `num_tokens` tokens."""
    assert balance.capacity_factor is not None, "experts are padded to a capacity"
    return capacity_of(balance.capacity_factor, seq_length, experts) * num_tokens // seq_length


def sharing_axes(mode: Mode) -> Axes:
    """Return the axes of the ranks that have tokens of the sequences of one rank of the experts, with it."""
    group = *mode.experts, *mode.etensor
    return *group, *(axis for axis in mode.home if axis not in {*group, *mode.batch_axes})


def router_notes(balance: Balance | None) -> list[str]:
    """Return what a run says at its start about routers that do not choose, and losses that depend on the layout."""
    notes = list[str]()
    if balance is not None and balance.forces_even_load:
        notes.append(
            "WARNING: moe_router_force_load_balancing: EXPERTS ARE CHOSEN IN TURN AND NOT BY THEIR ROUTERS; measure "
            "speed with this run, and keep nothing that it trains"
        )
    if balance is not None and MICROBATCH in balance.losses:
        notes.append(
            f"{MICROBATCH}: the balance of each microbatch of a data rank, so that it depends on the microbatches' "
            f"size; {GLOBAL} and {SEQUENCE} are the same in every layout"
        )
    return notes


_INDEX_BYTES = 8


@dataclass(frozen=True)
class DispatchSizes:
    """Sizes of one exchange: this rank's tokens, their width, the experts of each, and all experts of a layer.

    Attributes:
        itemsize: bytes of an element of a token.
        wide: bytes of the weight of a choice.
        packed: bytes of a token that is sent to the experts in fp8 (`packed_bytes`); None: it is sent as it is.
    """

    tokens: int
    hidden: int
    topk: int
    num_experts: int
    itemsize: int
    wide: int
    packed: int | None = None

    @property
    def row(self) -> int:
        """Bytes of a token, of an output, or of a gradient of either."""
        return self.hidden * self.itemsize

    @property
    def sent_row(self) -> int:
        """Bytes of a token on its way to the experts."""
        return self.row if self.packed is None else self.packed


def balanced(total: int, parts: int) -> list[int]:
    """Return `total` in parts that differ by one at most, the larger ones first."""
    return [total // parts + (place < total % parts) for place in range(parts)]


def balanced_rows(total: int, num_ranks: int, rank: int) -> list[int]:
    """Return the rows that a rank sends to each where all send and receive `total`: as many as come from each."""
    return [total // num_ranks + ((rank + other) % num_ranks < total % num_ranks) for other in range(num_ranks)]


@dataclass(frozen=True)
class RowsSent:
    """Rows that this rank sends to the other ranks, and those that it receives from them."""

    there: float
    back: float


def balanced_exchange(sizes: DispatchSizes, num_ranks: int, rank: int) -> RowsSent:
    """Return the rows that leave and reach a rank where the load is balanced."""
    rows = balanced_rows(sizes.tokens * sizes.topk, num_ranks, rank)
    others = sum(rows) - rows[rank]
    return RowsSent(others, others)


def forward_traffic(
    dispatcher: str, axes: Axes, sizes: DispatchSizes, num_ranks: int, rows: RowsSent, again: bool = False
) -> list[Traffic]:
    """Return the collectives of a forward pass, in order, with the bytes that this rank sends.

    Args:
        rows: of `alltoall`; those of any load, or `balanced_exchange`.
        again: the pass is recomputed, with the numbers of rows that forward has kept.
    """
    slots, tokens = sizes.tokens * sizes.topk, sizes.tokens
    if dispatcher == ALLGATHER:
        gathered = slots * _INDEX_BYTES, slots * sizes.wide, tokens * sizes.sent_row
        calls = [Traffic("all_gather", axes, (num_ranks - 1) * each) for each in gathered]
        return [*calls, Traffic("reduce_scatter", axes, (num_ranks - 1) * tokens * sizes.row)]
    counts = sizes.num_experts * _INDEX_BYTES * (num_ranks - 1) / num_ranks
    sent = [counts, rows.there * sizes.wide, rows.there * sizes.sent_row, rows.back * sizes.row]
    calls = [Traffic("all_to_all", axes, each) for each in sent]
    return calls[1:] if again else calls


def backward_traffic(
    dispatcher: str, axes: Axes, sizes: DispatchSizes, num_ranks: int, rows: RowsSent
) -> list[Traffic]:
    """Return the collectives of a backward pass, in order, with the bytes that this rank sends."""
    whole, weights = sizes.tokens * sizes.row, sizes.tokens * sizes.topk * sizes.wide
    if dispatcher == ALLGATHER:
        sent = [(num_ranks - 1) * each for each in (whole, whole, weights)]
        return [Traffic("all_gather", axes, sent[0])] + [Traffic("reduce_scatter", axes, each) for each in sent[1:]]
    row = sizes.row
    return [Traffic("all_to_all", axes, each) for each in (rows.there * row, rows.back * sizes.wide, rows.back * row)]


def tokens_traffic(
    dispatcher: str, axes: Axes, sizes: DispatchSizes, num_ranks: int, rows: RowsSent, backward: bool
) -> Traffic:
    """Return the collective that is in flight during the shared experts: of tokens, or of their gradients."""
    if backward:
        return backward_traffic(dispatcher, axes, sizes, num_ranks, rows)[1 if dispatcher == ALLGATHER else -1]
    return forward_traffic(dispatcher, axes, sizes, num_ranks, rows)[-2]


def fewest_bytes(num_ranks: int, hidden: int, topk: int, itemsize: int) -> str:
    """Return the dispatcher that sends fewer bytes for each token, forward and backward, where the load is balanced."""
    sizes, rows = DispatchSizes(1, hidden, topk, 0, itemsize, max(itemsize, 4)), topk * (num_ranks - 1) / num_ranks

    def sent(dispatcher: str) -> float:
        passes = (forward_traffic, backward_traffic)
        calls = [each(dispatcher, (), sizes, num_ranks, RowsSent(rows, rows)) for each in passes]
        return sum(call.wire_bytes for part in calls for call in part)

    return min(DISPATCHERS, key=sent)


class _Factor(NamedTuple):
    """An axis or a piece of one, of more than one rank; `end` is the product of it and of all factors inside it."""

    name: str
    size: int
    end: int


@dataclass(frozen=True)
class Folding:
    """Axes that distribute whole experts, axes that split each, both in mesh order, and the axes that have pieces."""

    experts: Axes = ()
    etensor: Axes = ()
    pieces: tuple[tuple[str, Sizes], ...] = ()


def fold(axes: Sizes, experts: int, etensor: int = 1) -> Folding | None:
    """Return the folding of `etensor` x `experts` ranks onto the last of `axes`; None where no refinement has them.

    Args:
        axes: dense axes of a stage, the last one varying fastest.
    """
    if experts == etensor == 1:
        return Folding()
    if not all(ranks for _, ranks in axes):  # sizes that do not make the world, which other rules refuse
        return None
    cuts, inner = (etensor, etensor * experts), 1
    factors: list[_Factor] = []
    pieces: list[tuple[str, Sizes]] = []
    for name, ranks in reversed(axes):
        end = inner * ranks
        edges = sorted({inner, end, *(cut for cut in cuts if inner < cut < end)})
        if any(high % low for low, high in pairwise(edges)):
            return None
        made = tuple(_split(name, edges))
        if len(made) > 1:
            pieces.insert(0, (name, tuple((each.name, each.size) for each in made)))
        factors, inner = [*made, *factors], end
    if cuts[-1] > inner:
        return None
    split = tuple(each.name for each in factors if each.end <= cuts[0])
    whole = tuple(each.name for each in factors if cuts[0] < each.end <= cuts[1])
    return Folding(whole, split, tuple(pieces))


def _split(name: str, edges: list[int]) -> Iterator[_Factor]:
    """Yield the factors of an axis between `edges`, the slowest first: the axis itself, or its pieces."""
    ranges = list(pairwise(edges))
    for place, (low, high) in enumerate(reversed(ranges)):
        yield _Factor(name if len(ranges) == 1 else f"{name}.{place}", high // low, high)


def stage_axes(mode: Mode, num_shards: int, num_replicas: int = 1) -> Sizes:
    """Return the dense axes of the ranks of a pipeline stage, where `num_shards` are data ranks of one replica."""
    return (*zip(DATA, (num_replicas, num_shards), strict=True), *mode.axes)


def expert_sizes(axes: Sizes, etensor: int = 1) -> dict[int, Axes]:
    """Return the possible expert-parallel sizes on a stage, each with its axes."""
    ranks = 1
    for _, size in axes:
        ranks *= size
    found = {size: fold(axes, size, etensor) for size in range(1, ranks // etensor + 1) if ranks % size == 0}
    return {size: folding.experts for size, folding in found.items() if folding is not None}


def with_experts(mode: Mode, size: int, etensor: int, axes: Sizes) -> Mode:
    """Return a mode whose experts are distributed over `size` ranks, each split over `etensor`; unchanged where the
    axes of a stage have no such folding."""
    folding = fold(axes, size, etensor) or Folding()
    return replace(mode, experts=folding.experts, etensor=folding.etensor, pieces=folding.pieces)
