"""Checkpoints: a damaged one is skipped; one with right checksums and hostile contents is refused, or harmless."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch
import xxhash
from pydantic_core import from_json, to_json

from megatron3d.checkpoint.compare import describe_differences, flatten, mean_pieces
from megatron3d.checkpoint.index import Index, Meta, read_index, read_meta
from megatron3d.checkpoint.pieces import Piece
from megatron3d.checkpoint.read import load_with_index
from megatron3d.checkpoint.store import save
from megatron3d.comm.objects import GroupObjects
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import Mesh
from tests.fuzz.runner import Files, Target
from tests.support.checkpoints import newest_intact

INDEX, BOXES = "run/iter_0000003/index.json", "run/iter_0000003/rank_00000.safetensors"
TENSORS = {
    "model.w": torch.arange(12.0).reshape(4, 3),
    "model.b": torch.arange(3, dtype=torch.bfloat16),
    "optimizer.exp_avg.w": torch.ones(4, 3, dtype=torch.float64),
}
META = Meta(
    model={"num_layers": 2, "norm_epsilon": 1e-5},
    identity={"train.seed": 1234, "corpus": [["sha", 1.0]]},
    iteration=3,
    consumed_samples=24,
    optimizer_steps=3.0,
    loss_scale={"scale": 65536.0, "growth_tracker": 2.0, "hysteresis_tracker": 2.0},
    cursors={"0": [0, 1, 2, 3, 4, 5, 6]},
)
WORDS = (
    *(
        b'"shape":',
        b'"dtype":',
        b'"boxes":',
        b'"box":',
        b'"file":',
        b'"key":',
        b'"checksum":',
        b'"meta":',
        b'"tensors":',
    ),
    *(
        b'"F32"',
        b'"F64"',
        b'"BF16"',
        b'"F4"',
        b'"F8_E8M0"',
        b'"C64"',
        b'"BOOL"',
        b'"data_offsets":',
        b'"__metadata__":',
    ),
    *(
        b"rank_00000.safetensors",
        b"rank_00001.safetensors",
        b"model.w[0:4,0:3]",
        b"float32",
        b"bfloat16",
        b"float4_e2m1fn_x2",
    ),
)


def write_checkpoint(folder: Path) -> None:
    """Save iteration 3 with rows of `model.w` in two boxes."""
    pieces = []
    for name, tensor in TENSORS.items():
        cuts = (0, 2, len(tensor)) if name == "model.w" else (0, len(tensor))
        for low, high in pairwise(cuts):
            box = ((low, high), *((0, size) for size in tensor.shape[1:]))
            pieces.append(Piece(name, tuple(tensor.shape), box, tensor[low:high]))
    save(folder / "run", 3, pieces, META.model_dump(), GroupObjects(Mesh((("data", 1),))))


def intact(folder: Path) -> Path:
    """Return the newest intact checkpoint; raises UserError with the reason why it was skipped."""
    found, skipped = newest_intact(folder / "run")
    if found is None:
        raise UserError(*[reason for _, reason in skipped] or ["no checkpoint"])
    return found


def load_tensors(path: Path, index: Index) -> dict[str, object]:
    """Load the known tensors whole."""
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in TENSORS.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in loaded.items()}
    pieces = [Piece(name, shapes[name], tuple((0, n) for n in shapes[name]), each) for name, each in loaded.items()]
    load_with_index(path, index, pieces)
    return {name: tensor.tolist() for name, tensor in loaded.items()}


def read_checkpoint(folder: Path) -> object:
    """Load a checkpoint as a run that resumes does."""
    path = intact(folder)
    index = read_index(path)
    return load_tensors(path, index), read_meta(path).model_dump_json(), index.iteration


def read_hostile(folder: Path) -> object:
    """Use a checkpoint in every way; raises AssertionError where impossible counters are accepted."""
    path = intact(folder)
    index, meta = read_index(path), read_meta(path)
    counters = (index.iteration, meta.iteration, meta.consumed_samples, meta.optimizer_steps)
    assert all(0 <= number < math.inf for number in counters), f"accepted {counters}"
    flatten(index)
    differing = [line for line in describe_differences(path, path) if "nan" not in line]
    assert not differing, f"a checkpoint differs from itself: {differing}"
    means = [piece.compute() for piece in mean_pieces([path, path]) if piece.compute]
    return len(means), load_tensors(path, index)


def seal_index(files: Files) -> Files:
    """Write the checksum of what the index has become, where it is JSON."""
    try:
        index = from_json(files[INDEX])
        index.pop("checksum", None)
        content = to_json(index, inf_nan_mode="constants")
    except (ValueError, AttributeError):
        return files
    index["checksum"] = xxhash.xxh3_64_hexdigest(content)
    return {**files, INDEX: to_json(index, inf_nan_mode="constants")}


TARGETS = (
    Target("checkpoint", write_checkpoint, read_checkpoint, WORDS, accepts=lambda one, other: one == other),
    Target("sealed_index", write_checkpoint, read_hostile, WORDS, (INDEX,), seal_index),
    Target("safetensors", write_checkpoint, read_checkpoint, WORDS, (BOXES,), accepts=lambda one, other: one == other),
)
