"""Fact: an initial value is a function of (seed, name, global index): a box drawn alone is a slice of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.model.params import initialize, normal_box, part_views
from megatron3d.parallel.layout import Box, ParamSpec, Part, box
from megatron3d.parallel.mesh import Mesh

LAYOUTS = [((), ()), (("x",), ()), ((), ("y",)), (("x", "y"), ()), (("y",), ("x",))]


def whole_box(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """Draw a shape of one or two dims that crosses tiles, and a box within it."""
    shape = tuple(draw(st.integers(1, limit)) for limit in draw(st.sampled_from([(3000,), (200, 2500)])))
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, tuple((low, high) for low, high in ends)


@settings(deadline=None, max_examples=40)
@given(case=boxes(), seed=st.integers(0, 2**40))
def test_a_box_initialized_alone_equals_its_part_of_the_whole(case: tuple[tuple[int, ...], Box], seed: int) -> None:
    shape, held = case
    whole = normal_box(seed, "w", shape, whole_box(shape))
    part = normal_box(seed, "w", shape, held)
    assert torch.equal(part, whole[tuple(slice(low, high) for low, high in held)])


@settings(deadline=None, max_examples=40)
@given(
    layout=st.sampled_from(LAYOUTS),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    rows=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    columns=st.integers(1, 30),
    blocks=st.integers(1, 2),
)
def test_every_layout_starts_from_the_same_tensors(
    layout: tuple[tuple[str, ...], ...],
    sizes: tuple[int, int],
    rows: list[int],
    columns: int,
    blocks: int,
) -> None:
    mesh = Mesh((("x", sizes[0]), ("y", sizes[1])))
    unit = mesh.world_size * blocks
    parts = tuple(Part(f"w{i}", (n, columns), (-(-n // unit) * unit, columns)) for i, n in enumerate(rows))
    spec = ParamSpec(parts, layout, (), init=0.5, blocks=blocks)
    expected = {p.name: 0.5 * normal_box(3, p.name, p.shape, whole_box(p.shape)) for p in parts}
    for rank in range(mesh.world_size):
        here = mesh.at(rank)
        local = torch.full(spec.local_shape(here), torch.nan)
        initialize(spec, local, here, seed=3)
        filled = 0
        for part, held, view in part_views(spec, local, here):
            assert torch.equal(view, expected[part.name][tuple(slice(low, high) for low, high in held)])
            filled += view.numel()
        assert (local == 0).sum() == local.numel() - filled, "padding is not zero"


def test_threads_draw_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that threads share, or a tile in the wrong place, would change the values."""
    alone = normal_box(7, "w", (300, 2500), ((10, 290), (5, 2400)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(normal_box(7, "w", (300, 2500), ((10, 290), (5, 2400))), alone)


def test_mean_deviation_and_shape_of_the_distribution() -> None:
    shape = (500, 2000)
    values = normal_box(1234, "w", shape, whole_box(shape)).double()
    count = values.numel()
    assert abs(values.mean()) < 5 / count**0.5
    assert abs(values.square().mean() - 1) < 5 * (2 / count) ** 0.5
    assert abs(values.pow(4).mean() - 3) < 5 * (96 / count) ** 0.5
    assert abs((values[1:] * values[:-1]).mean()) < 5 / count**0.5
    assert abs((values[:, 1:] * values[:, :-1]).mean()) < 5 / count**0.5
    assert abs((values[:64, :1024] * values[64:128, :1024]).mean()) < 5 / (64 * 1024) ** 0.5


def test_seeds_names_and_tiles_differ() -> None:
    shape = (130, 1100)
    draws = [normal_box(seed, name, shape, whole_box(shape)) for seed in (1, 2) for name in ("w", "v")]
    corners = [draw[rows, columns] for draw in draws for rows in (0, 64, 128) for columns in (0, 1024)]
    assert len({corner.item() for corner in corners}) == len(corners)


def test_values_do_not_depend_on_the_length_of_the_tensor() -> None:
    """A larger padded vocabulary starts from the same rows, up to the last whole tile."""
    short, long = (normal_box(5, "w", (rows, 40), ((0, 64), (0, 40))) for rows in (64, 1000))
    assert torch.equal(short, long)


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_constants(fill: float) -> None:
    spec = ParamSpec((Part("b", (5,), (6,)),), (("x",),), (), fill=fill)
    local = torch.full((3,), torch.nan)
    initialize(spec, local, Mesh((("x", 2),), rank=1), seed=0)
    assert local.tolist() == [fill, fill, 0.0]
    assert box((6,), (("x",),), Mesh((("x", 2),), rank=1)) == ((3, 6),)


def test_lower_precision_is_the_rounded_value() -> None:
    spec = ParamSpec((Part("w", (70, 30), (70, 30)),), ((), ()), (), init=0.02)
    exact, rounded = torch.empty(70, 30), torch.empty(70, 30, dtype=torch.bfloat16)
    for local in (exact, rounded):
        initialize(spec, local, Mesh(()), seed=0)
    assert torch.equal(exact.bfloat16(), rounded)
