"""Bytes of an update of whole matrices: of those on their way to their homes, there, and on their way back.

round 0   sent, received | computed | given, returned
round 1                    sent, received             | computed | given, returned
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megatron3d.config.schema import ITEMSIZES
from megatron3d.forecast.memory.flat_buffers import FlatBufferSize
from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.optim.rule_spec import GroupSpec
from megatron3d.parallel.home_plan import HomeMatrix, HomeRound, home_axes, plan_homes
from megatron3d.parallel.layout import ParamSpec, Shape
from megatron3d.parallel.mesh import Mesh


class _RoundBytes(NamedTuple):
    """Bytes of a round: its directions on this rank, what travels there and back, and its matrices at home."""

    held: int
    there: int
    back: int
    home: int
    work: int


def home_bytes(step: StepSpec, flats: Sequence[FlatBufferSize]) -> int:
    """Return the most bytes at a time; 0 without matrices."""
    found = (_group_bytes(step, group, with_group) for group, with_group in _groups(flats).items())
    return max(found, default=0)


def home_state_bytes(step: StepSpec, flats: Sequence[FlatBufferSize]) -> int:
    """Return the bytes of the state of the matrices whose home this rank is."""
    me, numel = step.local.mesh.index(home_axes(step.local.mesh)), 0
    for group, with_group in _groups(flats).items():
        for each in _rounds(step, group, with_group) if group.rule.matrix_states else ():
            shapes = (matrix.part.shape for matrix in each.matrices if matrix.home == me)
            numel += sum(group.rule.matrix_state_numel(shape, step.optimizer) for shape in shapes)
    return numel * step.local.wide


def _groups(flats: Sequence[FlatBufferSize]) -> dict[GroupSpec, list[FlatBufferSize]]:
    """Return the flat buffers with whole matrices of each group."""
    groups = dict.fromkeys(group for flat in flats for group in flat.matrices)
    return {group: [flat for flat in flats if group in flat.matrices] for group in groups}


def _rounds(step: StepSpec, group: GroupSpec, flats: Sequence[FlatBufferSize]) -> list[HomeRound]:
    work, config = group.rule.matrix_flops, step.optimizer
    matrices, most = [flat.matrices[group] for flat in flats], group.rule.max_home_elements(config)
    return plan_homes(matrices, step.local.mesh, lambda shape: work(shape, config), most)


def _group_bytes(step: StepSpec, group: GroupSpec, flats: Sequence[FlatBufferSize]) -> int:
    planned = _rounds(step, group, flats)
    none = _RoundBytes(0, 0, 0, 0, 0)
    found = (_round_bytes(step, group, [flats[number] for number in each.flats], each.matrices) for each in planned)
    rounds = [none, *found, none]
    return max(_peak(*each) for each in zip(rounds, rounds[1:], rounds[2:], strict=False))


def _peak(before: _RoundBytes, each: _RoundBytes, after: _RoundBytes) -> int:
    """Return the most bytes of a round: when it is assembled, computed, or sent back."""
    others = before.held + before.back + after.held + after.there
    return others + each.held + max(each.there + each.home, each.home + each.work, each.home + each.back)


def _round_bytes(
    step: StepSpec, group: GroupSpec, flats: Sequence[FlatBufferSize], matrices: Sequence[HomeMatrix]
) -> _RoundBytes:
    mesh, wide, rule = step.local.mesh, step.local.wide, group.rule
    itemsize = wide if wide > 4 else ITEMSIZES[rule.matrix_dtype(step.optimizer)]
    axes = home_axes(mesh)
    me, is_alone = mesh.index(axes), mesh.size(axes) == 1
    held = sum(flat.held(mesh)[group] for flat in flats)
    copies = {path: _num_copies(flat, spec, mesh) for flat in flats for path, spec in flat.matrices[group].items()}
    mine = [each for each in matrices if each.home == me]
    home = sum(each.numel for each in mine)
    once = sum(each.numel / copies[each.path] for each in matrices)
    sent = round(held * once / sum(each.numel for each in matrices))
    given = sum(each.numel * copies[each.path] for each in mine)
    alike = Counter[tuple[Shape, int]]((each.part.shape, each.numel) for each in mine)
    works = (count * rule.matrix_work(shape, step.optimizer, numel) for (shape, numel), count in alike.items())
    work = max(works, default=0) * (wide if rule.computes_wide else itemsize)
    there, back = (sent, given) if is_alone else (sent + home, given + held)
    return _RoundBytes(held * wide, there * itemsize, back * itemsize, home * itemsize, work)


def _num_copies(flat: FlatBufferSize, spec: ParamSpec, mesh: Mesh) -> int:
    """Return how many of the home ranks hold the same elements of a parameter."""
    return mesh.size(mesh.without(home_axes(mesh), (*flat.zero_axes, *spec.axes)))
