"""Whole logical matrices for optimizers that need them: each goes to its home rank, and its result comes back.

    rank 0   q rows 0-3 | k rows 0-3         all-to-all        rank 0   q, all rows
    rank 1   q rows 4-7 | k rows 4-7         -------->         rank 1   k, all rows

Weights, and state in their shape, keep the layout of the parameter, so that ZeRO, tensor parallelism and checkpoints
know nothing of it.  State of whole matrices is at their homes alone, and checkpoints store it without a layout.

Of ranks that hold the same elements, those at the home's coordinates send them; the result goes to all of them.

Flat buffers are taken in rounds, each with one all-to-all there and one back; the next round travels while this one is
computed.  (As LayerShardedMuon of Megatron-LM, with tensor parallelism and ZeRO alike.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron3d.comm.interface import Pending
from megatron3d.config.schema import OptimizerConfig
from megatron3d.model.params import part_views
from megatron3d.optim.precision import PRECISIONS
from megatron3d.optim.rule_spec import MatrixState, UpdateRule
from megatron3d.parallel.home_plan import HomeMatrix, HomeRound, home_axes, plan_homes
from megatron3d.parallel.layout import Box, Shape, box_shape
from megatron3d.parallel.mesh import Axes
from megatron3d.zero import Buffers, FlatBuffer

# A flat buffer, its parameters that are updated, and the elements of this rank's shard that belong to them.
Shard = tuple[FlatBuffer, Sequence[str], slice]
# Returns, for shards of a round by their index, what is sent home: tensors of their own.
Sources = Callable[["Round"], Mapping[int, Tensor]]
# Returns the sum of a tensor over all homes.
Total = Callable[[Tensor], Tensor]
# Takes matrices of one shape whose home this rank is [count, rows, columns] and their state by its name; returns as
# many results.
Compute = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


class _Kind(NamedTuple):
    """Matrices that are computed at once: their shape here, and that of the whole ones, of which these may be slabs."""

    shape: Shape
    whole: Shape


class HomeState(NamedTuple):
    """A kind of state of matrices of one shape whose home this rank is [count, ...], with the names of the matrices."""

    kind: MatrixState
    parts: Sequence[str]
    values: Tensor

    def reset(self) -> None:
        """Set it to what it begins with."""
        self.values.zero_()
        if self.kind.is_identity:
            self.values.diagonal(dim1=-2, dim2=-1).fill_(1)


class _Place(NamedTuple):
    """A box of a matrix that some rank holds: the index of the matrix in its round, and the box."""

    matrix: int
    box: Box

    @property
    def sides(self) -> tuple[int, int]:
        (top, bottom), (left, right) = self.box
        return bottom - top, right - left

    @property
    def numel(self) -> int:
        rows, columns = self.sides
        return rows * columns


@dataclass(frozen=True)
class Round:
    """Matrices that travel and are computed together.

    Attributes:
        shards: indices of this rank's shards that hold elements of them, or none.
        boxes: the matrices of each part of a parameter, its slabs or itself, with their boxes.
        params: their parameters, each with the index of its shard, in the order of `mine`.
        mine: places that this rank holds.
        sent: indices of `mine` in the order in which they are sent, and `returned` in which they come back.
        sent_to: elements for each rank, and `returned_from` those that come back from it.
        here: kind of each matrix whose home this rank is, by its index, and its number among those of this kind.
        names: logical tensors of these matrices by kind, in the order of their numbers.
        received: places that each rank sends here, and `given` those that go back to it.
    """

    shards: tuple[int, ...]
    boxes: Mapping[tuple[str, str], Sequence[_Place]]
    params: tuple[tuple[int, str], ...]
    mine: tuple[_Place, ...]
    sent: tuple[int, ...]
    returned: tuple[int, ...]
    sent_to: tuple[int, ...]
    returned_from: tuple[int, ...]
    here: Mapping[int, tuple[_Kind, int]]
    names: Mapping[_Kind, Sequence[str]]
    received: tuple[tuple[_Place, ...], ...]
    given: tuple[tuple[_Place, ...], ...]


class MatrixExchange:
    """Moves the logical matrices of some parameters of a stage to their homes and back, and has their state there.

    Args:
        shards: flat buffers with such parameters, also those of which this rank's shard has no elements of them.
        rule: their update rule.

    Attributes:
        state: state of the matrices whose home this rank is.
    """

    def __init__(self, buffers: Buffers, shards: Sequence[Shard], rule: UpdateRule, config: OptimizerConfig) -> None:
        self._comm, self._specs, self._shards = buffers.comm, buffers.specs, shards
        mesh = buffers.comm.mesh
        self.axes: Axes = home_axes(mesh)
        self._meshes = [mesh.at(rank) for rank in mesh.ranks(self.axes)]
        self._me = mesh.index(self.axes)
        self._dtype = shards[0][0].main_dtype if shards else torch.float32
        # Dtype in which matrices travel.
        self._narrow = self._dtype if self._dtype.itemsize > 4 else PRECISIONS[rule.matrix_dtype(config)]
        self._device = shards[0][0].main.device if shards else None
        self._flat_of = {path: flat for flat, paths, _ in shards for path in paths}
        self._copy_index = cache(self._find_copy_index)
        params = [{path: self._specs[path] for path in paths} for _, paths, _ in shards]
        most = rule.max_home_elements(config)
        planned = plan_homes(params, mesh, lambda shape: rule.matrix_flops(shape, config), most)
        self.rounds = [self._round(each) for each in planned]
        self._states = [
            {kind: self._new_state(rule, config, kind, names) for kind, names in each.names.items()}
            for each in self.rounds
        ]
        self.state = [state for kinds in self._states for states in kinds.values() for state in states]

    def _new_state(
        self, rule: UpdateRule, config: OptimizerConfig, matrices: _Kind, names: Sequence[str]
    ) -> list[HomeState]:
        assert not rule.matrix_states or matrices.shape == matrices.whole, "slabs have no state of their matrix"
        found = []
        for each in rule.matrix_states:
            if (shape := each.shape(matrices.whole, config)) is not None:
                values = torch.empty((len(names), *shape), dtype=self._dtype, device=self._device)
                found.append(HomeState(each, names, values))
                found[-1].reset()
        return found

    def map(
        self,
        sources: Sources,
        compute: Compute,
        compute_slabs: Callable[[Tensor, Shape, Total], Tensor] | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Apply `compute` to whole matrices; yield the index of each shard with its part of the results.

        Args:
            sources: what is sent; its tensors are overwritten with the results.
            compute_slabs: computes slabs of matrices that are divided, given the shape of the whole ones.
        """
        there = [self._start(each, sources) for each in self.rounds[:1]]
        back: tuple[Round, Mapping[int, Tensor], Pending] | None = None
        for number, each in enumerate(self.rounds):
            there += [self._start(after, sources) for after in self.rounds[number + 1 : number + 2]]
            held, arriving = there.pop(0)
            batches = self._assembled(each, arriving.wait())
            for kind in batches:
                if kind.shape == kind.whole:
                    states = {state.kind.name: state.values for state in self._states[number][kind]}
                    batches[kind] = compute(batches[kind], states)
                elif compute_slabs is not None:
                    batches[kind] = compute_slabs(batches[kind], kind.whole, self._total)
            returning = each, held, self._return(each, batches)
            del held, arriving, batches
            if back is not None:
                yield from self._finish(*back)
            back = returning
        if back is not None:
            yield from self._finish(*back)

    def _start(self, round_: Round, sources: Sources) -> tuple[Mapping[int, Tensor], Pending]:
        held = sources(round_)
        views = self._views(round_, held)
        sent = self._joined([views[index] for index in round_.sent])
        counts = [sum(place.numel for place in places) for places in round_.received]
        return held, self._comm.all_to_all_rows(sent, round_.sent_to, counts, self.axes)

    def _total(self, x: Tensor) -> Tensor:
        return self._comm.all_reduce(x, self.axes).wait()

    def _assembled(self, round_: Round, received: Tensor) -> dict[_Kind, Tensor]:
        """Return the matrices whose home this rank is, by their kind, from the boxes that all ranks sent."""
        batches = {kind: received.new_empty((len(names), *kind.shape)) for kind, names in round_.names.items()}
        places = [place for each in round_.received for place in each]
        for place, values in zip(places, received.split([place.numel for place in places]), strict=True):
            _at(round_, batches, place).copy_(values.view(place.sides))
        return batches

    def _return(self, round_: Round, batches: Mapping[_Kind, Tensor]) -> Pending:
        sent = self._joined([_at(round_, batches, place) for each in round_.given for place in each])
        counts = [sum(place.numel for place in places) for places in round_.given]
        return self._comm.all_to_all_rows(sent, counts, round_.returned_from, self.axes)

    def _finish(self, round_: Round, held: Mapping[int, Tensor], back: Pending) -> Iterator[tuple[int, Tensor]]:
        views, received = self._views(round_, held), back.wait()
        sizes = [round_.mine[index].numel for index in round_.returned]
        for index, values in zip(round_.returned, received.split(sizes), strict=True):
            views[index].copy_(values.view(views[index].shape))
        del views, received
        yield from held.items()

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the elements of tensors one after another, in the dtype in which they travel."""
        out = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=self._narrow, device=self._device)
        for part, tensor in zip(out.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
            part.view(tensor.shape).copy_(tensor)
        return out

    def _views(self, round_: Round, held: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the boxes of matrices that tensors of this rank's shards hold, in the order of `mine`."""
        views = list[Tensor]()
        for number, path in round_.params:
            flat, _, where = self._shards[number]
            first, own = flat.shard_range(path)
            values = held[number][own.start - where.start : own.stop - where.start]
            for part, box, view in part_views(self._specs[path], values, self._comm.mesh, first):
                views += [view[inside] for _, inside in _cut(round_.boxes[path, part.name], box)]
        return views

    def _round(self, planned: HomeRound) -> Round:
        matrices = planned.matrices
        boxes: dict[tuple[str, str], list[_Place]] = {}
        for index, each in enumerate(matrices):
            boxes.setdefault((each.path, each.part.name), []).append(_Place(index, each.box))
        params = [(number, path) for number in planned.flats for path in self._shards[number][1]]
        places = self._places(boxes, [path for _, path in params], self._me)
        mine = [place for each in places for place in each]
        homes = [matrices[place.matrix].home for place in mine]
        returned = sorted(range(len(mine)), key=homes.__getitem__)
        sent = [index for index in returned if self._sends(matrices[mine[index].matrix], self._me)]

        def counts(indices: Sequence[int]) -> tuple[int, ...]:
            found = [0] * len(self._meshes)
            for index in indices:
                found[homes[index]] += mine[index].numel
            return tuple(found)

        names, here = dict[_Kind, list[str]](), dict[int, tuple[_Kind, int]]()
        for index, each in enumerate(matrices):
            if each.home == self._me:
                kind = _Kind(box_shape(each.box), each.part.shape)
                alike = names.setdefault(kind, [])
                here[index] = kind, len(alike)
                alike.append(each.part.name)
        at_home = list(dict.fromkeys(matrices[index].path for index in here))
        given = [
            tuple(place for held in self._places(boxes, at_home, rank) for place in held if place.matrix in here)
            for rank in range(len(self._meshes))
        ]
        return Round(
            shards=planned.flats,
            boxes=boxes,
            params=tuple(each for each, held in zip(params, places, strict=True) if held),
            mine=tuple(mine),
            sent=tuple(sent),
            returned=tuple(returned),
            sent_to=counts(sent),
            returned_from=counts(returned),
            here=here,
            names=names,
            received=tuple(
                tuple(place for place in held if self._sends(matrices[place.matrix], rank))
                for rank, held in enumerate(given)
            ),
            given=tuple(given),
        )

    def _places(
        self, boxes: Mapping[tuple[str, str], Sequence[_Place]], paths: Sequence[str], rank: int
    ) -> list[list[_Place]]:
        """Return for each parameter the places that a rank holds."""
        found, mesh = [], self._meshes[rank]
        for path in paths:
            start, stop = self._flat_of[path].range_on(path, mesh)
            held = part_views(self._specs[path], torch.empty(stop - start, device="meta"), mesh, start)
            found.append([place for part, box, _ in held for place, _ in _cut(boxes[path, part.name], box)])
        return found

    def _sends(self, matrix: HomeMatrix, rank: int) -> bool:
        """Return whether a rank sends its elements of a matrix: of those with the same ones, it is at the home's."""
        axes = self._flat_of[matrix.path].sharding.axes
        copies = self._comm.mesh.without(self.axes, (*axes, *self._specs[matrix.path].axes))
        return self._copy_index(rank, copies) == self._copy_index(matrix.home, copies)

    def _find_copy_index(self, rank: int, copies: Axes) -> int:
        return self._meshes[rank].index(copies)


def _cut(matrices: Sequence[_Place], held: Box) -> Iterator[tuple[_Place, tuple[slice, ...]]]:
    """Yield for the matrices that a box overlaps: the place of the overlap, and where it is in the box."""
    for matrix, box in matrices:
        overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, box, strict=True)]
        if all(low < high for low, high in overlap):
            inside = tuple(
                slice(low - start, high - start) for (low, high), (start, _) in zip(overlap, held, strict=True)
            )
            yield (
                _Place(
                    matrix,
                    tuple((low - start, high - start) for (low, high), (start, _) in zip(overlap, box, strict=True)),
                ),
                inside,
            )


def _at(round_: Round, batches: Mapping[_Kind, Tensor], place: _Place) -> Tensor:
    """Return the box of a matrix whose home this rank is."""
    kind, number = round_.here[place.matrix]
    (top, bottom), (left, right) = place.box
    return batches[kind][number, top:bottom, left:right]
