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
from megatron3d.parallel.home_plan import HomeMatrix, home_axes, plan_homes
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
    groups = dict.fromkeys(group for flat in flats for group in flat.matrices)
    return max(
        (_group_bytes(step, group, [flat for flat in flats if group in flat.matrices]) for group in groups), default=0
    )


def _group_bytes(step: StepSpec, group: GroupSpec, flats: Sequence[FlatBufferSize]) -> int:
    planned = plan_homes(
        [flat.matrices[group] for flat in flats], step.local.mesh, group.rule.max_home_elements(step.optimizer)
    )
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
    mesh, wide = step.local.mesh, step.local.wide
    itemsize = wide if wide > 4 else ITEMSIZES[step.optimizer.muon_dtype]
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
    work = max((count * _work_numel(*kind) for kind, count in alike.items()), default=0)
    there, back = (sent, given) if is_alone else (sent + home, given + held)
    return _RoundBytes(held * wide, there * itemsize, back * itemsize, home * itemsize, work * itemsize)


def _work_numel(whole: Shape, numel: int) -> int:
    """Return the elements of an iteration's input and result, and of two products of the whole's smaller side."""
    return 2 * (numel + min(whole) ** 2)


def _num_copies(flat: FlatBufferSize, spec: ParamSpec, mesh: Mesh) -> int:
    """Return how many of the home ranks hold the same elements of a parameter."""
    return mesh.size(mesh.without(home_axes(mesh), (*flat.zero_axes, *spec.axes)))
