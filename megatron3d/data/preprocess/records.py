"""A document as it was read: a line of JSON, a row, or a part of a text; what is wrong is said with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron3d.data.preprocess.input_chunks import InputChunk
from megatron3d.errors import UserError

TEXT_KEY = "text"
BYTE_ORDER_MARK = "\ufeff"
"""What some programs of Windows begin a file with; it is no text."""


@dataclass(frozen=True, slots=True)
class Record:
    """An undecoded document, or a part of one.

    Attributes:
        position: where in its piece it begins: a byte, or the number of a row.
        after: where the one behind it begins.
        content: a line of JSON, a text, or the fields of a row; what is wrong where it could not be read.
        num_bytes: how much of the input it is.
        ends: whether its document ends here.
    """

    piece: InputChunk
    position: int
    after: int
    content: bytes | str | Mapping[str, object] | UserError
    num_bytes: int
    ends: bool = True

    @property
    def place(self) -> str:
        """File and line, or row; lines are counted now, since that is needed for errors only."""
        return self.piece.describe(self.position)

    @property
    def is_whole(self) -> bool:
        """Whether it is a document by itself; a part of one cannot be left out."""
        return self.ends and (self.position == 0 or self.piece.kind != "text")

    def texts(self, keys: Sequence[str]) -> list[str]:
        """The text under each key; raises UserError that names file and line."""
        if isinstance(self.content, UserError):
            raise self._wrong(str(self.content))
        if isinstance(self.content, bytes):
            fields = self._parsed(self.content)
        else:
            fields = {TEXT_KEY: self.content} if isinstance(self.content, str) else self.content
        return [self._text(fields, key) for key in keys]

    def _parsed(self, line: bytes) -> Mapping[str, object]:
        try:
            fields: object = json.loads(line.decode().removeprefix(BYTE_ORDER_MARK))
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"not JSON, of which a line is to hold a document ({error})") from error
        if not isinstance(fields, dict):
            raise self._wrong(f"a JSON {type(fields).__name__}, not an object with a text under a key")
        return fields

    def _text(self, fields: Mapping[str, object], key: str) -> str:
        if key not in fields:
            names = ", ".join(map(repr, fields)) or "none"
            raise self._wrong(f"no key {key!r}; it has {names}, see --json-keys, or data.stream_key of a run")
        text = fields[key]
        if not isinstance(text, str):
            raise self._wrong(f"{key!r} holds a {type(text).__name__}, not a string")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                why = f"{error.reason} at character {error.start}"
                raise self._wrong(f"{key!r} is not valid Unicode ({why})") from error
        return text

    def _wrong(self, problem: str) -> UserError:
        return UserError(f"{self.place}: {problem}; correct it or remove it")
