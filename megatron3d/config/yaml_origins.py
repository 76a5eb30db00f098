"""Read a YAML file as a list of entries, each with its line.

Plain scalars follow YAML 1.2's core schema: `1e-3` is a number and `on` is text, but a string and a boolean in PyYAML.
ruamel.yaml would need the same table of scalars (it reads `2001-01-01` as a date and refuses `=`) and takes two to
three times as long to compose a file, so the table is written for PyYAML, which the YAML files of clusters need anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml


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
    """Safe YAML with the scalars of YAML 1.2 and sequences as tuples."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own protocol)

    def tuple_of(self, node: yaml.SequenceNode) -> tuple[object, ...]:
        """Return the values of a sequence."""
        return tuple(self.construct_sequence(node, deep=True))


Loader.add_constructor("tag:yaml.org,2002:seq", Loader.tuple_of)
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def parse_value(text: str) -> object:
    """Parse a YAML value; raises ValueError."""
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(_first_line(error)) from error


def show(value: object) -> str:
    """Return a value as a user would type it, at most 200 characters."""
    if isinstance(value, tuple | list):
        return f"[{','.join(show(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = f'"{value}"' if isinstance(value, str) and not is_plain(value) else str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


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
        loader = Loader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            return list(_entries(path, loader, root, problems))
        form = {type(None): "empty", yaml.SequenceNode: "a list"}.get(type(root), "plain text")
        problems.append(f"{path}: the file is {form}, not a mapping; write sections with keys, as in configs/")
    except OSError as error:
        problems.append(f"{path}: {error.strerror}; give a YAML file that can be read, such as one of configs/")
    except UnicodeDecodeError as error:
        problems.append(f"{path}: byte {error.start} is not UTF-8 text; give a YAML file, such as one of configs/")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problems.append(f"{path}:{line}: not YAML ({error.problem}); correct this line or the one before it")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.append(f"{path}: not YAML ({_first_line(error)}); give a file like those of configs/")
    return None


def _first_line(error: Exception) -> str:
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
    return (problem or type(error).__name__).splitlines()[0]


def _entries(path: Path, loader: Loader, root: yaml.MappingNode, problems: list[str]) -> Iterator[Entry]:
    for section, node, origin in _pairs(path, root, "", problems):
        if isinstance(node, yaml.MappingNode):
            for name, value, inner_origin in _pairs(path, node, f"{section}.", problems):
                yield Entry(section, name, loader.construct_object(value, deep=True), inner_origin)
        elif (value := loader.construct_object(node, deep=True)) is not None:
            yield Entry(section, "", value, origin)


def _pairs(
    path: Path, node: yaml.MappingNode, prefix: str, problems: list[str]
) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yield key, value node and `file:line` of a mapping; a repeated key is reported and skipped."""
    first: dict[str, str] = {}
    for key_node, value_node in node.value:
        key, origin = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(f"{origin}: a key must be a word, not a list or a mapping; write `key: value`")
        elif key in first:
            problems.append(f"{prefix}{key} ({origin}): already given at {first[key]}; keep one of the two")
        else:
            first[key] = origin
            yield key, value_node, origin
