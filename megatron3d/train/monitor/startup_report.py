"""Startup report, and the check that the built model has the configured number of layers and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron3d.analysis.cost_model.forecast import forecast
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.analysis.memory_model.table import memory_table, stage_table
from megatron3d.checkpoint.param_pieces import ranges_to_write
from megatron3d.hardware.peaks import Peak, describe_peak
from megatron3d.model.architecture import GATED
from megatron3d.model.flops import flops_per_token, num_parameters
from megatron3d.parallel.logical_views import part_views
from megatron3d.train.monitor.oom_report import job_of
from megatron3d.train.monitor.run_facts import run_facts
from megatron3d.train.state import TrainState


def check_built(state: TrainState) -> None:
    """Count layers and parameters over all ranks; raise RuntimeError if the configuration has other numbers."""
    model, mesh = state.model, state.model.comm.mesh
    mine = ranges_to_write(state.buffers)
    held = 0
    for name, start, values in state.buffers.shards("main"):
        _, spec, low, high = mine[name]
        views = part_views(spec, values[low - start : high - start], mesh, low)
        held += sum(view.numel() for _, _, view in views)
    is_first = all(mesh.coord(axis) == 0 for axis in mesh.names if axis != "pipeline")
    gathered = model.comm.gather_object((held, len(model.layers) * is_first))
    expected = num_parameters(model.arch), model.arch.num_layers
    found = gathered and tuple(map(sum, zip(*gathered, strict=True)))
    if found and found != expected:
        raise RuntimeError(
            f"the built model has {found[0]:,} parameters in {found[1]} layers, "
            f"the configuration has {expected[0]:,} in {expected[1]}"
        )


def describe_connections(seconds: Sequence[tuple[str, float]]) -> str:
    """Return the line on the communicators of rank 0, given the name of each and the seconds until it was connected."""
    total = sum(each for _, each in seconds)
    shown = ", ".join(f"{name} {each:.2f}" for name, each in seconds)
    return f"> {len(seconds)} communicators of rank 0 connected in {total:.2f} s: {shown}"


def startup_report(state: TrainState, peak: Peak | None, settings: Mapping[str, str]) -> str:
    """Return lines on the model, its kernels, stages, estimated memory and step time, and the peak used for MFU.

    Args:
        settings: what the process was set up with (`Runtime.settings`).
    """
    return "\n".join(f"> {line}" for line in _lines(state, peak, settings))


def describe_documents(documents: Sequence[Sequence[int]], local: LocalSizes) -> str:
    """Return the line about the documents by which predictions count attention."""
    count = sum(len(starts) + 1 for starts in documents)
    tokens, sequences = len(documents) * local.arch.seq_length / count, "sequence" + "s" * (len(documents) > 1)
    return (
        f"documents: {tokens:,.0f} tokens on average in {len(documents)} typical {sequences}; attention multiplies "
        f"{100 * local.seen_share:.3g} % of the causal pairs"
    )


def _lines(state: TrainState, peak: Peak | None, settings: Mapping[str, str]) -> Iterator[str]:
    spec, flats = state.spec, state.buffers.flat_buffers
    arch, whole = spec.arch, flats[0].params
    job, config = job_of(spec, whole.device), spec.config
    groups = "" if arch.num_query_groups == arch.num_attention_heads else f" ({arch.num_query_groups} key/value groups)"
    gate = " gated" if arch.activation in GATED else ""
    yield (
        f"model: {arch.num_layers} layers, hidden {arch.hidden_size}, {arch.num_attention_heads} heads{groups}, "
        f"ffn {arch.ffn_hidden_size}{gate}, length {arch.seq_length}, vocabulary {arch.vocab_size} "
        f"padded to {arch.padded_vocab_size}"
    )
    local = sum(high - low for flat in flats for low, high in flat.spans.values())
    yield f"parameters: {num_parameters(arch):,} in the model, counted over all ranks; {local:,} on rank 0"
    parts = {name: sum(flat.nbytes[name] for flat in flats) for name in ("weights", "gradients")}
    parts["optimizer"] = state.optimizer.num_bytes
    shown = " + ".join(f"{name} {value / 2**20:,.1f}" for name, value in parts.items())
    yield f"memory of rank 0 before activations: {sum(parts.values()) / 2**20:,.1f} MiB = {shown}"
    yield f"model FLOPs: {flops_per_token(arch):,} per token, forward and backward"
    if (documents := job.local.documents) is not None:
        yield describe_documents(documents, job.local)
    yield from run_facts(state, settings)
    if job.pipeline.num_ranks > 1:
        yield from ("pipeline stages:", *stage_table(job))
    yield from ("estimated memory:", *memory_table(job))
    expected = forecast(spec, whole.device.type == "cpu")
    yield expected if isinstance(expected, str) else expected.line()
    yield describe_peak(peak, whole.device, config.train.precision)
