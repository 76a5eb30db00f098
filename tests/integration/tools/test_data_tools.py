"""Fact: raw text becomes the same token files for any number of workers, and bad input gives one message."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, build_tokenizer
from tests.support.processes import start
from tools import make_corpus, preprocess_data, train_tokenizer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a corpus from part of the standard library and a tokenizer trained on it."""
    folder = tmp_path_factory.mktemp("stdlib")
    corpus, prefix = str(folder / "corpus.jsonl"), str(folder / "tokenizer")
    assert make_corpus.main(["--output", corpus, "--max-mb", "1.5"]) == 0
    assert train_tokenizer.main(["--input", corpus, "--vocab-size", "600", "--output-prefix", prefix]) == 0
    return folder


def read_texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def preprocess(folder: Path, output: Path, *more: str) -> int:
    arguments = ["--input", str(folder / "corpus.jsonl"), "--output-prefix", str(output), "--workers", "1"]
    return preprocess_data.main([*arguments, "--tokenizer-model", str(folder / "tokenizer.model"), *more])


def contents(folder: Path, name: str) -> dict[str, bytes]:
    return {path.name.removeprefix(name): path.read_bytes() for path in sorted(folder.glob(f"{name}*"))}


def test_the_corpus_is_deterministic_and_within_the_limit(folder: Path, tmp_path: Path) -> None:
    assert make_corpus.main(["--output", str(tmp_path / "again.jsonl"), "--max-mb", "1.5"]) == 0
    again = (tmp_path / "again.jsonl").read_bytes()
    assert again == (folder / "corpus.jsonl").read_bytes() and 1e6 < len(again) <= 1.5e6
    lines = [json.loads(line) for line in again.splitlines()]
    assert list(lines[0]) == ["name", "text"]
    initials = [line["name"][0] for line in lines]
    assert initials != sorted(initials), "the last modules, which validate, would be those of the last letters"


def test_broken_and_installed_modules_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = tmp_path / "library"
    (library / "site-packages").mkdir(parents=True)
    (library / "b.py").write_bytes("# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"))
    (library / "a.py").write_text("pass\n")
    (library / "bad.py").write_bytes(b"\xff\xfe\n")
    (library / "empty.py").touch()
    (library / "site-packages" / "c.py").write_text("pass\n")
    assert make_corpus.main(["--source", str(library), "--output", str(tmp_path / "out.jsonl")]) == 0
    assert "2 modules" in (printed := capsys.readouterr().out) and "1 undecodable" in printed
    assert sorted(read_texts(tmp_path / "out.jsonl")) == ["# -*- coding: latin-1 -*-\nx = 'é'\n", "pass\n"]


def test_token_files_hold_the_text(folder: Path, tmp_path: Path) -> None:
    assert preprocess(folder, tmp_path / "corpus", "--append-eod") == 0
    data = IndexedDataset(tmp_path / "corpus_text_document")
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(folder / "tokenizer.model"))
    texts = read_texts(folder / "corpus.jsonl")
    tokens = data.tokens(0, data.num_tokens)
    assert np.count_nonzero(tokens == tokenizer.eod) == len(texts) == data.num_documents
    assert tokenizer.decode(tokens.tolist()) == "".join(texts)
    assert data.manifest is not None and data.manifest.fingerprint == tokenizer.fingerprint


def test_bytes_do_not_depend_on_the_workers(folder: Path, tmp_path: Path) -> None:
    assert preprocess(folder, tmp_path / "one") == 0
    assert preprocess(folder, tmp_path / "two", "--workers", "2") == 0
    assert contents(tmp_path, "one") == contents(tmp_path, "two")


def test_several_keys_and_file_formats_give_their_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab", "title": "t"}\n\n{"text": "", "title": "u"}\n')
    (tmp_path / "b.txt").write_text("c\nd")
    common = ["--tokenizer-type", "ByteTokenizer", "--workers", "1"]
    one = ["--input", str(tmp_path / "*.jsonl"), "--json-keys", "text", "title", "--output-prefix", str(tmp_path / "x")]
    assert preprocess_data.main([*one, *common]) == 0
    both = ["--input", str(tmp_path / "*.jsonl"), str(tmp_path / "b.txt"), "--output-prefix", str(tmp_path / "y")]
    assert preprocess_data.main([*both, *common]) == 0
    for name, text, documents in (("x_text", "ab", 1), ("x_title", "tu", 2), ("y_text", "abc\nd", 2)):
        data = IndexedDataset(tmp_path / f"{name}_document")
        assert ByteTokenizer(None).decode(data.tokens(0, data.num_tokens).tolist()) == text
        assert data.num_documents == documents


def test_a_character_corpus_equals_nanogpts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\nworld")
    prefix = str(tmp_path / "chars")
    assert train_tokenizer.main(["--input", str(tmp_path / "a.txt"), "--type", "char", "--model-prefix", prefix]) == 0
    assert build_tokenizer("CharTokenizer", f"{prefix}.json").encode("hello") == [3, 2, 4, 4, 5]


BAD_RECORDS: list[tuple[bytes, str]] = [
    (b"{", "a.jsonl:2: not JSON"),
    (b"[1]", "a.jsonl:2: a JSON list"),
    (b'{"name": "x"}', "a.jsonl:2: no key 'text'; it has 'name'"),
    (b'{"text": 5}', "a.jsonl:2: 'text' holds a int"),
    (b'{"text": "\\ud800"}', "a.jsonl:2: 'text' is not valid Unicode"),
    (b'{"text": "\xff"}', "a.jsonl:2: not JSON"),
]


@pytest.mark.parametrize(("record", "message"), BAD_RECORDS)
@pytest.mark.parametrize("tool", ["preprocess", "train"])
def test_a_bad_record_is_named_and_nothing_is_written(
    tool: str, record: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + record + b"\n")
    common = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out")]
    if tool == "preprocess":
        code = preprocess_data.main([*common, "--tokenizer-type", "ByteTokenizer", "--workers", "1"])
    else:
        code = train_tokenizer.main([*common, "--type", "char"])
    assert code == 2 and message in capsys.readouterr().err
    assert names(tmp_path) == ["a.jsonl"]


def test_a_bad_record_is_named_while_a_tokenizer_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{\n')
    common = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out"), "--vocab-size", "300"]
    assert train_tokenizer.main(common) == 2
    assert "a.jsonl:2: not JSON" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    assert train_tokenizer.main(common) == 2
    assert "no text under 'text'" in capsys.readouterr().err
    assert names(tmp_path) == ["a.jsonl"]


def test_a_bad_record_in_a_worker_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chars.json").write_text('["a"]')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "ab"}\n')
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out"), "--workers", "2"]
    arguments += ["--tokenizer-type", "CharTokenizer", "--tokenizer-model", str(tmp_path / "chars.json")]
    assert preprocess_data.main(arguments) == 2
    assert "a.jsonl:2: character 'b' (U+0062)" in capsys.readouterr().err
    assert names(tmp_path) == ["a.jsonl", "chars.json"]


BYTES = {"--input": "{}/a.txt", "--output-prefix": "{}/out", "--tokenizer-type": "ByteTokenizer", "--workers": "1"}
BAD_ARGUMENTS: list[tuple[dict[str, str | None], str]] = [
    ({"--input": "{}/missing.txt"}, "missing.txt: no such file"),
    ({"--input": "{}/*.jsonl"}, "*.jsonl: no such file"),
    ({"--input": "{}/a.parquet"}, "a.parquet: no parquet file"),
    ({"--input": "{}/a.csv"}, "unknown kind '.csv'"),
    ({"--input": "{}/folder"}, "a folder without .jsonl, "),
    ({"--shard": "3/3"}, "--shard 3/3: not i/n"),
    ({"--shard": "0/" + "9" * 5000}, "9...: not i/n"),
    ({"--shard": "\u0663/\u0664"}, ": not i/n"),
    ({"--piece-mb": "0"}, "--piece-mb 0: must be"),
    ({"--input": "{}/empty.txt"}, "no text under the key 'text'"),
    ({"--input": "{}/latin.txt"}, "not UTF-8 text"),
    ({"--json-keys": "body"}, "no key 'body'; it has 'text'"),
    ({"--output-prefix": "{}/a.txt/out"}, "cannot be written"),
    ({"--workers": "0"}, "--workers 0: must be 1 or more"),
    ({"--tokenizer-model": "{}/a.txt"}, "ByteTokenizer has no model file"),
    ({"--tokenizer-type": "SentencePieceTokenizer"}, "needs a model file"),
    ({"--tokenizer-type": "CharTokenizer", "--tokenizer-model": "{}/c.json", "--append-eod": None}, "--append-eod:"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused_and_nothing_is_written(
    changes: dict[str, str | None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "c.json").write_text('["e", "t", "x"]')
    (tmp_path / "folder").mkdir()
    for name in ("a.parquet", "a.csv", "empty.txt"):
        (tmp_path / name).touch()
    before = names(tmp_path)
    words = [word for pair in (BYTES | changes).items() for word in pair if word is not None]
    assert preprocess_data.main([word.format(tmp_path) for word in words]) == 2
    assert message in capsys.readouterr().err
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["text", "text"], "--json-keys text text: 'text' is there twice"),
        (["text", "a/b"], "out_a/b_document: cannot be the name of a file"),
        (["text", "x" * 300], "File name too long"),
    ],
)
def test_keys_that_cannot_name_files_are_refused_and_nothing_is_written(
    keys: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(keys, "words")) + "\n")
    words = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out"), "--json-keys", *keys]
    assert preprocess_data.main([*words, "--tokenizer-type", "ByteTokenizer", "--workers", "1"]) == 2
    assert message in capsys.readouterr().err and names(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--type", "char", "--vocab-size", "9"], "remove --vocab-size"),
        (["--type", "bpe"], "needs one"),
        (["--type", "byte-bpe", "--vocab-size", "99999999"], "needs one of 1 to 16777216"),
        (["--vocab-size", "100000"], "Vocabulary size too high"),
        (["--vocab-size", "10"], "--vocab-size 10"),
        (["--vocab-size", "300", "--json-keys", "body"], "no key 'body'"),
    ],
)
def test_a_vocabulary_size_that_the_text_cannot_fill_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some words, some other words\n" * 10)
    common = ["--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "out")]
    assert train_tokenizer.main([*common, *words]) == 2
    assert message in capsys.readouterr().err
    assert names(tmp_path) == ["a.txt"]


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    with text.open("w") as file:
        file.writelines(json.dumps({"text": "words " * 5000}) + "\n" for _ in range(8000))
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(text), "--output-prefix", str(tmp_path / "x")]
    command += ["--tokenizer-type", "ByteTokenizer", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    tool = start(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in tmp_path.glob("*.bin*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(tool.pid, signal.SIGINT)
    _, errors = tool.communicate(timeout=60)
    assert tool.returncode == 130 and "Traceback" not in errors, errors
    assert names(tmp_path) == ["a.jsonl"]


def test_the_tools_do_not_import_torch() -> None:
    code = (
        "import sys, tools.make_corpus, tools.train_tokenizer, tools.preprocess_data; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
