"""Mutations of a file's bytes, each a function of a random generator."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")
NUMBERS = (
    *(
        b"0",
        b"-0",
        b"-1",
        b"1",
        b"1.5",
        b"007",
        b"+3",
        b"1_000",
        b"0x10",
        b"1e3",
        b"1e308",
        b"1e999",
        b"-1e999",
        b"5e-324",
    ),
    *(b"nan", b"NaN", b"inf", b"Infinity", b".nan", b".inf", b"2147483648", b"4294967295", b"9223372036854775807"),
    *(b"9223372036854775808", b"18446744073709551616", b"9" * 40, b"9" * 400, b"9" * 5000, "٣²".encode()),
)
# Bytes that are special in some format, or in a terminal.
TOKENS = (
    *(b"", b"\0", b"\n", b"\r\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3\x28", "\u2028\u202e".encode(), b"\x1b[2J"),
    *(
        b'"',
        b"\\",
        b"\\ud800",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"null",
        b"true",
        b"../",
        b"/dev/zero",
        b"$(touch x)",
    ),
)
BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n".encode()
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
Mutator = Callable[[Random, bytes, Sequence[bytes]], bytes]


def _span(rng: Random, content: bytes) -> tuple[int, int]:
    """Return a short or, rarely, a long range of a file."""
    start = rng.randrange(len(content) + 1)
    return start, min(start + rng.choice((0, 1, 2, 4, 8, 16, 64, 512, len(content))), len(content))


def flip_bit(rng: Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """Flip one bit."""
    if not content:
        return content
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def truncate(rng: Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """Drop the end."""
    return content[: rng.randrange(len(content) + 1)]


def delete(rng: Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """Drop a range."""
    start, stop = _span(rng, content)
    return content[:start] + content[stop:]


def duplicate(rng: Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """Repeat a range in its place, now and then many times."""
    start, stop = _span(rng, content)
    return content[:start] + content[start:stop] * rng.choice((2, 2, 3, 100)) + content[stop:]


def splice(rng: Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """Copy a range over another place."""
    (start, stop), (low, high) = _span(rng, content), _span(rng, content)
    return content[:low] + content[start:stop] + content[high:]


def insert_token(rng: Random, content: bytes, tokens: Sequence[bytes]) -> bytes:
    """Write a word of the format over a range."""
    start, stop = _span(rng, content)
    return content[:start] + rng.choice((*TOKENS, *tokens)) + content[rng.choice((start, stop)) :]


def swap_tokens(rng: Random, content: bytes, tokens: Sequence[bytes]) -> bytes:
    """Replace an occurrence of one word of the format by another one."""
    places = [(found.start(), token) for token in tokens if token for found in re.finditer(re.escape(token), content)]
    if not places:
        return insert_token(rng, content, tokens)
    place, token = rng.choice(places)
    return content[:place] + rng.choice(tokens) + content[place + len(token) :]


def extreme_number(rng: Random, content: bytes, tokens: Sequence[bytes]) -> bytes:
    """Replace a number in a text."""
    found = list(NUMBER.finditer(content[:100_000]))
    if not found:
        return extreme_word(rng, content, tokens)
    start, stop = rng.choice(found).span()
    return content[:start] + rng.choice(NUMBERS) + content[stop:]


def extreme_word(rng: Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """Replace a little-endian number of 1 to 8 bytes."""
    size = rng.choice((1, 2, 4, 8))
    place = rng.randrange(max(len(content) - size, 0) + 1)
    value = rng.choice((0, 1, -1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), rng.randrange(2 ** (8 * size))))
    return content[:place] + (value % 2 ** (8 * size)).to_bytes(size, "little") + content[place + size :]


def nest(rng: Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """Write very many opening brackets over a range."""
    start, stop = _span(rng, content)
    depth = rng.choice((50, 1000, 100_000))
    return content[:start] + rng.choice((b"[", b'{"a":', b"{", b"- ", b"(")) * depth + content[stop:]


def random_bytes(rng: Random, content: bytes, _: Sequence[bytes]) -> bytes:
    """Write random bytes over a range."""
    start, stop = _span(rng, content)
    return content[:start] + rng.randbytes(rng.choice((1, 4, 64))) + content[stop:]


BYTES: tuple[Mutator, ...] = (
    *(flip_bit, truncate, delete, duplicate, splice, insert_token, swap_tokens, extreme_number, extreme_word),
    *(nest, random_bytes),
)
