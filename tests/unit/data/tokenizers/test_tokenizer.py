"""Fact: a tokenizer decodes to the text it encoded, is identified by its fingerprint, and refuses a foreign model."""

import base64
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.data.option_table import TOKENIZER_TYPES
from megatron3d.data.preprocess.tokenizer_training import TrainingText, collect_characters, train_sentencepiece
from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.errors import UserError

CODE = Path(json.__file__).with_name("decoder.py").read_text(encoding="utf-8")
NO_SPACE_MARK = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Train a model file of every type on one module of the standard library."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "code.txt").write_text(CODE, encoding="utf-8")
    source = TrainingText((folder / "code.txt",), ("text",))
    (folder / "code.model").write_bytes(train_sentencepiece(source, "bpe", 500))
    (folder / "code.json").write_bytes(collect_characters(source))
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([CODE], trainer)
    library.save(str(folder / "tokenizer.json"))
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"  ": 256, b"in": 257, b"def": 258, b"de": 259}
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "ranks.tiktoken").write_text("".join(lines))
    described = {"ranks": "ranks.tiktoken", "pattern": r"\w+|\W+", "special_tokens": {"<|endoftext|>": 300}}
    (folder / "tik.json").write_text(json.dumps(described))
    return {
        "TikTokenizer": str(folder / "tik.json"),
        "SentencePieceTokenizer": str(folder / "code.model"),
        "HuggingFaceTokenizer": str(folder / "tokenizer.json"),
        "CharTokenizer": str(folder / "code.json"),
    }


def test_ids_that_tiktoken_leaves_out_have_no_text(models: dict[str, str]) -> None:
    """A model may sample them, since they are below the size of the vocabulary."""
    tokenizer = build_tokenizer("TikTokenizer", models["TikTokenizer"])
    assert tokenizer.vocab_size == 301
    assert tokenizer.decode([258, 270, 299, 257]) == "defin"


@pytest.mark.parametrize("tokenizer_type", TOKENIZER_TYPES)
def test_source_code_survives_encoding(models: dict[str, str], tokenizer_type: str) -> None:
    tokenizer = build_tokenizer(tokenizer_type, models.get(tokenizer_type))
    ids = tokenizer.encode(CODE)
    assert tokenizer.decode(ids) == CODE
    assert min(ids) >= 0 and max(ids) < tokenizer.vocab_size


@pytest.mark.parametrize(
    "tokenizer_type", ["SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer", "ByteTokenizer"]
)
@settings(deadline=None)
@given(text=NO_SPACE_MARK)
def test_any_text_survives_encoding(models: dict[str, str], tokenizer_type: str, text: str) -> None:
    tokenizer = build_tokenizer(tokenizer_type, models.get(tokenizer_type))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_tokens_hold_newlines_and_indentation(models: dict[str, str]) -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", models["SentencePieceTokenizer"])
    assert len(tokenizer.encode(":\n        ")) <= 2


@pytest.mark.parametrize(
    ("tokenizer_type", "eod"),
    [("SentencePieceTokenizer", 1), ("HuggingFaceTokenizer", 0), ("ByteTokenizer", 256), ("CharTokenizer", None)],
)
def test_the_eod_token_is_known_and_no_text_encodes_to_it(
    models: dict[str, str], tokenizer_type: str, eod: int | None
) -> None:
    tokenizer = build_tokenizer(tokenizer_type, models.get(tokenizer_type))
    assert tokenizer.eod == eod
    if eod is not None:
        assert tokenizer.decode([eod]) == ""
    if tokenizer_type in ("SentencePieceTokenizer", "ByteTokenizer"):
        assert eod not in tokenizer.encode("<|endoftext|>")


def test_the_fingerprint_depends_on_the_model_file(models: dict[str, str], tmp_path: Path) -> None:
    first = build_tokenizer("CharTokenizer", models["CharTokenizer"])
    (tmp_path / "copy.json").write_bytes(Path(models["CharTokenizer"]).read_bytes())
    (tmp_path / "other.json").write_text('["a"]')
    assert first.fingerprint == build_tokenizer("CharTokenizer", str(tmp_path / "copy.json")).fingerprint
    assert first.fingerprint != build_tokenizer("CharTokenizer", str(tmp_path / "other.json")).fingerprint
    kinds = {build_tokenizer(kind, models.get(kind)).fingerprint for kind in TOKENIZER_TYPES}
    assert len(kinds) == len(TOKENIZER_TYPES)


def test_a_folder_with_a_tokenizer_json_is_a_tokenizer(models: dict[str, str]) -> None:
    path = models["HuggingFaceTokenizer"]
    folder = build_tokenizer("HuggingFaceTokenizer", str(Path(path).parent))
    assert folder.fingerprint == build_tokenizer("HuggingFaceTokenizer", path).fingerprint


def test_an_unknown_character_is_named(models: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"character '\\u20ac'|character '€' \(U\+20AC\)"):
        build_tokenizer("CharTokenizer", models["CharTokenizer"]).encode("a€")


@pytest.mark.parametrize("tokenizer_type", ["SentencePieceTokenizer", "HuggingFaceTokenizer", "CharTokenizer"])
def test_a_wrong_model_is_refused(tokenizer_type: str, models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a model file"):
        build_tokenizer(tokenizer_type, None)
    with pytest.raises(UserError, match="No such file"):
        build_tokenizer(tokenizer_type, str(tmp_path / "missing"))
    with pytest.raises(UserError, match="cannot read"):
        build_tokenizer(tokenizer_type, str(tmp_path))
    for content in (b"", b"\x00garbage\xff", b"{}", b"[]", b'["ab"]', b'["a", "a"]', b"[1]"):
        (tmp_path / "model").write_bytes(content)
        with pytest.raises(UserError, match=r"which data\.tokenizer_type"):
            build_tokenizer(tokenizer_type, str(tmp_path / "model"))
    for foreign in set(models) - {tokenizer_type}:
        with pytest.raises(UserError, match=r"which data\.tokenizer_type"):
            build_tokenizer(tokenizer_type, models[foreign])


def test_a_model_for_bytes_and_an_unknown_type_are_refused() -> None:
    with pytest.raises(UserError, match="has no model file"):
        build_tokenizer("ByteTokenizer", "x.model")
    with pytest.raises(UserError, match="use SentencePieceTokenizer, "):
        build_tokenizer("BytesTokenizer", None)


def test_truncation_and_padding_of_a_tokenizer_file_are_ignored(models: dict[str, str], tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(models["HuggingFaceTokenizer"])
    library.enable_truncation(4)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"))
    assert [tokenizer.decode(tokenizer.encode(text)) for text in (CODE, "a")] == [CODE, "a"]
    assert len(tokenizer.encode("a")) == 1
