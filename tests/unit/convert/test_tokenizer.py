"""Fact: a converted tokenizer encodes as ours does; one that would not is not written, and a message says so."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

from megatron3d.config.schema import DataConfig
from megatron3d.convert.tokenizer import (
    CONTROL,
    SAMPLE,
    export_tokenizer,
    import_tokenizer,
    keep_token_ids,
    of_type,
    open_texts,
    surfaces,
)
from megatron3d.data.preprocess.tokenizer_training import TrainingText, train_sentencepiece
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron3d.errors import UserError
from tests.support.hub_models import write_tokenizer

ROOT = Path(__file__).parents[3]


# What tokenizers are trained on: a text that stays as it is, since in a unigram model pieces of one and of two equal
# characters ("0" and "000", one and two line ends) have the same score in either order, and there rounding decides,
# in fp32 in SentencePiece, in fp64 in Hugging Face's library. Blank lines are left out for that reason.
LINES = [line.strip() for line in (ROOT / "LICENSE").read_text().splitlines() if line.strip()]


def made(folder: Path, kind: str) -> DataConfig:
    if kind == "ByteTokenizer":
        return DataConfig(tokenizer_type=kind)
    if kind == "CharTokenizer":
        path = folder / "chars.json"
        path.write_text(json.dumps(sorted(set(SAMPLE)), ensure_ascii=False))
        return DataConfig(tokenizer_type=kind, tokenizer_model=str(path))
    path = folder / "pieces.model"
    (folder / "text.txt").write_text("\n".join([*LINES, ""]) * 2)
    path.write_bytes(train_sentencepiece(TrainingText((folder / "text.txt",), ("text",), 1.0), kind, 500))
    return DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path))


KINDS = ("ByteTokenizer", "CharTokenizer", "bpe", "unigram")


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer, notes = export_tokenizer(made(folder, request.param), folder, 64)
    assert notes == []
    return tokenizer, folder


def test_transformers_loads_the_exported_tokenizer(both: tuple[Tokenizer, Path]) -> None:
    ours, folder = both
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "a few words, 12 of them\n"
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eod


@settings(max_examples=60)
@given(text=st.text(st.sampled_from(sorted(set(SAMPLE) - set("▁"))), max_size=60))
def test_the_exported_tokenizer_encodes_every_text_alike(both: tuple[Tokenizer, Path], text: str) -> None:
    ours, folder = both
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))


def test_a_tokenizer_that_would_encode_differently_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron3d.convert.tokenizer._merges", lambda scored: [])
    data = made(tmp_path, "bpe")
    (tmp_path / "out").mkdir()
    _, notes = export_tokenizer(data, tmp_path / "out", 64)
    (note,) = notes
    assert note.startswith("SentencePieceTokenizer has no tokenizer.json that encodes alike; none was written")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sentencepiece.model"]
    ours, kind, name = import_tokenizer(tmp_path / "out", tmp_path, None, None)
    assert (kind, name) == ("SentencePieceTokenizer", "sentencepiece.model")
    assert ours.fingerprint == build_tokenizer(kind, data.tokenizer_model).fingerprint


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SYMBOLS = ["<sep>", "def", "def x", "  ", "\n", "a.b*"]
FOREIGN: dict[str, tuple[dict[str, Any], bool]] = {
    "spm_train's defaults": ({}, True),
    "defaults, bpe": ({"model_type": "bpe"}, True),
    "characters": ({"model_type": "char"}, True),
    "case folding": ({"normalization_rule_name": "nmt_nfkc_cf"}, True),
    "no prefix": ({"add_dummy_prefix": False, "model_type": "bpe", "byte_fallback": True}, True),
    "symbols of the user, bpe": (
        {"model_type": "bpe", "user_defined_symbols": SYMBOLS, "byte_fallback": True, **IDENTITY},
        True,
    ),
    "symbols of the user, unigram": ({"user_defined_symbols": SYMBOLS, "byte_fallback": True, **IDENTITY}, True),
    "spaces at the end of words": ({"treat_whitespace_as_suffix": True}, False),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_models_of_other_trainers_encode_alike_or_are_not_written(name: str, tmp_path: Path) -> None:
    """What is written encodes alike, in transformers too; what cannot is not left under a name that is misread."""
    options, converts = FOREIGN[name]
    model = io.BytesIO()
    lines = (LINES + SAMPLE.splitlines()) * 2
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=600,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    (tmp_path / "their.model").write_bytes(model.getvalue())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "their.model"))
    ours, notes = export_tokenizer(data, tmp_path, 64)
    assert (notes == []) == converts == (tmp_path / "tokenizer.model").exists()
    assert (tmp_path / "sentencepiece.model").exists() != converts
    if converts:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
        pieces = ModelProto.FromString(model.getvalue())
        texts = open_texts(surfaces(pieces)[::-1], of_type(pieces, CONTROL))
        for text in ("Hello <sep>  def x\tﬁ½ ", "<sep><0x9B>", *texts):
            assert theirs(text).input_ids == ours.encode(text), text


def test_what_transformers_reads_differently_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    class Other:
        unk_token = None

        def __call__(self, text: str, verbose: bool) -> SimpleNamespace:
            return SimpleNamespace(input_ids=[0])

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Other())
    (tmp_path / "out").mkdir()
    _, notes = export_tokenizer(made(tmp_path, "bpe"), tmp_path / "out", 64)
    assert len(notes) == 1 and [path.name for path in (tmp_path / "out").iterdir()] == ["sentencepiece.model"]


def test_tokenizer_config_lets_generate_take_its_output(both: tuple[Tokenizer, Path]) -> None:
    """transformers 4 also returns token_type_ids, which models refuse, unless model_input_names leaves them out."""
    settings = json.loads((both[1] / "tokenizer_config.json").read_text())
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_add_bos_token_survives_both_ways(adds_bos: bool, tmp_path: Path) -> None:
    """A tokenizer.json is copied, and a tokenizer.model converted."""
    for kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer"):
        hub, run, back = (tmp_path / kind / name for name in ("hub", "run", "back"))
        for folder in (hub, run, back):
            folder.mkdir(parents=True)
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
        (hub / "tokenizer_config.json").write_text(json.dumps({**names, "add_bos_token": adds_bos}))
        if kind == "SentencePieceTokenizer":
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(LINES), model_prefix=str(hub / "tokenizer"), vocab_size=300, minloglevel=2
            )
        else:
            write_tokenizer(hub)
        tokenizer, _, name = import_tokenizer(hub, run, None, None)
        data = DataConfig.model_validate({"tokenizer_type": kind, "tokenizer_model": str(run / str(name))})
        assert export_tokenizer(data, back, 64)[1] == []
        assert json.loads((back / "tokenizer_config.json").read_text())["add_bos_token"] == adds_bos
        again = import_tokenizer(back, tmp_path, None, None)[0]
        assert again.special.prepended == tokenizer.special.prepended
        if kind == "SentencePieceTokenizer":
            assert tokenizer.special.prepended == ((1,) if adds_bos else ())
            theirs = transformers.AutoTokenizer.from_pretrained(back, local_files_only=True)
            assert theirs("a b").input_ids == [*tokenizer.special.prepended, *tokenizer.encode("a b")]
            assert (theirs.unk_token, theirs.unk_token_id) == ("<unk>", 0)


def test_token_ids_of_config_json_are_kept(tmp_path: Path) -> None:
    """In generation_config.json, unless that names others; ids outside of the vocabulary are reported."""
    settings = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": -1}
    notes = keep_token_ids(settings, tmp_path, tmp_path, 4)
    assert notes == ["config.json: pad_token_id=-1: not in the tokenizer's vocabulary of 4"]
    path = tmp_path / "generation_config.json"
    assert json.loads(path.read_text()) == {"bos_token_id": 1, "eos_token_id": [2, 3]}
    path.write_text('{"eos_token_id": 0, "temperature": 0.6}')
    keep_token_ids(settings, tmp_path, tmp_path, 4)
    assert json.loads(path.read_text()) == {"eos_token_id": 0, "temperature": 0.6, "bos_token_id": 1}


def test_tiktoken_comes_with_its_ranks(tmp_path: Path) -> None:
    ranks = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "bytes.tiktoken").write_text("".join(ranks))
    described = {"ranks": "bytes.tiktoken", "pattern": ".", "special_tokens": {}}
    (tmp_path / "tik.json").write_text(json.dumps(described))
    (tmp_path / "run").mkdir()
    ours, kind, name = import_tokenizer(tmp_path, tmp_path / "run", "TikTokenizer", str(tmp_path / "tik.json"))
    assert (kind, name) == ("TikTokenizer", "tiktoken.json")
    assert build_tokenizer(kind, str(tmp_path / "run" / "tiktoken.json")).fingerprint == ours.fingerprint


LINKED = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@pytest.mark.parametrize("name", LINKED)
def test_links_out_of_the_folder_are_not_followed(name: str, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    write_tokenizer(hub)
    (tmp_path / "secret").write_text("{}")
    (hub / name).unlink(missing_ok=True)
    (hub / name).symlink_to("../secret")
    with pytest.raises(UserError, match=rf"hub/{name}: is a link to .*secret, outside of the folder"):
        import_tokenizer(hub, tmp_path, None, None)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    hub, blobs = tmp_path / "models--a" / "snapshots" / "1234", tmp_path / "models--a" / "blobs"
    hub.mkdir(parents=True)
    blobs.mkdir()
    write_tokenizer(blobs)
    (blobs / "tokenizer.json").rename(blobs / "abcd")
    (hub / "tokenizer.json").symlink_to("../../blobs/abcd")
    assert import_tokenizer(hub, tmp_path, None, None)[2] == "tokenizer.json"


def test_a_hugging_face_tokenizer_keeps_its_files(tmp_path: Path) -> None:
    source, run, back = (tmp_path / name for name in ("hub", "run", "back"))
    for folder in (source, run, back):
        folder.mkdir()
    write_tokenizer(source)
    (source / "special_tokens_map.json").write_text("{}")
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    (source / "vocab.json").write_text('{"a": 1}')
    (source / "merges.txt").write_text("#version: 0.2")
    tokenizer, kind, name = import_tokenizer(source, run, None, None)
    assert (tokenizer.vocab_size, kind, name) == (4, "HuggingFaceTokenizer", "tokenizer.json")
    export_tokenizer(DataConfig(tokenizer_type=kind, tokenizer_model=str(run / str(name))), back, 64)
    copied = ("tokenizer.json", "special_tokens_map.json", "generation_config.json", "vocab.json", "merges.txt")
    assert all((back / file).read_bytes() == (source / file).read_bytes() for file in copied)


def test_a_sentencepiece_model_is_found(tmp_path: Path) -> None:
    data = made(tmp_path, "unigram")
    (tmp_path / "hub").mkdir()
    (tmp_path / "run").mkdir()
    Path(str(data.tokenizer_model)).rename(tmp_path / "hub" / "tokenizer.model")
    tokenizer, kind, name = import_tokenizer(tmp_path / "hub", tmp_path / "run", None, None)
    assert (kind, name) == ("SentencePieceTokenizer", "tokenizer.model")
    assert tokenizer.fingerprint == build_tokenizer(kind, str(tmp_path / "run" / "tokenizer.model")).fingerprint
