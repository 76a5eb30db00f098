"""Samples of a streamed dataset are those of its lanes written out: for any rank, after any stop, at any place."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron3d.data.encode import Encoder
from megatron3d.data.stream import Cursor, Stream, open_stream
from megatron3d.data.tokenizer import ByteTokenizer
from megatron3d.errors import UserError

SEQ_LENGTH, SEED = 7, 3
TEXTS = [f"{number}:" + "abcdefghijklmnop"[: number % 17] * (number % 3) for number in range(90)]


@pytest.fixture(scope="module", params=["jsonl, 3 files", "parquet, 1 file"])
def name(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some rows are empty; one file is as many shards as datasets can make of it, which is one."""
    folder, rows = tmp_path_factory.mktemp("data"), [{"body": text} for text in TEXTS]
    rows[5]["body"] = ""
    if request.param.startswith("jsonl"):
        for part in range(3):
            lines = "".join(json.dumps(row) + "\n" for row in rows[30 * part : 30 * part + 30])
            (folder / f"part-{part}.jsonl").write_text(lines)
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / "all.parquet", row_group_size=20)
    return f"hf:{folder}"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def stream(name: str, lanes: int = 4, shuffle_rows: int = 5, seed: int | None = SEED, key: str = "body") -> Stream:
    tokenizer = ByteTokenizer(None)
    encoder = Encoder("ByteTokenizer", None, tokenizer.fingerprint, (key,), append_eod=True)
    return Stream(open_stream(name, lanes, shuffle_rows, seed, encoder), SEQ_LENGTH)


def test_in_order_the_lanes_are_the_rows_by_turns(name: str) -> None:
    made = stream(name, lanes=4, seed=None)
    assert made.rows.num_shards in (1, 3)
    texts = [text if number != 5 else "" for number, text in enumerate(TEXTS)]
    if made.rows.num_shards == 1:
        lanes = [texts[lane::4] for lane in range(4)]
    else:  # the first shard is shared by lanes 0 and 3
        lanes = [texts[0:30:2], texts[30:60], texts[60:90], texts[1:30:2]]
    for lane, mine in enumerate(lanes):
        tokens = [token for text in mine * 3 if text for token in [*text.encode(), 256]]
        windows = len(tokens) // SEQ_LENGTH - 1
        read = made.read(np.arange(windows) * 4 + lane)
        wanted = [tokens[w * SEQ_LENGTH : w * SEQ_LENGTH + SEQ_LENGTH + 1] for w in range(windows)]
        assert read.tolist() == wanted


def test_shuffled_epochs_hold_the_same_documents_in_other_orders(name: str) -> None:
    rows, documents = stream(name, lanes=2).rows, []
    for place, tokens in rows.documents(1, Cursor()):
        if place.epoch == 2:
            break
        documents.append((place.epoch, bytes(tokens[:-1].tolist()).decode()))
    first, second = ([text for epoch, text in documents if epoch == e] for e in range(2))
    assert sorted(first) == sorted(second) and first != second and len(set(first)) == len(first)
    others = {text for text in TEXTS if text != TEXTS[5]} - set(first)
    assert others and others.isdisjoint(first)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_reads_its_rows_of_one_order(name: str, ranks: int) -> None:
    expected = stream(name).read(np.arange(96))
    mine = [stream(name) for _ in range(ranks)]
    for begin in range(0, 96, 12):
        for rank, own in enumerate(mine):
            places = begin + np.arange(rank, 12, ranks)
            assert np.array_equal(own.read(places), expected[places])


def test_any_sample_is_the_same_from_the_start_and_from_a_checkpoint(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stream(name).read(np.arange(120))
    before = [stream(name), stream(name)]
    for begin in range(0, 60, 6):
        for rank, own in enumerate(before):
            own.read(begin + np.arange(rank, 6, 2))
    known = {lane: cursor for own in before for lane, cursor in own.cursors(60).items()}
    assert len(known) == 4
    assert np.array_equal(stream(name).read(np.arange(60, 120)), expected[60:])
    after = stream(name)
    after.go_on(60, json.loads(json.dumps(known)))
    opened: list[tuple[int, Cursor]] = []
    documents = type(after.rows).documents
    monkeypatch.setattr(
        type(after.rows), "documents", lambda rows, lane, at: opened.append((lane, at)) or documents(rows, lane, at)
    )
    assert np.array_equal(after.read(np.arange(60, 120)), expected[60:])
    assert len(opened) == 4 and all(at != Cursor() for _, at in opened)
    assert np.array_equal(after.read(np.arange(30, 50)), expected[30:50])


def test_few_cursors_are_kept(name: str) -> None:
    made = stream(name)
    for begin in range(0, 400, 20):
        made.read(begin + np.arange(20))
    assert all(len(lane.cursors) < 25 for lane in made._lanes)


def test_what_is_wrong_is_said(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no key 'text'; it has 'body'"):
        stream(name, key="text").read(np.arange(4))
    with pytest.raises(UserError, match=r"lane \d+ of data.stream_lanes=200 has no text"):
        stream(name, lanes=200).read(np.arange(200))
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    before = stream(f"hf:{path.parent}", lanes=1)
    before.read(np.arange(20))
    contents = before.contents
    path.write_text("".join(json.dumps({"body": "x" + text}) + "\n" for text in TEXTS))
    after = stream(f"hf:{path.parent}", lanes=1)
    after.go_on(20, before.cursors(20))
    with pytest.raises(UserError, match="has changed since the run began"):
        after.read(np.array([20]))
    assert contents != after.contents
