"""Split long texts into sections whose tokens, joined, are those of the whole text, and texts into sentences.

A split is exact where encode(left + right) = encode(left) + encode(right), tried on the characters around it.  For a
SentencePiece model that puts a space before each text, the same holds where `right` begins with a space and loses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from megatron3d.errors import UserError

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
