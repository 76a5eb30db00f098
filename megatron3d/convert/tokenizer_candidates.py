"""Tokenizers of Hugging Face's library that may equal one of ours: bytes, characters and SentencePiece's pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron3d.config.io_schema import DataConfig
from megatron3d.convert.sentencepiece_pieces import piece_tokenizers, read_pieces
from megatron3d.convert.tokenizer_probe import closed_texts, open_texts
from megatron3d.data.preprocess.tokenizer_training import END_OF_DOCUMENT
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer


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
    return iter([made]), closed_texts("".join(characters))


def _pieces(path: Path) -> tuple[Iterator[tokenizers.Tokenizer], list[str]]:
    try:
        pieces = read_pieces(path.read_bytes())
    except (KeyError, ValueError):  # SentencePiece reads fields that it never writes, and pieces that are not UTF-8
        return iter(()), []
    return piece_tokenizers(pieces), open_texts(pieces.surfaces, pieces.specials)


_CANDIDATES: Mapping[str, Callable[[Path], tuple[Iterator[tokenizers.Tokenizer], list[str]]]] = {
    "ByteTokenizer": _bytes,
    "CharTokenizer": _characters,
    "SentencePieceTokenizer": _pieces,
}
