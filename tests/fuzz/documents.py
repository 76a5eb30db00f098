"""Mutations of the values in JSON, YAML, CSV, safetensors and protocol buffer files, which leave the syntax right."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import yaml

from tests.fuzz.mutators import BYTES

EXTREMES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**40, 10**400),
    *(0.5, -0.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), -float("inf")),
    *(
        "",
        " ",
        "a",
        "1",
        "nan",
        "²",
        "a" * 10_000,
        "\0",
        "\x1b[2J",
        "\u202e",
        "\ud800",
        "../../x",
        "/dev/zero",
        "${x}",
        "\n",
    ),
    *([], {}, [[]], [{}], {"": None}, {"a": {"a": {}}}, [0] * 1000, [None], [1.5, "a"]),
)
# Replaced by brackets in brackets after a value is written, since no writer goes so deep.
DEEP = "deep" * 4


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield container and key of every value in a value."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def change_value(rng: Random, root: Any) -> Any:
    """Return a parsed document with one value replaced, removed, repeated, exchanged, renamed or nested."""
    places = list(_places(root))
    if not places:
        return rng.choice(EXTREMES)
    container, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind < 3:
        container[key] = rng.choice(EXTREMES)
    elif kind == 3:
        del container[key]
    elif kind == 4:
        other, its = rng.choice(places)
        container[key] = json.loads(json.dumps(other[its]))
    elif kind == 5 and isinstance(container, dict):
        container["".join(rng.choices(string.printable, k=rng.choice((1, 3, 300))))] = container.pop(key)
    elif kind == 6:
        container[key] = rng.choice(([container[key]], {"a": container[key]}, [container[key]] * 3, DEEP))
    elif isinstance(container, list):
        container[key:key] = [container[key]] * rng.choice((1, 5, 1000))
    else:
        container[key] = str(container[key])
    return root


def _deep(rng: Random, text: str) -> bytes:
    depth = rng.choice((30, 1000, 100_000))
    return text.replace(f'"{DEEP}"', DEEP).replace(DEEP, "[" * depth + "]" * depth).encode(errors="surrogatepass")


def change_json(rng: Random, content: bytes) -> bytes:
    """Change values of a JSON document."""
    return _deep(rng, json.dumps(change_value(rng, json.loads(content)), separators=(",", ":")))


def change_json_line(rng: Random, content: bytes) -> bytes:
    """Change values of one of several lines of JSON."""
    lines = content.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    lines[place] = change_json(rng, lines[place]) + b"\n"
    return b"".join(lines)


def change_yaml(rng: Random, content: bytes) -> bytes:
    """Change values of a YAML document."""
    changed = change_value(rng, yaml.safe_load(content))
    return _deep(rng, yaml.safe_dump(changed, sort_keys=False, allow_unicode=rng.random() < 0.5))


def change_csv(rng: Random, content: bytes) -> bytes:
    """Exchange rows, or cells of a row, or move a cell to another row."""
    rows = [row.split(b",") for row in content.splitlines()]
    one, other = rng.choice(rows), rng.choice(rows)
    kind = rng.randrange(4)
    if kind == 0:
        rng.shuffle(rows)
    elif kind == 1:
        place = rng.randrange(len(one))
        one[place - 1], one[place] = one[place], one[place - 1]
    elif kind == 2:
        other.insert(rng.randrange(len(other) + 1), one.pop(rng.randrange(len(one))))
    else:
        rows.append(other)
    return b"\n".join(b",".join(row) for row in rows) + b"\n"


def change_safetensors(rng: Random, content: bytes) -> bytes:
    """Change values of the header of a safetensors file, whose length stays right."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = change_json(rng, content[8:end])
    return len(header).to_bytes(8, "little") + header + content[end:]


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Return a number of protocol buffers and the place after it; raises IndexError at the end."""
    value = shift = 0
    while True:
        byte = content[place]
        value, place = value | (byte & 127) << shift, place + 1
        if byte < 128:
            return value, place
        shift += 7


def _as_varint(value: int) -> bytes:
    head = b"" if value < 128 else bytes([value & 127 | 128])
    return head + _as_varint(value >> 7) if head else bytes([value])


def _message(content: bytes) -> list[tuple[int, bytes]]:
    """Return the fields of a message as tag and content; raises ValueError or IndexError where it is none."""
    fields, place = [], 0
    while place < len(content):
        tag, start = _varint(content, place)
        length, place = _varint(content, start) if tag % 8 in (0, 2) else (0, start)
        stop = {0: place, 1: start + 8, 2: place + length, 5: start + 4}.get(tag % 8, -1)
        if not place <= stop <= len(content) or not tag // 8:
            raise ValueError("no message")
        fields.append((tag, content[place if tag % 8 == 2 else start : stop]))
        place = stop
    return fields


def change_message(rng: Random, content: bytes) -> bytes:
    """Change, remove, repeat or exchange a field of a message of protocol buffers, or of a message in it."""
    fields = _message(content)
    place, kind = rng.randrange(len(fields)), rng.randrange(6)
    tag, value = fields[place]
    if kind < 2 and tag % 8 == 2 and value:
        try:
            value = change_message(rng, value)
        except (ValueError, IndexError):
            value = rng.choice(BYTES)(rng, value, ())
    elif kind < 3:
        value = rng.choice((b"", b"\xff" * 9 + b"\1", b"\0" * len(value), rng.randbytes(len(value) or 1)))
    elif kind == 3:
        tag = rng.choice((tag + 8, rng.choice(fields)[0], tag ^ rng.randrange(8)))
    fields[place] = tag, value
    if kind == 4:
        fields[place : place + 1] = [(tag, value)] * rng.choice((0, 0, 2, 1000))
    elif kind == 5:
        fields.append(fields.pop(rng.randrange(len(fields))))
    return b"".join(_as_varint(tag) + (_as_varint(len(data)) if tag % 8 == 2 else b"") + data for tag, data in fields)


DOCUMENTS: dict[str, Callable[[Random, bytes], bytes]] = {
    ".json": change_json,
    ".jsonl": change_json_line,
    ".yaml": change_yaml,
    ".safetensors": change_safetensors,
    ".csv": change_csv,
    ".model": change_message,
}


def mutate(rng: Random, suffix: str, content: bytes, tokens: Sequence[bytes]) -> bytes:
    """Return the content of a file after one or several mutations."""
    change_document = DOCUMENTS.get(suffix)
    num_left = rng.choice((1, 1, 1, 2, 3, 6))
    if change_document and rng.random() < 0.6:
        for _ in range(num_left):
            try:
                content = change_document(rng, content)
            except (ValueError, IndexError, yaml.YAMLError, RecursionError):  # an earlier change left no document
                break
        num_left = rng.choice((0, 0, 0, 1))
    for _ in range(num_left):
        content = rng.choice(BYTES)(rng, content, tokens)[: 2**20]
    return content
