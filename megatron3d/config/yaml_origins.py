"""Read a YAML file as a list of entries, each with its line, the mark of PyYAML's node.

Plain scalars follow YAML 1.2's core schema: `1e-3` is a number and `on` is text, but a string and a boolean in PyYAML.
ruamel.yaml would need the same table of scalars (it reads `2001-01-01` as a date and refuses `=`) and composes
configs/llama-8b.yaml in 2.8 ms instead of 1.8 ms, so the table is written for PyYAML, which is needed anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import BaseModel

from megatron3d.errors import UserError
from megatron3d.runtime.arguments import MAX_QUOTED, read_limited, shorten

# Levels of lists and mappings in each other, and values of a file with every alias written out.
MAX_DEPTH, MAX_NODES = 20, 20_000
MAX_DIGITS = 1000
TAG = "tag:yaml.org,2002:"


class Entry(NamedTuple):
    """One value as written; `section` or `name` is empty where it is missing."""

    section: str
    name: str
    value: object
    origin: str

    @property
    def key(self) -> str:
        """`section.name`, as far as it was written."""
        return ".".join(filter(None, (self.section, self.name)))


class Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2, sequences as tuples, no other tags, and limits of depth and size."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own protocol)
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(TAG) in ("null", "bool", "int", "float", "str", "map")
    }
    _depth = _num_composed = 0

    def tuple_of(self, node: yaml.SequenceNode) -> tuple[object, ...]:
        """Return the values of a sequence."""
        return tuple(self.construct_sequence(node, deep=True))

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Compose a value; raises MarkedYAMLError beyond the limits, and where a tag does not fit its text."""
        mark = self.peek_event().start_mark
        self._num_composed += 1
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels of lists and mappings", problem_mark=mark)
        if self._num_composed > MAX_NODES:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_NODES} values", problem_mark=mark)
        self._depth += 1
        node = super().compose_node(parent, index)  # type: ignore[arg-type]
        self._depth -= 1
        kind = node.tag.removeprefix(TAG) if node else ""
        if isinstance(node, yaml.ScalarNode) and kind in SCALARS and not _is_scalar(kind, node.value):
            raise yaml.MarkedYAMLError(problem=f'not of type {kind}: "{node.value}"', problem_mark=mark)
        return node

    def get_single_node(self) -> yaml.Node | None:
        """Compose the document; raises MarkedYAMLError above `MAX_NODES` values with every alias written out."""
        root = super().get_single_node()
        if root is not None and _num_nodes(root, {}) > MAX_NODES:
            problem = f"more than {MAX_NODES} values with every alias written out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=root.start_mark)
        return root


def _is_scalar(kind: str, text: str) -> bool:
    return len(text) < MAX_DIGITS and re.fullmatch(SCALARS[kind], text) is not None


def _num_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values in a node, an alias counting as a copy, at most one more than `MAX_NODES`."""
    if id(node) not in known:
        known[id(node)] = MAX_NODES
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        each = (part for item in inner for part in (item if isinstance(item, tuple) else (item,)))
        known[id(node)] = min(1 + sum(_num_nodes(part, known) for part in each), MAX_NODES + 1)
    return known[id(node)]


_FLOAT = r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
# Pattern of the scalars of each type; those without a tag get the first type that fits.
SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9_]*)",
    "float": rf"{_FLOAT}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
Loader.add_constructor(f"{TAG}seq", Loader.tuple_of)
for _tag, _first in (
    ("null", ["~", "n", "N", ""]),
    ("bool", list("tTfF")),
    ("int", list("-+0123456789")),
    ("float", list("-+.0123456789")),
):
    Loader.add_implicit_resolver(f"{TAG}{_tag}", re.compile(rf"(?:{SCALARS[_tag]})\Z"), _first)


def parse_value(text: str) -> object:
    """Parse a YAML value; raises ValueError."""
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(_first_line(error)) from error


def show(value: object) -> str:
    """Return a value as a user would type it, at most 200 characters."""
    return shorten("".join(islice(_pieces(value), MAX_QUOTED + 1)))


def _pieces(value: object) -> Iterator[str]:
    """Yield the text of a value in pieces, each of at least one character."""
    if isinstance(value, tuple | list):
        yield "["
        for index, item in enumerate(value):
            if index:
                yield ","
            yield from _pieces(item)
        yield "]"
    elif isinstance(value, dict | BaseModel):
        yield "{"
        for index, (name, item) in enumerate(dict(value).items()):
            yield f"{', ' * (index > 0)}{shorten(str(name))}: "
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, str):
        text = shorten(value)
        yield text if is_plain(text) else f'"{text}"'
    else:
        yield "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def is_plain(text: str) -> bool:
    """Return whether YAML reads the text without quotes as that text."""
    if re.fullmatch(r"[\w./,+-]+", text) is None:
        return False
    try:
        return parse_value(text) == text
    except ValueError:
        return False


def read_document(path: Path, problems: list[str]) -> list[Entry] | None:
    """Read the entries of a file of sections, None where it is not one; append each syntax problem to `problems`."""
    try:
        return parse_document(read_limited(path), str(path), problems)
    except OSError as error:
        problems.append(f"{path}: {error.strerror}; give a YAML file that can be read, such as one of configs/")
    return None


def parse_document(content: bytes, name: str, problems: list[str]) -> list[Entry] | None:
    """Return what `read_document` does, for the content of the file `name`."""
    try:
        loader = Loader(content.decode("utf-8"))
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            return list(_entries(name, loader, root, problems))
        form = {type(None): "empty", yaml.SequenceNode: "a list"}.get(type(root), "plain text")
        problems.append(f"{name}: the file is {form}, not a mapping; write sections with keys, as in configs/")
    except UnicodeDecodeError as error:
        problems.append(f"{name}: byte {error.start} is not UTF-8 text; give a YAML file, such as one of configs/")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problems.append(f"{name}:{line}: not YAML ({_first_line(error)}); correct this line or the one before it")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.append(f"{name}: not YAML ({_first_line(error)}); give a file like those of configs/")
    return None


def read_yaml(path: Path) -> object:
    """Return the value of a YAML file of any form; raises UserError where it cannot be read."""
    try:
        return parse_value(read_limited(path).decode("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a YAML file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not YAML ({_first_line(error)}); correct it") from error


def _first_line(error: Exception) -> str:
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
    return shorten((problem or type(error).__name__).splitlines()[0])


def _entries(file: str, loader: Loader, root: yaml.MappingNode, problems: list[str]) -> Iterator[Entry]:
    for section, node, origin in _pairs(file, root, "", problems):
        if isinstance(node, yaml.MappingNode) and node.value:
            for name, value, inner_origin in _pairs(file, node, f"{section}.", problems):
                yield Entry(section, name, loader.construct_object(value, deep=True), inner_origin)
        else:
            yield Entry(section, "", loader.construct_object(node, deep=True), origin)


def _pairs(file: str, node: yaml.MappingNode, prefix: str, problems: list[str]) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yield key, value node and `file:line` of a mapping; a repeated key is reported and skipped."""
    first: dict[str, str] = {}
    for key_node, value_node in node.value:
        key, origin = str(key_node.value), f"{file}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(f"{origin}: a key must be a word, not a list or a mapping; write `key: value`")
        elif key in first:
            where = f"{prefix}{shorten(key)} ({origin})"
            problems.append(f"{where}: already given at {first[key]}; keep one of the two")
        else:
            first[key] = origin
            yield key, value_node, origin
