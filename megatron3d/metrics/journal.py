"""metrics.jsonl: one JSON object per launch, logged step, evaluation and event; floats at full precision, NaN as NaN.

No iteration is logged twice: a run that continues from iteration n first drops the lines after n, which will be written
again.  A line with `start` has the metadata of the launch that started after that iteration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import NotRequired, TypedDict

from megatron3d.errors import UserError
from megatron3d.parallel.mesh import PIPELINE
from megatron3d.runtime.arguments import MAX_RANKS
from megatron3d.runtime.files import write_text


def _with_pipeline(mesh: dict[str, int]) -> dict[str, int]:
    if PIPELINE not in mesh:
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
    num_active_parameters: NotRequired[Count]
    num_layers: Count
    hidden_size: Count
    vocab_size: Count


class ExpertAxis(_Open):
    """Ranks of an axis of experts, and the axes of the mesh that they are of."""

    ranks: Rank
    over: list[str]


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
    expert_mesh: NotRequired[dict[str, ExpertAxis]]
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
    replan: NotRequired[str]
    replan_details: NotRequired[dict[str, Any]]
    straggler: NotRequired[str]
    stop: NotRequired[str]


T = TypeVar("T")
FILE_NAME = "metrics.jsonl"
ANY_ROW, JOURNAL_ROW = TypeAdapter[Any](AnyRow), TypeAdapter[Any](JournalRow)


class Journal:
    """Open metrics.jsonl of a run that continues after `start_iteration` iterations; 0 empties it.

    Training does not end with the disk's space: rows that cannot be written are counted and reported.
    """

    def __init__(self, folder: Path, start_iteration: int) -> None:
        self._path = folder / FILE_NAME
        self._num_lost = 0
        kept = [line for line, row in read_lines(self._path, ANY_ROW) if row["iteration"] <= start_iteration]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, "".join(kept) if start_iteration > 0 else "")
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}; choose another checkpoint.save") from error
        self._size = self._file.tell()

    def drop_after(self, iteration: int) -> None:
        """Drop the lines after an iteration, which are the last ones."""
        kept = takewhile(
            lambda line: iteration > 0 and line[1]["iteration"] <= iteration, read_lines(self._path, ANY_ROW)
        )
        self._size = sum(len(line.encode()) for line, _ in kept)
        with suppress(OSError):  # else the next row tries again
            self._file.truncate(self._size)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line; where that fails, warn once, and again when lines can be written, with how many were lost."""
        line = json.dumps(row).encode() + b"\n"
        try:
            self._file.truncate(self._size)  # what a failed write left of its line
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._num_lost += 1
            if self._num_lost == 1:
                reason = f"{error.strerror}; training goes on without"
                print(f"> WARNING: {self._path} cannot be written: {reason}", flush=True)
            return
        self._size += len(line)
        self._tell_lost("can be written again")

    def _tell_lost(self, when: str) -> None:
        if self._num_lost:
            print(f"> WARNING: {self._path} {when}: {self._num_lost} of its rows were lost", flush=True)
            self._num_lost = 0

    def close(self) -> None:
        """Close the file, after dropping what a failed write left."""
        with suppress(OSError):
            self._file.truncate(self._size)
        self._file.close()
        self._tell_lost("is closed")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, without a last line that is cut off; raises UserError for other files."""
    if not path.exists():
        raise UserError(f"{path}: there is no such file; give the folder of a run, its checkpoint.save")
    return [from_json(line) for line, _ in read_lines(path, JOURNAL_ROW)]


def validation_losses(path: Path) -> dict[int, float]:
    """Return the losses on the validation split in a metrics.jsonl, by iteration; none without the file."""
    rows = read_journal(path) if path.exists() else []
    return {row["iteration"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def read_lines(path: Path, form: TypeAdapter[T]) -> list[tuple[str, T]]:
    """Return the lines of a file of JSON objects, each with its content in a form; none without a file.

    A last line that is cut off is left out.  Raises UserError where the file cannot be read or has other contents.
    """
    try:
        if not path.exists():
            return []
        if not path.is_file():
            raise UserError(f"{path}: not a file; move it away")
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [(line, _parse(path, number, line, form)) for number, line in enumerate(lines, start=1)]


def _parse(path: Path, number: int, line: str, form: TypeAdapter[T]) -> T:
    try:
        return form.validate_python(from_json(line))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        why = f"not a record of a run ({'.'.join(map(str, fault['loc']))} {fault['msg']})"
    except ValueError as error:
        why = f"not JSON ({error})"
    raise UserError(f"{path}:{number}: {why}; move the file away or repair the line")
