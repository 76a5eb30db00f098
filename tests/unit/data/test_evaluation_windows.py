"""Fact: every token of a range but the first is a label once, with the tokens before it as context.

The bytes of a text are the sum of its tokens' bytes.
"""

from __future__ import annotations

import inspect
import string
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron3d.convert.tokenizer import SAMPLE
from megatron3d.data.corpus.corpus import EvaluationWindows
from megatron3d.data.corpus.plan import Split
from megatron3d.data.preprocess.tokenizer_training import TrainingText, train_sentencepiece
from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.errors import UserError
from tests.support.tiny_run import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return IndexedDataset(write_corpus(tmp_path_factory.mktemp("corpus") / "c", string.ascii_letters * 3))


@given(
    first=st.integers(0, 20),
    size=st.integers(2, 100),
    seq_length=st.integers(1, 120),
    most=st.none() | st.integers(1, 9),
    beyond=st.integers(0, 5),
)
def test_every_token_of_a_range_is_predicted_once(
    corpus: IndexedDataset, first: int, size: int, seq_length: int, most: int | None, beyond: int
) -> None:
    samples = EvaluationWindows(corpus, Split(first, size), seq_length, 257, most)
    rows = samples.read(np.arange(samples.num_samples + beyond))
    inputs, labels = rows[:, :-1], rows[:, 1:]
    tokens = corpus.tokens(first, first + size).astype(np.int64)
    count = size - 1 if most is None else min(size - 1, most * seq_length)
    assert samples.num_tokens == count == (labels >= 0).sum()
    assert np.array_equal(labels[labels >= 0], tokens[1 : count + 1])
    assert np.array_equal(inputs[labels >= 0], tokens[:count])
    assert (rows[samples.num_samples :] == -1).all()


def test_an_id_outside_the_vocabulary_is_refused(corpus: IndexedDataset) -> None:
    samples = EvaluationWindows(corpus, Split(0, 30), 8, 90)
    with pytest.raises(UserError, match="token ids are 97 to 105, outside the vocabulary of 90"):
        samples.read(np.arange(2))


def test_bytes_of_a_range(corpus: IndexedDataset) -> None:
    counts = build_tokenizer("ByteTokenizer", None).token_bytes()
    assert counts is not None
    samples = EvaluationWindows(corpus, Split(0, corpus.num_tokens), 16, 257)
    assert samples.count_bytes(counts) == len(string.ascii_letters * 3) - 1


def byte_level(path: Path) -> None:
    """Return a byte-level tokenizer of GPT-2's kind."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    made.train_from_iterator([inspect.getsource(string), SAMPLE], trainer)
    made.save(str(path))


@pytest.fixture(scope="module", params=["HuggingFaceTokenizer", "bpe", "unigram", "ByteTokenizer"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str | None]:
    if request.param == "ByteTokenizer":
        return request.param, None
    path = tmp_path_factory.mktemp("tokenizer") / "model"
    if request.param == "HuggingFaceTokenizer":
        byte_level(path)
        return request.param, str(path)
    text = path.with_name("text.txt")
    text.write_text(inspect.getsource(string) * 4)
    path.write_bytes(train_sentencepiece(TrainingText((text,), ("text",), 1.0), request.param, 400))
    return "SentencePieceTokenizer", str(path)


@given(text=st.text(st.sampled_from(sorted(set(SAMPLE) - {"▁"})), max_size=80))
def test_bytes_of_the_tokens_add_up(kind: tuple[str, str | None], text: str) -> None:
    tokenizer = build_tokenizer(*kind)
    counts = tokenizer.token_bytes()
    assert counts is not None and len(counts) == tokenizer.vocab_size
    assert counts[tokenizer.encode(text)].sum() == len(text.encode())
    assert tokenizer.eod is not None and counts[tokenizer.eod] == 0


def test_tokens_of_a_word_level_tokenizer_have_no_bytes(tmp_path: Path) -> None:
    """Where a decoder inserts spaces between words, a token has no bytes of its own."""
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    assert build_tokenizer("HuggingFaceTokenizer", str(path)).token_bytes() is None
