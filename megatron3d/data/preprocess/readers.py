"""Reads the documents of a piece from any position on, with memory for one document at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatron3d.data.preprocess.hub_datasets import open_shard
from megatron3d.data.preprocess.input_chunks import InputChunk, open_decompressed, open_parquet
from megatron3d.data.preprocess.records import Record
from megatron3d.data.preprocess.split_text import LONG, Cut, cut_at_newline
from megatron3d.errors import UserError

SKIP_BYTES = 1 << 20
ROWS, ROWS_BYTES = 256, 1 << 22
"""Rows of a parquet file that are taken at one time, and about how many bytes of them at most; one at least."""
DEFAULT_RECORD_BYTES = 64 << 20


@dataclass(frozen=True)
class ReadOptions:
    """How to read.

    Attributes:
        keys: fields of a row that are wanted.
        cut: where a long text may be cut.
        max_record_bytes: longest line of JSON, or text of a row, that is taken.
    """

    keys: tuple[str, ...]
    cut: Cut = cut_at_newline
    max_record_bytes: int = DEFAULT_RECORD_BYTES


def read_piece(piece: InputChunk, reading: ReadOptions, position: int | None = None) -> Iterator[Record]:
    """The records of a piece, from a position that an earlier record was followed by, or from the start."""
    try:
        yield from _READERS[piece.kind](piece, reading, position)
    except OSError as error:
        why = " ".join(str(error.strerror or error).split())
        raise UserError(f"--input {piece.path}: cannot be read ({why})") from error


def read_pieces(pieces: Sequence[InputChunk], reading: ReadOptions) -> Iterator[Record]:
    """The records of all pieces."""
    for piece in pieces:
        yield from read_piece(piece, reading)


def _lines(piece: InputChunk, reading: ReadOptions, position: int | None) -> Iterator[Record]:
    limit = reading.max_record_bytes
    with open_decompressed(piece.path, piece.kind) as file:
        place = _first_line(file, piece) if position is None else _skip(file, piece, position)
        while place < piece.stop and (line := file.readline(limit + 1)):
            content: bytes | UserError = line
            after = place + len(line)
            if len(line) > limit:
                after += _rest_of_line(file, line)
                content = _too_long(reading)
            if not line.isspace():
                yield Record(piece, place, after, content, after - place)
            place = after


def _first_line(file: BinaryIO, piece: InputChunk) -> int:
    """Go to the first line that begins in the piece."""
    if piece.start == 0:
        return 0
    file.seek(piece.start - 1)
    return piece.start - 1 + _rest_of_line(file, b"")


def _rest_of_line(file: BinaryIO, line: bytes) -> int:
    """Bytes up to the end of a line that has begun with `line`, passed over."""
    skipped = 0
    while not line.endswith(b"\n") and (line := file.readline(SKIP_BYTES)):
        skipped += len(line)
    return skipped


def _skip(file: BinaryIO, piece: InputChunk, position: int) -> int:
    if piece.kind == "lines":
        return file.seek(position)
    rest = position
    while rest and (block := file.read(min(rest, SKIP_BYTES))):
        rest -= len(block)
    if rest:
        raise UserError(f"--input {piece.path}: shorter than it was; start again with --restart")
    return position


def _text(piece: InputChunk, reading: ReadOptions, position: int | None) -> Iterator[Record]:
    """A whole file is one document: of a long one come parts, cut where that changes no token."""
    place = position or 0
    if position is None and (problem := _not_text(piece)):
        yield Record(piece, 0, piece.num_bytes, problem, piece.num_bytes)
        return
    with open_decompressed(piece.path, piece.kind) as file:
        mark = len(codecs.BOM_UTF8) if place == 0 and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        file.seek(place + mark)
        decoder, text, more = codecs.getincrementaldecoder("utf-8")(), "", True
        while more or text:
            while more and len(text) <= LONG:
                block = file.read(SKIP_BYTES)
                text, more = text + decoder.decode(block), bool(block)
            end, following = reading.cut(text) if len(text) > LONG else (len(text), len(text))
            after, mark = place + mark + len(text[:following].encode()), 0
            if text:
                yield Record(piece, place, after, text[:end], after - place, ends=following == len(text))
            place, text = after, text[following:]


def _not_text(piece: InputChunk) -> UserError | None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_decompressed(piece.path, piece.kind) as file:
        try:
            while block := file.read(SKIP_BYTES):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            return UserError(f"not UTF-8 text ({error.reason})")
    return None


def _rows(piece: InputChunk, reading: ReadOptions, position: int | None) -> Iterator[Record]:
    file, first = open_parquet(piece.path), position or 0
    columns = [key for key in reading.keys if key in file.schema_arrow.names]
    if missing := [key for key in reading.keys if key not in columns]:
        names = ", ".join(map(repr, file.schema_arrow.names)) or "none"
        raise UserError(f"{piece.path}: no column {missing[0]!r}; it has {names}, see --json-keys")
    row, size = 0, piece.num_bytes // max(file.metadata.row_group(piece.start).num_rows, 1)
    at_once = min(max(ROWS_BYTES // max(size, 1), 1), ROWS)
    for batch in _sound(
        piece, file.iter_batches(at_once, row_groups=[piece.start], columns=columns, use_threads=False)
    ):
        if row + batch.num_rows > first:
            for number, fields in enumerate(batch.to_pylist(), row):
                if number >= first:
                    yield Record(piece, number, number + 1, _within(fields, reading), size)
        row += batch.num_rows


def _sound(piece: InputChunk, batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow

    try:
        yield from batches
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{piece.path}: row group {piece.start} is damaged ({error}); make the file again or leave it out"
        ) from error


def _dataset(piece: InputChunk, reading: ReadOptions, position: int | None) -> Iterator[Record]:
    first = position or 0
    rows: Iterator[Mapping[str, Any]] = open_shard(piece.path, piece.start, piece.stop, first)
    for number, fields in enumerate(rows, first):
        wanted = {key: fields[key] for key in reading.keys if key in fields}
        yield Record(piece, number, number + 1, _within(wanted or dict(fields), reading), 0)


def _within(fields: Mapping[str, object], reading: ReadOptions) -> Mapping[str, object] | UserError:
    """The fields of a row, unless one of them is too long."""
    if any(isinstance(value, str) and len(value) > reading.max_record_bytes for value in fields.values()):
        return _too_long(reading)
    return fields


def _too_long(reading: ReadOptions) -> UserError:
    return UserError(f"longer than --max-record-mb {reading.max_record_bytes / 1e6:g}")


_READERS: Mapping[str, Callable[[InputChunk, ReadOptions, int | None], Iterator[Record]]] = {
    "lines": _lines,
    "gzip": _lines,
    "zstd": _lines,
    "text": _text,
    "rows": _rows,
    "dataset": _dataset,
}
