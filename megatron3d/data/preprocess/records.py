"""One document as it was read: a line of JSON, a row, or a section of a text file; errors name its place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron3d.data.preprocess.input_chunks import InputChunk
from megatron3d.errors import UserError
from megatron3d.runtime.limits import shorten

TEXT_KEY = "text"
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
