"""Read a YAML file and `section.key=value` overrides into a frozen configuration with an origin for every value.

Unknown keys get suggestions: similar names, and the names of the same option in other frameworks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron3d.config.schema import Config, Refused, declared
from megatron3d.config.yaml_origins import Entry, parse_value, read_document, show
from megatron3d.errors import UserError
from megatron3d.pipeline.schedules import INTERLEAVED, ONE_F_ONE_B
from megatron3d.runtime.arguments import shorten

SECTIONS: Mapping[str, tuple[str, ...]] = {
    section: tuple(type(getattr(Config(), section)).model_fields) for section in Config.model_fields
}

# Key of each name in another framework.
_BY_ALIAS: Mapping[str, str] = {
    alias: f"{section}.{name}"
    for section, field in Config.model_fields.items()
    for name, key in type(field.default).model_fields.items()
    for alias in declared(key).get("also", ())
}
# Values that names of other frameworks stand for.
_VALUES: Mapping[str, str] = {
    "swiglu": "swiglu",
    "openai_gelu": "gelu_tanh",
    "use_rotary_position_embeddings": "rope",
    "bf16": "bf16",
    "fp16": "fp16",
    "disable_bias_linear": "false",
    "untie_embeddings_and_output_weights": "false",
    "use_distributed_optimizer": "1",
    "fsdp": "3",
    "data_parallel_shard_degree": "3",
    "gradient_checkpointing": "full",
    "recompute_activations": "selective",
}
# Words that do not tell one key from another, and letters of a name that are compared.
_COMMON_WORDS = frozenset(
    ("num", "size", "type", "name", "model", "init", "max", "min", "use", "of", "in", "to", "per")
)
_LONGEST = 100


def nearest_key(section: str, name: str) -> str | None:
    """Return the `section.key` closest to a misspelt, misplaced or foreign name, or None if no key is similar.

    A similar key has a word in common with the name, up to its spelling.
    """
    name = name.lower().replace("-", "_")
    if found := _BY_ALIAS.get(f"{section}.{name}"):
        return found
    section = section if section in SECTIONS else (nearest(section, SECTIONS) or "")
    places = [section] if section in SECTIONS else []
    places += [other for other in SECTIONS if other != section]
    exact = next((f"{place}.{name}" for place in places if name in SECTIONS[place]), None)
    if found := exact or _BY_ALIAS.get(name):
        return found
    for place, cutoff in zip(places, [0.6] + [0.8] * len(places), strict=False):
        if near := nearest(name, (key for key in SECTIONS[place] if _share_a_word(name, key)), cutoff):
            return f"{place}.{near}"
    return None


def value_of(name: str) -> str | None:
    """Return the value that a name of another framework stands for: `bf16` for train.precision; None for others."""
    return _VALUES.get(name.lower().replace("-", "_"))


def _share_a_word(name: str, key: str) -> bool:
    words = (word for word in name[:_LONGEST].split("_") if word not in _COMMON_WORDS)
    return any(nearest(word, (other for other in key.split("_") if other not in _COMMON_WORDS), 0.7) for word in words)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, or None."""
    return next(iter(get_close_matches(name[:_LONGEST], list(known), 1, cutoff)), None)


def one_of(values: Iterable[object]) -> str:
    """Join values as `1, 2, 4 or 8`."""
    *most, last = (str(value) for value in values)
    return f"{', '.join(most)} or {last}" if most else last


COMMAND_LINE = "command line"
SCHEDULE = "parallel.pipeline_schedule"
DEFAULT = "default"
# Problems of a file that are described; of the others only their number is.
MAX_PROBLEMS = 50
# Removed keys: the value without effect that is still accepted, and ignored, and why any other is refused.
REMOVED: Mapping[str, tuple[int, str]] = {
    "parallel.tp_num_panels": (1, "panels were removed, since they were slower in nearly every measurement")
}

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
    """A configuration, the origin of the value of every `section.key`, and remarks on it, a line each."""

    config: Config
    origins: Mapping[str, str]
    remarks: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Reading(Resolved):
    """A configuration that may have problems: keys with a problem keep their defaults.

    Attributes:
        problems: one message per problem.
        unsure: keys whose value is not the one that the user meant.
    """

    problems: tuple[str, ...]
    unsure: frozenset[str]


def read_config(path: Path, overrides: Sequence[str] = ()) -> Resolved:
    """Return the configuration of a file with overrides; raises UserError with every problem."""
    reading = read(path, overrides)
    UserError.collect(reading.problems)
    return Resolved(reading.config, reading.origins)


def read(path: Path, overrides: Sequence[str] = ()) -> Reading:
    """Read a file with overrides, and return problems instead of raising; the last override of a key wins."""
    problems: list[str] = []
    document = read_document(path, problems)
    entries = [
        each
        for each in document or ()
        if each.section not in SECTIONS or each.name or each.value not in (None, {})  # not `logging:` without keys
    ]
    entries += _override_entries(overrides, problems)
    entries = _without_removed(entries, problems)
    known = {entry.key: entry for entry in entries if entry.name in SECTIONS.get(entry.section, ())}
    unknown = [entry for entry in entries if entry.name not in SECTIONS.get(entry.section, ())]
    described = unknown[:MAX_PROBLEMS]
    problems += dict.fromkeys(map(_unknown, described))
    meant = {nearest_key(entry.section, entry.name) or "" for entry in described}

    if (entry := known.get("data.tokenizer_model")) is not None:
        known["data.tokenizer_model"] = _next_to(path, entry)
    config, invalid = _validated(known)
    problems += invalid.values()
    if more := max(len(problems) - MAX_PROBLEMS, 0) + len(unknown) - len(described):
        problems[MAX_PROBLEMS:] = [f"{path}: {more} more problems; correct these first"]
    valid = {key: entry.origin for key, entry in known.items() if key not in invalid}
    origins = {f"{section}.{name}": DEFAULT for section, names in SECTIONS.items() for name in names} | valid
    schedule = known.get(SCHEDULE)
    if config.parallel.pipeline_schedule == INTERLEAVED and (schedule is None or schedule.value == ONE_F_ONE_B):
        virtual = config.parallel.virtual_pipeline_model_parallel_size
        origins[SCHEDULE] = f"derived: {ONE_F_ONE_B} with {virtual} stages per rank"
    unsure = frozenset(origins) if document is None else frozenset(origins) & (meant | set(invalid))
    return Reading(config, origins, tuple(problems), unsure)


def read_values(values: Mapping[str, object], origin: str) -> Config:
    """Return the configuration of values by `section.key`; raises UserError with every problem."""
    entries = [Entry(*_section_and_name(key), _as_yaml(value), origin) for key, value in values.items()]
    problems: list[str] = []
    entries = _without_removed(entries, problems)
    problems += [_unknown(entry) for entry in entries if entry.name not in SECTIONS.get(entry.section, ())]
    config, invalid = _validated(
        {entry.key: entry for entry in entries if entry.name in SECTIONS.get(entry.section, ())}
    )
    UserError.collect([*problems, *invalid.values()][:MAX_PROBLEMS])
    return config


def _section_and_name(key: str) -> tuple[str, str]:
    section, _, name = key.rpartition(".")
    return section, name


def _as_yaml(value: object) -> object:
    """Return a value of JSON as the reader of YAML files gives it."""
    return tuple(map(_as_yaml, value)) if isinstance(value, list) else value


def _override_entries(overrides: Iterable[str], problems: list[str]) -> list[Entry]:
    entries = []
    for text in overrides:
        key, equals, value = text.partition("=")
        section, _, name = key.strip().rpartition(".")
        if not equals or not name:
            where = f"{shorten(text)} ({COMMAND_LINE})"
            problems.append(f"{where}: not of the form section.key=value; use for example train.train_iters=100")
            continue
        try:
            entries.append(Entry(section, name, parse_value(value), COMMAND_LINE))
        except (ValueError, RecursionError) as error:
            problems.append(f"{shorten(text)} ({COMMAND_LINE}): the value is not YAML ({error}); put it in quotes")
    return entries


def _without_removed(entries: Sequence[Entry], problems: list[str]) -> list[Entry]:
    """Return the entries of other than removed keys; a removed key whose last value had an effect is a problem."""
    for key, entry in {entry.key: entry for entry in entries if entry.key in REMOVED}.items():
        accepted, reason = REMOVED[key]
        if type(entry.value) is not int or entry.value != accepted:
            problems.append(f"{key}={show(entry.value)} ({entry.origin}): {reason}; remove the key")
    return [entry for entry in entries if entry.key not in REMOVED]


def _next_to(path: Path, entry: Entry) -> Entry:
    """Return the entry with the path of a file next to the configuration, where its value is the name of one."""
    name = entry.value
    if entry.origin != COMMAND_LINE and isinstance(name, str) and Path(name).name == name:
        with suppress(OSError):
            if (path.parent / name).is_file():
                return entry._replace(value=str(path.parent / name))
    return entry


def _unknown(entry: Entry) -> str:
    """Return the message for an entry whose section or key is not in the schema."""
    where = f"{shorten(entry.key)}={show(entry.value)} ({entry.origin})"
    likely = nearest_key(entry.section, entry.name) if entry.name else nearest_key("", entry.section)
    section, dot, name = entry.section.rpartition(".")
    if dot and not entry.name and name in SECTIONS.get(section, ()):
        return f"{where}: the dot is for the command line; write {name} below {section}"
    if entry.key in SECTIONS:
        return f"{where}: a section, not a value; write its keys below it, such as {SECTIONS[entry.key][0]}"
    if entry.section in SECTIONS:
        return f"{where}: unknown key; use {likely or one_of(SECTIONS[entry.section])}"
    if entry.section and entry.name:
        use = likely or nearest(entry.section, SECTIONS) or one_of(SECTIONS)
        return f"{where}: unknown section {shorten(entry.section)}; use {use}"
    return f"{where}: a key without its section; use {likely or 'section.key with section ' + one_of(SECTIONS)}"


def _validated(known: Mapping[str, Entry]) -> tuple[Config, dict[str, str]]:
    """Return the configuration without its invalid values, and a message for the key of each of these."""
    values: dict[str, dict[str, object]] = {}
    for entry in known.values():
        values.setdefault(entry.section, {})[entry.name] = entry.value
    invalid: dict[str, str] = {}
    try:
        return Config.model_validate(values), invalid
    except ValidationError as error:
        last = {detail["loc"][:2]: detail for detail in error.errors()}  # each item of a list has one
        for (section, name), detail in ((map(str, key), detail) for key, detail in last.items()):
            entry = known[f"{section}.{name}"]
            where = f"{entry.key}={show(entry.value)} ({entry.origin})"
            values[section].pop(name, None)
            if isinstance(problem := detail.get("ctx", {}).get("error"), Refused):
                invalid[entry.key] = f"{where}: {problem}"
                continue
            whole = detail["type"].endswith("_type") and len(detail["loc"]) == 2
            rule = f"{_KINDS.get(type(entry.value), 'this')} is not allowed" if whole else "not allowed"
            if len(detail["loc"]) > 3 and isinstance(number := detail["loc"][2], int):
                rule = f"{detail['loc'][3]} of entry {number + 1}: {detail['msg']}"
            invalid[entry.key] = f"{where}: {rule}; use {expected(section, name, entry.value)}"
    return Config.model_validate(values), invalid


def expected(section: str, name: str, given: object = None) -> str:
    """Describe the values that a key allows, the one closest to `given` first."""
    schema = type(getattr(Config(), section)).model_json_schema()["properties"][name]
    kinds = schema.get("anyOf", [schema])
    return " or ".join(_describe_kind(kind | {"default": schema.get("default")}, given) for kind in kinds)


def _describe_kind(kind: Mapping[str, Any], given: object) -> str:
    if "const" in kind:
        return str(kind["const"])
    if "enum" in kind:
        near = nearest(str(given).lower(), map(str, kind["enum"]))
        return one_of(sorted(map(str, kind["enum"]), key=lambda value: value != near))
    if kind["type"] == "array":
        if "$ref" in kind.get("items", ()):
            return f"a list of mappings such as {kind['examples'][0]}"
        if "prefixItems" in kind:
            numbers = kind["prefixItems"]
            least, example = numbers[0]["minimum"], kind["examples"][0]
            return f"a list of {len(numbers)} whole numbers of at least {least}, such as {example}"
        if "anyOf" in kind["items"]:
            return "a list such as [0.7, data/web, 0.3, data/books]"
        if "enum" in kind["items"]:
            choices = [str(choice) for choice in kind["items"]["enum"]]
            return f"a list of {one_of(choices)}, such as [{choices[0]}]"
        example = kind.get("examples", ["[2,2,2]"])[0]
        if kind["items"]["type"] == "string":
            return f"a list of texts, such as {example}"
        whole = "whole " if kind["items"]["type"] == "integer" else ""
        return f"a list of {whole}numbers{_limits(kind['items'])}, such as {example}"
    names = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "printable text" if isinstance(given, str | tuple) else "text",
        "null": "null",
    }
    example = f" such as {kind['default']}" if kind["type"] == "string" and kind["default"] else ""
    return names[str(kind["type"])] + _limits(kind) + example


def _limits(kind: Mapping[str, Any]) -> str:
    """Return the words for the limits of a number."""
    bounds = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "exclusiveMaximum": "and below",
        "maximum": "and at most",
    }
    return "".join(f" {words} {kind[bound]:g}" for bound, words in bounds.items() if bound in kind)
