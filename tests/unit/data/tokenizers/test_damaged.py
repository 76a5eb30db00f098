"""Fact: a damaged tokenizer raises UserError with the name of its file, when it is read or when it is used."""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron3d.data.option_table import TOKENIZER_TYPES
from megatron3d.data.preprocess.tokenizer_training import TrainingText, train_byte_level, train_sentencepiece
from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.errors import UserError

TEXT = "def main(argv):\n    return 'über', argv[1:]\n"
RANKS = {bytes([byte]): byte for byte in range(256)}
TIKTOKEN: Mapping[str, object] = {"ranks": "r", "pattern": r"\w+|\W+", "special_tokens": {"<|endoftext|>": 300}}


def write_ranks(folder: Path, ranks: Mapping[bytes, int]) -> None:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "r").write_text("".join(lines))


def use(tokenizer_type: str, path: Path) -> None:
    tokenizer = build_tokenizer(tokenizer_type, str(path))
    tokenizer.decode(tokenizer.encode(TEXT))
    tokenizer.token_bytes()
    tokenizer.decode([tokenizer.vocab_size - 1])


HUGGING_FACE: list[tuple[Mapping[str, object], str]] = [
    ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}, "cannot encode a text (WordLevel error"),
    ({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}, "cannot encode a text (Encountered an unknown token"),
    ({"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<unk>"}, "cannot encode a text (Unk token"),
    ({"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}, "its largest id is 4294967295"),
    ({"type": "BPE", "vocab": {}, "merges": []}, "it has no tokens"),
    (
        {"type": "BPE", "continuing_subword_prefix": "a", "vocab": {"\u00e9": 0}, "merges": [["\u00e9", "\u00e9"]]},
        "goes on without the prefix 'a'",
    ),
    ({"type": "Unigram", "vocab": [["- " * 10**5, -1.0]], "unk_id": 0}, "a token has 200000 characters"),
]


@pytest.mark.parametrize(("model", "message"), HUGGING_FACE)
def test_a_tokenizer_json_without_a_token_for_unknown_text(
    model: Mapping[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(UserError) as error:
        use("HuggingFaceTokenizer", tmp_path)
    assert message in str(error.value) and f"data.tokenizer_model={tmp_path}" in str(error.value)


def test_a_tokenizer_json_that_is_not_utf_8(tmp_path: Path) -> None:
    """The library, given these bytes, ends the process."""
    (tmp_path / "tokenizer.json").write_bytes(b'{"version": "1.0", "model": {"type": "\xa0"}}')
    with pytest.raises(UserError, match="invalid start byte"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


@pytest.mark.parametrize("name", ["precompiled_charsmap", "\\u0070recompiled_charsmap"])
@pytest.mark.parametrize("table", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x40" + bytes(100), b"\x01"])
def test_a_table_of_characters_that_claims_more_than_it_has(table: bytes, name: str, tmp_path: Path) -> None:
    """The library allocates what the first number says, and ends the process where it cannot."""
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    described = {"version": "1.0", "added_tokens": [], "model": model}
    normalizer = f'{{"type": "Precompiled", "{name}": "{base64.b64encode(table).decode()}"}}'
    (tmp_path / "tokenizer.json").write_text(f'{json.dumps(described)[:-1]}, "normalizer": {normalizer}}}')
    with pytest.raises(UserError, match="precompiled_charsmap has"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_a_pattern_of_a_tokenizer_json_beyond_the_limit(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    described = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": split}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="retry-limit-in-match over"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).encode("a" * 60 + "b")


BAD_TIKTOKEN: list[tuple[Mapping[str, object], Mapping[bytes, int], str]] = [
    ({}, {b"ab": 5}, "a token or a rank is there twice"),
    ({}, {b"ab": -5}, "ranks must be from 0"),
    ({}, {b"ab": 2**40}, "ranks must be from 0"),
    ({"special_tokens": [1]}, {}, "list"),
    ({"special_tokens": {"<|endoftext|>": 5}}, {}, "a token or a rank is there twice"),
    ({"special_tokens": {"<|endoftext|>": "5"}}, {}, "not supported"),
    ({"pattern": "(a"}, {}, "Parsing error"),
    ({"pattern": None}, {}, "'None' is not an instance of 'str'"),
    ({"pattern": "a"}, {}, "its pattern leaves out part of the text"),
    ({"ranks": "../r"}, {}, "not the name of a file in the same folder"),
    ({"ranks": 5}, {}, "not"),
    ({"ranks": "none"}, {}, "No such file"),
]


@pytest.mark.parametrize(("changes", "more", "message"), BAD_TIKTOKEN)
def test_damaged_tiktoken(
    changes: Mapping[str, object], more: Mapping[bytes, int], message: str, tmp_path: Path
) -> None:
    write_ranks(tmp_path, {**RANKS, **more})
    (tmp_path / "tik.json").write_text(json.dumps({**TIKTOKEN, **changes}))
    with pytest.raises(UserError, match=message):
        use("TikTokenizer", tmp_path / "tik.json")


def test_tiktoken_without_a_byte(tmp_path: Path) -> None:
    write_ranks(tmp_path, {token: rank for token, rank in RANKS.items() if rank != 97})
    (tmp_path / "tik.json").write_text(json.dumps(TIKTOKEN))
    with pytest.raises(UserError, match="byte 97 is no token"):
        use("TikTokenizer", tmp_path / "tik.json")


@pytest.mark.parametrize("kind", [kind for kind in TOKENIZER_TYPES if kind != "ByteTokenizer"])
@pytest.mark.parametrize("content", [b"[" * 10**5, b'["\\ud800"]', b"1" * 10**4, b"\xff\xfe", b"\0"])
def test_odd_contents(kind: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(content)
    with pytest.raises(UserError, match=rf"which data\.tokenizer_type={kind} needs"):
        build_tokenizer(kind, str(tmp_path / "model"))


def test_a_pipe_or_device_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model")
    for path in (tmp_path / "model", Path("/dev/zero")):
        with pytest.raises(UserError, match="not a regular file"):
            build_tokenizer("CharTokenizer", str(path))


def test_pieces_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "code.txt").write_text(TEXT * 50)
    model = train_sentencepiece(TrainingText((tmp_path / "code.txt",), ("text",)), "bpe", 290)
    place = model.index(b"argv")
    (tmp_path / "model").write_bytes(model[:place] + b"\xff\xfe\xfd\xfc" + model[place + 4 :])
    with pytest.raises(UserError, match=r"model: cannot .*codec can't decode"):
        use("SentencePieceTokenizer", tmp_path / "model")


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer"])
def test_changed_bytes_raise_nothing_else(kind: str, tmp_path: Path) -> None:
    (tmp_path / "code.txt").write_text(TEXT * 50)
    text, draw = TrainingText((tmp_path / "code.txt",), ("text",)), random.Random(1)
    write_ranks(tmp_path, RANKS)
    changed = tmp_path / ("r" if kind == "TikTokenizer" else "model")
    (tmp_path / "model").write_bytes(
        {
            "SentencePieceTokenizer": lambda: train_sentencepiece(text, "bpe", 290),
            "HuggingFaceTokenizer": lambda: train_byte_level(text, 270),
            "TikTokenizer": lambda: json.dumps(TIKTOKEN).encode(),
        }[kind]()
    )
    whole, refused = changed.read_bytes(), 0
    for _ in range(300):
        content = bytearray(whole)
        content[draw.randrange(len(content))] = draw.randrange(256)
        changed.write_bytes(content[: draw.choice([None, None, draw.randrange(len(content))])])
        try:
            use(kind, tmp_path / "model")
        except UserError:
            refused += 1
    assert refused > 50
