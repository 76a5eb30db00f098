"""Fact: token files have the same bytes for any number of workers, shards and pieces, from every kind of input."""

from __future__ import annotations

import gzip
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron3d.data.preprocess import readers as split_text
from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer
from tests.support.preprocess_jobs import corpus, documents, run, write_jsonl
from tools import merge_datasets


def test_tokens_are_those_of_the_texts(source: Path, expected: dict[str, bytes]) -> None:
    texts = [str(row["text"]) for row in documents() if row["text"]]
    data = IndexedDataset(source.parent / "expected_text_document")
    assert data.num_documents == len(texts)
    for index, text in enumerate(texts):
        (ids,) = data.sequences(index)
        assert ids.tolist() == [*text.encode(), 256]
    data.verify()


def test_bytes_do_not_depend_on_workers_shards_and_chunks(
    source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    for workers in ("2", "4"):
        assert run(source, tmp_path / workers, "--workers", workers) == 0
    assert run(source, tmp_path / "small", "--piece-mb", "0.002") == 0
    assert corpus(tmp_path / "2") == corpus(tmp_path / "4") == corpus(tmp_path / "small") == expected
    for part in range(3):
        assert run(source, tmp_path / "parts", "--piece-mb", "0.01", "--shard", f"{part}/3") == 0
    inputs = str(tmp_path / "parts_shard-*_text_document")
    assert merge_datasets.main(["--input", inputs, "--output-prefix", str(tmp_path / "whole_text_document")]) == 0
    assert corpus(tmp_path / "whole") == expected


def test_more_shards_than_chunks_leave_some_empty(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    for part in range(4):
        assert run(source, tmp_path / "x", "--shard", f"{part}/4") == 0
    inputs = str(tmp_path / "x_shard-*")
    assert merge_datasets.main(["--input", inputs, "--output-prefix", str(tmp_path / "y_text_document")]) == 0
    assert corpus(tmp_path / "y") == expected


def test_a_missing_shard_and_one_of_another_job_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in (0, 2):
        assert run(source, tmp_path / "x", "--piece-mb", "0.01", "--shard", f"{part}/3") == 0
    output = ["--output-prefix", str(tmp_path / "y")]
    assert merge_datasets.main(["--input", str(tmp_path / "x_shard-*"), *output]) == 2
    assert "part 1/3 is missing" in capsys.readouterr().err
    assert run(source, tmp_path / "x", "--piece-mb", "0.02", "--shard", "1/3") == 0
    assert merge_datasets.main(["--input", str(tmp_path / "x_shard-*"), *output]) == 2
    assert "a part of another job" in capsys.readouterr().err
    assert not list(tmp_path.glob("y*"))


def test_a_finished_shard_is_not_repeated(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(source, tmp_path / "x", "--shard", "0/1") == 0
    assert run(source, tmp_path / "x", "--shard", "0/1") == 0
    assert "done already" in capsys.readouterr().out


def test_every_kind_of_input_gives_the_same_tokens(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    raw, rows = source.read_bytes(), documents()
    table = pa.Table.from_pylist(rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw[:5000]) + gzip.compress(raw[5000:]))
    with pa.CompressedOutputStream(str(tmp_path / "b.jsonl.zst"), "zstd") as file:
        file.write(raw)
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=70)
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    write_jsonl(tmp_path / "folder" / "a.jsonl", rows[:100])
    write_jsonl(tmp_path / "folder" / "inner" / "b.jsonl", rows[100:])
    (tmp_path / "folder" / "ignored.md").write_text("no text")
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    names = ["a.jsonl.gz", "b.jsonl.zst", "c.parquet", "folder"]
    for number, name in enumerate([*(str(tmp_path / name) for name in names), f"hf:{tmp_path / 'saved'}"]):
        assert run(name, tmp_path / f"out{number}") == 0
        assert corpus(tmp_path / f"out{number}") == expected, name


def test_a_folder_is_a_streamed_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(documents(50)), tmp_path / "data" / "train-0.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert run(f"hf:{tmp_path / 'data'}:train", tmp_path / "x", "--json-keys", "title") == 0
    data = IndexedDataset(tmp_path / "x_title_document")
    assert [bytes(s[:-1].astype(np.uint8)).decode() for i in range(50) for s in data.sequences(i)] == [
        f"t{i}" for i in range(50)
    ]


def test_long_texts_are_split_within_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_TEXT", 1000), ("SECTION", 300), ("SEARCH", 50), ("CONTEXT", 20)):
        monkeypatch.setattr(split_text, name, value)
        monkeypatch.setattr("megatron3d.data.preprocess.readers.MAX_TEXT", 1000)
    text = "".join(str(row["text"]) for row in documents(100))
    (tmp_path / "a.txt").write_text(text)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text}])
    for name in ("a.txt", "a.jsonl"):
        assert run(tmp_path / name, tmp_path / "x", "--overwrite") == 0
        data = IndexedDataset(tmp_path / "x_text_document")
        (ids,) = data.sequences(0)
        assert data.num_documents == 1 and ids.tolist() == [*text.encode(), 256]


def test_sentences_are_sequences_of_their_document(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "One is here. Two is there!\nThree? "}, {"text": "Four."}])
    assert run(tmp_path / "a.jsonl", tmp_path / "x", "--split-sentences") == 0
    data = IndexedDataset(tmp_path / "x_text_sentence")
    texts = [[ByteTokenizer(None).decode(s.tolist()) for s in data.sequences(i)] for i in range(2)]
    assert texts == [["One is here. ", "Two is there!\n", "Three? "], ["Four."]]
    assert data.num_sequences == 4 and data.tokens(0, data.num_tokens).tolist().count(256) == 2
    assert [int(n) for block in data.document_lengths() for n in block] == [35, 6]


def test_shuffling_moves_chunks_and_keeps_documents(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    outputs = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run(source, tmp_path / name, "--piece-mb", "0.005", "--shuffle-seed", seed) == 0
        outputs.append(corpus(tmp_path / name)[".bin"])
    assert outputs[0] == outputs[1] and len({outputs[0], outputs[2], expected[".bin"]}) == 3

    def split(tokens: bytes) -> list[tuple[int, ...]]:
        ids = np.frombuffer(tokens, "<u2")
        return sorted(tuple(part.tolist()) for part in np.split(ids, np.flatnonzero(ids == 256) + 1))

    assert split(outputs[0]) == split(outputs[2]) == split(expected[".bin"])


def test_bad_records_are_skipped_on_request(
    source: Path, expected: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = source.read_bytes().splitlines(keepends=True)
    bad = [b"{\n", b'{"text": 5}\n', b'{"text": "\xff"}\n', b'{"text": "' + b"x" * 20_000 + b'"}\n']
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:7] + bad + lines[7:]))
    limit = ["--max-record-mb", "0.01"]
    assert run(tmp_path / "a.jsonl", tmp_path / "x", *limit) == 2
    assert "a.jsonl:8: not JSON" in capsys.readouterr().err and not list(tmp_path.glob("x*"))
    assert run(tmp_path / "a.jsonl", tmp_path / "x", "--on-bad-record", "skip", *limit) == 0
    told = capsys.readouterr().err
    assert all(f"a.jsonl:{line}: " in told for line in (8, 9, 10, 11)) and "--max-record-mb 0.01" in told
    assert corpus(tmp_path / "x") == expected


def test_a_long_row_is_skipped_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"row {number}" for number in range(5)]
    rows = [{"text": "x" * 20_000 if number == 3 else text} for number, text in enumerate(texts)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    limit = ["--max-record-mb", "0.01"]
    assert run(tmp_path / "a.parquet", tmp_path / "x", *limit) == 2
    assert "row group 0, row 3: longer than --max-record-mb 0.01" in capsys.readouterr().err
    assert run(tmp_path / "a.parquet", tmp_path / "x", *limit, "--on-bad-record", "skip") == 0
    data = IndexedDataset(tmp_path / "x_text_document")
    found = [ByteTokenizer(None).decode(data.sequences(n)[0].tolist()) for n in range(data.num_documents)]
    assert found == texts[:3] + texts[4:]


def test_a_truncated_compressed_file_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(source.read_bytes())[:-200])
    assert run(tmp_path / "a.jsonl.gz", tmp_path / "x") == 2
    assert "cannot be read" in capsys.readouterr().err and not list(tmp_path.glob("x*"))
