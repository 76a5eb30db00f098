"""Bytes of text that each token stands for, where the tokenizer determines them.

They give bits per byte, loss / ln 2 * tokens / bytes, which compares models with different tokenizers (Gao et al. 2020,
arXiv:2101.00027, section 3.1).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece
import tokenizers

_SPACE = "▁"
Counts = npt.NDArray[np.int64]


def bytes_of_tokens(tokenizer_type: str, tokenizer_model: str | None) -> Counts | None:
    """Return bytes by token id, 0 for special tokens; None where a token's bytes depend on its neighbours."""
    count = _COUNTS.get(tokenizer_type)
    return count(tokenizer_model) if count else None


def _bytes(_: str | None) -> Counts:
    return np.array([1] * 256 + [0])


def _characters(model: str | None) -> Counts:
    return np.array([len(character.encode()) for character in json.loads(Path(str(model)).read_bytes())])


def _pieces(model: str | None) -> Counts:
    pieces = sentencepiece.SentencePieceProcessor(model_file=model)
    return np.array(
        [
            0 if pieces.is_control(i) else 1 if pieces.is_byte(i) else _piece_bytes(pieces.id_to_piece(i))
            for i in range(pieces.vocab_size())
        ]
    )


def _piece_bytes(piece: str) -> int:
    return len(piece.replace(_SPACE, " ").encode())


def _hugging_face(model: str | None) -> Counts | None:
    """Count bytes of a tokenizer.json: byte-level models have a character per byte, SentencePiece's <0x0A>."""
    path = Path(str(model))
    path = path / "tokenizer.json" if path.is_dir() else path
    described = json.loads(path.read_bytes())
    decoder = described.get("decoder") or {}
    kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
    special = {token["id"] for token in described.get("added_tokens", ()) if token.get("special")}
    added = {token["id"]: token["content"] for token in described.get("added_tokens", ())}
    vocabulary = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    if "ByteLevel" not in kinds and "ByteFallback" not in kinds:
        return None
    counts = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, i in vocabulary.items():
        if i in added:
            counts[i] = 0 if i in special else len(added[i].encode())
        elif "ByteLevel" in kinds:
            counts[i] = len(token)
        else:
            counts[i] = 1 if _is_byte(token) else _piece_bytes(token)
    return counts


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


_COUNTS: Mapping[str, Callable[[str | None], Counts | None]] = {
    "ByteTokenizer": _bytes,
    "CharTokenizer": _characters,
    "SentencePieceTokenizer": _pieces,
    "HuggingFaceTokenizer": _hugging_face,
}
