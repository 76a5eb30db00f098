"""SentencePiece models as tokenizers of Hugging Face's library: the same normalization, pieces and order of merges.

    model file: ModelProto { pieces: [piece, score, type], trainer_spec, normalizer_spec }, a protobuf message

Field numbers are those of sentencepiece_model.proto (github.com/google/sentencepiece).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

SPACE = "▁"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
# Score of pieces that text never becomes, in a model of the library that knows no types.
_NEVER = -1e6


@dataclass(frozen=True)
class Pieces:
    """The parts of a model file that determine how it encodes.

    Attributes:
        pieces: piece, score and type by token id.
        charsmap: compiled rules of Unicode normalization; empty for none.
        has_prefix: whether a space is put before a text.
        strips: whether spaces at the ends are removed, and runs of spaces become one.
    """

    pieces: tuple[tuple[str, float, int], ...]
    charsmap: bytes
    has_prefix: bool
    strips: bool

    def of_type(self, kind: int) -> list[str]:
        """Return the pieces of a type."""
        return [piece for piece, _, each in self.pieces if each == kind]

    @property
    def surfaces(self) -> list[str]:
        """Texts of pieces that occur in texts."""
        return [piece.replace(SPACE, " ") for piece, _, kind in self.pieces if kind != _CONTROL]

    @property
    def specials(self) -> list[str]:
        """Pieces that stand for no text."""
        return self.of_type(_CONTROL)


def read_pieces(model: bytes) -> Pieces:
    """Return the pieces of a model file."""
    message = list(_fields(model))
    spec = dict(_fields(next((bytes_of(value) for number, value in message if number == 3), b"")))
    return Pieces(
        tuple(_piece(bytes_of(value)) for number, value in message if number == 1),
        bytes_of(spec.get(2, b"")),
        bool(spec.get(3, 1)),
        bool(spec.get(4, 1)),
    )


def piece_tokenizers(pieces: Pieces) -> Iterator[tokenizers.Tokenizer]:
    """Yield a Unigram and a BPE model of the pieces; a caller finds out which one encodes alike."""
    unknown = next(i for i, (_, _, kind) in enumerate(pieces.pieces) if kind == _UNKNOWN)
    falls_back = bool(pieces.of_type(_BYTE))
    occurs = (_NORMAL, _USER_DEFINED)
    scored = [(piece, score if kind in occurs else _NEVER) for piece, score, kind in pieces.pieces]
    vocab = {piece: i for i, (piece, _) in enumerate(scored)}
    yield _tokenizer(pieces, models.Unigram(scored, unk_id=unknown, byte_fallback=falls_back))
    bpe = models.BPE(
        vocab,
        _merges([(piece, score) for piece, score, kind in pieces.pieces if kind == _NORMAL]),
        unk_token=scored[unknown][0],
        fuse_unk=True,
        byte_fallback=falls_back,
        ignore_merges=bool(pieces.of_type(_USER_DEFINED)),
    )
    yield _tokenizer(pieces, bpe)


def _tokenizer(pieces: Pieces, model: models.Model) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.strips:
        steps += [normalizers.Replace(tokenizers.Regex(r"\A +|[ ▁]+\z| +(?= )"), "")]
    if pieces.has_prefix:
        steps.append(normalizers.Prepend(SPACE))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    splits = list(_splits(pieces, isinstance(model, models.BPE)))
    if splits:
        made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    strip = [decoders.Strip(" ", 1, 0)] if pieces.has_prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    made.add_special_tokens(pieces.specials)
    return made


def _splits(pieces: Pieces, is_bpe: bool) -> Iterator[pre_tokenizers.PreTokenizer]:
    """Yield the splits of a text before its parts are encoded.

    SentencePiece takes the user's symbols out of a text first, the longest one at each place.  The library's Unigram
    model knows no types of pieces, and would find the names of bytes in texts, unless their last characters stand
    apart; its BPE model looks up whole words where that finds the user's symbols, and would find such names there.
    """
    symbols = sorted(pieces.of_type(_USER_DEFINED), key=len, reverse=True)
    names = [piece for piece, _, kind in pieces.pieces if kind in (_UNKNOWN, _BYTE)]
    last = "".join(sorted({name[-1] for name in names}))
    if symbols:
        yield pre_tokenizers.Split(tokenizers.Regex(_either(symbols)), "isolated")
    if not is_bpe:
        yield pre_tokenizers.Split(tokenizers.Regex(rf"[{_escaped(last)}](?<={_either(names)})"), "merged_with_next")
    elif symbols:
        whole = rf"[{_escaped(last)}](?<=\A(?:{_either(names)}))\z"
        yield pre_tokenizers.Split(tokenizers.Regex(whole), "merged_with_next")


def _either(texts: Iterable[str]) -> str:
    """Return a pattern of any of the texts."""
    return "|".join(map(_escaped, texts))


def _escaped(text: str) -> str:
    return re.sub(r"(\W)", r"\\\1", text)


def _merges(scored: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return every split of a piece into two pieces, those of the best pieces first, SentencePiece's merge order."""
    ids = {piece: i for i, (piece, _) in enumerate(scored)}
    splits = []
    for piece, score in scored:
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = sorted((ids[left], ids[right], left, right) for left, right in pairs if left in ids and right in ids)
        splits += [(-score, place, left, right) for place, (_, _, left, right) in enumerate(known)]
    return [(left, right) for _, _, left, right in sorted(splits, key=lambda split: split[:2])]


def _piece(message: bytes) -> tuple[str, float, int]:
    values = dict(_fields(message))
    (score,) = struct.unpack("<f", bytes_of(values.get(2, bytes(4))))
    kind = values.get(3, _NORMAL)
    assert isinstance(kind, int), "a type is a number"
    return bytes_of(values.get(1, b"")).decode(), score, kind


def bytes_of(value: int | bytes) -> bytes:
    """Return a field's bytes; the library that reads model files has accepted it."""
    assert isinstance(value, bytes), "a field with a length"
    return value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message: an integer, or bytes."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield number, value
            continue
        size, place = _varint(message, place) if wire == 2 else ({1: 8, 5: 4}[wire], place)
        yield number, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Return the integer at a place, 7 bits a byte, and the place after it."""
    value = shift = 0
    while True:
        value |= (message[place] & 0x7F) << shift
        shift, place = shift + 7, place + 1
        if not message[place - 1] & 0x80:
            return value, place
