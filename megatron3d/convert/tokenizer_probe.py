"""Texts on which two tokenizers are compared, and the comparison."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from megatron3d.convert.compare import has_transformers
from megatron3d.convert.sentencepiece_pieces import SPACE
from megatron3d.data.tokenizers.tokenizer import Tokenizer

SAMPLE = (
    "The quick brown fox, 1234567890 times;  two spaces,\ta tab\nand a new line.\n\n"
    "    if x_1 != 'ä': return \"漢字 😀\"\n"
    "Ünïcödé – naïve façade … ½ ≤ ∑; http://example.org/?q=a+b&c=%20 <b>bold</b> e=mc²\r\n"
)
# Spaces at the ends, what Unicode normalization changes, control characters, the name of a byte.
ODD = ("", " ", "  a  b  ", "\n a", "½ﬁÅ Å Ⅳ ａｂｃ　ｄ", "a\u200bb\u00a0c", "\x01\x02", "a\u0301", "<0x0A>", "▁a▁▁")
NUM_RANDOM_TEXTS, MAX_SURFACES = 300, 20


def closed_texts(characters: str) -> list[str]:
    """Return texts of the characters, in order and in random orders."""
    return [characters, *_random_texts(characters)]


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
