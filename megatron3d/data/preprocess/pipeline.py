"""A job of preprocessing: pieces of input to token files, killed and resumed at any moment, with the same bytes.

{prefix}_{key}_document       with --split-sentences {prefix}_{key}_sentence
{prefix}_shard-00002-of-00008_{key}_document      one part of eight
{prefix}.ledger.jsonl         while it is not finished
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue

from megatron3d.data.preprocess.encode import Batch, EncoderSpec, encode
from megatron3d.data.preprocess.input_chunks import InputChunk
from megatron3d.data.preprocess.readers import ReadOptions, read_piece
from megatron3d.data.preprocess.records import Record
from megatron3d.data.preprocess.resume_log import ResumeLog, ResumePoint
from megatron3d.data.token_files.files import with_suffix
from megatron3d.data.token_files.indexed import token_dtype
from megatron3d.data.token_files.manifest import read_manifest
from megatron3d.data.token_files.writer import IndexedWriter, WrittenCounts, can_publish, manifest_of, publish, reaches
from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.errors import UserError

Watch = Callable[[ResumePoint, tuple[str, ...]], None]
"""Told after each batch how far the job is, and what is wrong with records that were left out."""


@dataclass(frozen=True)
class PreprocessJob:
    """What is to be done.

    Attributes:
        pieces: those of this part, in order.
        identity: what an unfinished job must share to be gone on with.
        part: (i, n) of a part, None for everything.
    """

    encoder: EncoderSpec
    tokenizer: Tokenizer
    reading: ReadOptions
    pieces: tuple[InputChunk, ...]
    output_prefix: Path
    identity: dict[str, JsonValue]
    part: tuple[int, int] | None = None

    @property
    def stem(self) -> Path:
        """What all its files begin with."""
        return with_suffix(self.output_prefix, "_shard-{:05}-of-{:05}".format(*self.part) if self.part else "")

    @property
    def prefixes(self) -> tuple[Path, ...]:
        """Of the token files of each key."""
        level = "sentence" if self.encoder.split_sentences else "document"
        return tuple(with_suffix(self.stem, f"_{key}_{level}") for key in self.encoder.keys)

    @property
    def stamps(self) -> dict[str, str | None]:
        """What the manifests of a part say of it."""
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        return {"job": digest, "part": "{}/{}".format(*self.part)} if self.part else {"job": None, "part": None}

    @property
    def is_done(self) -> bool:
        """Whether this part of this very job is there already."""
        manifests = [read_manifest(prefix) for prefix in self.prefixes if with_suffix(prefix, ".idx").exists()]
        stamps = [{"job": m.job, "part": m.part} for m in manifests if m is not None]
        return self.part is not None and stamps == [self.stamps] * len(self.prefixes)

    def records(self, entry: ResumePoint) -> Iterator[tuple[int, Record]]:
        """All records from a point on, with the numbers of their pieces."""
        for number, piece in enumerate(self.pieces[entry.piece :], entry.piece):
            position = entry.position if number == entry.piece else None
            for record in read_piece(piece, self.reading, position):
                yield number, record


def run(job: PreprocessJob, num_workers: int, interval_s: float, restart: bool, watch: Watch) -> ResumePoint:
    """Do a job, or what is left of it; returns what was read and written.

    Raises UserError for bad input, and KeyboardInterrupt; what is done by then stays if a ledger line counts it.
    """
    ledger = ResumeLog(with_suffix(job.stem, ".ledger.jsonl"), job.identity | {"shard": list(job.part or ())}, restart)
    try:
        entry = _last_sound(ledger, job)
        if not entry.is_done:
            entry = _encode_rest(job, ledger, entry, (num_workers, interval_s), watch)
        _publish(job, entry)
    except BaseException:
        if ledger.entries:
            ledger.close()
        else:
            ledger.remove()
        raise
    ledger.remove()
    return entry


def _last_sound(ledger: ResumeLog, job: PreprocessJob) -> ResumePoint:
    """The last point that all files reach."""
    dtype = token_dtype(job.tokenizer.vocab_size)

    def is_there(entry: ResumePoint) -> bool:
        is_enough = can_publish if entry.is_done else reaches
        return all(
            is_enough(prefix, written, dtype) for prefix, written in zip(job.prefixes, entry.written, strict=True)
        )

    start = ResumePoint(written=tuple(WrittenCounts() for _ in job.prefixes))
    while ledger.entries and not is_there(ledger.entries[-1]):
        ledger.entries.pop()
    return ledger.entries[-1] if ledger.entries else start


def _encode_rest(
    job: PreprocessJob, ledger: ResumeLog, entry: ResumePoint, how: tuple[int, float], watch: Watch
) -> ResumePoint:
    (num_workers, interval_s), kept_at = how, time.monotonic()
    dtype = token_dtype(job.tokenizer.vocab_size)
    writers = [
        IndexedWriter(prefix, dtype, written) for prefix, written in zip(job.prefixes, entry.written, strict=True)
    ]
    try:
        with closing(encode(job.encoder, job.records(entry), num_workers)) as batches:
            for batch in batches:
                entry = _write(writers, entry, batch)
                watch(entry, batch[0].faults)
                if time.monotonic() - kept_at >= interval_s:
                    _keep(writers, ledger, entry)
                    kept_at = time.monotonic()
        _require_text(job, entry)
        entry = replace(entry, is_done=True)
        _keep(writers, ledger, entry)
    except BaseException:
        for writer in writers:
            writer.close() if ledger.entries else writer.discard()
        raise
    for writer in writers:
        writer.close()
    return entry


def _write(writers: list[IndexedWriter], entry: ResumePoint, batch: Batch) -> ResumePoint:
    encoded, piece, after = batch
    for writer, (tokens, lengths, marks) in zip(writers, encoded.columns, strict=True):
        writer.add(tokens, lengths, marks)
    return ResumePoint(
        piece=piece,
        position=after,
        num_documents=entry.num_documents + encoded.num_documents,
        num_bytes=entry.num_bytes + encoded.num_bytes,
        num_bad=entry.num_bad + encoded.num_bad,
        written=tuple(writer.written for writer in writers),
    )


def _keep(writers: list[IndexedWriter], ledger: ResumeLog, entry: ResumePoint) -> None:
    for writer in writers:
        writer.sync()
    ledger.write(entry)


def _require_text(job: PreprocessJob, entry: ResumePoint) -> None:
    """A part may be empty, a corpus not."""
    if job.part is None and not all(written.num_tokens for written in entry.written):
        empty = next(key for key, w in zip(job.encoder.keys, entry.written, strict=True) if not w.num_tokens)
        raise UserError(
            f"--input: no text under the key {empty!r} in {entry.num_documents} documents ({entry.num_bad} more left "
            "out); name other files, or other --json-keys"
        )


def _publish(job: PreprocessJob, entry: ResumePoint) -> None:
    tokenizer = job.tokenizer
    for prefix, written in zip(job.prefixes, entry.written, strict=True):
        manifest = manifest_of(written, type(tokenizer).__name__, tokenizer.vocab_size, tokenizer.fingerprint)
        publish(prefix, token_dtype(tokenizer.vocab_size), written, manifest.model_copy(update=job.stamps))
