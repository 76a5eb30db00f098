"""Raw text as documents: a line of a .jsonl file is one, or a whole .txt file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron3d.errors import UserError

TEXT_KEY = "text"
_JSON, _TEXT = (".jsonl", ".json"), (".txt",)


@dataclass(frozen=True)
class Record:
    """An undecoded document and where it stands; `line` is None for a whole file."""

    path: Path
    line: int | None
    content: bytes

    @property
    def place(self) -> str:
        """File and line."""
        return str(self.path) if self.line is None else f"{self.path}:{self.line}"

    def texts(self, keys: Sequence[str]) -> list[str]:
        """The text under each key; raises UserError that names file and line."""
        try:
            if self.line is None:
                fields: object = {TEXT_KEY: self.content.decode()}
            else:
                fields = json.loads(self.content.decode())
        except ValueError as error:
            raise self._wrong(f"not {'JSON' if self.line else 'UTF-8 text'} ({error})") from error
        if not isinstance(fields, dict):
            raise self._wrong(f"a JSON {type(fields).__name__}, not an object with the key {keys[0]!r}")
        return [self._text(fields, key) for key in keys]

    def _text(self, fields: dict[str, object], key: str) -> str:
        if key not in fields:
            raise self._wrong(f"no key {key!r}; it has {', '.join(map(repr, fields)) or 'none'}, see --json-keys")
        text = fields[key]
        if not isinstance(text, str):
            raise self._wrong(f"{key!r} holds a {type(text).__name__}, not a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self._wrong(f"{key!r} is not valid Unicode ({error.reason} at character {error.start})") from error
        return text

    def _wrong(self, problem: str) -> UserError:
        return UserError(f"{self.place}: {problem}; correct it or remove it")


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files that names and globs mean, a glob's in sorted order; raises UserError for a missing or unknown file."""
    paths = [path for pattern in patterns for path in _expand(pattern)]
    known = _JSON + _TEXT
    UserError.collect(
        [f"--input {path}: no such file" for path in paths if not path.is_file()]
        + [
            f"--input {path}: unknown kind {path.suffix!r}; name it .jsonl (a document per line) or .txt (one document)"
            for path in paths
            if path.is_file() and path.suffix not in known
        ]
    )
    return paths


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.exists():
        return [path]
    return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))) or [path]


def read_records(paths: Sequence[Path]) -> Iterator[Record]:
    """Every document in order; blank lines of a .jsonl file hold none."""
    for path in paths:
        try:
            with path.open("rb") as file:
                if path.suffix in _TEXT:
                    yield Record(path, None, file.read())
                else:
                    yield from (Record(path, line, text) for line, text in enumerate(file, 1) if text.strip())
        except OSError as error:
            raise UserError(f"--input {path}: cannot be read ({error.strerror})") from error
