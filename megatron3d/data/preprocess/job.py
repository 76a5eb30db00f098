"""A preprocessing job: input chunks to token files, killed and resumed at any moment, with the same bytes.

{prefix}_{key}_document                           with --split-sentences {prefix}_{key}_sentence
{prefix}_shard-00002-of-00008_{key}_document      one shard of eight
{prefix}.ledger.jsonl                             while the job is not finished, locked while a process works on it

The first line of the ledger identifies the job, each further one is a point to resume from, written after the data
that it counts.  After a kill, data after the last valid line is truncated and written again.  The `crc32` of a line
covers it and all lines before; the counts of a point have those of the written files.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import JsonValue, TypeAdapter, ValidationError

from megatron3d.data.preprocess.encode import EncodedBatch, EncoderSpec, encode
from megatron3d.data.preprocess.inputs import InputChunk
from megatron3d.data.preprocess.readers import ReadOptions, Record, read_chunk
from megatron3d.data.token_files.files import AppendOnlyFile, with_suffix
from megatron3d.data.token_files.indexed import read_manifest, token_dtype
from megatron3d.data.token_files.writer import (
    IndexedWriter,
    WrittenCounts,
    can_publish,
    corpus_files,
    is_on_disk,
    make_manifest,
    publish,
)
from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.errors import UserError
from megatron3d.runtime.arguments import require_free


@dataclass(frozen=True)
class ResumePoint:
    """A point from which a job can resume; the names of its fields are those in the file.

    Attributes:
        piece: number of the input chunk of the next record, and `position` in it; None for its start.
        written: counts of each key's token file.
        is_done: whether all input is read, so that only publishing is left.
    """

    piece: int = 0
    position: int | None = None
    num_documents: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    is_done: bool = False
    written: tuple[WrittenCounts, ...] = ()


_POINT = TypeAdapter(ResumePoint)


class ResumeLog:
    """Opens the log of a job, or begins it.

    Attributes:
        points: the points in the file, oldest first.
        faults: a description of the lines that were dropped because they are damaged, if any.

    Raises:
        UserError: it is the log of another job, or of an older version without checksums; another process works on
            it, or it cannot be written.
    """

    def __init__(self, path: Path, job: Mapping[str, JsonValue], restart: bool = False) -> None:
        self._file = AppendOnlyFile(path, size=None)
        self._crc32 = 0
        self.points: list[ResumePoint] = []
        self.faults: tuple[str, ...] = ()
        try:
            size = 0 if restart else self._read(path, job)
            self._file.truncate(size)
        except UserError:
            self.close()
            raise
        if not size:
            try:
                self._append(job)
            except UserError:
                self.remove()
                raise

    def write(self, point: ResumePoint) -> None:
        """Append a point durably."""
        self._append(asdict(point))
        self.points.append(point)

    def close(self) -> None:
        """Release the log to other processes."""
        self._file.close()

    def remove(self) -> None:
        """Delete the log: the job is done, or there is nothing to resume from."""
        self._file.discard()

    def _append(self, values: Mapping[str, Any]) -> None:
        self._crc32 = _checksum(values, self._crc32)
        self._file.append((json.dumps({**values, "crc32": self._crc32}) + "\n").encode())
        self._file.sync()

    def _read(self, path: Path, job: Mapping[str, JsonValue]) -> int:
        """Read the points up to the first line that is incomplete or damaged; return the number of bytes up to it."""
        content = path.read_bytes()
        first, *lines = content.splitlines(keepends=True) or [b""]
        values, crc32 = _parse(first, 0)
        if values is not None:
            _require_same(path, job, values, is_valid=crc32 is not None)
        size, self._crc32 = (0, 0) if crc32 is None else (len(first), crc32)
        for line in lines if size else ():
            values, crc32 = _parse(line, self._crc32)
            if crc32 is None:
                break
            try:
                self.points.append(_POINT.validate_python(values))
            except ValidationError:
                break
            size, self._crc32 = size + len(line), crc32
        if b"\n" in content[size:]:
            number = content[:size].count(b"\n") + 1
            self.faults = (f"{path}: damaged from line {number} on; the documents of these lines are encoded again",)
        return size


def _checksum(values: Mapping[str, Any], before: int) -> int:
    return zlib.crc32(json.dumps(values).encode(), before)


def _parse(line: bytes, before: int) -> tuple[dict[str, Any] | None, int | None]:
    """Return the values of a complete line, else None, and its checksum, None where that is not in it."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not line.endswith(b"\n"):
        return None, None
    found = values.pop("crc32", None)
    return values, found if found == _checksum(values, before) else None


def _require_same(path: Path, job: Mapping[str, JsonValue], found: Mapping[str, Any], is_valid: bool) -> None:
    """Require that the log is that of this job; raises UserError."""
    ways_out = "give another --output-prefix, or --restart to drop what it did"
    if differing := [name for name in job if found.get(name) != job[name]]:
        raise UserError(
            f"{path}: an unfinished job with another {', another '.join(differing)} is here; repeat its command, "
            f"{ways_out}"
        )
    if not is_valid:
        raise UserError(
            f"{path}: its first line has no valid checksum: it is damaged, or of an older version, which resumes it; "
            f"{ways_out}"
        )


OnProgress = Callable[[ResumePoint, tuple[str, ...]], None]
"""Called after each batch with how far the job is, and descriptions of records that were left out."""


@dataclass(frozen=True)
class PreprocessJob:
    """A job, or one shard of it.

    Attributes:
        chunks: input chunks of this shard, in order.
        identity: values that an unfinished job must share to be resumed.
        shard: (i, n) of a shard, None for a whole job.
        overwrite: whether token files that exist may be replaced.
    """

    encoder: EncoderSpec
    tokenizer: Tokenizer
    read_options: ReadOptions
    chunks: tuple[InputChunk, ...]
    output_prefix: Path
    identity: dict[str, JsonValue]
    shard: tuple[int, int] | None = None
    overwrite: bool = False

    @property
    def stem(self) -> Path:
        """Prefix of all files of the job."""
        return with_suffix(self.output_prefix, "_shard-{:05}-of-{:05}".format(*self.shard) if self.shard else "")

    @property
    def prefixes(self) -> tuple[Path, ...]:
        """Prefixes of the token files, one per key."""
        level = "sentence" if self.encoder.split_sentences else "document"
        return tuple(with_suffix(self.stem, f"_{key}_{level}") for key in self.encoder.keys)

    def require_free(self, is_publishing: bool) -> None:
        """Raise UserError where a token file is an input, or exists and is not this job's own, half published."""
        inputs = [Path(chunk.path) for chunk in self.chunks if chunk.kind != "dataset"]
        if self.encoder.tokenizer_model:
            inputs.append(Path(self.encoder.tokenizer_model))
        outputs = [path for prefix in self.prefixes for path in corpus_files(prefix)]
        require_free("--output-prefix", outputs, inputs, self.overwrite or is_publishing)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the token files."""
        return token_dtype(self.tokenizer.vocab_size)

    @property
    def stamps(self) -> dict[str, str | None]:
        """Fields of the manifests that identify a shard."""
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        return {"job": digest, "part": "{}/{}".format(*self.shard)} if self.shard else {"job": None, "part": None}

    @property
    def is_done(self) -> bool:
        """Whether this shard of this very job is published already."""
        manifests = [read_manifest(prefix) for prefix in self.prefixes if with_suffix(prefix, ".idx").exists()]
        stamps = [{"job": m.job, "part": m.part} for m in manifests if m is not None]
        return self.shard is not None and stamps == [self.stamps] * len(self.prefixes)

    def records(self, point: ResumePoint) -> Iterator[tuple[int, Record]]:
        """Yield all records from a point on, with the numbers of their chunks."""
        for number, chunk in enumerate(self.chunks[point.piece :], point.piece):
            position = point.position if number == point.piece else None
            for record in read_chunk(chunk, self.read_options, position):
                yield number, record


def run(job: PreprocessJob, num_workers: int, interval_s: float, restart: bool, on_progress: OnProgress) -> ResumePoint:
    """Run a job, or what is left of it, and return its counts; a resume point is logged every `interval_s`.

    Raises UserError for bad input, and KeyboardInterrupt; everything up to the last logged point is kept.
    """
    log = ResumeLog(with_suffix(job.stem, ".ledger.jsonl"), job.identity | {"shard": list(job.shard or ())}, restart)
    try:
        point = _resume_point(log, job)
        if log.faults:
            on_progress(point, log.faults)
        job.require_free(point.is_done)
        if not point.is_done:
            point = _encode_rest(job, log, point, num_workers, interval_s, on_progress)
        for prefix, written in zip(job.prefixes, point.written, strict=True):
            manifest = make_manifest(written, job.tokenizer).model_copy(update=job.stamps)
            publish(prefix, job.dtype, written, manifest)
    except UserError as error:
        if not log.points:
            log.remove()
            raise
        log.close()
        kept = "what is done is kept in .partial files, which the same command goes on from and --restart drops"
        raise UserError(*error.problems[:-1], f"{error.problems[-1]}; {kept}") from error
    except BaseException:
        log.close() if log.points else log.remove()
        raise
    log.remove()
    return point


def _resume_point(log: ResumeLog, job: PreprocessJob) -> ResumePoint:
    """Return the last point whose data is on disk in all files, and drop later ones."""

    def is_reached(point: ResumePoint) -> bool:
        is_reached_by = can_publish if point.is_done else is_on_disk
        pairs = zip(job.prefixes, point.written, strict=False)
        return len(point.written) == len(job.prefixes) and all(is_reached_by(*pair, job.dtype) for pair in pairs)

    while log.points and not is_reached(log.points[-1]):
        log.points.pop()
    return log.points[-1] if log.points else ResumePoint(written=tuple(WrittenCounts() for _ in job.prefixes))


def _encode_rest(
    job: PreprocessJob, log: ResumeLog, point: ResumePoint, num_workers: int, interval_s: float, on_progress: OnProgress
) -> ResumePoint:
    writers: list[IndexedWriter] = []
    logged_at = time.monotonic()
    try:
        for prefix, written in zip(job.prefixes, point.written, strict=True):
            writers.append(IndexedWriter(prefix, job.dtype, written))
        with closing(encode(job.encoder, job.records(point), num_workers)) as batches:
            for batch in batches:
                point = _write(writers, point, batch)
                on_progress(point, batch.faults)
                if time.monotonic() - logged_at >= interval_s:
                    _log(writers, log, point)
                    logged_at = time.monotonic()
        _require_text(job, point)
        point = replace(point, is_done=True)
        _log(writers, log, point)
    finally:
        for writer in writers:
            writer.close() if log.points else writer.discard()
    return point


def _write(writers: list[IndexedWriter], point: ResumePoint, batch: EncodedBatch) -> ResumePoint:
    for writer, (tokens, lengths, marks) in zip(writers, batch.columns, strict=True):
        writer.add(tokens, lengths, marks)
    return ResumePoint(
        piece=batch.chunk,
        position=batch.after,
        num_documents=point.num_documents + batch.num_documents,
        num_bytes=point.num_bytes + batch.num_bytes,
        num_bad=point.num_bad + batch.num_bad,
        written=tuple(writer.written for writer in writers),
    )


def _log(writers: list[IndexedWriter], log: ResumeLog, point: ResumePoint) -> None:
    for writer in writers:
        writer.sync()
    log.write(point)


def _require_text(job: PreprocessJob, point: ResumePoint) -> None:
    """Refuse an empty corpus; a shard may be empty."""
    empty = [key for key, counts in zip(job.encoder.keys, point.written, strict=True) if not counts.num_tokens]
    if job.shard is None and empty:
        raise UserError(
            f"--input: no text under the key {empty[0]!r} in {point.num_documents} documents ({point.num_bad} more "
            "left out); name other files, or other --json-keys"
        )
