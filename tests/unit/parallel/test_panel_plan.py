"""Fact: panels cover every index once, with equally many from every shard, along the dim in which most bytes move."""

from __future__ import annotations

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.linear.overlap_plan import OVERLAP_ALL, Direction, TPOverlap
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.parallel.panel_plan import TENSORS, WHOLE, PanelPlan, plan_panels, split_into_panels, stored_over

BOTH = tuple(Direction)
UNEVEN = MatmulPlan(m=("r",), n=("c",), x={"c": "K"}, w={"r": "K"})
UNEVEN_MESH = Mesh((("r", 2), ("c", 3)))


def numbers(panels: PanelPlan, size: int) -> list[list[int]]:
    """Return the indices of each panel."""
    width = size // panels.cells
    return [
        [cell * width + start + i for cell in range(panels.cells) for i in range(length)]
        for start, length in panels.slices
    ]


@pytest.mark.parametrize("num_panels", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("dim", "MNK")
def test_every_shard_contributes_equally_to_a_panel(dim: str, num_panels: int) -> None:
    """K=42 is stored in 3 shards by X and in 2 by W: six cells of seven."""
    panels = split_into_panels(UNEVEN, dim, 42, num_panels, UNEVEN_MESH)
    assert sorted(index for panel in numbers(panels, 42) for index in panel) == list(range(42))
    assert panels.num_panels <= num_panels
    for name, table in (("x", UNEVEN.x), ("w", UNEVEN.w), ("y", UNEVEN.dy)):
        if dim in TENSORS[name]:
            ranks = UNEVEN_MESH.size(stored_over(table, dim))
            for panel in numbers(panels, 42):
                owners = [index // (42 // ranks) for index in panel]
                assert {owners.count(rank) for rank in range(ranks)} == {len(panel) // ranks}


@pytest.mark.parametrize(
    ("mode", "form", "sizes", "forward", "backward"),
    [
        ("1d", "replicated", {"M": 64, "N": 32, "K": 32}, "", "M"),
        ("1d", "sequence_parallel", {"M": 64, "N": 32, "K": 32}, "M", "M"),
        ("2d", "summa", {"M": 32, "N": 32, "K": 32}, "K", "K"),
        ("grid", "all_reduce", {"M": 32, "N": 64, "K": 64}, "N", "K"),
        ("3d", "heads", {"M": 4096, "N": 32, "K": 32}, "M", "M"),
        ("3d", "heads", {"M": 4, "N": 32, "K": 256}, "K", "K"),
    ],
)
def test_panels_split_the_dimension_with_the_most_bytes(
    mode: str, form: str, sizes: dict[str, int], forward: str, backward: str
) -> None:
    built = build_mode(mode, form, MODES[mode].default_shape(8))
    mesh = Mesh(built.axes)
    found = [plan_panels(built.expand.on(mesh), at, sizes, TPOverlap(2), mesh).dim for at in BOTH]
    assert found == [forward, backward]
    assert all(plan_panels(built.expand.on(mesh), at, sizes, OVERLAP_ALL, mesh) == WHOLE for at in BOTH)


def test_kept_weights_do_not_count_for_panels() -> None:
    """Kept weights are gathered whole: with few tokens W moves most bytes, and only X remains to be overlapped."""
    mesh, sizes = Mesh((("r", 2), ("c", 2))), {"M": 4, "N": 64, "K": 64}
    overlaps = TPOverlap(2), TPOverlap(2, keep_gathered_weights=True)
    found = [plan_panels(UNEVEN, Direction.FORWARD, sizes, overlap, mesh) for overlap in overlaps]
    assert [panels.dim for panels in found] == ["K", "M"]


def test_overlaps_follow_the_configuration() -> None:
    assert RunSpec(Config()).overlap == OVERLAP_ALL
    keys = {"tp_num_panels": 3, "tp_comm_overlap_input_grad": False, "tp_comm_overlap_weight_grad": False}
    keys |= {"tp_comm_overlap_weight_gather": False, "tp_keep_gathered_weights": True}
    config = Config.model_validate({"parallel": keys})
    assert RunSpec(config).overlap == TPOverlap(3, False, False, False, True)
