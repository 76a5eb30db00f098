"""Fact: a corpus opens only if every sample that the run reads exists and fits the tokenizer and the model."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.data.corpus.corpus import Corpus, open_corpus
from megatron3d.data.token_files import indexed
from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.token_files.writer import IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from megatron3d.errors import UserError

NUM_TOKENS = 200


def make(prefix: Path, tokens: list[int]) -> None:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add(np.array(tokens, "<u2"), np.array([len(tokens)], np.int32))
        writer.finish(ByteTokenizer(None))


def opened(config: Config, tokenizer: Tokenizer) -> Corpus:
    spec = RunSpec(config)
    return open_corpus(spec.corpus, tokenizer, spec.packing(tokenizer.eod))


def config(prefix: Path | None, **values: object) -> Config:
    sections: dict[str, dict[str, object]] = {
        "data": {"data_path": str(prefix) if prefix else None},
        "model": {"seq_length": 9},
    }
    for key, value in values.items():
        section, name = key.split("__")
        sections.setdefault(section, {})[name] = value
    return Config.model_validate({"data": {"split": "80,10,10"}, **sections})


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    make(tmp_path / "corpus", [index % 256 for index in range(NUM_TOKENS)])
    return tmp_path / "corpus"


def test_splits_hold_their_own_tokens_and_wrap_around(prefix: Path) -> None:
    corpus = opened(config(prefix, data__split="80,10,10"), ByteTokenizer(None))
    assert corpus.valid is not None and corpus.test is not None
    assert corpus.valid.read(np.arange(3)).tolist() == [
        list(range(160, 170)),
        list(range(169, 179)),
        list(range(160, 170)),
    ]
    assert corpus.test.read(np.array([0])).tolist() == [list(range(180, 190))]
    epoch = corpus.train.read(np.arange(corpus.train.sources[0].num_windows))
    assert sorted(epoch[:, 0].tolist()) == list(range(0, 151, 9)) and epoch[:, -1].max() <= 159


def test_the_seed_shuffles_training_only(prefix: Path) -> None:
    first, second = (opened(config(prefix, train__seed=seed), ByteTokenizer(None)) for seed in (1, 2))
    order = np.arange(first.train.sources[0].num_windows)
    assert first.train.read(order).tolist() != second.train.read(order).tolist()
    assert first.fingerprint == second.fingerprint


def test_the_fingerprint_depends_on_the_contents(prefix: Path) -> None:
    before = opened(config(prefix), ByteTokenizer(None)).fingerprint
    make(prefix, [(index + (index == NUM_TOKENS - 1)) % 256 for index in range(NUM_TOKENS)])
    assert opened(config(prefix), ByteTokenizer(None)).fingerprint != before


def test_another_tokenizer_is_refused(prefix: Path) -> None:
    (prefix.parent / "chars.json").write_text(json.dumps([chr(index) for index in range(257)]))
    tokenizer = CharTokenizer(str(prefix.parent / "chars.json"))
    with pytest.raises(UserError, match=r"made with ByteTokenizer .* but configured is CharTokenizer"):
        opened(config(prefix), tokenizer)


def test_a_model_with_a_smaller_vocabulary_is_refused(prefix: Path) -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size=256: less than the tokenizer's 257"):
        opened(config(prefix, model__vocab_size=256), ByteTokenizer(None))
    assert opened(config(prefix, model__vocab_size=300), ByteTokenizer(None)).train.sources[0].vocab_size == 300


def test_ids_beyond_the_vocabulary_are_refused_with_a_manifest(prefix: Path) -> None:
    make(prefix, [300] * NUM_TOKENS)
    with pytest.raises(UserError, match="largest token id is 300, outside the vocabulary of 257"):
        opened(config(prefix), ByteTokenizer(None))


def test_ids_beyond_the_vocabulary_are_found_on_reading_without_a_manifest(prefix: Path) -> None:
    make(prefix, [0] * 165 + [300] + [0] * 34)
    prefix.with_name("corpus.manifest.json").unlink()
    corpus = opened(config(prefix, data__split="80,10,10"), ByteTokenizer(None))
    assert corpus.valid is not None
    corpus.valid.read(np.array([1]))
    with pytest.raises(UserError, match="token 165 has id 300, outside the vocabulary of 257"):
        corpus.valid.read(np.array([0]))


def test_a_used_split_shorter_than_a_sample_is_refused(prefix: Path) -> None:
    with pytest.raises(UserError, match=r"train is 2 of 200 tokens.* 10; .*at most 1"):
        opened(config(prefix, data__split="1,99,0"), ByteTokenizer(None))
    with pytest.raises(UserError, match="valid is 0 of 200 tokens"):
        opened(config(prefix, data__split="1,0,0", train__eval_interval=1), ByteTokenizer(None))
    assert opened(config(prefix, data__split="1,0,0"), ByteTokenizer(None)).valid is None


def test_a_sample_that_just_fits_is_accepted(prefix: Path) -> None:
    corpus = opened(config(prefix, data__split="1,0,0", model__seq_length=NUM_TOKENS - 1), ByteTokenizer(None))
    assert corpus.train.sources[0].num_windows == 1
    with pytest.raises(UserError, match="at most 199"):
        opened(config(prefix, data__split="1,0,0", model__seq_length=NUM_TOKENS), ByteTokenizer(None))


def test_a_missing_path_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.data_path"):
        opened(config(None), ByteTokenizer(None))


def second(prefix: Path) -> Path:
    other = prefix.with_name("other")
    make(other, [100 + index % 100 for index in range(100)])
    return other


def test_a_blend_reads_each_corpus_in_its_own_order(prefix: Path) -> None:
    other = second(prefix)
    paths = (0.75, str(prefix), 0.25, str(other))
    corpus = opened(config(None, data__data_path=paths, data__split="80,10,10"), ByteTokenizer(None))
    alone = [
        opened(config(path, data__split="80,10,10", data__data_path=str(path)), ByteTokenizer(None)).train
        for path in (prefix, other)
    ]
    order, positions = corpus.train.blend.locate(np.arange(40))  # type: ignore[union-attr]
    assert np.bincount(order).tolist() == [30, 10]
    read = corpus.train.read(np.arange(40))
    assert read[order == 0].tolist() == alone[0].read(positions[order == 0]).tolist()
    windows = corpus.train.sources[1].num_windows
    assert np.array_equal(
        np.sort(corpus.train.sources[1].read(np.arange(windows)), axis=0),
        np.sort(alone[1].read(np.arange(windows)), axis=0),
    )
    assert corpus.train.consumed_tokens([(0, 40, 9)]) == {
        f"consumed_tokens/{prefix}": 270,
        f"consumed_tokens/{other}": 90,
    }
    assert corpus.valid is not None and len(corpus.valid.sources) == 2


def test_the_fingerprint_of_a_blend_depends_on_its_weights(prefix: Path) -> None:
    other = second(prefix)
    blends = [(1, str(prefix), 1, str(other)), (1, str(prefix), 2, str(other)), (str(prefix), str(other))]
    found = {opened(config(None, data__data_path=b), ByteTokenizer(None)).fingerprint for b in blends}
    assert len(found) == 3


def test_the_plan_counts_epochs_and_warns(prefix: Path) -> None:
    other = second(prefix)
    paths = (1, str(prefix), 1, str(other))
    corpus = opened(config(None, data__data_path=paths, data__split="80,10,10"), ByteTokenizer(None))
    lines = list(corpus.train.describe(80, 4))
    assert lines[0] == f"{prefix}: 50 % 40 samples to read, of 17: 2.353 epochs"
    assert lines[2].startswith(f"WARNING: {other} is read 5 times, more than data.max_epochs=4")


def test_splits_with_their_own_paths_are_read_whole(prefix: Path) -> None:
    other = second(prefix)
    values = {"data__split": "969,30,1", "data__train_data_path": str(prefix), "data__valid_data_path": str(other)}
    corpus = opened(config(None, **values), ByteTokenizer(None))
    assert corpus.train.sources[0].split.num_tokens == NUM_TOKENS and corpus.test is None
    assert corpus.valid is not None and corpus.valid.read(np.array([0])).tolist() == [list(range(100, 110))]
    assert [data.prefix for data in corpus.datasets] == [prefix, other]
    values["data__valid_data_path"] = str(prefix)
    assert opened(config(None, **values), ByteTokenizer(None)).fingerprint != corpus.fingerprint


def test_documents_must_end_with_the_eod_token_for_packing(prefix: Path) -> None:
    values = {"data__reset_attention_mask": True}
    with pytest.raises(UserError, match="document 0 does not end with token 256, by which data"):
        opened(config(prefix, **values), ByteTokenizer(None))
    make(prefix, [*range(150), 256])
    assert opened(config(prefix, data__split="1,0,0", **values), ByteTokenizer(None)).train
    (prefix.parent / "chars.json").write_text(json.dumps([chr(index) for index in range(257)]))
    with pytest.raises(UserError, match="CharTokenizer has no token that ends a document"):
        tokenizer = CharTokenizer(str(prefix.parent / "chars.json"))
        RunSpec(config(prefix, data__tokenizer_type="CharTokenizer", **values)).packing(tokenizer.eod)


def test_a_corpus_that_changes_during_a_run_is_detected(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug that this finds: each of thousands of ranks looks at the file in every step."""
    corpus = opened(config(prefix), ByteTokenizer(None))
    corpus.train.read(np.array([0]))
    state, looks = IndexedDataset._file_state, list[int]()
    monkeypatch.setattr(IndexedDataset, "_file_state", lambda data: (looks.append(1), state(data))[1])
    for sample in range(10):
        corpus.train.read(np.array([sample]))
    assert not looks
    make(prefix, [0] * 100)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + indexed.CHECK_S)
    with pytest.raises(UserError, match="has changed since it was opened"):
        corpus.train.read(np.array([0]))


def test_a_corpus_that_is_cut_off_during_a_run_does_not_end_the_process(prefix: Path) -> None:
    """Bug that this finds: the system ends a process that reads a mapped file behind its end (SIGBUS)."""
    corpus = opened(config(prefix), ByteTokenizer(None))
    corpus.train.read(np.array([0]))
    prefix.with_suffix(".bin").write_bytes(b"")
    with pytest.raises(UserError, match="has changed since it was opened"):
        corpus.train.read(np.array([0]))
