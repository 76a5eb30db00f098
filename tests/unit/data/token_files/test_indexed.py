"""Fact: token files are Megatron's bytes, read back what was written, and are refused unless every number agrees."""

import json
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.data.token_files.indexed import HEADER, IndexedDataset, token_dtype
from megatron3d.data.token_files.writer import IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer
from megatron3d.errors import UserError

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8]]


def write(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> None:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(np.array(document, dtype), np.array([len(document)], np.int32))
        writer.finish(ByteTokenizer(None))


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write(tmp_path / "a.b_text_document", DOCUMENTS)
    return tmp_path / "a.b_text_document"


def file(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def test_bytes_equal_those_of_megatron(prefix: Path) -> None:
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    body = struct.pack("<3i", 3, 1, 4) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    assert file(prefix, ".idx").read_bytes() == header + body
    assert file(prefix, ".bin").read_bytes() == struct.pack("<8H", *range(1, 9))


@settings(deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 65499), min_size=1, max_size=5), min_size=1, max_size=20))
def test_reads_what_was_written(documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    prefix = tmp_path_factory.mktemp("corpus") / "x"
    write(prefix, documents)
    data = IndexedDataset(prefix)
    flat = [token for document in documents for token in document]
    assert data.tokens(0, data.num_tokens).tolist() == flat
    assert data.num_documents == len(documents)
    assert data.manifest is not None and data.manifest.max_token_id == max(flat)
    assert data.windows(np.array([len(flat) - 1, 0]), 1).tolist() == [[flat[-1]], [flat[0]]]


def test_a_megatron_file_without_manifest_and_with_modes_is_read(prefix: Path) -> None:
    file(prefix, ".manifest.json").unlink()
    with file(prefix, ".idx").open("ab") as index:
        index.write(b"\0\0\0")
    data = IndexedDataset(prefix)
    assert data.manifest is None and data.tokens(2, 5).tolist() == [3, 4, 5]


def test_documents_of_several_sequences_are_read(prefix: Path) -> None:
    file(prefix, ".manifest.json").unlink()
    index = bytearray(file(prefix, ".idx").read_bytes())[: -4 * 8]
    index[18 : HEADER.size] = struct.pack("<QQ", 3, 2)
    file(prefix, ".idx").write_bytes(bytes(index) + struct.pack("<2q", 0, 3))
    assert IndexedDataset(prefix).num_documents == 1


def test_the_token_dtype_equals_megatrons() -> None:
    assert [token_dtype(vocab).name for vocab in (257, 65499, 65500, 200_000)] == ["uint16", "uint16", "int32", "int32"]


def patch(position: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda old: old[:position] + new + old[position + len(new) :]


LENGTHS, OFFSETS, STARTS = 34, 34 + 12, 34 + 36
DAMAGE: list[tuple[str, Callable[[bytes], bytes], str]] = [
    (".bin", lambda old: b"", "empty"),
    (".bin", lambda old: old[:-1], "15 bytes where the index counts 8 tokens of 2 bytes"),
    (".bin", lambda old: old + b"xx", "18 bytes where the index counts 8 tokens of 2 bytes"),
    (".idx", lambda old: b"", "empty"),
    (".idx", lambda old: old[:20], "cut short, 20 bytes"),
    (".idx", lambda old: old[:-1], "cut short or damaged"),
    (".idx", lambda old: old[:60], "cut short or damaged"),
    (".idx", patch(0, b"TNTIDX"), "not a Megatron index"),
    (".idx", patch(9, b"\x02"), "version 2"),
    (".idx", patch(17, b"\x07"), "dtype code 7"),
    (".idx", patch(17, b"\x63"), "dtype code 99"),
    (".idx", patch(17, b"\x04"), "16 bytes where the index counts 6 tokens of 4 bytes"),
    (".idx", patch(18, b"\x00"), "no documents"),
    (".idx", patch(18, b"\xff" * 8), "damaged"),
    (".idx", patch(LENGTHS, struct.pack("<i", -3)), "sequence 0 does not end where"),
    (".idx", patch(LENGTHS + 8, struct.pack("<i", 5)), "the index counts 9 tokens"),
    (".idx", patch(OFFSETS + 8, struct.pack("<q", 4)), "sequence 0 does not end where"),
    (".idx", patch(STARTS, struct.pack("<q", -1)), "document array decreases"),
    (".idx", patch(STARTS + 8, struct.pack("<q", 3)), "document array decreases"),
    (".idx", patch(STARTS + 24, struct.pack("<q", 2)), "document array ends at sequence 2 of 3"),
    (".idx", patch(OFFSETS, struct.pack("<q", 2)), "sequence 0 does not end where"),
    (".manifest.json", lambda old: b"{", "damaged"),
    (".manifest.json", lambda old: b"[]", "damaged"),
    (".manifest.json", lambda old: old.replace(b'"num_tokens": 8', b'"num_tokens": "8"'), "damaged (num_tokens"),
    (".manifest.json", lambda old: old.replace(b'"num_tokens": 8', b'"num_tokens": 9'), "manifest says (3, 9)"),
]


@pytest.mark.parametrize(("suffix", "damage", "message"), DAMAGE)
def test_damage_is_refused(prefix: Path, suffix: str, damage: Callable[[bytes], bytes], message: str) -> None:
    path = file(prefix, suffix)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as error:
        IndexedDataset(prefix)
    assert message in str(error.value) and str(prefix) in str(error.value)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".manifest.json"])
def test_any_changed_byte_is_refused_or_changes_nothing(prefix: Path, suffix: str) -> None:
    """Only the vocabulary's size and the largest token of a manifest are not known otherwise."""
    path = file(prefix, suffix)
    whole, unknown = path.read_bytes(), (b"vocab_size", b"max_token_id", b"fingerprint", b"tokenizer_type")
    for place in range(len(whole)):
        for mask in (1, 0x80):
            changed = bytearray(whole)
            changed[place] ^= mask
            path.write_bytes(changed)
            line = whole[whole.rfind(b"\n", 0, place) + 1 : whole.find(b"\n", place)]
            try:
                data = IndexedDataset(prefix)
            except UserError:
                continue
            assert any(name in line for name in unknown) or line.isspace(), (place, line)
            assert data.tokens(0, 8).tolist() == list(range(1, 9))
            assert [sequence.tolist() for n in range(3) for sequence in data.sequences(n)] == DOCUMENTS


def test_an_index_with_modes_other_than_text_is_refused_by_name(prefix: Path) -> None:
    file(prefix, ".manifest.json").unlink()
    with file(prefix, ".idx").open("ab") as index:
        index.write(b"\0\1\0")
    with pytest.raises(UserError, match=r"multimodal index of Megatron, whose sequence 1 has mode 1"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".manifest.json"])
def test_a_pipe_is_no_token_file(prefix: Path, suffix: str) -> None:
    file(prefix, suffix).unlink()
    os.mkfifo(file(prefix, suffix))
    with pytest.raises(UserError, match="Not a regular file"):
        IndexedDataset(prefix)


def test_damage_that_opening_does_not_see_is_refused_where_it_is_read(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only some entries of a large index are checked on opening."""
    monkeypatch.setattr("megatron3d.data.token_files.indexed.RUNS", 2)
    monkeypatch.setattr("megatron3d.data.token_files.indexed.RUN", 2)
    write(prefix, [[number] * 3 for number in range(99)])
    file(prefix, ".manifest.json").unlink()
    whole = file(prefix, ".idx").read_bytes()
    lengths, offsets, documents = LENGTHS + 4 * 50, LENGTHS + 4 * 99 + 8 * 50, LENGTHS + 12 * 99 + 8 * 50
    for place in (lengths, lengths + 3, offsets, offsets + 1, offsets + 7, documents + 1, documents + 7):
        file(prefix, ".idx").write_bytes(patch(place, bytes([whole[place] ^ 0x81]))(whole))
        data = IndexedDataset(prefix)
        for read in (partial(data.sequences, 50), data.verify, lambda data=data: list(data.document_lengths())):
            with pytest.raises(UserError, match=r"a\.b_text_document\.idx: "):
                read()


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix: Path, suffix: str) -> None:
    file(prefix, suffix).unlink()
    with pytest.raises(UserError, match="No such file") as error:
        IndexedDataset(prefix)
    assert str(file(prefix, suffix)) in str(error.value)


def test_an_unfinished_corpus_leaves_nothing_and_keeps_the_old_one(prefix: Path) -> None:
    before = {path: path.read_bytes() for path in prefix.parent.iterdir()}
    with pytest.raises(KeyboardInterrupt), IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add(np.array([9], "<u2"), np.array([1], np.int32))
        raise KeyboardInterrupt
    assert {path: path.read_bytes() for path in prefix.parent.iterdir()} == before


def test_a_new_corpus_replaces_the_old_one(prefix: Path) -> None:
    write(prefix, [[70_000]], "<i4")
    assert IndexedDataset(prefix).tokens(0, 1).tolist() == [70_000]
    assert sorted(path.suffix for path in prefix.parent.iterdir()) == [".bin", ".idx", ".json"]
    assert json.loads(file(prefix, ".manifest.json").read_text())["num_documents"] == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        IndexedWriter(tmp_path / "file" / "corpus", np.dtype("<u2"))
