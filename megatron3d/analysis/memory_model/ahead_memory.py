"""Activations that the modules of multi-token prediction keep from forward to backward of a microbatch.

module   embedding | two norms and linears | layer | norm, LM head
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.analysis.memory_model.activations import (
    dropout_mask,
    embedding_activations,
    head_activations,
    layer_activations,
    norm_tensors,
)
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.analysis.memory_model.mlp_activations import KeptTensor
from megatron3d.model.linears import MTP_LINEARS
from megatron3d.model.stages import Stage


def num_ahead(local: LocalSizes, stage: Stage) -> int:
    """Return the modules of multi-token prediction in a stage."""
    return local.arch.mtp_num_layers if stage.has_head else 0


def ahead_activations(local: LocalSizes) -> tuple[KeptTensor, ...]:
    """Return what multi-token prediction keeps: for each module embedding, two norms and linears, layer, and head.

    With full recomputation a module keeps its two inputs only.
    """
    return local.arch.mtp_num_layers * tuple(_module_ahead(local))


def _module_ahead(local: LocalSizes) -> Iterator[KeptTensor]:
    yield embedding_activations(local)[0]
    if local.recompute.recomputes_ahead:
        for what in ("hidden state", "embedding"):
            yield KeptTensor("mtp", what, local.residual)
        yield head_activations(local)[-1]
        return
    yield from dropout_mask(local, "embedding_dropout")
    for site, linear in zip(("hidden_norm", "embedding_norm"), MTP_LINEARS, strict=True):
        yield from norm_tensors(local, site, local.tokens, local.hidden, local.splits_features)
        yield KeptTensor(linear, "input", local.residual)
    yield from layer_activations(local.layer_ahead)
    yield from head_activations(local)
