"""Sections of gpu_day.py about whole steps: MFU, single ranks of large layouts, the profile, and switches in turns."""

from __future__ import annotations

import gzip
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from gpu.gpu_timing import Place, Row, Steps, spec_of
from torch.profiler import ProfilerActivity, profile

from megatron3d.config.run_spec import RunSpec
from megatron3d.verify.dry_run import with_few_microbatches

_MODELS = {"1b": "llama-1b", "124m": "gpt2-124m"}
# Shipped presets of one GPU, by the section that measures them and the GPU.
PRESETS: Mapping[str, Mapping[str, str]] = {
    "8b": {"h100": "llama-8b-10-layers-1xh100", "h200": "llama-8b-12-layers-1xh200"},
    **{name: {gpu: f"{model}-1x{gpu}" for gpu in ("h100", "h200")} for name, model in _MODELS.items()},
}
# Bytes of memory from which on a GPU takes the presets of an H200.
H200_BYTES = 100 * 2**30


def preset_of(place: Place, name: str) -> str:
    """Return the preset of a section for this GPU; a CPU takes that of an H200."""
    is_large = place.device.type == "cpu" or torch.cuda.get_device_properties(place.device).total_memory > H200_BYTES
    return f"gpus/{PRESETS[name]['h200' if is_large else 'h100']}"


def steps_of(place: Place, name: str, *overrides: str, num_microbatches: int = 1) -> Steps:
    """Return steps of a shipped preset with its own microbatch, of which there are only a few."""
    return Steps(place, spec_of(place, preset_of(place, name), overrides).with_microbatches(num_microbatches))


def _shown(place: Place, what: Row, measure: Callable[[], Row]) -> Row:
    """Return a row of what was measured, or of its error, so that one model that fails ends no section."""
    try:
        return {**what, **measure()}
    except (RuntimeError, ValueError) as error:
        return {**what, "error": str(error).splitlines()[0][:200]}
    finally:
        place.free()


def preset(place: Place, name: str) -> Iterator[Row]:
    """Yield step time, MFU and memory of a shipped preset, compiled as it is shipped."""
    what = {"preset": preset_of(place, name)}
    yield _shown(place, what, lambda: steps_of(place, name, num_microbatches=2).measured())


class Rank(NamedTuple):
    """A rank of a large layout; "last" is the last pipeline stage's."""

    preset: str
    which: str
    overrides: tuple[str, ...] = ()


IN_3D = (
    "train.micro_batch_size=2",
    "parallel.tensor_model_parallel_size=8",
    "parallel.sequence_parallel=false",
    "parallel.tensor_parallel_mode=3d",
)
RANKS: Mapping[str, Rank] = {
    "llama-8b, TP 8": Rank("llama-8b", "first"),
    "llama-70b, first stage": Rank("llama-70b", "first"),
    "llama-70b, last stage": Rank("llama-70b", "last"),
    "gpt3-175b, first stage": Rank("gpt3-175b", "first"),
    "llama-8b, 3-D 2x2x2": Rank("llama-8b", "first", (*IN_3D, "parallel.tensor_parallel_shape=[2,2,2]")),
}


def ranks(place: Place) -> Iterator[Row]:
    """Yield, of single ranks that communicate with themselves, the time of each action and the memory."""
    for name, rank in list(RANKS.items())[: 1 if place.quick else None]:
        yield _shown(place, {"rank": name}, partial(rank_row, place, rank))


def rank_spec(place: Place, rank: Rank) -> RunSpec:
    """Return the run with two data-parallel ranks, seen from the rank."""
    overrides = [*rank.overrides, *(["parallel.tensor_model_parallel_size=2"] if place.quick else [])]
    model = spec_of(place, rank.preset, overrides).sizes.model
    world_size = 2 * model
    spec = spec_of(place, rank.preset, overrides, world_size)
    return with_few_microbatches(spec.on_rank(world_size - 1 if rank.which == "last" else 0))


def rank_row(place: Place, rank: Rank) -> Row:
    """Return the row of one rank."""
    steps = Steps(place, rank_spec(place, rank))
    measured = steps.measured(3)
    return {"step_ms": measured["step_ms"], **steps.memory(), "action_ms": steps.action_ms()}


def profiled(place: Place) -> Iterator[Row]:
    """Yield the operations that take most of a step, and write its trace, compiled and eager."""
    for compiled in (False,) if place.quick else (True, False):
        steps = steps_of(place, "1b", f"train.compile={str(compiled).lower()}")
        steps()
        steps()
        kinds = [ProfilerActivity.CPU, *([] if place.device.type == "cpu" else [ProfilerActivity.CUDA])]
        with profile(activities=kinds) as found:
            steps()
            place.synchronize()
        spent = "self_cpu_time_total" if place.device.type == "cpu" else "self_device_time_total"
        top = sorted(found.key_averages(), key=lambda each: -float(getattr(each, spent)))[: 3 if place.quick else 25]
        for each in top:
            row = {"operation": each.key[:80], "calls": each.count, "ms": getattr(each, spent) / 1e3}
            yield {"compiled": compiled, **row}
        yield {"compiled": compiled, **steps.measured(3)}
        del steps
        write_trace(place, found, "compiled" if compiled else "eager")
        place.free()


def write_trace(place: Place, found: profile, name: str) -> None:
    """Write the trace of a profile, compressed."""
    trace = place.output / f"trace_{name}.json"
    found.export_chrome_trace(str(trace))
    with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    trace.unlink()


# Switch: the keys of the baseline and of the variant.
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "compile": ("train.compile=false", "train.compile=true"),
    "logits of 1024 or 4096 tokens": ("train.loss_chunk_tokens=1024", "train.loss_chunk_tokens=4096"),
    "logits of 1024 or 8192 tokens": ("train.loss_chunk_tokens=1024", "train.loss_chunk_tokens=8192"),
    "buckets of 25 or 160 MB": ("train.bucket_mb=25", "train.bucket_mb=160"),
}


def switches(place: Place) -> Iterator[Row]:
    """Yield the ratio of baseline to variant: steps in turns, so that clocks and heat affect both alike."""
    for name, keys in list(SWITCHES.items())[1 : 2 if place.quick else None]:

        def measure(keys: tuple[str, ...] = keys) -> Row:
            both = [steps_of(place, "124m", key) for key in keys]
            return _ratio(place, [each.__call__ for each in both])

        yield _shown(place, {"switch": name}, measure)
    yield {"switch": "cuDNN or flash attention", **_attention_kernels(place)}


def _attention_kernels(place: Place) -> Row:
    """Compare steps with and without the cuDNN kernel of attention."""
    # A compiled step keeps the kernel that it was compiled with.
    steps, flags = steps_of(place, "124m", "train.compile=false"), torch.backends.cuda

    def with_cudnn(enabled: bool) -> None:
        flags.enable_cudnn_sdp(enabled)
        steps()

    try:
        return _ratio(place, [lambda: with_cudnn(True), lambda: with_cudnn(False)])
    finally:
        flags.enable_cudnn_sdp(True)
        place.free()


def _ratio(place: Place, contestants: Sequence[Callable[[], object]]) -> Row:
    """Return the milliseconds of two contestants in turns, and how much faster the second is."""
    for each in contestants:
        each()
        each()
    rounds: list[list[float]] = []
    for _ in range(1 if place.quick else 8):
        took = []
        for each in contestants:
            place.synchronize()
            begin = time.perf_counter()
            each()
            place.synchronize()
            took.append(1e3 * (time.perf_counter() - begin))
        rounds.append(took)
    ratios = [one / other for one, other in rounds]
    spread = 0.0 if len(ratios) < 2 else (max(ratios) - min(ratios)) / math.sqrt(len(ratios))
    baseline, variant = (median(each) for each in zip(*rounds, strict=True))
    return {"baseline_ms": baseline, "variant_ms": variant, "speed_up": median(ratios), "spread": spread}
