"""What a run prints at its start about kernels, communicators and its process, and the `start` line of metrics.jsonl.

A new fact is one more row: a function of the state, or a name and a text in `Runtime.settings` where it is known only
when the process starts.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from shlex import quote
from typing import Any

import torch

from megatron3d import __version__
from megatron3d.attention.packed import choose
from megatron3d.attention.pairs import kernel_name
from megatron3d.comm.interface import Comm
from megatron3d.config.run_spec import RunSpec
from megatron3d.experts.grouped_matmul import grouped_gemm_name
from megatron3d.forecast.memory.rank import rank_memory
from megatron3d.forecast.memory.step_spec import StepSpec, make_step_spec
from megatron3d.forecast.memory.suggestions import suggest
from megatron3d.forecast.memory.table import memory_table, stage_summaries, stage_table
from megatron3d.forecast.time.forecast import Forecast, forecast
from megatron3d.hardware.apex import describe_apex
from megatron3d.hardware.devices import Peak, describe_attention, describe_peak
from megatron3d.linear.gemm import onednn_gemms
from megatron3d.linear.scaled_mm import describe_fp8, gemm_device, kernel_on
from megatron3d.metrics.step_record import StepWork
from megatron3d.model.experts import ExpertLinear
from megatron3d.model.layers import is_opaque
from megatron3d.model.linear_spec import flops_per_token, num_active_parameters, num_parameters
from megatron3d.model.local_sizes import KERNELS, LocalSizes
from megatron3d.model.router_state import is_first
from megatron3d.model.spec import GATED, has_window
from megatron3d.ops.cross_entropy import LOSS_KERNEL_NAMES, loss_kernel
from megatron3d.parallel.mesh import PIPELINE
from megatron3d.parallel.parallel_state import ParallelState
from megatron3d.train.monitor.tensor_stats import written_tensors
from megatron3d.train.run import Run
from megatron3d.train.state import TrainState

# Messages of the RuntimeError that torch's CPU allocator raises.
_CPU_MESSAGES = ("can't allocate memory", "not enough memory")


def job_of(spec: RunSpec, device: torch.device) -> StepSpec:
    """Return the description of this rank's step from which its memory is estimated."""
    kernels = KERNELS["cpu" if device.type == "cpu" else "gpu"]
    if spec.fp8 is not None:
        kernel = kernel_on(gemm_device(device), spec.fp8.recipe_name) if spec.config.train.precision == "bf16" else None
        kernels = replace(kernels, multiplies_fp8=kernel is not None)
    return make_step_spec(spec, kernels)


def max_by_pipeline_rank(state: ParallelState, comm: Comm, num_bytes: int) -> list[int]:
    """Return the largest `num_bytes` among the ranks of each pipeline rank, on rank 0; an empty list elsewhere."""
    gathered = comm.gather_object((state.pipeline_parallel_rank, num_bytes)) or []
    ranks = range(state.pipeline_parallel_size if gathered else 0)
    return [max(held for coord, held in gathered if coord == rank) for rank in ranks]


@contextlib.contextmanager
def oom_report(job: StepSpec) -> Iterator[None]:
    """Turn an out-of-memory error of the body into a RuntimeError with the report."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_named = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_named and not any(text in str(error) for text in _CPU_MESSAGES):
            raise
        changes = [f"    {change}" for change in suggest(job)] or ["    a smaller model, or more ranks"]
        lines = ["out of memory. Estimated memory of each pipeline rank:", *memory_table(job)]
        raise RuntimeError("\n".join([*lines, "Changes that need less, cheapest first:", *changes])) from error


# Returns `name: text` of this rank; None leaves the row out.
Fact = Callable[[TrainState], str | None]


def describe_gemms(state: TrainState) -> str | None:
    """Describe which library multiplies in fp32 on a CPU."""
    whole = state.model.like
    if whole.device.type != "cpu" or whole.dtype != torch.float32:
        return None
    return f"GEMMs by oneDNN instead of MKL on this CPU: {onednn_gemms(whole.device, whole.dtype)}"


def describe_fp8_linears(state: TrainState) -> str | None:
    """Describe the recipe of fp8, the kernels that multiply by it, and the linears that stay in precision."""
    fp8, train, whole = state.spec.fp8, state.spec.config.train, state.model.like
    if fp8 is None:
        return None
    layers = [f"layers {', '.join(map(str, sorted(fp8.wide_layers)))}"] if fp8.wide_layers else []
    kept = " and ".join([*layers, *fp8.wide])
    stay = f"; {kept} stay in {train.precision}" if kept else ""
    return f"{describe_fp8(fp8, gemm_device(whole.device), whole.dtype)}{stay}"


# Packages that multiply in fp8 in other frameworks, by the name of their distribution.
FP8_PACKAGES = {"torchao": "torchao", "transformer-engine": "Transformer Engine"}


def describe_fp8_packages(state: TrainState) -> str | None:
    """Name the installed packages for fp8, none of which is imported."""
    installed = []
    for distribution, name in FP8_PACKAGES.items():
        with contextlib.suppress(PackageNotFoundError):
            installed.append(f"{name} {version(distribution)}")
    return f"installed and not used: {', '.join(installed)}" if state.spec.fp8 and installed else None


def describe_attention_kernel(state: TrainState) -> str:
    """Describe the attention kernels of this rank."""
    arch, whole = state.model.arch, state.model.like
    work = job_of(state.spec, whole.device).local
    heads = work.num_queries, work.num_groups, arch.kv_channels
    q, k = (whole.new_empty((1, n, 1, arch.kv_channels)) for n in heads[:2])
    by_pairs = state.spec.config.data.reset_attention_mask or has_window(arch) or not arch.has_vanilla_softmax
    packed = choose(q, k, arch.attention_softcap).name if by_pairs else None
    return describe_attention(whole.device, whole.dtype, heads, arch.seq_length, arch.attention_dropout, packed)


def describe_experts(state: TrainState) -> str | None:
    """Describe how this rank multiplies the rows of experts, if it has any."""
    linears = [module for module in state.model.modules() if isinstance(module, ExpertLinear)]
    if not linears:
        return None
    weights = [each.matmul.by_expert(each.weight) for each in linears]
    pairs = zip(linears, weights, strict=True)
    names = (grouped_gemm_name(w.new_empty((1, w.shape[2])), w, each.matmul.gemm) for each, w in pairs)
    return f"experts: {'; '.join(dict.fromkeys(names))}"


def describe_context(state: TrainState) -> str | None:
    """Describe how sequences are split over context ranks, if they are."""
    model, ranks = state.model, state.spec.sizes.context
    if ranks == 1:
        return None
    chunks = ", ".join(f"{low:,} to {high - 1:,}" for low, high in model.order.chunks(model.arch.seq_length))
    by_documents = f"1/{ranks} of the positions, by the documents of each sequence"
    held = by_documents if model.order.by_documents else f"positions {chunks}"
    exchange, arch = state.spec.config.parallel.cp_comm_type, model.arch
    q = state.model.like.new_empty((1, 1, 1, arch.kv_channels))
    kernel = kernel_name(q, arch.attention_softcap, arch.attention_dropout)
    what = f"{ranks} ranks, of which this one has {held}; keys and values by {exchange}"
    return f"context: {what}; pairs of rows by {kernel}"


def describe_loss(state: TrainState) -> str:
    """Describe the kernel and the chunks of the loss."""
    whole = state.model.like
    rows, ranks = job_of(state.spec, whole.device).local.chunk_rows
    kernel = LOSS_KERNEL_NAMES[loss_kernel(whole.is_cuda, whole.dtype)]
    return f"loss: {kernel}, in chunks of {rows * ranks:,} tokens"


def describe_compilation(state: TrainState) -> str:
    """Describe whether layers are compiled, why, and which of their modules split the graph."""
    setting, device = state.spec.config.train.compile, state.model.like.device
    why = f"train.compile={str(setting).lower()}"
    if not state.spec.compiles(on_gpu=device.type != "cpu"):
        unfit = " where norms are recomputed, logits of attention recorded, or elements in fp8 counted"
        where = " on a CPU" if device.type == "cpu" else unfit
        return f"layers: not compiled ({why}{where if setting == 'auto' else ''})"
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
    train, device = state.spec.config.train, state.model.like.device
    least = state.spec.bucket_bytes(on_gpu=device.type != "cpu") / 2**20
    why = "the default" if train.bucket_mb is None else "train.bucket_mb"
    size = "one per FSDP unit" if state.spec.sharding.params else f"of at least {least:,.4g} MiB ({why})"
    what = "data-parallel and context ranks" if sizes.context > 1 else "data-parallel ranks"
    return f"gradient buckets of rank {state.spec.rank}: {len(flats)}, {size}, over {ranks} {what}"


# In the order of the report.
FACTS: tuple[Fact, ...] = (
    describe_gemms,
    describe_fp8_linears,
    describe_fp8_packages,
    describe_attention_kernel,
    describe_experts,
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


def check_built(state: TrainState) -> None:
    """Count layers and parameters over all ranks; raise RuntimeError if the configuration has other numbers."""
    model = state.model
    held = sum(values.numel() for _, values in written_tensors(state.buffers, "main"))
    gathered = model.comm.gather_object((held, len(model.layers) * is_first(model.comm.mesh)))
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
    arch, whole = spec.arch, state.model.like
    job, config = job_of(spec, whole.device), spec.config
    groups = "" if arch.num_query_groups == arch.num_attention_heads else f" ({arch.num_query_groups} key/value groups)"
    gate = " gated" if arch.activation in GATED else ""
    yield (
        f"model: {arch.num_layers} layers, hidden {arch.hidden_size}, {arch.num_attention_heads} heads{groups}, "
        f"ffn {arch.ffn_hidden_size}{gate}, length {arch.seq_length}, vocabulary {arch.vocab_size} "
        f"padded to {arch.padded_vocab_size}"
    )
    local = sum(high - low for flat in flats for low, high in flat.spans.values())
    active = f" ({num_active_parameters(arch):,} active for a token)" if arch.experts else ""
    yield f"parameters: {num_parameters(arch):,} in the model{active}, counted over all ranks; {local:,} on rank 0"
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
    yield describe_peak(peak, whole.device, config.train.precision, spec.fp8 is not None)


def report_end(run: Run) -> Iterator[str]:
    """Yield what a run says when it has ended: where it is, what to do with it, and how to go on."""
    iteration, last = run.state.iteration, run.spec.train_iters
    load, save = run.config.checkpoint.load, run.config.checkpoint.save
    how = "complete" if iteration == last else "stopped"
    if save is None:
        yield f"{how} at iteration {iteration} of {last}; nothing was saved, since there is no checkpoint.save"
        return
    yield f"{how} at iteration {iteration} of {last}, saved in {save}"
    samples = run.config.train.train_samples
    longer = f"train.train_iters={2 * last}" if samples is None else f"train.train_samples={2 * samples}"
    more = [f"checkpoint.load={quote(save)}"] * (load is None) + [longer] * (iteration == last)
    yield f"to go on: the same command{' with ' * bool(more)}{' '.join(more)}"
    yield f"to sample: python tools/generate.py --load {quote(save)}"
    yield f"to plot: python tools/plot_run.py --load {quote(save)} --output {quote(save + '/curves.png')}"


def run_metadata(
    run: Run, job: StepSpec, work: StepWork, devices: Sequence[str], forecast: Forecast | str
) -> Mapping[str, Any]:
    """Return versions, meshes, devices, model, work per step, and the estimated memory and step time.

    Args:
        devices: host and device of each rank.
        forecast: the predicted step, or the reason for having none.
    """
    arch, peak = run.state.model.arch, run.peak
    ranks = [job.on_pipeline_rank(coord) for coord in range(job.pipeline.num_ranks)]
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"megatron3d": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "world_size": run.runtime.world_size,
        "mesh": dict(run.comm.mesh.axes),
        "expert_mesh": expert_mesh(job.local) if arch.experts else {},
        "ranks": {name: [rank for rank, at in enumerate(devices) if at == name] for name in dict.fromkeys(devices)},
        "train_iters": run.spec.train_iters,
        "model": {
            **asdict(arch),
            "num_parameters": num_parameters(arch),
            "num_active_parameters": num_active_parameters(arch),
        },
        "work": asdict(work),
        "peak": None if peak is None else asdict(peak),
        "stages": [asdict(stage) for stage in stage_summaries(job)],
        "memory_bytes": [rank_memory(rank).categories for rank in ranks],
        "step_s": _predicted_step(forecast),
    }


def expert_mesh(local: LocalSizes) -> Mapping[str, Mapping[str, Any]]:
    """Return the axes of experts by name: their ranks, and over which axes of the mesh these are."""
    mesh, mode = local.mesh, local.mode
    stage = tuple(axis for axis in mesh.names if axis != PIPELINE)
    axes = {"expert": mode.experts, "etensor": mode.etensor}
    axes = {"edata": mesh.without(stage, (*mode.experts, *mode.etensor)), **axes}
    return {name: {"ranks": mesh.size(over), "over": list(mesh.nontrivial(over))} for name, over in axes.items()}


def _predicted_step(forecast: Forecast | str) -> Mapping[str, Any]:
    """Return the predicted step time by parts, or why it is unknown."""
    if isinstance(forecast, str):
        return {"unknown": forecast}
    return {"cluster": forecast.cluster, "total": forecast.step.step_s, "parts": dict(forecast.parts)}
