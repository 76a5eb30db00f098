"""Fact: token files are joined as they are, or not at all: a damaged part ends in exit code 2 and leaves no file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron3d.data.token_files import indexed
from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.token_files.writer import IndexedWriter, publish
from tests.support.preprocess_jobs import run
from tools import merge_datasets


def merge(inputs: Path | str, output: Path) -> int:
    return merge_datasets.main(["--input", str(inputs), "--output-prefix", str(output)])


@pytest.fixture
def parts(source: Path, tmp_path: Path) -> Path:
    """Return a folder with two shards of a job."""
    for part in range(2):
        assert run(source, tmp_path / "parts" / "x", "--piece-mb", "0.01", "--shard", f"{part}/2") == 0
    return tmp_path / "parts"


def middle_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_changed_byte_of_a_part_is_refused(
    parts: Path, suffix: str, is_large: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small corpus is refused when it is opened, a large one while it is read."""
    middle_byte(next(parts.glob(f"*00001-of*{suffix}")))
    monkeypatch.setattr(indexed, "WHOLE", 0 if is_large else 1 << 24)
    assert merge(parts, parts.parent / "y") == 2
    assert f"_text_document{suffix}: " in (message := capsys.readouterr().err) and "00001-of" in message
    assert [path.name for path in parts.parent.iterdir()] == ["parts"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_documents", 0, "its manifest says (0, "),
        ("vocab_size", 258, "made with another tokenizer"),
        ("vocab_size", 10**30, "damaged (vocab_size"),
        ("tokenizer_type", "\x1b[31m", "damaged (tokenizer_type"),
        ("bin_sha256", "f" * 64, "its manifest says ffff"),
        ("part", "1", "damaged (part"),
        ("part", "0/999999", "part 1/999999, 2/999999"),
        ("part", "1/0", "parts are not in order"),
        ("more", {}, "damaged (more"),
    ],
)
def test_a_changed_manifest_is_refused(
    parts: Path, field: str, value: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(parts.glob("*00000-of*.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert merge(parts, parts.parent / "y") == 2
    assert message in (told := capsys.readouterr().err) and len(told) < 2000
    assert [path.name for path in parts.parent.iterdir()] == ["parts"]


def test_parts_without_checksums_are_joined_with_a_warning(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in parts.glob("*.json"):
        old = {key: value for key, value in json.loads(path.read_text()).items() if not key.endswith("sha256")}
        path.write_text(json.dumps(old))
    assert merge(parts, parts.parent / "y") == 0
    assert capsys.readouterr().err.count("WARNING: --input") == 2


def test_parts_of_megatron_are_joined_unless_their_index_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have no manifest; the damaged entry is none of those that are checked on opening."""
    monkeypatch.setattr(indexed, "RUNS", 2)
    monkeypatch.setattr(indexed, "RUN", 4)
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        writer.add(np.arange(300, dtype="<u2"), np.full(100, 3))
        publish(tmp_path / "a", np.dtype("<u2"), writer.written, None)
    assert merge(tmp_path / "a", tmp_path / "b") == 0
    assert not list(tmp_path.glob("b*.json")) and IndexedDataset(tmp_path / "b").manifest is None
    shutil.copy(tmp_path / "a.bin", tmp_path / "c.bin")
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[indexed.HEADER.size + 4 * 50] = 7
    (tmp_path / "c.idx").write_bytes(bytes(index))
    assert IndexedDataset(tmp_path / "c").num_tokens == 300
    before = sorted(tmp_path.iterdir())
    assert merge(tmp_path / "c", tmp_path / "d") == 2
    assert "sequence 50 does not end where" in capsys.readouterr().err and sorted(tmp_path.iterdir()) == before
