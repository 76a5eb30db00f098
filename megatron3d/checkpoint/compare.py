"""Comparison and averaging of checkpoints, box by box, for any layouts that wrote them.

Needs memory for three copies of one box.  Averaging the last checkpoints of a run: Izmailov et al. 2018,
arXiv:1803.05407.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron3d.checkpoint.index import Index, StoredTensor, read_index
from megatron3d.checkpoint.pieces import Piece
from megatron3d.checkpoint.read import load_with_index
from megatron3d.errors import UserError
from megatron3d.parallel.layout import Box, Shape, box_shape

WEIGHTS = "model."
# Metadata that checkpoints must share to be averaged.
SHARED = ("model", "identity.tokenizer")


def describe_differences(first: Path, second: Path) -> Iterator[str]:
    """Yield one line per difference of the second checkpoint from the first: metadata, then tensors."""
    one, other = read_index(first), read_index(second)
    facts, others = flatten(one), flatten(other)
    for name in sorted(facts.keys() | others.keys()):
        if facts.get(name) != others.get(name):
            yield f"{name}: {facts.get(name)} -> {others.get(name)}"
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        mine, its = one.tensors.get(name), other.tensors.get(name)
        if mine is None or its is None:
            yield f"{name}: only in the {'first' if its is None else 'second'}"
        elif (mine.shape, mine.dtype) != (its.shape, its.dtype):
            yield f"{name}: {list(mine.shape)} {mine.dtype} -> {list(its.shape)} {its.dtype}"
        elif found := _difference(name, mine, (first, one), (second, other)):
            yield found


def flatten(index: Index) -> dict[str, object]:
    """Return the metadata of an index by dotted name."""

    def inside(prefix: str, value: object) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict):
            for key, each in value.items():
                yield from inside(f"{prefix}{key}.", each)
        else:
            yield prefix[:-1], value

    return {"iteration": index.iteration} | dict(inside("", index.meta))


def _difference(name: str, tensor: StoredTensor, one: tuple[Path, Index], other: tuple[Path, Index]) -> str | None:
    """Describe the largest difference of a tensor over all boxes; two NaNs count as equal."""
    num_different, largest = 0, 0.0
    scale = 0.0
    for stored in tensor.boxes:
        a, b = (read_box(path, index, name, stored.box) for path, index in (one, other))
        different = (a != b) & ~(a.isnan() & b.isnan())
        num_different += int(different.sum())
        if different.any():
            largest = max(largest, float((a - b)[different].abs().max()))
        scale = max(scale, float(a.abs().max()))
    if not num_different:
        return None
    share = largest / scale if scale else float("inf")
    return f"{name}: {num_different} elements differ by at most {largest:.3g}, {share:.1e} of the largest"


def read_box(path: Path, index: Index, name: str, box: Box) -> Tensor:
    """Read a box of a tensor as float64."""
    shape: Shape = index.tensors[name].shape
    _check_sizes(path, index, name)
    values = torch.empty(box_shape(box), dtype=torch.float64)
    load_with_index(path, index, [Piece(name, shape, box, values)])
    return values


def _check_sizes(path: Path, index: Index, name: str) -> None:
    """Raise UserError where the boxes of a tensor are larger than their files, before memory is allocated for it."""
    for stored in index.tensors[name].boxes:
        file = path / stored.file
        size = file.stat().st_size if file.is_file() else 0
        if torch.Size(box_shape(stored.box)).numel() > size:
            raise UserError(f"checkpoint {path}: {stored.file} is missing or damaged: it is shorter than {stored.key}")


def mean_pieces(paths: Sequence[Path]) -> Iterator[Piece]:
    """Yield the mean of the weights in the first checkpoint's dtype; each box is computed when it is written.

    Raises UserError with all differences between the models.
    """
    indexes = [read_index(path) for path in paths]
    UserError.collect(_model_differences(paths, indexes))
    for name, tensor in indexes[0].tensors.items():
        dtype = getattr(torch, tensor.dtype, None)
        if not name.startswith(WEIGHTS) or not isinstance(dtype, torch.dtype):
            continue
        for stored in tensor.boxes:

            def mean(name: str = name, box: Box = stored.box, dtype: torch.dtype = dtype) -> Tensor:
                total = read_box(paths[0], indexes[0], name, box)
                for path, index in zip(paths[1:], indexes[1:], strict=True):
                    total += read_box(path, index, name, box)
                return (total / len(paths)).to(dtype)

            like = torch.empty(box_shape(stored.box), dtype=dtype, device="meta")
            yield Piece(name, tensor.shape, stored.box, like, mean)


def _model_differences(paths: Sequence[Path], indexes: Sequence[Index]) -> Iterator[str]:
    """Yield why the checkpoints are not of the same model."""
    facts = [_shared_facts(index) for index in indexes]
    for path, other in zip(paths[1:], facts[1:], strict=True):
        for name in sorted(facts[0].keys() | other.keys()):
            if facts[0].get(name) != other.get(name):
                yield (
                    f"{path} has {name}={other.get(name)}, but {paths[0]} has {facts[0].get(name)}; "
                    "average checkpoints of one model"
                )


def _shared_facts(index: Index) -> dict[str, object]:
    shapes = {name: list(tensor.shape) for name, tensor in index.tensors.items() if name.startswith(WEIGHTS)}
    facts = {name: value for name, value in flatten(index).items() if name.startswith(SHARED)}
    return {**facts, **shapes}
