"""Fact: attention over a rank's heads equals the same heads of attention over all heads.

This includes grouped queries, groups whose boundary lies inside a rank, rotary positions and dropout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron3d.attention import attention as attention_module
from megatron3d.attention.attention import AttentionHeads, attention
from megatron3d.attention.packed import Visible
from megatron3d.attention.pairs import Drop
from megatron3d.attention.rotary import rotary_tables, rotate
from megatron3d.attention.rotary_spec import Rotary
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.ops.dropout import derive_seed
from megatron3d.parallel.layout import span
from megatron3d.parallel.mesh import Axes, Mesh
from tests.support.shards import cut, error, every_group, normal
from tests.support.turn_ranks import run_turns

NOBODY: Any = None
BATCH, SEQ, SIZE = 2, 5, 8


class Place:
    """Communicator that knows its coordinates and cannot communicate."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh


def heads_on(mesh: Mesh, num_heads: int, num_groups: int, axes: Axes) -> AttentionHeads:
    place: Any = Place(mesh)
    return AttentionHeads(num_heads, num_groups, SIZE, axes, place)


def reference(q_MF: Tensor, k_MF: Tensor, v_MF: Tensor, num_heads: int) -> Tensor:
    """Compute attention by its definition, one head at a time."""
    q, k, v = (t.view(BATCH, SEQ, -1, SIZE) for t in (q_MF, k_MF, v_MF))
    outputs = []
    for head in range(num_heads):
        group = head * k.shape[2] // num_heads
        scores = torch.einsum("bsd,btd->bst", q[:, :, head], k[:, :, group]) / SIZE**0.5
        future = torch.arange(SEQ)[None, :] > torch.arange(SEQ)[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("bst,btd->bsd", weights, v[:, :, group]))
    return torch.stack(outputs, 2).flatten(2).flatten(0, 1)


def run(heads: AttentionHeads, qkv_MF: Tensor, drop: Drop | None = None) -> Tensor:
    q, k, v = heads.split(qkv_MF, SEQ)
    return attention(q, k, v, heads, drop)


def projections(num_heads: int, num_groups: int) -> list[Tensor]:
    """Return q, k and v of all heads, [M, F]."""
    return [normal(BATCH * SEQ, n * SIZE, seed=seed) for seed, n in enumerate((num_heads, num_groups, num_groups))]


@pytest.mark.parametrize("num_heads,num_groups", [(1, 1), (4, 4), (4, 2), (6, 3), (6, 1)])
def test_on_one_rank(num_heads: int, num_groups: int) -> None:
    heads = AttentionHeads(num_heads, num_groups, SIZE, (), ProcessComm(Mesh(()), []))
    whole = [t.requires_grad_() for t in projections(num_heads, num_groups)]
    got, expected = run(heads, torch.cat(whole, 1)), reference(*whole, num_heads)  # type: ignore[call-arg]
    assert error(got.detach(), expected.detach()) < 1e-13
    dy = normal(*got.shape, seed=9)
    for mine, theirs in zip(torch.autograd.grad(got, whole, dy), torch.autograd.grad(expected, whole, dy), strict=True):
        assert error(mine, theirs) < 1e-13


SPLITS: list[tuple[int, int, Axes]] = [
    (8, 8, ("x", "y", "z")),
    (8, 4, ("x", "y", "z")),
    (8, 2, ("x", "y", "z")),
    (8, 1, ("x", "y", "z")),
    (8, 2, ("y", "z")),
    (8, 1, ("z", "x", "y")),
    (16, 2, ("x", "y", "z")),
    (24, 6, ("x", "y", "z")),
    (12, 6, ("y", "z")),
    (24, 3, ("x", "z")),
]


def split_errors(rank: int, world_size: int) -> list[str]:
    """Return the errors of a rank that holds its query heads and an even shard of the features of k and v."""
    mesh = Mesh((("x", 2), ("y", 2), ("z", 2)), rank)
    comm, wrong = every_group(mesh), []
    for num_heads, num_groups, axes in SPLITS:
        whole = [t.requires_grad_() for t in projections(num_heads, num_groups)]
        mine = [cut(t.detach(), ((), axes), mesh).requires_grad_() for t in whole]
        heads = AttentionHeads(num_heads, num_groups, SIZE, axes, comm)
        expected, got = reference(*whole, num_heads), run(heads, torch.cat(mine, 1))  # type: ignore[call-arg]
        dy = normal(*expected.shape, seed=9)
        expected.backward(dy)
        got.backward(cut(dy, ((), axes), mesh))
        found = [error(got.detach(), cut(expected.detach(), ((), axes), mesh))]
        for part, full in zip(mine, whole, strict=True):
            assert part.grad is not None and full.grad is not None, "a projection has no gradient"
            found.append(error(part.grad, cut(full.grad, ((), axes), mesh)))
        if not max(found) < 1e-13:
            wrong.append(f"{num_heads} heads, {num_groups} groups over {axes} on rank {rank}: {found}")
    return wrong


def test_split_heads_are_whole_heads() -> None:
    assert run_turns(split_errors, 8) == [[]] * 8


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    heads_per_rank=st.integers(1, 4),
    divisor=st.integers(1, 12),
)
@settings(deadline=None)
def test_gathered_keys_cover_the_ranks_groups_over_the_fewest_axes(
    sizes: tuple[int, int, int], heads_per_rank: int, divisor: int
) -> None:
    mesh, axes = Mesh(tuple(zip("xyz", sizes, strict=True))), ("x", "y", "z")
    num_heads = heads_per_rank * mesh.world_size
    num_groups = next(n for n in range(num_heads // min(divisor, num_heads), num_heads + 1) if num_heads % n == 0)
    everyone = [heads_on(mesh.at(rank), num_heads, num_groups, axes) for rank in range(mesh.world_size)]
    assert len({heads.gather_axes for heads in everyone}) == 1, "ranks would call different collectives"

    def covered(gathered: int) -> bool:
        kept = axes[: 3 - gathered]
        spans = [span(num_groups * SIZE, kept, heads.comm.mesh) for heads in everyone]
        return all(
            low <= heads.group_span[0] * SIZE and heads.group_span[1] * SIZE <= high
            for heads, (low, high) in zip(everyone, spans, strict=True)
        )

    gathered = len(everyone[0].gather_axes)
    assert everyone[0].gather_axes == axes[3 - gathered :]
    assert covered(gathered) and not (gathered and covered(gathered - 1))
    per_group = num_heads // num_groups
    for heads in everyone:
        groups = [head // per_group for head in range(*heads.query_span)]
        assert [heads.group_span[0] + group for group in heads.group_of_query] == groups
        assert heads.group_span == (groups[0], groups[-1] + 1)


def test_nothing_is_gathered_when_groups_are_whole() -> None:
    mesh = Mesh((("y", 2), ("z", 2)))
    assert heads_on(mesh, 8, 4, ("y", "z")).gather_axes == ()
    assert heads_on(mesh, 8, 2, ("y", "z")).gather_axes == ("z",)
    assert heads_on(mesh, 8, 1, ("y", "z")).gather_axes == ("y", "z")


def test_groups_whose_boundary_lies_inside_a_rank() -> None:
    """Rank 0 of 2 reads groups 0, 0, 0, 0, 1, 1 of 12 heads in 3 groups."""
    first, second = (heads_on(Mesh((("x", 2),), rank), 12, 3, ("x",)) for rank in (0, 1))
    assert (first.group_span, first.group_of_query) == ((0, 2), [0, 0, 0, 0, 1, 1])
    assert (second.group_span, second.group_of_query) == ((1, 3), [0, 0, 1, 1, 1, 1])


def test_rotary_is_a_complex_rotation() -> None:
    x_BSND = normal(2, 7, 3, 8, seed=1)
    base = 10000.0
    pairs = torch.complex(x_BSND[..., :4], x_BSND[..., 4:])
    angles = torch.arange(7)[:, None].double() * base ** (-torch.arange(4).double() / 4)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    got = rotate(x_BSND, rotary_tables(7, Rotary(base, 8), x_BSND))
    assert error(got, torch.cat((turned.real, turned.imag), -1)) < 1e-13


def test_rotary_scores_depend_on_the_distance_only() -> None:
    q, k = (normal(1, 1, 1, 8, seed=seed).expand(1, 9, 1, 8) for seed in (1, 2))
    tables = rotary_tables(9, Rotary(100.0, 8), q)
    scores = torch.einsum("bsnd,btnd->st", rotate(q, tables), rotate(k, tables))
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)


def test_rotary_angles_of_far_positions_are_exact_in_low_precision() -> None:
    """bf16 cannot represent 4097, nor the cosines of angles that differ by less than a degree."""
    like = torch.zeros(1, dtype=torch.bfloat16)
    got, exact = rotary_tables(5000, Rotary(10000.0, 8), like), rotary_tables(5000, Rotary(10000.0, 8), like.double())
    for low, high in zip(got, exact, strict=True):
        assert low.dtype == torch.float32 and (low - high).abs().max() < 2**-10


def test_a_rotation_in_bf16_is_rounded_once() -> None:
    """Tables rounded to bf16 would have errors of 2^-9 of x, however small the rotated value is."""
    x_BSND = torch.randn(1, 5000, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = rotate(x_BSND, rotary_tables(5000, Rotary(10000.0, 8), x_BSND))
    exact = rotate(x_BSND.double(), rotary_tables(5000, Rotary(10000.0, 8), x_BSND.double()))
    assert got.dtype == torch.bfloat16
    assert ((got - exact).abs() <= 2**-8 * exact.abs() + 2**-11 * x_BSND.abs().amax(-1, keepdim=True)).all()


KEY = derive_seed(1, 2, "attention")


def test_dropout_of_rate_zero_is_attention() -> None:
    heads = AttentionHeads(6, 3, SIZE, (), ProcessComm(Mesh(()), []))
    qkv = torch.cat(projections(6, 3), 1)
    assert error(run(heads, qkv, Drop(0.0, KEY, 0)), run(heads, qkv)) < 1e-13


def test_dropout_keeps_the_expectation() -> None:
    heads = AttentionHeads(2, 1, SIZE, (), ProcessComm(Mesh(()), []))
    qkv = torch.cat(projections(2, 1), 1)
    runs = torch.stack([run(heads, qkv, Drop(0.3, derive_seed(i), 0)) for i in range(2000)])
    deviations = (runs.mean(0) - run(heads, qkv)) / runs.std(0) * 2000**0.5
    assert deviations.abs().max() < 5.5


@pytest.mark.parametrize("axes", [("x",), ("x", "y")])
def test_dropout_drops_the_same_weights_on_every_rank(axes: Axes) -> None:
    """A rank's mask is the slice of the global mask for its heads and sequences."""
    alone = AttentionHeads(8, 8, SIZE, (), ProcessComm(Mesh(()), []))
    qkv = projections(8, 8)
    whole = run(alone, torch.cat(qkv, 1), Drop(0.3, KEY, 10)).view(BATCH, SEQ, -1)
    for rank in range(4):
        mesh = Mesh((("x", 2), ("y", 2)), rank)
        mine = torch.cat([cut(t, ((), axes), mesh) for t in qkv], 1)
        for sequence in range(BATCH):
            part = run(heads_on(mesh, 8, 8, axes), mine.view(BATCH, SEQ, -1)[sequence], Drop(0.3, KEY, 10 + sequence))
            assert error(part, cut(whole[sequence], ((), axes), mesh)) < 1e-13


@pytest.mark.parametrize("visible", [None, Visible(((2,), (1, 4)), 3)], ids=["whole", "documents and window"])
def test_pieces_of_long_sequences_drop_the_same_weights(
    visible: Visible | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = AttentionHeads(4, 2, SIZE, (), ProcessComm(Mesh(()), []))
    qkv = torch.cat(projections(4, 2), 1).requires_grad_()
    results = []
    for rows, piece in ((SEQ, SEQ), (SEQ - 1, 2)):
        monkeypatch.setattr(attention_module, "DROPOUT_ROWS", rows)
        monkeypatch.setattr(attention_module, "DROPOUT_PIECE", piece)
        y = attention(*heads.split(qkv, SEQ), heads, Drop(0.3, KEY, 10), visible=visible)
        results.append((y, *torch.autograd.grad(y, qkv, normal(*y.shape, seed=9))))
    for mine, theirs in zip(*results, strict=True):
        assert error(mine.detach(), theirs.detach()) < 1e-13


def test_dropout_differs_between_heads_and_sequences() -> None:
    heads = AttentionHeads(2, 2, SIZE, (), ProcessComm(Mesh(()), []))
    one = normal(SEQ, SIZE, seed=1)
    qkv = one.repeat(BATCH, 6)
    y = run(heads, qkv, Drop(0.5, KEY, 0)).view(BATCH, SEQ, 2, SIZE)
    views = [y[batch, :, head].tolist() for batch in range(BATCH) for head in range(2)]
    assert all(a != b for i, a in enumerate(views) for b in views[:i])
