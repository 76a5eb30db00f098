"""Layout for a run that has lost ranks: near its present one, with the same global batch, within the memory of a rank.

Of each tensor-parallel shape and number of pipeline ranks the most data-parallel ranks are taken that are left; what
they lack becomes gradient accumulation, and where they do not divide the global batch some compute an empty microbatch
(`train.pad_global_batch`), which changes no number.  Layouts that use most ranks and change least are
predicted first, for some seconds at most, and the fastest that fits is chosen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.errors import RunFailed
from megatron3d.forecast.search.options import MAX_PIPELINE, MAX_TENSOR, divisors
from megatron3d.forecast.search.problem import PlanningProblem
from megatron3d.parallel.mesh import PIPELINE
from megatron3d.parallel.modes import MODES, factorizations
from megatron3d.pipeline.schedules import ONE_F_ONE_B

Values = Mapping[str, Mapping[str, Any]]
# Seconds in which layouts are predicted, and layouts that are predicted at most.
LIMIT_S, MOST = 2.5, 24
# Without a prediction, a halving or doubling of a size is worth this part of the ranks.
STEP_WORTH = 0.02
# Changes of the other keys that a layout may need, tried in order; then those that save memory.
REPAIRS: Sequence[Values] = (
    {},
    {"parallel": {"num_distributed_optimizer_instances": 1}},
    {"parallel": {"num_distributed_optimizer_instances": 1, "expert_model_parallel_size": 1}},
)
THRIFT: Sequence[Values] = (
    {},
    {"parallel": {"zero_stage": 3}},
    {"parallel": {"zero_stage": 3}, "train": {"recompute_granularity": "full", "recompute_modules": None}},
)
# Numbers of data-parallel ranks that are tried for one tensor-parallel shape and pipeline.
TRIES = 3


@dataclass(frozen=True)
class NearbyLayout:
    """Layout of the ranks that are left.

    Attributes:
        slowdown: predicted step time over that of the layout before; by the number of ranks where the machine is not
            known.
    """

    num_ranks: int
    config: Config
    text: str
    slowdown: float
    is_predicted: bool


@dataclass(frozen=True)
class _Candidate:
    """Sizes of a layout, and how far they are from the present ones, in doublings.

    Attributes:
        useful: number of ranks that would compute as much without empty microbatches.
    """

    shape: Mapping[str, Any]
    pipeline: int
    num_ranks: int
    useful: float
    micro_batch_size: int
    distance: float


def with_changes(config: Config, changes: Values) -> Config:
    """Return a configuration with other values by section and key; nothing is validated but their types."""
    values = config.model_dump()
    for section, keys in changes.items():
        values[section] |= keys
    return Config.model_validate(values)


def describe_layout(spec: RunSpec) -> str:
    """Return a layout in words: mode and sizes, ranks, microbatches."""
    axes = " ".join(f"{name}={size}" for name, size in spec.mesh.axes if size > 1) or "one rank"
    mode, zero = spec.config.parallel.tensor_parallel_mode, spec.config.parallel.zero_stage
    named = f"{mode} {axes}" if spec.tensor_size > 1 else axes
    return f"{named}, ZeRO {zero}, {spec.num_microbatches} microbatches of {spec.config.train.micro_batch_size}"


def nearby_layout(
    spec: RunSpec, num_ranks: int, cluster: str | None, limit_s: float = LIMIT_S, *, present: RunSpec | None = None
) -> NearbyLayout:
    """Return the layout for at most `num_ranks` ranks.

    Args:
        spec: the run in the layout that others are near to, which is chosen for as many ranks as it has.
        cluster: whose machine the prediction is for; None: it is not known, and memory is not looked at either.
        limit_s: seconds in which layouts are predicted; where several ranks plan, infinite, so that all plan the same.
        present: the run in its present layout, which the slow-down is over; None: it is `spec`.

    Raises RunFailed where no layout of so few ranks is valid and fits.
    """
    present = present or spec
    for thrift in THRIFT:
        valid = iter([spec]) if num_ranks == spec.world_size else _valid(spec, num_ranks, thrift)
        best = _fastest(present, valid, cluster, limit_s) if cluster is not None else next(valid, None)
        if best is not None:
            found, slowdown = best if isinstance(best, tuple) else (best, present.world_size / best.world_size)
            return NearbyLayout(
                found.world_size, found.config, describe_layout(found), slowdown, is_predicted=cluster is not None
            )
    raise RunFailed(
        f"no layout of this model on {num_ranks} ranks or fewer is valid with "
        f"train.global_batch_size={spec.config.train.global_batch_size} and fits into memory"
    )


def _fastest(spec: RunSpec, valid: Iterator[RunSpec], cluster: str, limit_s: float) -> tuple[RunSpec, float] | None:
    """Return the layout with the shortest predicted step of those that fit, and its time over the present one's."""
    end_s = time.monotonic() + limit_s
    problem = PlanningProblem(spec.config, spec.arch.vocab_size, cluster, spec.world_size)
    best: tuple[float, RunSpec] | None = None
    for number, each in enumerate(valid):
        here = PlanningProblem(each.config, spec.arch.vocab_size, cluster, each.world_size)
        if here.fitting_memory(here.spec(each.config)) is not None:
            step_s = here.step(here.spec(each.config)).step_s
            best = min(best or (math.inf, each), (step_s, each), key=lambda pair: pair[0])
        if number + 1 >= MOST or time.monotonic() > end_s:
            break
    if best is None:
        return None
    return best[1], best[0] / problem.step(problem.spec(spec.config)).step_s


def _valid(spec: RunSpec, num_ranks: int, thrift: Values) -> Iterator[RunSpec]:
    """Yield valid layouts, those that use most ranks and change least first."""
    candidates = sorted(_candidates(spec, num_ranks), key=lambda each: _worth(each, num_ranks), reverse=True)
    for each in candidates:
        config = _repaired(spec, each, thrift)
        if config is not None:
            yield RunSpec(config, each.num_ranks, spec.vocab_size)


def _worth(candidate: _Candidate, num_ranks: int) -> float:
    return candidate.useful / num_ranks - STEP_WORTH * candidate.distance


def _repaired(spec: RunSpec, candidate: _Candidate, thrift: Values) -> Config | None:
    """Return the configuration of a candidate, with other keys changed as far as it needs that; None: it has none."""
    sizes = {**candidate.shape, **_pipeline(spec.config, candidate.pipeline)}
    pads = spec.config.train.pad_global_batch or candidate.useful < candidate.num_ranks
    train = {"micro_batch_size": candidate.micro_batch_size, "pad_global_batch": pads, **thrift.get("train", {})}
    for repair in REPAIRS:
        parallel = {**sizes, **thrift.get("parallel", {}), **repair.get("parallel", {})}
        config = with_changes(spec.config, {"parallel": parallel, "train": train})
        if not check(config, candidate.num_ranks, spec.vocab_size):
            return config
    return None


def _pipeline(config: Config, size: int) -> Mapping[str, Any]:
    """Return the keys of a pipeline of another size; those of the present one stay as they are."""
    if size == config.parallel.pipeline_model_parallel_size:
        return {}
    return {
        "pipeline_model_parallel_size": size,
        "pipeline_schedule": ONE_F_ONE_B,
        "pipeline_schedule_file": None,
        "pipeline_model_parallel_layout": None,
        "virtual_pipeline_model_parallel_size": None,
    }


def _candidates(spec: RunSpec, num_ranks: int) -> Iterator[_Candidate]:
    """Yield the sizes of all layouts that are tried."""
    train, context = spec.config.train, spec.config.parallel.context_parallel_size
    for shape, tensor, moved in _shapes(spec, num_ranks):
        for pipeline in _pipelines(spec, num_ranks):
            inner = tensor * context * pipeline
            changed = moved + abs(math.log2(pipeline / spec.mesh.sizes[PIPELINE]))
            for size in _micro_batch_sizes(spec):
                microbatches = train.global_batch_size // size
                distance = changed + 0.5 * math.log2(train.micro_batch_size / size)
                for data in _data_ranks(spec.config, microbatches, min(num_ranks // inner, microbatches)):
                    useful = inner * microbatches / -(-microbatches // data)
                    yield _Candidate(shape, pipeline, data * inner, useful, size, distance)


def _data_ranks(config: Config, microbatches: int, most: int) -> Sequence[int]:
    """Return a few numbers of data-parallel ranks: the fewest for each number of microbatches per rank."""
    if most < 1:
        return ()
    if not _may_pad(config):
        return [each for each in divisors(microbatches) if each <= most][::-1][:TRIES]
    fewest = -(-microbatches // most)
    return list(dict.fromkeys(-(-microbatches // count) for count in range(fewest, fewest + TRIES)))


def _may_pad(config: Config) -> bool:
    """Return whether empty microbatches change no number."""
    watches = config.logging.noise_scale_interval or (config.train.fp8 and config.logging.fp8_stats_interval)
    counts = config.optimizer.qk_clip or watches or config.train.rampup_batch_size
    return config.model.num_moe_experts is None and not counts


def _micro_batch_sizes(spec: RunSpec) -> Sequence[int]:
    """Return the microbatch sizes that leave every number as it is: what experts balance over must not change."""
    size = spec.config.train.micro_batch_size
    return [size] if spec.arch.experts else [each for each in divisors(size) if size // each in (1, 2, 4, 8)]


def _pipelines(spec: RunSpec, num_ranks: int) -> Sequence[int]:
    """Return numbers of pipeline ranks: the present one, and those whose ranks have as many layers each."""
    layers, present = spec.arch.num_layers, spec.mesh.sizes[PIPELINE]
    return sorted({present, *(each for each in divisors(layers) if each <= min(num_ranks, MAX_PIPELINE))})


def _shapes(spec: RunSpec, num_ranks: int) -> Iterator[tuple[Mapping[str, Any], int, float]]:
    """Yield keys, number of ranks and distance of the present tensor-parallel shape, then of others."""
    yield {}, spec.tensor_size, 0.0
    parallel = spec.config.parallel
    for name, entry in MODES.items():
        same = name == parallel.tensor_parallel_mode
        form = parallel.tensor_parallel_form if same else next(iter(entry.forms))
        for size in (each for each in (2**power for power in range(7)) if each <= min(num_ranks, MAX_TENSOR)):
            shapes = factorizations(size, len(entry.axis_names)) if same else (entry.default_shape(size),)
            for shape in shapes if same or size > 1 else ():
                keys: dict[str, Any] = {"tensor_parallel_mode": name, "tensor_parallel_shape": shape}
                keys |= {"tensor_model_parallel_size": size}
                keys |= {} if same else {"tensor_parallel_form": form, "sequence_parallel": False}
                moved = abs(math.log2(size / spec.tensor_size)) + (0.25 if same else 1.5)
                yield keys, size, moved


def differences(before: Config, after: Config) -> Values:
    """Return the values of the second configuration that the first has otherwise, as JSON has them."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    changed = {
        section: {key: value for key, value in keys.items() if value != old[section][key]}
        for section, keys in new.items()
    }
    return {section: keys for section, keys in changed.items() if keys}
