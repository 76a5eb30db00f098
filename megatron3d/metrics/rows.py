"""Rows of metrics.jsonl as reports read them.  Further keys are allowed, since other versions may write them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from megatron3d.runtime.limits import MAX_RANKS


def _with_pipeline(mesh: dict[str, int]) -> dict[str, int]:
    if "pipeline" not in mesh:
        raise ValueError("has no axis pipeline")
    return mesh


Count = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]


class _Open(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]


class OverRanks(_Open):
    """Maximum over ranks, and a rank that has it."""

    max: float
    max_rank: Rank


class PhaseTimes(OverRanks):
    """Milliseconds of a phase over ranks."""

    min: float
    mean: float


class Memory(_Open):
    """Bytes over ranks."""

    peak: OverRanks


class FirstStep(_Open):
    """Peak bytes of the first step by pipeline rank."""

    memory_bytes: list[float]


class Versions(_Open):
    """Versions of the software."""

    torch: str


class ModelSizes(_Open):
    """Sizes of the model."""

    num_parameters: Count
    num_layers: Count
    hidden_size: Count
    vocab_size: Count


class FlopPeak(_Open):
    """Peak FLOP/s of a device."""

    flops: float
    source: str


class StageRow(_Open):
    """Stage of the pipeline."""

    index: Rank
    rank: Rank
    num_layers: Count
    num_parameters: Count
    flops: float
    in_flight: float
    activation_bytes: float
    what: str


class UnknownTime(_Open):
    """Reason why no time is predicted."""

    unknown: str


class PredictedTime(_Open):
    """Predicted seconds of a step, and of its parts."""

    cluster: str
    total: Annotated[float, Field(gt=0)]
    parts: dict[str, float]


class Start(_Open):
    """Metadata of a launch; curves need only the first key, the page of a run needs all but the last."""

    train_iters: Count
    time: NotRequired[str]
    versions: NotRequired[Versions]
    world_size: NotRequired[Rank]
    mesh: NotRequired[Annotated[dict[str, Rank], AfterValidator(_with_pipeline)]]
    ranks: NotRequired[dict[str, list[Rank]]]
    model: NotRequired[ModelSizes]
    peak: NotRequired[FlopPeak | None]
    stages: NotRequired[Annotated[list[StageRow], Field(min_length=1)]]
    memory_bytes: NotRequired[Annotated[list[dict[str, float]], Field(min_length=1)]]
    step_s: NotRequired[PredictedTime | UnknownTime]


class AnyRow(_Open):
    """Row of any kind, also of other files."""

    iteration: Count


class JournalRow(AnyRow):
    """Row of metrics.jsonl: of a launch, a logged step, an evaluation, or an event."""

    start: NotRequired[Start]
    lm_loss: NotRequired[float]
    grad_norm: NotRequired[float]
    elapsed_ms: NotRequired[float]
    learning_rate: NotRequired[float | None]
    tokens_per_s: NotRequired[float | None]
    tflops_per_s_per_rank: NotRequired[float | None]
    mfu: NotRequired[float | None]
    hfu: NotRequired[float | None]
    pipeline_bubble: NotRequired[float | None]
    peak_memory_bytes: NotRequired[float | None]
    timers: NotRequired[dict[str, PhaseTimes]]
    memory: NotRequired[Memory]
    first_step: NotRequired[FirstStep]
    validation_loss: NotRequired[float | None]
    rollback: NotRequired[str]
    straggler: NotRequired[str]
