"""Tokenizers of Hugging Face's library that may equal one of ours, and the texts on which the two are compared.

Bytes become the library's byte-level model, characters its word-level one, and SentencePiece's pieces its Unigram or
BPE model with the same normalization, pieces and order of merges.  transformers' own converters are not used: they find
the user's symbols and the names of bytes in texts where SentencePiece does not, and transformers need not be installed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron3d.config.schema import DataConfig
from megatron3d.convert.compare import has_transformers
from megatron3d.data.preprocess.tokenizer_training import END_OF_DOCUMENT
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer

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
    """Return the pieces of a model file; raises DecodeError or ValueError where a part cannot be read."""
    message = ModelProto.FromString(model)
    rules = message.normalizer_spec
    return Pieces(
        tuple((each.piece, each.score, each.type) for each in message.pieces),
        rules.precompiled_charsmap,
        rules.add_dummy_prefix,
        rules.remove_extra_whitespaces,
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


SAMPLE = (
    "The quick brown fox, 1234567890 times;  two spaces,\ta tab\nand a new line.\n\n"
    "    if x_1 != 'ä': return \"漢字 😀\"\n"
    "Ünïcödé – naïve façade … ½ ≤ ∑; http://example.org/?q=a+b&c=%20 <b>bold</b> e=mc²\r\n"
)
# Spaces at the ends, what Unicode normalization changes, control characters, the name of a byte.
ODD = ("", " ", "  a  b  ", "\n a", "½ﬁÅ Å Ⅳ ａｂｃ　ｄ", "a\u200bb\u00a0c", "\x01\x02", "a\u0301", "<0x0A>", "▁a▁▁")
NUM_RANDOM_TEXTS, MAX_SURFACES = 300, 20


def open_texts(surfaces: Sequence[str], specials: Sequence[str]) -> list[str]:
    """Return texts of all surfaces of tokens, in order and in random orders, and texts that need care.

    Texts with the name of a special token are left out: the tokenizers library recognizes it there, and ours do not.
    """
    rows = [surfaces[start : start + MAX_SURFACES] for start in range(0, len(surfaces), MAX_SURFACES)]
    texts = [joint.join(row) for row in rows for joint in (" ", "")]
    texts += [SAMPLE, *SAMPLE.splitlines(), *ODD, *_random_texts([*surfaces, " ", "  ", "\n", "\t", "é", "漢", "x"])]
    return [text for text in texts if not any(special in text for special in specials)]


def _random_texts(surfaces: Sequence[str]) -> list[str]:
    rng = random.Random(1234)
    return ["".join(rng.choices(surfaces, k=rng.randint(1, MAX_SURFACES))) for _ in range(NUM_RANDOM_TEXTS)]


def encodes_alike(ours: Tokenizer, theirs: tokenizers.Tokenizer, texts: Sequence[str]) -> bool:
    """Return whether both encode the texts alike, and decode them to the same text if they represent all of it."""
    unknown = theirs.token_to_id(getattr(theirs.model, "unk_token", None) or "<unk>")
    for text in texts:
        ids = ours.encode(text)
        if theirs.encode(text, add_special_tokens=False).ids != ids:
            return False
        is_whole = unknown not in ids and SPACE not in text  # SentencePiece decodes its own sign of a space as a space
        if is_whole and theirs.decode(ids) != ours.decode(ids):
            return False
    return True


def transformers_encodes_alike(ours: Tokenizer, begin: Sequence[int], folder: Path, texts: Sequence[str]) -> bool:
    """Return whether transformers, if it is installed, encodes the texts alike from the files of a folder."""
    if not has_transformers():
        return True
    import transformers

    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # of any kind, where a setting that was kept is one that it does not take
        return False
    return all(theirs(text, verbose=False).input_ids == [*begin, *ours.encode(text)] for text in texts)


def candidates(data: DataConfig) -> tuple[Iterator[tokenizers.Tokenizer], list[str]]:
    """Return the tokenizers that may equal the configured one, and texts to compare them on; none for another type."""
    find = _CANDIDATES.get(data.tokenizer_type)
    return (iter(()), []) if find is None else find(Path(data.tokenizer_model or ""))


def _bytes(_: Path) -> tuple[Iterator[tokenizers.Tokenizer], list[str]]:
    """Return the byte-level model whose token of each byte is the byte's number, as in our tokenizer."""
    alphabet = {_byte_name(byte): byte for byte in range(256)}
    made = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_DOCUMENT])
    assert made.token_to_id(END_OF_DOCUMENT) == ByteTokenizer.eod, "the end of a document follows the bytes"
    return iter([made]), open_texts([chr(code) for code in range(256)], [END_OF_DOCUMENT])


def _byte_name(byte: int) -> str:
    """Return the character of a byte in byte-level models (Radford et al. 2019): itself, or one above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(other not in printable for other in range(byte)))


def _characters(path: Path) -> tuple[Iterator[tokenizers.Tokenizer], list[str]]:
    characters = json.loads(path.read_bytes())
    made = tokenizers.Tokenizer(models.WordLevel({c: place for place, c in enumerate(characters)}, unk_token=None))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"(?m:[\s\S])"), "isolated")
    made.decoder = decoders.Fuse()
    return iter([made]), ["".join(characters), *_random_texts(characters)]


def _pieces(path: Path) -> tuple[Iterator[tokenizers.Tokenizer], list[str]]:
    try:
        pieces = read_pieces(path.read_bytes())
    except (DecodeError, ValueError):  # SentencePiece reads pieces that are not UTF-8
        return iter(()), []
    return piece_tokenizers(pieces), open_texts(pieces.surfaces, pieces.specials)


_CANDIDATES: Mapping[str, Callable[[Path], tuple[Iterator[tokenizers.Tokenizer], list[str]]]] = {
    "ByteTokenizer": _bytes,
    "CharTokenizer": _characters,
    "SentencePieceTokenizer": _pieces,
}
