"""Cuts long texts into parts that are encoded one by one to the tokens of the whole, and texts into sentences.

A place is good where the tokens around it are those of both sides: encode(left right) = encode(left) encode(right),
tried on the neighbourhood.  A SentencePiece model that puts a space before each text passes where `right` begins with
a space, without that space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from megatron3d.errors import UserError

LONG = 1 << 20
"""Characters of the longest text that is encoded in one go, and of the longest piece that is looked at."""
PART = 1 << 18
SEARCH = 1 << 13
AROUND = 256

Cut = Callable[[str], tuple[int, int]]
"""End of the first part of a long text, and begin of the rest (a space between may be part of neither)."""
Encode = Callable[[str], list[int]]


def cut_at_newline(text: str) -> tuple[int, int]:
    """After the last newline, else space, of the first part."""
    end = next((found + 1 for mark in "\n " if (found := text.rfind(mark, PART - SEARCH, PART)) >= 0), PART)
    return end, end


def cutter(encode: Encode) -> Cut:
    """Cuts where no token changes, as near to the end of the first part as there is such a place."""

    def cut(text: str) -> tuple[int, int]:
        for end in _candidates(text):
            left, right = text[end - AROUND : end], text[end : end + AROUND]
            try:
                whole, left_ids = encode(left + right), encode(left)
                if whole == left_ids + encode(right):
                    return end, end
                if right.startswith(" ") and whole == left_ids + encode(right[1:]):
                    return end, end + 1
            except UserError:  # a character that the tokenizer lacks: said with its place when the part is encoded
                break
        return cut_at_newline(text)

    return cut


def _candidates(text: str) -> Iterator[int]:
    """Places to try: before a space that follows something else, after a newline; from the back."""
    for end in range(PART, PART - SEARCH, -1):
        before, after = text[end - 1], text[end]
        if before == "\n" or (after.isspace() and not before.isspace()):
            yield end


def parts(text: str, cut: Cut) -> Iterator[str]:
    """A text in pieces of bounded length; one that is not long is one."""
    start = 0
    while len(text) - start > LONG:
        end, following = cut(text[start : start + PART + AROUND])
        yield text[start : start + end]
        start += following
    yield text[start:]


def sentence_splitter() -> Callable[[str], Sequence[str]]:
    """Cuts a text before each sentence with nltk's Punkt, untrained; the sentences joined are the text."""
    try:
        from nltk.tokenize import PunktSentenceTokenizer
    except ImportError as error:
        raise UserError("--split-sentences: needs the package nltk; pip install nltk") from error
    punkt: Any = PunktSentenceTokenizer()

    def split(text: str) -> Sequence[str]:
        starts = [start for start, _ in punkt.span_tokenize(text)]
        return [text[start:end] for start, end in pairwise([0, *starts[1:], len(text)])]

    return split
