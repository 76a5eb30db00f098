"""Fact: an unusable corpus, tokenizer, schedule or folder ends in exit code 2 and one message per problem.

The message names the problem and a remedy; there is no traceback, and no byte is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron3d.errors import ExitCode
from tests.support.tiny_run import Words, cut, refuse, run, write_config

Damage = Callable[[Path], object]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


CORPUS: dict[str, tuple[Damage, list[str], list[Words]]] = {
    "none": (lambda here: None, ["data.data_path=null"], [("data.data_path=null", "tools/preprocess_data.py")]),
    "absent": (
        lambda here: None,
        ["data.data_path={here}/no"],
        [("data.data_path", "{here}/no.bin does not exist"), ("data.data_path", "{here}/no.idx does not exist")],
    ),
    "below a file": (
        lambda here: None,
        ["data.data_path={here}/tiny.yaml/c"],
        [("tiny.yaml/c.bin does not exist",), ("tiny.yaml/c.idx does not exist",)],
    ),
    "a file instead of the prefix": (
        lambda here: None,
        ["data.data_path={here}/corpus.bin"],
        [("data.data_path", "prefix", "use {here}/corpus")],
    ),
    "no index": (lambda here: (here / "corpus.idx").unlink(), [], [("{here}/corpus.idx does not exist",)]),
    "no tokens": (lambda here: (here / "corpus.bin").unlink(), [], [("{here}/corpus.bin does not exist",)]),
    "empty index": (lambda here: (here / "corpus.idx").write_bytes(b""), [], [("{here}/corpus.idx is empty",)]),
    "empty tokens": (lambda here: (here / "corpus.bin").write_bytes(b""), [], [("{here}/corpus.bin is empty",)]),
    "cut index": (
        lambda here: cut(here / "corpus.idx", 5),
        [],
        [("{here}/corpus.idx", "cut short", "tools/preprocess_data.py")],
    ),
    "cut tokens": (
        lambda here: cut(here / "corpus.bin", 10),
        [],
        [("{here}/corpus.bin", "cut short", "tools/preprocess_data.py")],
    ),
    "foreign index": (
        lambda here: (here / "corpus.idx").write_bytes(b"PK" * 99),
        [],
        [("{here}/corpus.idx", "not a Megatron index")],
    ),
    "foreign tokens": (
        lambda here: (here / "corpus.bin").write_bytes(b"PK" * 99),
        [],
        [("{here}/corpus.bin", "198 bytes", "foreign")],
    ),
    "damaged manifest": (
        lambda here: (here / "corpus.manifest.json").write_text("{}"),
        [],
        [("{here}/corpus.manifest.json", "make the corpus again")],
    ),
    "shorter than a sample": (
        lambda here: None,
        ["model.seq_length=30000"],
        [("data.split=90,10,0", "train is ", "model.seq_length + 1 = 30001", "set model.seq_length to at most")],
    ),
    "validation shorter than a sample": (
        lambda here: None,
        ["model.seq_length=3000", "train.eval_interval=5"],
        [("data.split=90,10,0", "valid is ", "3001", "larger weight")],
    ),
    "vocabulary below the tokenizer's": (
        lambda here: None,
        ["model.vocab_size=200"],
        [("model.vocab_size=200", "257", "leave it out")],
    ),
    "another tokenizer": (
        lambda here: (here / "chars.json").write_text('["a", "b"]'),
        ["data.tokenizer_type=CharTokenizer", "data.tokenizer_model={here}/chars.json"],
        [("made with ByteTokenizer", "configured is CharTokenizer", "data.tokenizer_model")],
    ),
    "ids beyond the vocabulary, and Megatron's file does not say": (
        lambda here: ((here / "corpus.manifest.json").unlink(), (here / "chars.json").write_text('["a", "b"]')),
        ["data.tokenizer_type=CharTokenizer", "data.tokenizer_model={here}/chars.json"],
        [("data.data_path={here}/corpus", "token ids are 10 to 256", "outside the vocabulary of 2", "the tokenizer")],
    ),
    "no tokenizer": (
        lambda here: None,
        ["data.tokenizer_type=SentencePieceTokenizer"],
        [("data.tokenizer_model", "SentencePieceTokenizer needs a file", "tools/train_tokenizer.py")],
    ),
    "absent tokenizer": (
        lambda here: None,
        ["data.tokenizer_type=CharTokenizer", "data.tokenizer_model={here}/no.json"],
        [("data.tokenizer_model", "{here}/no.json does not exist")],
    ),
    "foreign tokenizer": (
        lambda here: None,
        ["data.tokenizer_type=SentencePieceTokenizer", "data.tokenizer_model={here}/tiny.yaml"],
        [("data.tokenizer_model={here}/tiny.yaml", "not a SentencePiece model")],
    ),
}


@pytest.mark.parametrize("name", CORPUS)
def test_bad_corpora_and_tokenizers_are_refused(config: Path, name: str) -> None:
    damage, overrides, problems = CORPUS[name]
    damage(config.parent)
    refuse(config, overrides, *problems)


SCHEDULES: dict[str, tuple[str | None, list[Words]]] = {
    "absent": (None, [("{here}/mine.csv does not exist", "tools/plot_schedule.py")]),
    "empty": ("", [("there are no actions",)]),
    "text": ("F0,B0\n", [("rank 0, cell 1", "'F0' is no action"), ("rank 0, cell 2", "'B0' is no action")]),
    "half a backward": ("0F0,0I0,0W0,0F1,0I1", [("rank 0: 0W1 or 0B1 is missing",)]),
    "backward first": ("0F0,0B1,0F1,0B0", [("rank 0: 0B1, action 2 of 4, waits for 0F1", "put 0F1 earlier")]),
    "for another batch": (
        "0F0,0B0",
        [("is for 1 microbatches", "train.global_batch_size=16", "use global_batch_size 4")],
    ),
    "for more ranks": (
        "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3",
        [("is for 2 ranks", "parallel.pipeline_model_parallel_size=1", "use 2")],
    ),
    "of more stages than layers": (
        ",".join(
            f"{stage}{kind}{mb}" for mb in range(4) for kind in "FB" for stage in (0, 1, 2)[:: 1 - 2 * (kind == "B")]
        ),
        [("has 3 stages, more than model.num_layers=2", "use num_layers 3")],
    ),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
def test_bad_schedule_files_are_refused(config: Path, name: str, check: bool) -> None:
    text, problems = SCHEDULES[name]
    file = config.parent / "mine.csv"
    if text is not None:
        file.write_text(text)
    typed = ["parallel.pipeline_schedule=file", f"parallel.pipeline_schedule_file={file}", *["--check"] * check]
    where = f"parallel.pipeline_schedule_file={file} (command line): "
    refuse(config, typed, *((where, *words) for words in problems))


def test_a_missing_schedule_file_of_another_machine_is_only_reported(config: Path) -> None:
    typed = ["parallel.pipeline_schedule=file", "parallel.pipeline_schedule_file=/there/mine.csv"]
    typed = ["--check", "--world-size", "2", "parallel.pipeline_model_parallel_size=2", *typed]
    refuse(config, typed, ("parallel.pipeline_schedule_file=/there/mine.csv", "does not exist"))
    outcome = run(config, "--elsewhere", *typed)
    assert outcome.code == ExitCode.DONE and not outcome.err
    assert "pipeline: file /there/mine.csv, 2 ranks; stages and bubble are not known here" in outcome.out
    assert "on this machine: parallel.pipeline_schedule_file=/there/mine.csv (command line): " in outcome.out


@pytest.mark.parametrize("key", ["checkpoint.save", "logging.tensorboard_dir"])
@pytest.mark.parametrize("folder", ["{here}/tiny.yaml", "{here}/tiny.yaml/run", "/proc/run", "/dev/null/run"])
def test_folders_that_cannot_be_written_are_refused(config: Path, key: str, folder: str) -> None:
    place = folder.format(here=config.parent)
    refuse(config, ["checkpoint.load=null", f"{key}={place}"], (f"{key}={place}", "use "))
