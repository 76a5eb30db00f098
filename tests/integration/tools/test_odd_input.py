"""Fact: for any input, token files hold its texts, or one message locates the error and no file is left."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.data.preprocess.inputs import InputChunk, select_shard, shuffle
from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.token_files.writer import IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer
from tools import inspect_dataset, merge_datasets, preprocess_data

ROOT = Path(__file__).parents[3]
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), min_size=1, max_size=12)


def run(source: Path | str, prefix: Path, *more: str) -> int:
    words = ["--input", str(source), "--output-prefix", str(prefix), "--tokenizer-type", "ByteTokenizer"]
    return preprocess_data.main([*words, "--workers", "1", "--append-eod", *more])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def texts_of(prefix: Path) -> list[str]:
    data, tokenizer = IndexedDataset(f"{prefix}_text_document"), ByteTokenizer(None)
    return [tokenizer.decode(data.sequences(number)[0].tolist()) for number in range(data.num_documents)]


def write(folder: Path, kind: str, texts: list[str], newline: str, is_ascii: bool) -> Path:
    path, rows = folder / f"a.{kind}", [{"text": text} for text in texts]
    lines = "".join(json.dumps(row, ensure_ascii=is_ascii) + newline for row in rows).encode()
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif kind == "jsonl.zst":  # in two frames
        path.write_bytes(b"".join(pa.compress(part, "zstd", asbytes=True) for part in (lines[:50], lines[50:])))
    else:
        path.write_bytes(gzip.compress(lines) if kind == "jsonl.gz" else lines)
    return path


@settings(deadline=None, max_examples=60)
@given(
    texts=TEXTS,
    kind=st.sampled_from(["jsonl", "json", "jsonl.gz", "jsonl.zst", "parquet"]),
    newline=st.sampled_from(["\n", "\r\n", "\n\n \n"]),
    is_ascii=st.booleans(),
    piece_mb=st.floats(1e-6, 2e-4),
    num_parts=st.integers(1, 4),
)
def test_documents_are_the_texts_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    kind: str,
    newline: str,
    is_ascii: bool,
    piece_mb: float,
    num_parts: int,
) -> None:
    """Documents keep their order for any alignment of lines and pieces, and any number of tasks."""
    folder = tmp_path_factory.mktemp("odd")
    source, more = write(folder, kind, ["first", *texts], newline, is_ascii), ["--piece-mb", str(piece_mb)]
    for part in range(num_parts):
        assert run(source, folder / "x", *more, "--shard", f"{part}/{num_parts}") == 0
    words = ["--input", str(folder / "x_shard-*"), "--output-prefix", str(folder / "y_text_document")]
    assert merge_datasets.main(words) == 0
    assert texts_of(folder / "y") == ["first", *filter(None, texts)]


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 8), st.integers(0, 2**70))
def test_shards_hold_every_chunk_once_in_order(sizes: list[int], count: int, seed: int) -> None:
    pieces = [InputChunk("dataset", "hf:x", number, len(sizes), size) for number, size in enumerate(sizes)]
    mixed = shuffle(pieces, seed)
    assert sorted(mixed, key=lambda piece: piece.start) == pieces
    assert [piece for number in range(count) for piece in select_shard(mixed, (number, count))] == mixed
    equal = [InputChunk("dataset", "hf:x", number, 40, 0) for number in range(40)]
    assert {len(select_shard(equal, (number, 8))) for number in range(8)} == {5}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_is_not_text(tmp_path: Path, mark: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_TEXT", 100), ("SECTION", 30), ("SEARCH", 10), ("CONTEXT", 4)):
        monkeypatch.setattr(f"megatron3d.data.preprocess.readers.{name}", value)
    monkeypatch.setattr("megatron3d.data.preprocess.readers.MAX_TEXT", 100)
    text = "".join(f"line {number} é\n" for number in range(40))
    (tmp_path / "a.txt").write_bytes(mark + text.encode())
    (tmp_path / "b.jsonl").write_bytes(mark + b'{"text": "b"}\n' + mark + b'{"text": "c"}\n')
    assert run(tmp_path, tmp_path / "x") == 0
    assert texts_of(tmp_path / "x") == [text, "b", "c"]


@pytest.mark.parametrize("name", ["with space [1]*?.jsonl", "{a},b;c$d.jsonl", "tab\tnewline\n.jsonl", "漢字-é.jsonl"])
def test_an_existing_file_name_is_not_read_as_a_pattern(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n')
    (tmp_path / "with space 1xx.jsonl").write_text('{"text": "other"}\n')
    assert run(tmp_path / name, tmp_path / f"to {name}") == 0
    assert texts_of(tmp_path / f"to {name}") == ["a"]


def test_output_files_next_to_the_input_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "a"}\n')
    for name in ("x.ledger.jsonl", "x_text_document.manifest.json", "notes.md"):
        (tmp_path / "in" / name).write_text("no documents")
    for number, pattern in enumerate((tmp_path / "in", tmp_path / "i*", tmp_path / "in" / "*.json*")):
        assert run(pattern, tmp_path / str(number)) == 0
        assert texts_of(tmp_path / str(number)) == ["a"]


def rows(folder: Path, values: list[object], **kinds: pa.DataType) -> Path:
    arrays = {"text": pa.array(values, **kinds)}
    pq.write_table(pa.table(arrays), folder / "a.parquet")
    return folder / "a.parquet"


def cut_zst(folder: Path) -> Path:
    whole = pa.compress(b'{"text": "abcdefgh"}\n' * 1000, "zstd", asbytes=True)
    (folder / "a.jsonl.zst").write_bytes(whole[:-20])
    return folder / "a.jsonl.zst"


def damaged_parquet(folder: Path) -> Path:
    path = rows(folder, ["x" * 500] * 300)
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(bytes(content))
    return path


def damaged_gzip(folder: Path) -> Path:
    path, content = folder / "a.jsonl.gz", bytearray(gzip.compress(os.urandom(9999)))
    content[500:600] = bytes(100)
    path.write_bytes(bytes(content))
    return path


def lines(content: bytes) -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        (folder / "a.jsonl").write_bytes(content)
        return folder / "a.jsonl"

    return written


def not_utf8(folder: Path) -> Path:
    texts, ends = pa.py_buffer(b"good\xff"), pa.py_buffer(np.array([0, 4, 5], "<i4").tobytes())
    array = pa.Array.from_buffers(pa.string(), 2, [None, ends, texts])
    pq.write_table(pa.table({"text": array}), folder / "a.parquet")
    return folder / "a.parquet"


ODD: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "null": (lambda here: rows(here, ["a", None]), "a.parquet, row group 0, row 1: 'text' holds a NoneType"),
    "numbers": (lambda here: rows(here, [1, 2]), "a.parquet, row group 0, row 0: 'text' holds a int"),
    "nested": (lambda here: rows(here, [{"inner": "a"}]), "row 0: 'text' holds a dict"),
    "bytes": (lambda here: rows(here, [b"a"]), "row 0: 'text' holds a bytes"),
    "not utf-8": (not_utf8, "a.parquet, row group 0, row 1: cannot be decoded ('utf-8' codec"),
    "damaged parquet": (damaged_parquet, "a.parquet"),
    "damaged gzip": (damaged_gzip, "a.jsonl.gz: cannot be read"),
    "cut zst": (cut_zst, "a.jsonl.zst: cannot be read"),
    "an array over lines": (
        lines(b'[\n{"text": "a"}\n]\n'),
        "a.jsonl:1: not JSON, of which a line is to hold a document",
    ),
    "utf-16": (lines('{"text": "a"}\n'.encode("utf-16")), "a.jsonl:1: not JSON"),
    "deep": (lines(b'{"text": ' + b"[" * 10**6), "a.jsonl:1: "),
    "a long number": (lines(b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n"), "a.jsonl:1: not JSON"),
    "no end": (lines(b'{"text": "a"}\n{"text": "b'), "a.jsonl:2: not JSON"),
    "zeros": (lines(bytes(100)), "a.jsonl:1: not JSON"),
    "blank": (lines(b"\n \n\r\n"), "no text under the key 'text' in 0 documents"),
    "empty texts": (lines(b'{"text": ""}\n' * 3), "no text under the key 'text' in 3 documents"),
}


@pytest.mark.parametrize("name", ODD)
def test_unreadable_input_is_reported_and_nothing_is_left(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = ODD[name]
    source = make(tmp_path)
    before = names(tmp_path)
    assert run(source, tmp_path / "x") == 2
    said = capsys.readouterr().err
    messages = [line for line in said.splitlines() if not line.startswith("encoding ")]  # except the progress bar
    assert len(messages) == 1 and words in messages[0], said
    assert names(tmp_path) == before


def test_a_row_that_is_not_utf8_is_left_out_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(not_utf8(tmp_path), tmp_path / "x", "--on-bad-record", "skip") == 0
    assert "row 1: cannot be decoded" in capsys.readouterr().err and texts_of(tmp_path / "x") == ["good"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", ""], "an empty name"),
        (["--input", "**.jsonl"], "**.jsonl: "),
        (["--piece-mb", "nan"], "--piece-mb nan: must be"),
        (["--max-record-mb", "inf"], "--max-record-mb inf: must be"),
        (["--output-prefix", "."], "no name of a file"),
        (["--output-prefix", "/proc/x"], "cannot be written"),
        (["--output-prefix", "x" * 300], "File name too long"),
        (["--input", "x" * 300], "x"),
        (["--input", "hf:/no/such/folder"], "hf:/no/such/folder: cannot be opened"),
        (["--input", "hf:"], "not a dataset"),
    ],
)
def test_odd_arguments_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert run("a.jsonl", Path("out"), *words) == 2
    assert message in capsys.readouterr().err
    assert names(tmp_path) == ["a.jsonl"]


def test_tokens_outside_the_vocabulary_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Megatron token file does not record which tokenizer made it."""
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add(np.array([1, 70], "<u2"), np.array([2]))
        writer.finish(ByteTokenizer(None))
    (tmp_path / "x.manifest.json").unlink()
    (tmp_path / "chars.json").write_text('["a", "b"]')
    tokenizer = ["--tokenizer-type", "CharTokenizer", "--tokenizer-model", str(tmp_path / "chars.json")]
    assert inspect_dataset.main([str(tmp_path / "x"), "--documents", "0", *tokenizer]) == 2
    assert "holds token 70, outside the vocabulary of 2" in capsys.readouterr().err


def test_a_closed_output_pipe_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "words\n" * 100_000}) + "\n")
    assert run(tmp_path / "a.jsonl", tmp_path / "x") == 0
    words = [f"{tmp_path}/x_text_document", "--documents", "0", "--max-tokens", "600000", "--tokenizer-type"]
    command = f"{sys.executable} tools/inspect_dataset.py {' '.join(words)} ByteTokenizer | head -1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("== document 0") and done.stderr == ""
