"""Read the records of an input chunk from any position on, with one document in memory, and split long texts.

Files are read here, not through `datasets`, whose streams neither resume at a byte, nor name the line of a bad record,
nor limit its size.

A split is exact where encode(left + right) = encode(left) + encode(right), tried on the characters around it.  For a
SentencePiece model that puts a space before each text, the same holds where `right` begins with a space and loses it.
"""

from __future__ import annotations

import codecs
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, BinaryIO

from megatron3d.data.option_table import TEXT_KEY
from megatron3d.data.preprocess.inputs import InputChunk, open_decompressed, open_parquet, open_shard
from megatron3d.errors import UserError
from megatron3d.runtime.arguments import shorten

BYTE_ORDER_MARK = "\ufeff"
"""First character of files that some Windows programs write; it is not text."""


@dataclass(frozen=True, slots=True)
class Record:
    """A document that is not decoded yet, or a section of one.

    Attributes:
        chunk: input chunk that holds it.
        position: its start in the chunk, a byte or the number of a row.
        after: position of the next record.
        content: a line of JSON, a text, the fields of a row, or the error where it could not be read.
        num_bytes: its size in the input.
        ends: whether its document ends with it.
    """

    chunk: InputChunk
    position: int
    after: int
    content: bytes | str | Mapping[str, object] | UserError
    num_bytes: int
    ends: bool = True

    @property
    def place(self) -> str:
        """File and line, or row.  Lines are counted on demand, since only errors need them."""
        return self.chunk.describe(self.position)

    @property
    def begins(self) -> bool:
        """Whether its document begins with it."""
        return self.position == 0 or self.chunk.kind != "text"

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole document; a section of one cannot be left out."""
        return self.ends and self.begins

    def texts(self, keys: Sequence[str]) -> list[str]:
        """Return the text under each key; raises UserError that names file and line."""
        if isinstance(self.content, UserError):
            raise self._error(str(self.content))
        if isinstance(self.content, bytes):
            fields = self._parse(self.content)
        else:
            fields = {TEXT_KEY: self.content} if isinstance(self.content, str) else self.content
        return [self._text(fields, key) for key in keys]

    def _parse(self, line: bytes) -> Mapping[str, object]:
        try:
            fields: object = json.loads(line.decode().removeprefix(BYTE_ORDER_MARK))
        except (ValueError, RecursionError) as error:
            raise self._error(f"not JSON, of which a line is to hold a document ({error})") from error
        if not isinstance(fields, dict):
            raise self._error(f"a JSON {type(fields).__name__}, not an object with a text under a key")
        return fields

    def _text(self, fields: Mapping[str, object], key: str) -> str:
        if key not in fields:
            names = shorten(", ".join(map(repr, fields)) or "none")
            raise self._error(f"no key {key!r}; it has {names}, see --json-keys, or data.stream_key of a run")
        text = fields[key]
        if not isinstance(text, str):
            raise self._error(f"{key!r} holds a {type(text).__name__}, not a string")
        try:
            if not text.isascii():
                text.encode()
        except UnicodeEncodeError as error:
            why = f"{error.reason} at character {error.start}"
            raise self._error(f"{key!r} is not valid Unicode ({why})") from error
        return text

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.place}: {problem}; correct it or remove it")


MAX_TEXT = 1 << 20
"""Characters of the longest text that is encoded in one call."""
SECTION, SEARCH = 1 << 18, 1 << 13
CONTEXT = 256
"""Characters of a section, of the range at its end that is searched for a split, and of each side that is tried."""

Split = Callable[[str], tuple[int, int]]
"""From a long text to the end of its first section and the start of the rest; a space between may be in neither."""
Encode = Callable[[str], list[int]]


def split_at_newline(text: str) -> tuple[int, int]:
    """Split after the last newline, else the last space, of the first section."""
    end = next((i + 1 for mark in "\n " if (i := text.rfind(mark, SECTION - SEARCH, SECTION)) >= 0), SECTION)
    return end, end


def exact_split(encode: Encode) -> Split:
    """Return a function that splits where no token changes, as near to the end of the first section as possible."""

    def split(text: str) -> tuple[int, int]:
        for end in _candidates(text):
            left, right = text[end - CONTEXT : end], text[end : end + CONTEXT]
            try:
                whole, left_ids = encode(left + right), encode(left)
                if whole == left_ids + encode(right):
                    return end, end
                if right.startswith(" ") and whole == left_ids + encode(right[1:]):
                    return end, end + 1
            except UserError:  # the tokenizer lacks a character; encoding the section raises that with its place
                break
        return split_at_newline(text)

    return split


def _candidates(text: str) -> Iterator[int]:
    """Yield the positions after a newline, and before a space that follows something else, from the back."""
    for end in range(SECTION, SECTION - SEARCH, -1):
        before, after = text[end - 1], text[end]
        if before == "\n" or (after.isspace() and not before.isspace()):
            yield end


def sections(text: str, split: Split) -> Iterator[str]:
    """Yield a text in sections of bounded length; a text that is not long is one section."""
    start = 0
    while len(text) - start > MAX_TEXT:
        end, following = split(text[start : start + SECTION + CONTEXT])
        yield text[start : start + end]
        start += following
    yield text[start:]


def sentence_splitter() -> Callable[[str], Sequence[str]]:
    """Return a function that splits a text into sentences with nltk's untrained Punkt; joined they are the text."""
    try:
        from nltk.tokenize import PunktSentenceTokenizer
    except ImportError as error:
        raise UserError("--split-sentences: needs the package nltk; pip install nltk") from error
    punkt: Any = PunktSentenceTokenizer()

    def split(text: str) -> Sequence[str]:
        starts = [start for start, _ in punkt.span_tokenize(text)]
        return [text[start:end] for start, end in pairwise([0, *starts[1:], len(text)])]

    return split


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
            deque(codecs.iterdecode(iter(partial(file.read, SKIP_BYTES), b""), "utf-8"), maxlen=0)
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
    **dict.fromkeys(("lines", "gzip", "zstd"), _lines),
    "text": _text,
    "rows": _parquet_rows,
    "dataset": _dataset_rows,
}
