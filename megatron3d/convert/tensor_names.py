"""The logical tensors in each tensor of a Hugging Face file, by name.

transformer.h.0.attn.c_attn.weight [H, 3H]  =  (layers.0.attention.q | .k | .v [H, H], concatenated along rows)^T
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron3d.convert.model_types import MODEL_TYPES
from megatron3d.convert.module_names import LAYER, MODULES, MTP_MODULES, STACKED_EXPERTS
from megatron3d.model.architecture import Architecture
from megatron3d.model.layer_kinds import EXPERT_BIAS, router_names
from megatron3d.model.params import EMBEDDING, HEAD, param_specs
from megatron3d.parallel.layout import Box, Shape
from megatron3d.parallel.modes import MODES, build_mode

TIED_HEAD = "lm_head.weight"
Modules = Mapping[str, tuple[str, ...]]
Logical = Mapping[str, Shape]


class Place(NamedTuple):
    """Where rows of a logical tensor are in a tensor of a file.

    Attributes:
        start, step: first row, and distance between rows.
        column: first column.
        expert: index in the first dim, over experts; -1: there is no such dim.
        is_transposed: rows are columns in the file.
    """

    start: int
    step: int = 1
    column: int = 0
    expert: int = -1
    is_transposed: bool = False


class RowRange(NamedTuple):
    """Consecutive rows of a logical tensor of a shape, and their place in a file's tensor."""

    name: str
    shape: Shape
    low: int
    high: int
    place: Place

    @property
    def box(self) -> Box:
        """The rows as a box of the logical tensor."""
        return ((self.low, self.high), *((0, size) for size in self.shape[1:]))


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file: logical tensors with their shapes, concatenated along dim 0, then perhaps transposed.

    Attributes:
        num_zeros: length of a vector of zeros, which has no parts: a bias that our model lacks.
        num_groups: the rows of the parts alternate: with 2 groups a first half of each part, then the second halves.
        num_experts: length of a first dim over experts, with as many parts for each in order; 0: there is none.
        is_striped: the rows of the parts, of each expert, alternate one by one.
        has_columns: the parts are concatenated along dim 1.
    """

    name: str
    parts: tuple[tuple[str, Shape], ...]
    is_transposed: bool
    num_zeros: int = 0
    num_groups: int = 1
    num_experts: int = 0
    is_striped: bool = False
    has_columns: bool = False

    def row_ranges(self) -> Iterator[RowRange]:
        """Yield the rows of every part, in the order of the rows of the tensor before transposition."""
        for expert in range(self.num_experts or 1):
            yield from self._rows_of_expert(expert if self.num_experts else -1)

    def _rows_of_expert(self, expert: int) -> Iterator[RowRange]:
        """Yield the rows of the parts of an expert; -1: of all parts."""
        parts, start, column = self._parts_of_expert(max(expert, 0)), 0, 0
        step = len(parts) if self.is_striped else 1
        for group in range(self.num_groups):
            for name, shape in parts:
                rows, rest = divmod(shape[0], self.num_groups)
                assert rest == 0, f"{self.name}: {shape[0]} rows of {name} in {self.num_groups} groups"
                place = Place(start, step, column, expert, self.is_transposed)
                yield RowRange(name, shape, group * rows, (group + 1) * rows, place)
                if self.has_columns:
                    column += shape[1]
                else:
                    start += 1 if self.is_striped else rows

    def _parts_of_expert(self, expert: int) -> tuple[tuple[str, Shape], ...]:
        count = len(self.parts) // (self.num_experts or 1)
        return self.parts[expert * count : (expert + 1) * count]

    @property
    def has_vocabulary(self) -> bool:
        """Whether there is a row for each token of the vocabulary."""
        return any(name in (EMBEDDING, HEAD) for name, _ in self.parts)

    @property
    def is_state(self) -> bool:
        """Whether it is state of a router, not a parameter: the bias of its choice."""
        return any(name.endswith(f".{EXPERT_BIAS}") for name, _ in self.parts)

    @property
    def joined_shape(self) -> Shape:
        """Shape before transposition, without the dim over experts."""
        if not self.parts:
            return (self.num_zeros,)
        shapes = [shape for _, shape in self._parts_of_expert(0)]
        if self.has_columns:
            return (shapes[0][0], sum(shape[1] for shape in shapes))
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def shape(self) -> Shape:
        """Shape in the file."""
        shape = self.joined_shape[::-1] if self.is_transposed else self.joined_shape
        return (self.num_experts, *shape) if self.num_experts else shape


def logical_shapes(arch: Architecture) -> dict[str, Shape]:
    """Return the shape of every logical tensor of the model, in the order of the forward pass.

    Biases of routers' choice come last.
    """
    mode = build_mode(next(iter(MODES)), None, (1,))
    shapes = {part.name: part.shape for spec in param_specs(arch, mode).values() for part in spec.parts}
    if arch.experts is None or not arch.experts.has_expert_bias:
        return shapes
    return shapes | {f"{name}.{EXPERT_BIAS}": (arch.experts.num_experts,) for name in router_names(arch)}


def file_tensors(arch: Architecture, model_type: str, stacks_experts: bool = False) -> tuple[FileTensor, ...]:
    """Return the tensors of a model's files, which together hold every logical tensor once.

    `stacks_experts`: those of all experts of a layer are one tensor, as in transformers' classes and few files.
    """
    logical = logical_shapes(arch)
    named = MODULES[model_type]
    has_files_apart = any("{e}" in theirs for theirs in named)
    modules = {**named, **(STACKED_EXPERTS if stacks_experts and has_files_apart else {})}
    found = tuple(_Table(arch, logical).tensors({name: ours for name, ours in modules.items() if ours is not None}))
    held = [part for tensor in found for part, _ in tensor.parts]
    assert sorted(held) == sorted(logical), f"not once: {set(held) ^ set(logical)}"
    return found


@dataclass(frozen=True)
class _Table:
    arch: Architecture
    logical: Logical

    def tensors(self, modules: Modules) -> Iterator[FileTensor]:
        inside = {theirs: ours for theirs, ours in modules.items() if "{n}" in theirs}
        position = list(modules).index(next(iter(inside)))
        outside = [item for item in modules.items() if item[0] not in inside]
        for theirs, ours in outside[:position]:
            yield from self.module(theirs, ours)
        for n in range(self.arch.num_layers):
            for theirs, ours in inside.items():
                yield from self.experts(theirs.replace("{n}", str(n)), _each(ours, "{n}", n))
        for k in range(self.arch.mtp_num_layers):
            yield from self.prediction_module(k, inside)
        for theirs, ours in outside[position:]:
            yield from self.module(theirs, ours)

    def prediction_module(self, k: int, inside: Modules) -> Iterator[FileTensor]:
        """Yield the tensors of a module of multi-token prediction, which is a layer after the last one."""
        place = str(self.arch.num_layers + k)
        for theirs, ours in MTP_MODULES.items():
            yield from self.module(f"{LAYER}{theirs}".replace("{n}", place), _each(ours, "{n}", k))
        for theirs, ours in inside.items():
            named = tuple(name.replace("layers.{n}.", f"mtp.{k}.layer.") for name in ours)
            yield from self.experts(theirs.replace("{n}", place), named)

    def experts(self, theirs: str, ours: tuple[str, ...]) -> Iterator[FileTensor]:
        """Yield the tensors of a module of a layer: where `{e}` is in its name, those of each expert."""
        num_experts = self.arch.experts.num_experts if self.arch.experts else 0
        if "{e}" not in ours[0]:
            yield from self.module(theirs, ours)
        elif "{e}" in theirs:
            for e in range(num_experts):
                yield from self.module(theirs.replace("{e}", str(e)), _each(ours, "{e}", e))
        elif num_experts:
            yield from self.stack(theirs, [name for e in range(num_experts) for name in _each(ours, "{e}", e)])

    def stack(self, theirs: str, ours: list[str]) -> Iterator[FileTensor]:
        """Yield weight and bias of all experts, each one tensor, if our layer has them."""
        for suffix, name in (("weight", theirs.rstrip("*~")), ("bias", f"{theirs.rstrip('*~')}_bias")):
            parts = tuple((f"{each}.{suffix}", self.logical.get(f"{each}.{suffix}", ())) for each in ours)
            if parts[0][0] in self.logical:
                is_transposed = "*" in theirs and suffix == "weight"
                count = self.arch.experts.num_experts if self.arch.experts else 0
                yield FileTensor(name, parts, is_transposed, num_experts=count, is_striped="~" in theirs)

    def module(self, theirs: str, ours: tuple[str, ...]) -> Iterator[FileTensor]:
        """Yield weight and bias of a module, if our model has them; the bias of a Conv1D is zero if it has none."""
        is_conv, has_columns = theirs.endswith("*"), theirs.endswith("=")
        num_groups = self.arch.num_attention_heads if theirs.endswith("%") else 1
        theirs, logical = theirs.rstrip("*%="), self.logical
        if ours[0] in logical:  # our bare parameter corresponds to a module, or a bare parameter, of theirs
            name = theirs.removesuffix("!") if theirs.endswith("!") else f"{theirs}.weight"
            yield FileTensor(name, ((ours[0], logical[ours[0]]),), is_transposed=False)
        for suffix in ("weight", "bias"):
            names = [f"{name}.{suffix}" for name in ours]
            if names[0] in logical:
                parts = tuple((name, logical[name]) for name in names)
                yield FileTensor(
                    f"{theirs}.{suffix}",
                    parts,
                    is_conv and suffix == "weight",
                    num_groups=num_groups,
                    has_columns=has_columns,
                )
            elif is_conv:
                num_zeros = sum(logical[f"{name}.weight"][0] for name in ours)
                yield FileTensor(f"{theirs}.{suffix}", (), is_transposed=False, num_zeros=num_zeros)


def _each(ours: tuple[str, ...], mark: str, index: int) -> tuple[str, ...]:
    return tuple(name.replace(mark, str(index)) for name in ours)


def strip_body_prefix(name: str, model_type: str) -> str:
    """Return the tensor's name in files of a model without head, such as those of the first GPT-2 models."""
    return name.removeprefix(MODEL_TYPES[model_type].body)
