"""Fact: the context ranks of a group hold every position of their sequences once, and have equal work in attention."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.attention.context.plan import TokenOrder, with_context, zigzag
from megatron3d.model.microbatch import Pass
from megatron3d.parallel.layout import span
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from tests.support.host_reads import NoHostReads

CPU = torch.device("cpu")
EVERY_FORM = [(name, form) for name, entry in MODES.items() for form in entry.forms]


@given(num_ranks=st.integers(1, 9), chunk=st.integers(1, 5))
def test_zigzag_is_a_permutation_with_equal_work(num_ranks: int, chunk: int) -> None:
    length = 2 * num_ranks * chunk
    held = [zigzag(length, num_ranks, rank) for rank in range(num_ranks)]
    positions = [[at for low, high in chunks for at in range(low, high)] for chunks in held]
    assert sorted(at for mine in positions for at in mine) == list(range(length))
    assert len({sum(at + 1 for at in mine) for mine in positions}) == 1, "keys that a rank's queries may see"
    assert all(mine == sorted(mine) for mine in positions)


def test_the_picture_of_the_docstring() -> None:
    owner = {low: rank for rank in range(4) for low, _ in zigzag(8, 4, rank)}
    assert [owner[chunk] for chunk in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_a_context_of_one_rank_changes_nothing() -> None:
    mode = build_mode("1d", None, (2,))
    assert with_context(mode, (("context", 1),)) is mode
    assert zigzag(7, 1, 0) == ((0, 7),)


@pytest.mark.parametrize("name,form", EVERY_FORM)
def test_every_mode_splits_tokens_over_context_behind_the_sequences(name: str, form: str) -> None:
    alone = build_mode(name, form, (2, 3, 2)[: len(MODES[name].axis_names)])
    mode = with_context(alone, (("context", 2), ("context_inner", 3)))
    names = ("context", "context_inner")
    assert mode.context == names and mode.axes == (("context", 2), ("context_inner", 3), *alone.axes)
    assert mode.batch_axes == alone.batch_axes
    assert mode.sequence_axes == alone.inner[0]
    assert mode.copies == alone.copies
    for tokens, axes_before in ((mode.residual[0], alone.residual[0]), (mode.inner[0], alone.inner[0])):
        assert tokens[: len(mode.batch_axes) + 2] == mode.batch_axes + names
        assert tuple(axis for axis in tokens if axis not in names) == axes_before
    for plan, before in ((mode.expand, alone.expand), (mode.contract, alone.contract), (mode.embed, alone.embed)):
        assert plan.w_layout == before.w_layout, "weights are not split over context ranks"


@pytest.mark.parametrize("name,form", EVERY_FORM)
def test_all_ranks_together_hold_every_token_once(name: str, form: str) -> None:
    """Rows of the residual and of the inner stream are global tokens, and logits of all ranks can be put in order."""
    shape = (2, 1, 2)[: len(MODES[name].axis_names)] if name != "1d" else (2,)
    mode = with_context(build_mode(name, form, shape), (("context", 2),))
    sequences, length, first = 4, 16, 12
    meshes = [Mesh(mode.axes).at(rank) for rank in range(Mesh(mode.axes).world_size)]
    for axes in (mode.residual[0], mode.inner[0]):
        rows = {}
        for mesh in meshes:
            order = TokenOrder(mode.batch_axes, mode.context, mesh)
            read = sequences // mesh.size(mode.batch_axes)
            at = Pass(
                tokens_BL=torch.zeros(read, length // 2),
                seq_length=length,
                order=order,
                target=None,
                num_sequences=sequences,
                first_sequence=first,
                key=None,
                rotary=(),
            )
            mine = at.token_rows(axes, CPU)
            low, high = span(sequences * length, axes, mesh)
            assert len(mine) == high - low
            rows[low] = mine
        every = torch.cat([rows[low] for low in sorted(rows)])
        assert sorted(every.tolist()) == list(range(first * length, (first + sequences) * length))
        with NoHostReads():
            whole = at.whole_sequences(every.unsqueeze(-1)).flatten()
        assert whole.tolist() == list(range(first * length, (first + sequences) * length))


def test_sequences_of_a_context_group_are_the_same_and_positions_differ() -> None:
    mode = with_context(build_mode("2d", None, (2, 2)), (("context", 2),))
    for rank in range(8):
        mesh = Mesh(mode.axes).at(rank)
        order = TokenOrder(mode.batch_axes, mode.context, mesh)
        tokens = torch.arange(4 * 8).view(4, 8)
        low, high = order.sequences(4, mode.inner[0])
        assert (low, high) == (2 * mesh.coord("r"), 2 * mesh.coord("r") + 2)
        at = Pass(
            tokens_BL=tokens[low:high, :4],
            seq_length=8,
            order=order,
            target=None,
            num_sequences=4,
            first_sequence=0,
            key=None,
            rotary=(),
        )
        mine = at.token_rows(mode.inner[0], CPU)
        expected = [s * 8 + p for s, (a, b) in product(range(low, high), order.chunks(8)) for p in range(a, b)]
        assert mine.tolist() == expected == at.cut(tokens[low:high]).flatten().tolist()
