"""Read the records of an input chunk from any position on, with one document in memory."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from megatron3d.data.preprocess.hub_datasets import open_shard
from megatron3d.data.preprocess.input_chunks import InputChunk, open_decompressed, open_parquet
from megatron3d.data.preprocess.records import Record
from megatron3d.data.preprocess.split_text import MAX_TEXT, Split, split_at_newline
from megatron3d.errors import UserError
from megatron3d.runtime.limits import shorten

SKIP_BYTES = 1 << 20
BATCH_ROWS, BATCH_ROWS_BYTES = 256, 1 << 22
"""Rows of a parquet file that are read together, limited by their approximate size as well; at least one."""
DEFAULT_RECORD_BYTES = 64 << 20


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading records.

    Attributes:
        keys: fields of a row that are returned.
        split: chooses where a long text is split.
        max_record_bytes: longest line of JSON, or text of a row, that is accepted.
    """

    keys: tuple[str, ...]
    split: Split = split_at_newline
    max_record_bytes: int = DEFAULT_RECORD_BYTES

    def too_long(self) -> UserError:
        """Return the error of a longer record."""
        return UserError(f"longer than --max-record-mb {self.max_record_bytes / 1e6:g}")

    def checked(self, fields: Mapping[str, object] | UserError) -> Mapping[str, object] | UserError:
        """Return the fields of a row, or the error where they could not be decoded or one of them is too long."""
        if isinstance(fields, UserError):
            return fields
        too_long = any(isinstance(value, str) and len(value) > self.max_record_bytes for value in fields.values())
        return self.too_long() if too_long else fields


def read_chunk(chunk: InputChunk, options: ReadOptions, position: int | None = None) -> Iterator[Record]:
    """Yield the records of a chunk, from the `after` of an earlier record on, or from the start."""
    try:
        yield from _READERS[chunk.kind](chunk, options, position)
    except OSError as error:
        why = " ".join(str(error.strerror or error).split())
        raise UserError(f"--input {chunk.path}: cannot be read ({why})") from error


def _lines(chunk: InputChunk, options: ReadOptions, position: int | None) -> Iterator[Record]:
    limit = options.max_record_bytes
    with open_decompressed(chunk.path, chunk.kind) as file:
        place = _seek(file, chunk, position)
        while place < chunk.stop and (line := file.readline(limit + 1)):
            content: bytes | UserError = line
            after = place + len(line)
            if len(line) > limit:
                after += _skip_line(file, line)
                content = options.too_long()
            if not line.isspace():
                yield Record(chunk, place, after, content, after - place)
            place = after


def _skip_line(file: BinaryIO, line: bytes) -> int:
    """Skip the rest of a line that begins with `line`, and return its length."""
    skipped = 0
    while not line.endswith(b"\n") and (line := file.readline(SKIP_BYTES)):
        skipped += len(line)
    return skipped


def _seek(file: BinaryIO, chunk: InputChunk, position: int | None) -> int:
    """Go to a position, None for the first line that begins in the chunk, and return it."""
    if position is None:
        return file.seek(chunk.start - 1) + _skip_line(file, b"") if chunk.start else 0
    if chunk.kind == "lines":
        return file.seek(position)
    rest = position
    while rest and (block := file.read(min(rest, SKIP_BYTES))):
        rest -= len(block)
    if rest:
        raise UserError(f"--input {chunk.path}: shorter than it was; start again with --restart")
    return position


def _text(chunk: InputChunk, options: ReadOptions, position: int | None) -> Iterator[Record]:
    """Yield a file that is one document; a long one in sections, split where that changes no token."""
    place = position or 0
    if position is None and (problem := _decoding_error(chunk)):
        yield Record(chunk, 0, chunk.num_bytes, problem, chunk.num_bytes)
        return
    with open_decompressed(chunk.path, chunk.kind) as file:
        mark = len(codecs.BOM_UTF8) if place == 0 and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        file.seek(place + mark)
        decoder = codecs.getincrementaldecoder("utf-8")()
        text, more = "", True
        while more or text:
            while more and len(text) <= MAX_TEXT:
                block = file.read(SKIP_BYTES)
                text, more = text + decoder.decode(block), bool(block)
            end, following = options.split(text) if len(text) > MAX_TEXT else (len(text), len(text))
            after, mark = place + mark + len(text[:following].encode()), 0
            if text:
                yield Record(chunk, place, after, text[:end], after - place, ends=following == len(text))
            place, text = after, text[following:]


def _decoding_error(chunk: InputChunk) -> UserError | None:
    with open_decompressed(chunk.path, chunk.kind) as file:
        try:
            for _ in codecs.iterdecode(iter(partial(file.read, SKIP_BYTES), b""), "utf-8"):
                pass
        except UnicodeDecodeError as error:
            return UserError(f"not UTF-8 text ({error.reason})")
    return None


def _parquet_rows(chunk: InputChunk, options: ReadOptions, position: int | None) -> Iterator[Record]:
    import pyarrow

    file, first = open_parquet(chunk.path), position or 0
    columns = [key for key in options.keys if key in file.schema_arrow.names]
    if missing := [key for key in options.keys if key not in columns]:
        names = shorten(", ".join(map(repr, file.schema_arrow.names)) or "none")
        raise UserError(f"{chunk.path}: no column {missing[0]!r}; it has {names}, see --json-keys")
    row, row_bytes = 0, chunk.num_bytes // max(file.metadata.row_group(chunk.start).num_rows, 1)
    batch_rows = min(max(BATCH_ROWS_BYTES // max(row_bytes, 1), 1), BATCH_ROWS)
    try:
        for batch in file.iter_batches(batch_rows, row_groups=[chunk.start], columns=columns, use_threads=False):
            if row + batch.num_rows > first:
                for number, fields in enumerate(_decoded_rows(batch), row):
                    if number >= first:
                        yield Record(chunk, number, number + 1, options.checked(fields), row_bytes)
            row += batch.num_rows
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{chunk.path}: row group {chunk.start} is damaged ({error}); make the file again or leave it out"
        ) from error


def _decoded_rows(batch: Any) -> Sequence[Mapping[str, object] | UserError]:
    """Return the rows of a batch of pyarrow's; the error of a row in place of one that cannot be decoded."""
    try:
        rows: list[Mapping[str, object]] = batch.to_pylist()
    except Exception as error:  # of any type: text that is not UTF-8, a date that Python does not have
        if batch.num_rows == 1:
            return [UserError(f"cannot be decoded ({error})")]
        return [row for number in range(batch.num_rows) for row in _decoded_rows(batch.slice(number, 1))]
    return rows


def _dataset_rows(chunk: InputChunk, options: ReadOptions, position: int | None) -> Iterator[Record]:
    first = position or 0
    rows: Iterator[Mapping[str, Any]] = open_shard(chunk.path, chunk.start, chunk.stop, first)
    for number, fields in enumerate(rows, first):
        wanted = {key: fields[key] for key in options.keys if key in fields}
        yield Record(chunk, number, number + 1, options.checked(wanted or dict(fields)), 0)


_READERS: Mapping[str, Callable[[InputChunk, ReadOptions, int | None], Iterator[Record]]] = {
    "lines": _lines,
    "gzip": _lines,
    "zstd": _lines,
    "text": _text,
    "rows": _parquet_rows,
    "dataset": _dataset_rows,
}
