"""Activations that latent attention keeps between its up projections and its output projection."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.analysis.memory_model.mlp_activations import KeptTensor
from megatron3d.model.linears import DOWN, KV_UP, Q_UP
from megatron3d.model.recompute_spec import MLA_UP_PROJ


def latent_projections(local: LocalSizes) -> Iterator[KeptTensor]:
    """Yield the inputs of the attention core, which are kept where it is recomputed; or of the up projections."""
    if not local.recompute.recomputes(MLA_UP_PROJ):
        yield KeptTensor(Q_UP, "output", local.inner(local.num_queries * local.arch.key_size))
        yield _kv_up_output(local)
    yield KeptTensor(DOWN, "rotary key", local.inner(local.arch.qk_pos_emb_head_dim))


def latent_path(local: LocalSizes, name: str, count: int) -> Iterator[KeptTensor]:
    """Yield q, k or v as attention sees it: values of full size are a view of their projection."""
    if name == "v" and local.arch.value_size == local.arch.kv_channels:
        yield _kv_up_output(local)
    else:
        yield KeptTensor("attention.core", f"{name} of one size", local.inner(count * local.arch.kv_channels))


def uncut_output(local: LocalSizes) -> Iterator[KeptTensor]:
    """Yield attention's output where its heads are larger than those of the output projection's input."""
    if local.arch.value_size < local.arch.kv_channels:
        width = local.num_queries * local.arch.kv_channels
        yield KeptTensor("attention.core", "output before its cut", local.inner(width))


def _kv_up_output(local: LocalSizes) -> KeptTensor:
    width = local.arch.qk_head_dim + local.arch.value_size
    return KeptTensor(KV_UP, "output", local.inner(local.num_queries * width))
