"""Fact: a converted tokenizer encodes as ours does; one that would not is not written, and a message says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.config.io_schema import DataConfig
from megatron3d.convert import tokenizer as module
from megatron3d.convert.tokenizer import SAMPLE, export_tokenizer, import_tokenizer
from megatron3d.data.preprocess.tokenizer_training import TrainingText, train_sentencepiece
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from tests.support.hub_models import write_tokenizer

ROOT = Path(__file__).parents[3]


def made(folder: Path, kind: str) -> DataConfig:
    """Return a tokenizer of a type, trained on the README."""
    if kind == "ByteTokenizer":
        return DataConfig(tokenizer_type=kind)
    if kind == "CharTokenizer":
        path = folder / "chars.json"
        path.write_text(json.dumps(sorted(set(SAMPLE)), ensure_ascii=False))
        return DataConfig(tokenizer_type=kind, tokenizer_model=str(path))
    path = folder / "pieces.model"
    (folder / "text.txt").write_text((ROOT / "README.md").read_text() * 2)
    path.write_bytes(train_sentencepiece(TrainingText((folder / "text.txt",), ("text",), 1.0), kind, 500))
    return DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path))


KINDS = ("ByteTokenizer", "CharTokenizer", "bpe", "unigram")


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer, notes = export_tokenizer(made(folder, request.param), folder, 64)
    assert notes == []
    return tokenizer, folder


def test_transformers_loads_it(both: tuple[Tokenizer, Path]) -> None:
    ours, folder = both
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "a few words, 12 of them\n"
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eod


@settings(max_examples=60)
@given(text=st.text(st.sampled_from(sorted(set(SAMPLE) - set("▁"))), max_size=60))
def test_every_text_is_encoded_alike(both: tuple[Tokenizer, Path], text: str) -> None:
    ours, folder = both
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))


def test_what_would_encode_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_merges", lambda scored: [])
    data = made(tmp_path, "bpe")
    (tmp_path / "out").mkdir()
    _, notes = export_tokenizer(data, tmp_path / "out", 64)
    assert notes == ["SentencePieceTokenizer has no tokenizer.json that encodes alike; none was written"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.model"]


def test_a_hugging_face_tokenizer_keeps_its_files(tmp_path: Path) -> None:
    source, run, back = (tmp_path / name for name in ("hub", "run", "back"))
    for folder in (source, run, back):
        folder.mkdir()
    write_tokenizer(source)
    (source / "special_tokens_map.json").write_text("{}")
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    tokenizer, kind, name = import_tokenizer(source, run, None, None)
    assert (tokenizer.vocab_size, kind, name) == (4, "HuggingFaceTokenizer", "tokenizer.json")
    export_tokenizer(DataConfig(tokenizer_type=kind, tokenizer_model=str(run / str(name))), back, 64)
    copied = ("tokenizer.json", "special_tokens_map.json", "generation_config.json")
    assert all((back / file).read_bytes() == (source / file).read_bytes() for file in copied)


def test_pieces_are_found(tmp_path: Path) -> None:
    data = made(tmp_path, "unigram")
    (tmp_path / "hub").mkdir()
    (tmp_path / "run").mkdir()
    Path(str(data.tokenizer_model)).rename(tmp_path / "hub" / "tokenizer.model")
    tokenizer, kind, name = import_tokenizer(tmp_path / "hub", tmp_path / "run", None, None)
    assert (kind, name) == ("SentencePieceTokenizer", "tokenizer.model")
    assert tokenizer.fingerprint == build_tokenizer(kind, str(tmp_path / "run" / "tokenizer.model")).fingerprint
