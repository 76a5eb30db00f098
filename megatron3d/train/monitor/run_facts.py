"""Table of the facts that a run prints at its start about kernels, communicators and its process.

A new fact is one more row: a function of the state, or a name and a text in `Runtime.settings` where it is known only
when the process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from megatron3d.analysis.memory_model.transient_peaks import chunk_rows
from megatron3d.hardware.apex import describe_apex
from megatron3d.hardware.sdpa_backends import describe_attention
from megatron3d.model.layer_kinds import has_window
from megatron3d.model.layers import is_opaque
from megatron3d.ops.cross_entropy import LOSS_KERNEL_NAMES, loss_kernel
from megatron3d.ops.gemm import onednn_gemms
from megatron3d.ops.packed_attention import choose
from megatron3d.train.monitor.oom_report import job_of
from megatron3d.train.state import TrainState

# Returns `name: text` of this rank; None leaves the row out.
Fact = Callable[[TrainState], str | None]


def describe_gemms(state: TrainState) -> str | None:
    """Describe which library multiplies in fp32 on a CPU."""
    whole = state.buffers.flat_buffers[0].params
    if whole.device.type != "cpu" or whole.dtype != torch.float32:
        return None
    return f"GEMMs by oneDNN instead of MKL on this CPU: {onednn_gemms(whole.device, whole.dtype)}"


def describe_attention_kernel(state: TrainState) -> str:
    """Describe the attention kernels of this rank."""
    arch, whole = state.model.arch, state.buffers.flat_buffers[0].params
    work = job_of(state.spec, whole.device).local
    heads = work.num_queries, work.num_groups, arch.kv_channels
    q, k = (whole.new_empty((1, n, 1, arch.kv_channels)) for n in heads[:2])
    by_pairs = state.spec.config.data.reset_attention_mask or has_window(arch) or not arch.has_vanilla_softmax
    packed = choose(q, k, arch.attention_softcap).name if by_pairs else None
    return describe_attention(whole.device, whole.dtype, heads, arch.seq_length, arch.attention_dropout, packed)


def describe_context(state: TrainState) -> str | None:
    """Describe how sequences are split over context ranks, if they are."""
    model, ranks = state.model, state.spec.sizes.context
    if ranks == 1:
        return None
    chunks = ", ".join(f"{low:,} to {high - 1:,}" for low, high in model.order.chunks(model.arch.seq_length))
    by_documents = f"1/{ranks} of the positions, by the documents of each sequence"
    held = by_documents if model.order.by_documents else f"positions {chunks}"
    exchange = state.spec.config.parallel.cp_comm_type
    return f"context: {ranks} ranks, of which this one has {held}; keys and values by {exchange}"


def describe_loss(state: TrainState) -> str:
    """Describe the kernel and the chunks of the loss."""
    whole = state.buffers.flat_buffers[0].params
    rows, ranks = chunk_rows(job_of(state.spec, whole.device))
    kernel = LOSS_KERNEL_NAMES[loss_kernel(whole.is_cuda, whole.dtype)]
    return f"loss: {kernel}, in chunks of {rows * ranks:,} tokens"


def describe_compilation(state: TrainState) -> str:
    """Describe whether layers are compiled, why, and which of their modules split the graph."""
    setting, device = state.spec.config.train.compile, state.buffers.flat_buffers[0].params.device
    why = f"train.compile={str(setting).lower()}"
    if not state.spec.compiles(on_gpu=device.type != "cpu"):
        return f"layers: not compiled ({why}{' on a CPU' if setting == 'auto' else ''})"
    layers, packs = state.model.layers.values(), state.spec.config.data.reset_attention_mask
    eager = sorted({type(m).__name__ for layer in layers for m in layer.modules() if is_opaque(m, packs)})
    parts = f"in parts between {', '.join(eager)}, which stay eager" if eager else "each as one graph"
    return f"layers: compiled {parts} ({why}), in the first step"


def describe_installed_apex(state: TrainState) -> str | None:
    """Describe the installed apex if the configuration asks for its kernels."""
    config = state.spec.config
    is_asked = "apex" in (config.optimizer.adam_implementation, config.train.norm_implementation)
    return describe_apex() if is_asked else None


def describe_communicators(state: TrainState) -> str | None:
    """Describe the groups and links of this rank, each with its number of ranks."""
    parallel = state.spec.parallel_state
    mesh = parallel.mesh
    if mesh.world_size == 1:
        return None
    sets = dict.fromkeys(mesh.nontrivial(mesh.in_order(axes)) for axes in parallel.group_axes)
    groups = [f"{' x '.join(axes)} of {mesh.size(axes)}" for axes in sets if axes]
    links = sum(mesh.coord(link.axis) in link.ends for link in parallel.links)
    ends = f", and {links} point-to-point link{'s' * (links > 1)}" if links else ""
    return f"communicators of rank {mesh.rank}: {', '.join(groups) or 'none'}{ends}"


def describe_buckets(state: TrainState) -> str | None:
    """Describe the buckets of gradients that this rank reduces over data-parallel ranks."""
    flats, sizes = state.buffers.flat_buffers, state.spec.sizes
    ranks = sizes.data * sizes.context
    if ranks == 1:
        return None
    train, device = state.spec.config.train, flats[0].params.device
    least = state.spec.bucket_bytes(on_gpu=device.type != "cpu") / 2**20
    why = "the default" if train.bucket_mb is None else "train.bucket_mb"
    size = "one per FSDP unit" if state.spec.sharding.params else f"of at least {least:,.4g} MiB ({why})"
    what = "data-parallel and context ranks" if sizes.context > 1 else "data-parallel ranks"
    return f"gradient buckets of rank {state.spec.rank}: {len(flats)}, {size}, over {ranks} {what}"


# In the order of the report.
FACTS: tuple[Fact, ...] = (
    describe_gemms,
    describe_attention_kernel,
    describe_context,
    describe_loss,
    describe_compilation,
    describe_installed_apex,
    describe_communicators,
    describe_buckets,
)


def run_facts(state: TrainState, settings: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each fact of the table that holds here, then for each setting of the process."""
    yield from (line for line in (fact(state) for fact in FACTS) if line is not None)
    yield from (f"{name}: {text}" for name, text in settings.items())
