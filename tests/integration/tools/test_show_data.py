"""Fact: tools describe a corpus as it is, and a run by what its ranks read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron3d.data.token_files.writer import ENDS_DOCUMENT, ENDS_SEQUENCE, IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer, build_tokenizer
from tools import inspect_dataset, show_samples, train_tokenizer

ROOT = Path(__file__).parents[3]
TEXTS = [f"document {number} {'x' * number}" for number in range(40)]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    runs = [np.array([*text.encode(), 256], "<u2") for text in TEXTS]
    with IndexedWriter(tmp_path / "c", np.dtype("<u2")) as writer:
        writer.add(np.concatenate(runs), np.array([len(run) for run in runs]))
        writer.finish(ByteTokenizer(None))
    return tmp_path / "c"


def test_statistics_are_those_of_the_documents(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_dataset.main([str(prefix), "--verify"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    lengths = sorted(len(text) + 1 for text in TEXTS)
    for fact in (
        f"documents │ {len(TEXTS)}",
        f"tokens │ {sum(lengths)}".replace(str(sum(lengths)), f"{sum(lengths):,}"),
        f"longest document │ {lengths[-1]}",
        "every entry, checksums",
        "ByteTokenizer",
    ):
        assert fact in said, said
    median = int(re.findall(r"50% are at most about │ (\d+)", said)[0])
    assert abs(median - lengths[19]) <= 2


def test_control_characters_of_the_text_are_escaped(tmp_path: Path) -> None:
    text = "a\x1b[31mred\x07\u202e\tb\nc"
    ids = np.array([*text.encode(), 256], "<u2")
    with IndexedWriter(tmp_path / "c", np.dtype("<u2")) as writer:
        writer.add(ids, np.array([len(ids)]))
        writer.finish(ByteTokenizer(None))
    words = [str(tmp_path / "c"), "--documents", "0", "--tokenizer-type", "ByteTokenizer"]
    command = [sys.executable, "tools/inspect_dataset.py", *words]
    shown = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True
    )
    assert shown.stdout.decode().partition("\n")[2] == "a\\x1b[31mred\\x07\\u202e\tb\nc\n"


def test_a_name_is_not_markup(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prefix.parent / "a[").mkdir()
    for suffix in (".bin", ".idx", ".manifest.json"):
        Path(f"{prefix}{suffix}").rename(prefix.parent / "a[" / f"b]{suffix}")
    assert inspect_dataset.main([str(prefix.parent / "a[" / "b]"), "--verify"]) == 0
    assert "a[/b]" in "".join(capsys.readouterr().out.split())


def test_documents_are_shown_as_text(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = ["--tokenizer-type", "ByteTokenizer"]
    assert inspect_dataset.main([str(prefix), "--documents", "3", "-1", *tokenizer]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["== document 3, 15 tokens", TEXTS[3], f"== document 39, {len(TEXTS[39]) + 1} tokens", TEXTS[39]]
    assert inspect_dataset.main([str(prefix), "--documents", "40"]) == 2
    assert "use 0 to 39" in capsys.readouterr().err


def test_damage_that_opening_does_not_detect_is_found(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Opening verifies the checksum of a small file only."""
    tokens = bytearray(Path(f"{prefix}.bin").read_bytes())
    tokens[10] ^= 1
    Path(f"{prefix}.bin").write_bytes(bytes(tokens))
    assert inspect_dataset.main([str(prefix)]) == 2
    assert "but its manifest says" in capsys.readouterr().err
    monkeypatch.setattr("megatron3d.data.token_files.indexed.WHOLE", 0)
    assert inspect_dataset.main([str(prefix)]) == 0
    assert inspect_dataset.main([str(prefix), "--verify"]) == 2
    assert "but its manifest says" in capsys.readouterr().err


def test_each_sequence_of_a_document_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedWriter(tmp_path / "s", np.dtype("<u2")) as writer:
        writer.add(
            np.arange(6, dtype="<u2"), np.array([2, 3, 1]), np.array([ENDS_SEQUENCE, ENDS_DOCUMENT, ENDS_DOCUMENT])
        )
        writer.finish(ByteTokenizer(None))
    assert inspect_dataset.main([str(tmp_path / "s"), "--documents", "0", "--max-tokens", "2"]) == 0
    said = capsys.readouterr().out
    assert "sequence 0, 2 tokens\n[0, 1]\n" in said and "sequence 1, 3 tokens\n[2, 3] ... 1 more tokens" in said


@pytest.fixture
def config(prefix: Path) -> Path:
    file = prefix.parent / "run.yaml"
    file.write_text(
        json.dumps(
            {
                "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 30},
                "train": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 9},
                "parallel": {"tensor_model_parallel_size": 2},
                "data": {"data_path": str(prefix), "split": "1,0,0", "tokenizer_type": "ByteTokenizer"},
            }
        )
    )
    return file


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert show_samples.main([*words]) == 0
    return re.split(r"(?m)^(?=== iteration)", capsys.readouterr().out)[1:]


def test_the_ranks_read_every_sample_once(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config", str(config), "--iterations", "2-3", "--world-size", "4"]
    whole = shown(capsys, *command)
    ranks = [shown(capsys, *command, "--rank", str(rank)) for rank in range(4)]
    assert len(whole) == 8 and ranks[0] == ranks[1] and ranks[2] == ranks[3]
    assert sorted(ranks[0] + ranks[2]) == sorted(whole)
    assert all("<end of document>" in text for text in whole if "document" in text.partition("\n")[2])
    assert "iteration 2, sample 4," in whole[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--iterations", "0"], "--iterations 0: neither"),
        (["--iterations", "3-2"], "--iterations 3-2: neither"),
        (["--rank", "2", "--world-size", "2"], "--rank 2: not below"),
        (["--world-size", "3"], "world_size 3"),
    ],
)
def test_bad_arguments_are_refused(
    config: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_samples.main(["--config", str(config), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_byte_level_tokenizer_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the cat and the dog and the cat\n" * 20)
    words = ["--input", f"{tmp_path}/a.txt", "--type", "byte-bpe", "--output-prefix", f"{tmp_path}/t", "--overwrite"]
    assert train_tokenizer.main([*words, "--vocab-size", "265"]) == 0
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "t.tokenizer.json"))
    text = "the cat \N{GRINNING FACE}\n  né"
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.vocab_size == 265
    assert tokenizer.eod is not None and len(tokenizer.encode("the cat")) < 7
    for size, message in (("100", "are 257; use more"), ("9999", "the text gives")):
        assert train_tokenizer.main([*words, "--vocab-size", size]) == 2
        assert message in capsys.readouterr().err
