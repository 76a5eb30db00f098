"""Fact: a long text encoded in pieces gives the tokens of the whole text, whatever the tokenizer does at its ends."""

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.data.preprocess import readers as split_text
from megatron3d.data.preprocess.readers import exact_split, sections, sentence_splitter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

TEXT = Path(json.__file__).with_name("decoder.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("models")
    for name, options in (("plain", {"add_dummy_prefix": False}), ("prefixed", {"add_dummy_prefix": True})):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.splitlines()),
            model_prefix=str(folder / name),
            vocab_size=400,
            byte_fallback=True,
            remove_extra_whitespaces=False,
            minloglevel=2,
            model_type="bpe",
            **options,
        )
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        [TEXT], tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    library.save(str(folder / "tokenizer.json"))
    return {
        "plain": SentencePieceTokenizer(str(folder / "plain.model")),
        "prefixed": SentencePieceTokenizer(str(folder / "prefixed.model")),
        "byte level": HuggingFaceTokenizer(str(folder / "tokenizer.json")),
        "bytes": ByteTokenizer(None),
    }


@pytest.mark.parametrize("name", ["plain", "prefixed", "byte level", "bytes"])
def test_parts_of_a_text_have_the_tokens_of_the_whole(
    models: dict[str, Tokenizer], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in (("MAX_TEXT", 900), ("SECTION", 500), ("SEARCH", 200), ("CONTEXT", 100)):
        monkeypatch.setattr(split_text, constant, value)
    encode = models[name].encode
    text = " ".join(TEXT.split())  # runs of spaces leave few split points for a model that prepends a space
    pieces = list(sections(text, exact_split(encode)))
    assert len(pieces) > 10 and max(map(len, pieces)) <= 900
    assert [token for piece in pieces for token in encode(piece)] == encode(text)


@given(text=st.text(alphabet="ab. !?\n", max_size=200))
def test_joined_sentences_are_the_text(text: str) -> None:
    assert "".join(sentence_splitter()(text)) == text


def test_a_text_without_a_safe_boundary_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_text, "MAX_TEXT", 2 * split_text.SEARCH)
    monkeypatch.setattr(split_text, "SECTION", split_text.SEARCH)
    text = "x" * (5 * split_text.SEARCH)
    pieces = list(sections(text, exact_split(lambda text: [0])))
    assert "".join(pieces) == text and len(pieces) == 4
