"""Compare the logits of a checkpoint and of a Hugging Face folder, on stored inputs, with weights rounded alike.

Our GPT runs as a pipeline of one layer per stage, one stage after another in this process, and both models with at most
8192 rows of the vocabulary's matrices, so that memory holds about 10 bytes per parameter of one layer, whatever the
model's size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron3d.checkpoint.index import Index
from megatron3d.checkpoint.pieces import Piece, param_pieces
from megatron3d.checkpoint.read import load_with_index
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.convert.fields import HubConfig
from megatron3d.convert.reference_models import REFERENCE_LOGITS, Weights
from megatron3d.model.gpt import GPT
from megatron3d.model.param_spec import EMBEDDING, HEAD
from megatron3d.model.spec import EXPERT_BIAS, Architecture
from megatron3d.model.stage_plan import Stage, StageAssignment, make_stages
from megatron3d.ops.plan import LossChunk
from megatron3d.parallel.mesh import DATA, PIPELINE, Mesh
from megatron3d.parallel.modes import MODES, build_mode

NUM_SEQUENCES, MAX_POSITIONS = 2, 24
# Rows of the vocabulary's matrices that are compared: with more, those of the inputs, and others evenly spread.
MAX_ROWS = 8192
VOCABULARY = (f"model.{EMBEDDING}", f"model.{HEAD}")
# Relative to the largest logit; transformers normalizes and rotates in fp32 in every precision.
PLAIN_TOLERANCE, TRANSFORMERS_TOLERANCE = 1e-9, 1e-4


@dataclass(frozen=True)
class LogitComparison:
    """Largest difference between the logits of two models; conversion.json stores these fields."""

    witness: str
    largest_difference: float
    largest_logit: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the logits are equal up to rounding."""
        return self.largest_difference <= self.tolerance * self.largest_logit

    def __str__(self) -> str:
        return (
            f"against {self.witness}: largest difference {self.largest_difference:.1e} of a largest logit "
            f"{self.largest_logit:.3g} (at most {self.tolerance:.0e} of it)"
        )


def stored_inputs(vocab_size: int, max_positions: int) -> Tensor:
    """Return tokens [B, S] that depend on the vocabulary size only, including its first and last token."""
    shape = NUM_SEQUENCES, min(MAX_POSITIONS, max_positions)
    tokens = np.random.default_rng(1234).integers(vocab_size, size=shape)
    tokens[0, 0], tokens[-1, 0] = 0, vocab_size - 1
    return torch.from_numpy(tokens)


def compared_rows(vocab_size: int, tokens_BS: Tensor) -> Tensor:
    """Return the ids of the tokens whose logits are compared, sorted: all, or `MAX_ROWS` and those of the inputs."""
    spread = torch.linspace(0, vocab_size - 1, min(vocab_size, MAX_ROWS), dtype=torch.float64).long()
    rows: Tensor = torch.cat((spread, tokens_BS.flatten())).unique()
    return rows


@torch.no_grad()
def our_logits(
    checkpoint: Path, index: Index, arch: Architecture, rounded: torch.dtype, tokens_BS: Tensor, rows_V: Tensor
) -> Tensor:
    """Return the logits [B, S, V] of our GPT in float64, its weights rounded to a dtype first.

    Args:
        tokens_BS: tokens of the model's vocabulary `rows_V`, by their places there.
        rows_V: ids in the vocabulary of the checkpoint.
    """
    num_stages = arch.num_layers
    pipeline = StageAssignment(make_stages([1] * num_stages), tuple(range(num_stages)))
    mode = build_mode(next(iter(MODES)), None, (1,))
    axes = ((PIPELINE, num_stages), *((axis, 1) for axis in DATA), *mode.axes)
    # Rotary positions that depend on the length of the model's sequences are those of these inputs, as in transformers.
    small = replace(arch, vocab_size=len(rows_V), padded_vocab_size=len(rows_V), seq_length=tokens_BS.shape[1])

    def run(stage: Stage, x_MH: Tensor | None) -> Tensor:
        """Return the output of a stage, whose weights are in memory only meanwhile."""
        comm = ProcessComm(Mesh(axes, stage.index), ())
        model = GPT(small, mode, comm, pipeline, LossChunk(1)).to_empty(device="cpu").double()
        pieces = [
            piece
            for name, param in model.named_parameters()
            for piece in param_pieces("model", model.specs[name], param.data.fill_(0.0), comm.mesh)
        ]
        model.routers.allocate(torch.device("cpu"))
        pieces += [
            Piece(f"model.{name}.{table}", tuple(bias_E.shape), ((0, len(bias_E)),), bias_E)
            for name, table, bias_E in model.routers.rows()
            if table == EXPERT_BIAS
        ]
        parts = [part for piece in pieces for part in _rows_of_vocabulary(piece, arch, rows_V)]
        load_with_index(checkpoint, index, parts)
        for param in model.parameters():
            param.data.copy_(param.to(rounded))
        y_MH: Tensor = model(stage, x_MH, model.begin_sampling(tokens_BS))
        return y_MH

    x_MH: Tensor | None = None
    for stage in pipeline.stages:
        x_MH = run(stage, x_MH)
    assert x_MH is not None, "a model has a layer"
    return x_MH


def _rows_of_vocabulary(piece: Piece, arch: Architecture, rows_V: Tensor) -> Iterator[Piece]:
    """Yield a piece of a model whose vocabulary is `rows_V` as pieces of runs of rows of the whole vocabulary."""
    if piece.name not in VOCABULARY or len(rows_V) == arch.vocab_size:
        yield piece
        return
    first = 0
    for end in [*(torch.nonzero(rows_V.diff() > 1).flatten() + 1).tolist(), len(rows_V)]:
        low = int(rows_V[first])
        box = ((low, low + end - first), *piece.box[1:])
        yield Piece(piece.name, (arch.vocab_size, *piece.shape[1:]), box, piece.tensor[first:end])
        first = end


@torch.no_grad()
def compare(
    ours_BSV: Tensor, hf: HubConfig, weights: Weights, rounded: torch.dtype, tokens_BS: Tensor
) -> LogitComparison:
    """Compare our logits with a reference forward in float64 of a file's tensors, rounded to a dtype."""
    theirs = REFERENCE_LOGITS[str(hf["model_type"])](hf, lambda name: weights(name).to(rounded).double(), tokens_BS)
    return _agreement("a plain forward of the files' tensors in float64", ours_BSV, theirs, PLAIN_TOLERANCE)


def has_transformers() -> bool:
    """Return whether the transformers package is installed."""
    return importlib.util.find_spec("transformers") is not None


@torch.no_grad()
def compare_transformers(
    ours_BSV: Tensor,
    folder: Path,
    rounded: torch.dtype,
    tokens_BS: Tensor,
    rows_V: Tensor,
    *,
    class_name: str,
    has_experts: bool = False,
) -> LogitComparison:
    """Compare our logits with those of transformers' class of a folder; the whole model is in memory.

    It is in fp32, with experts in fp64: rounding changes which experts a token is sent to, and then its logits.
    """
    import transformers

    wide = torch.float64 if has_experts else torch.float32
    # Its other ways to compute experts know no fp64; before version 5 there was one.
    eager = (
        {"experts_implementation": "eager"}
        if has_experts and int(transformers.__version__.partition(".")[0]) >= 5
        else {}
    )
    kind: Any = getattr(transformers, class_name)
    described = kind.config_class  # also where the folder names another model type
    config = described.from_pretrained(folder, local_files_only=True, model_type=described.model_type)
    model = kind.from_pretrained(folder, config=config, local_files_only=True, dtype=wide, **eager)
    for stored in model.state_dict().values():  # not the rotary frequencies, which are computed and never rounded
        stored.copy_(stored.to(rounded))
    text = getattr(model, "language_model", None)
    if hasattr(text, "lm_head"):  # Llama 4's whole model fails without images
        model = text
    theirs = model.eval()(tokens_BS, use_cache=False).logits.double()[..., rows_V]
    name = "fp64" if has_experts else "fp32"
    return _agreement(f"transformers {transformers.__version__} in {name}", ours_BSV, theirs, TRANSFORMERS_TOLERANCE)


def _agreement(witness: str, ours: Tensor, theirs: Tensor, tolerance: float) -> LogitComparison:
    assert ours.shape == theirs.shape, f"logits are {ours.shape} and {theirs.shape}"
    return LogitComparison(witness, (ours - theirs).abs().max().item(), theirs.abs().max().item(), tolerance)
