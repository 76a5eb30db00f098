"""Fact: samples of a streamed dataset equal those of its written-out lanes, on any rank and after any restart."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.data.corpus.plan import Blend
from megatron3d.data.corpus.stream import Cursor, StreamedDataset, StreamedSamples
from megatron3d.data.preprocess.encode import EncoderSpec
from megatron3d.data.preprocess.inputs import num_shards
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer
from megatron3d.errors import UserError

SEQ_LENGTH, SEED = 7, 3
TEXTS = [f"{number}:" + "abcdefghijklmnop"[: number % 17] * (number % 3) for number in range(90)]


@pytest.fixture(scope="module", params=["jsonl, 3 files", "parquet, 1 file"])
def name(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a dataset name; some rows are empty, and one file gives as many shards as datasets can make of it, one."""
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


def stream(
    name: str, lanes: int = 4, seed: int | None = SEED, key: str = "body", skip: bool = False
) -> StreamedSamples:
    tokenizer = ByteTokenizer(None)
    encoder = EncoderSpec("ByteTokenizer", None, tokenizer.fingerprint, (key,), append_eod=True, skip_bad=skip)
    return StreamedSamples([StreamedDataset(name, num_shards(name), lanes, 5, seed, encoder)], SEQ_LENGTH)


def test_lanes_read_the_rows_in_turn(name: str) -> None:
    made = stream(name, lanes=4, seed=None)
    assert made.datasets[0].num_shards in (1, 3)
    texts = [text if number != 5 else "" for number, text in enumerate(TEXTS)]
    if made.datasets[0].num_shards == 1:
        lanes = [texts[lane::4] for lane in range(4)]
    else:  # lanes 0 and 3 read the first shard
        lanes = [texts[0:30:2], texts[30:60], texts[60:90], texts[1:30:2]]
    for lane, mine in enumerate(lanes):
        tokens = [token for text in mine * 3 if text for token in [*text.encode(), 256]]
        windows = len(tokens) // SEQ_LENGTH - 1
        read = made.read(np.arange(windows) * 4 + lane)
        wanted = [tokens[w * SEQ_LENGTH : w * SEQ_LENGTH + SEQ_LENGTH + 1] for w in range(windows)]
        assert read.tolist() == wanted


def test_shuffled_epochs_hold_the_same_documents_in_other_orders(name: str) -> None:
    rows, documents = stream(name, lanes=2).datasets[0], []
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
    documents = type(after.datasets[0]).documents
    monkeypatch.setattr(
        type(after.datasets[0]),
        "documents",
        lambda rows, lane, at: opened.append((lane, at)) or documents(rows, lane, at),
    )
    assert np.array_equal(after.read(np.arange(60, 120)), expected[60:])
    assert len(opened) == 4 and all(at != Cursor() for _, at in opened)
    assert np.array_equal(after.read(np.arange(30, 50)), expected[30:50])


def test_a_lane_keeps_few_cursors(name: str) -> None:
    made = stream(name)
    for begin in range(0, 400, 20):
        made.read(begin + np.arange(20))
    assert all(len(lane.cursors) < 25 for lane in made._streams[0]._lanes)


def test_errors_of_a_stream_are_reported(name: str, tmp_path: Path) -> None:
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


BAD = (3, 4, 31, 60, 88)


def write_rows(folder: Path, bodies: list[str | None]) -> str:
    """Write a dataset of three files."""
    folder.mkdir()
    for part in range(3):
        lines = "".join(json.dumps({"body": body}) + "\n" for body in bodies[30 * part : 30 * part + 30])
        (folder / f"part-{part}.jsonl").write_text(lines)
    return f"hf:{folder}"


def test_a_bad_record_stops_or_is_skipped_like_an_empty_one(tmp_path: Path) -> None:
    bad = write_rows(tmp_path / "bad", [None if number in BAD else text for number, text in enumerate(TEXTS)])
    empty = write_rows(tmp_path / "empty", ["" if number in BAD else text for number, text in enumerate(TEXTS)])
    with pytest.raises(
        UserError, match=r"shard 0, row [34]: 'body' holds a NoneType, not a string; correct it or remove"
    ):
        stream(bad).read(np.arange(200))
    made = stream(bad, skip=True)
    assert np.array_equal(made.read(np.arange(200)), stream(empty).read(np.arange(200)))
    assert made.datasets[0].faults[0].startswith(f"{bad}, shard ") and len(set(made.datasets[0].faults)) == len(
        made.datasets[0].faults
    )


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_the_number_of_skipped_records_depends_only_on_the_samples(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The count depends neither on how rows are read nor on a restart: one rank that reads all counts the same."""
    numbers = data.draw(st.sets(st.integers(0, 89), min_size=1, max_size=14))
    bodies = [None if number in numbers else text for number, text in enumerate(TEXTS)]
    name = write_rows(tmp_path_factory.mktemp("rows") / "data", bodies)
    stop, size = data.draw(st.integers(1, 15)), data.draw(st.sampled_from([4, 6, 12]))
    ranks = data.draw(st.sampled_from([1, 2, 3]))
    alone = stream(name, skip=True)
    for begin in range(stop * size):
        alone.read(np.array([begin]))
    mine = [stream(name, skip=True) for _ in range(ranks)]
    for begin in range(0, stop * size, size):
        for rank, own in enumerate(mine):
            own.read(begin + np.arange(rank, size, ranks))
    known = [own.num_bad(stop * size) for own in mine]
    assert tuple(map(max, zip(*known, strict=True))) == alone.num_bad(stop * size)
    after = stream(name, skip=True)
    after.go_on(stop * size, {lane: cursor for own in mine for lane, cursor in own.cursors(stop * size).items()})
    assert after.num_bad(stop * size) == alone.num_bad(stop * size)
    more = np.arange(stop * size, stop * size + 40)
    assert np.array_equal(after.read(more), alone.read(more))
    assert after.num_bad(stop * size + 40) == alone.num_bad(stop * size + 40)


def test_a_dataset_that_starts_with_bad_records_is_refused(tmp_path: Path) -> None:
    name = write_rows(tmp_path / "data", [None] * 5 + TEXTS[5:])
    with pytest.raises(UserError, match="shard 0, row 0: 'body' holds a NoneType"):
        assert stream(name, skip=True).contents


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    name = write_rows(tmp_path / "data", list(TEXTS))
    with (tmp_path / "data" / "part-1.jsonl").open("a") as file:
        file.write('{"body": "cut')
    with pytest.raises(UserError, match=r"shard 1 of 3 cannot be read .*names the line"):
        stream(name).read(np.arange(200))


def blended(names: list[str], weights: tuple[int, ...]) -> StreamedSamples:
    return StreamedSamples([stream(each).datasets[0] for each in names], SEQ_LENGTH, Blend(weights))


@pytest.fixture
def two(name: str, tmp_path: Path) -> list[str]:
    """Return the names of two datasets."""
    (tmp_path / "other").mkdir()
    lines = "".join(json.dumps({"body": f"other {number}"}) + "\n" for number in range(20))
    (tmp_path / "other/rows.jsonl").write_text(lines)
    return [name, f"hf:{tmp_path}/other"]


def test_a_blend_takes_the_samples_of_its_datasets_in_turn(two: list[str]) -> None:
    """Three of four samples are the first one's, each dataset in its own order; messages name the right one."""
    made, blend = blended(two, (3, 1)), Blend((3, 1))
    read = made.read(np.arange(80))
    sources, places = blend.locate(np.arange(80))
    for source, each in enumerate(two):
        mine = sources == source
        assert np.array_equal(read[mine], stream(each).read(places[mine]))
        assert made.place(int(np.flatnonzero(mine)[0])).startswith(f"{each}, window 0 of lane 0")
    assert made.num_lanes == 8 and [part for _, part in made.contents] == [3, 1]
    first, second = made.describe(80, 4.0)
    assert first.endswith("; 60 samples, 75 %") and second.endswith("; 20 samples, 25 %")
    tokens = {f"consumed_tokens/{two[0]}": 30.0 * SEQ_LENGTH, f"consumed_tokens/{two[1]}": 10.0 * SEQ_LENGTH}
    assert made.consumed_tokens([(0, 40, SEQ_LENGTH)]) == tokens


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_blend_goes_on_from_a_checkpoint(two: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = blended(two, (3, 1)).read(np.arange(120))
    before = [blended(two, (3, 1)) for _ in range(ranks)]
    for begin in range(0, 60, 6):
        for rank, own in enumerate(before):
            assert np.array_equal(
                own.read(begin + np.arange(rank, 6, ranks)), expected[begin + rank : begin + 6 : ranks]
            )
    known = {lane: cursor for own in before for lane, cursor in own.cursors(60).items()}
    assert known.keys() == {f"{source}.{lane}" for source in range(2) for lane in range(4)}
    after = blended(two, (3, 1))
    after.go_on(60, json.loads(json.dumps(known)))
    opened: list[Cursor] = []
    documents = StreamedDataset.documents
    monkeypatch.setattr(
        StreamedDataset, "documents", lambda rows, lane, at: opened.append(at) or documents(rows, lane, at)
    )
    assert np.array_equal(after.read(np.arange(60, 120)), expected[60:])
    assert len(opened) == 8 and Cursor() not in opened
