"""From a YAML file and `section.key=value` overrides to a frozen configuration in which every value has an origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron3d.config.schema import Config
from megatron3d.config.suggest import SECTIONS, nearest, nearest_key, one_of
from megatron3d.config.yaml_origins import Entry, parse_value, read_document, show
from megatron3d.errors import UserError

COMMAND_LINE = "command line"
DEFAULT = "default"

_KINDS: Mapping[type, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list",
    dict: "a mapping",
    type(None): "null",
}


@dataclass(frozen=True)
class Resolved:
    """A configuration, and for every `section.key` where its value came from."""

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True)
class Reading(Resolved):
    """What could be read: keys with a problem keep their defaults.

    Attributes:
        problems: one message each.
        unsure: keys whose value is not what the person meant.
    """

    problems: tuple[str, ...]
    unsure: frozenset[str]


def read_config(path: Path, overrides: Sequence[str] = ()) -> Resolved:
    """The configuration of a file with overrides; raises UserError with every problem."""
    reading = read(path, overrides)
    UserError.collect(reading.problems)
    return Resolved(reading.config, reading.origins)


def read(path: Path, overrides: Sequence[str] = ()) -> Reading:
    """As read_config, with the problems beside what is right.  Of two overrides of one key the later one holds."""
    problems: list[str] = []
    document = read_document(path, problems)
    entries = [*(document or ()), *_override_entries(overrides, problems)]
    known = {entry.key: entry for entry in entries if entry.name in SECTIONS.get(entry.section, ())}
    unknown = [entry for entry in entries if entry.key not in known]
    problems += dict.fromkeys(_unknown(entry) for entry in unknown)
    meant = {nearest_key(entry.section, entry.name) or "" for entry in unknown}

    config, wrong = _validated(known)
    problems += wrong.values()
    right = {key: entry.origin for key, entry in known.items() if key not in wrong}
    origins = {f"{section}.{name}": DEFAULT for section, names in SECTIONS.items() for name in names} | right
    unsure = frozenset(origins) if document is None else frozenset(origins) & (meant | set(wrong))
    return Reading(config, origins, tuple(problems), unsure)


def _override_entries(overrides: Iterable[str], problems: list[str]) -> list[Entry]:
    entries = []
    for text in overrides:
        key, equals, value = text.partition("=")
        section, _, name = key.strip().rpartition(".")
        if not equals or not name:
            problems.append(
                f"{text} ({COMMAND_LINE}): not of the form section.key=value; such as train.train_iters=100"
            )
            continue
        try:
            entries.append(Entry(section, name, parse_value(value), COMMAND_LINE))
        except (ValueError, RecursionError) as error:
            problems.append(f"{text} ({COMMAND_LINE}): the value is not YAML ({error}); put it in quotes")
    return entries


def _unknown(entry: Entry) -> str:
    """The message for an entry whose section or key is not in the schema."""
    where = f"{entry.key}={show(entry.value)} ({entry.origin})"
    likely = nearest_key(entry.section, entry.name) if entry.name else nearest_key("", entry.section)
    if entry.key in SECTIONS:
        return f"{where}: a section, not a value; write its keys below it, such as {SECTIONS[entry.key][0]}"
    if entry.section in SECTIONS:
        return f"{where}: unknown key; use {likely or one_of(SECTIONS[entry.section])}"
    if entry.section and entry.name:
        section = nearest(entry.section, SECTIONS) or one_of(SECTIONS)
        return f"{where}: unknown section {entry.section}; use {likely or section}"
    return f"{where}: a key without its section; use {likely or 'section.key, section being ' + one_of(SECTIONS)}"


def _validated(known: Mapping[str, Entry]) -> tuple[Config, dict[str, str]]:
    """The configuration without its wrong values, and a message for the key of each of these."""
    values: dict[str, dict[str, object]] = {}
    for entry in known.values():
        values.setdefault(entry.section, {})[entry.name] = entry.value
    wrong: dict[str, str] = {}
    try:
        return Config.model_validate(values), wrong
    except ValidationError as error:
        for detail in error.errors():
            section, name = str(detail["loc"][0]), str(detail["loc"][1])
            entry = known[f"{section}.{name}"]
            where = f"{entry.key}={show(entry.value)} ({entry.origin})"
            whole = detail["type"].endswith("_type") and len(detail["loc"]) == 2
            rule = f"{_KINDS.get(type(entry.value), 'this')} is not allowed" if whole else "not allowed"
            wrong[entry.key] = f"{where}: {rule}; use {expected(section, name, entry.value)}"
            values[section].pop(name, None)
    return Config.model_validate(values), wrong


def expected(section: str, name: str, given: object = None) -> str:
    """In words, the values that a key takes, the one nearest to what was given first."""
    schema = type(getattr(Config(), section)).model_json_schema()["properties"][name]
    kinds = schema.get("anyOf", [schema])
    return " or ".join(_words(kind | {"default": schema.get("default")}, given) for kind in kinds)


def _words(kind: Mapping[str, Any], given: object) -> str:
    if "enum" in kind:
        near = nearest(str(given).lower(), map(str, kind["enum"]))
        return one_of(sorted(map(str, kind["enum"]), key=lambda value: value != near))
    if kind["type"] == "array":
        if "prefixItems" in kind:
            return f"a list of {len(kind['prefixItems'])} whole numbers of at least 1, such as [8,8,1000]"
        if "anyOf" in kind["items"]:
            return "a list such as [0.7, data/web, 0.3, data/books]"
        if "enum" in kind["items"]:
            return f"a list of {one_of(kind['items']['enum'])}, such as [{kind['items']['enum'][0]}]"
        return f"a list of whole numbers of at least {kind['items']['minimum']}, such as [2,2,2]"
    bounds = {"minimum": "of at least", "exclusiveMinimum": "above", "exclusiveMaximum": "and below"}
    limits = "".join(f" {words} {kind[bound]:g}" for bound, words in bounds.items() if bound in kind)
    names = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "text",
        "null": "null",
    }
    example = f" such as {kind['default']}" if kind["type"] == "string" and kind["default"] else ""
    return names[str(kind["type"])] + limits + example
