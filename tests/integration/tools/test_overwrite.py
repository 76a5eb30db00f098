"""Fact: no program replaces an existing file without `--overwrite`, nor one of its inputs with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.preprocess_jobs import corpus, documents, run, write_jsonl
from tests.support.tiny_run import ROOT
from tools import (
    calibrate,
    draw_layouts,
    make_corpus,
    make_slurm,
    merge_datasets,
    plan,
    plot_run,
    plot_schedule,
    preprocess_data,
    train_tokenizer,
)

GPT = str(ROOT / "configs" / "gpt3-175b.yaml")
SELENE = ("--cluster", "selene")
PLAN = ("--config", GPT, *SELENE, "--world-size", "8", "--explain")
# The file that is there, and the command that would replace it; words with a dot are files of the folder.
COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int], Sequence[str]]] = {
    "make_corpus": ("out.jsonl", make_corpus.main, ("--output", "out.jsonl")),
    "train_tokenizer": (
        "t.json",
        train_tokenizer.main,
        ["--input", "in.txt", "--type", "char", "--output-prefix", "t"],
    ),
    "preprocess_data": (
        "x_text_document.idx",
        preprocess_data.main,
        ("--input", "in.txt", "--output-prefix", "x", "--tokenizer-type", "ByteTokenizer", "--workers", "1"),
    ),
    "plan --output": ("p.yaml", plan.main, ("--config", GPT, *SELENE, "--world-size", "8", "--output", "p.yaml")),
    "plan --picture": ("p.png", plan.main, (*PLAN, "--picture", "p.png")),
    "make_slurm": (
        "gpt3-175b.sbatch",
        make_slurm.main,
        ("--config", GPT, *SELENE, "--nodes", "128"),
    ),
    "plot_run": ("curves.png", plot_run.main, ("run",)),
    "plot_schedule": ("s.csv", plot_schedule.main, ["--schedule", "gpipe", "-p", "2", "-m", "2", "--output", "s.csv"]),
    "draw_layouts": ("3d.svg", draw_layouts.main, ("--mode", "3d", "--output", "3d.svg")),
    "calibrate": ("local.yaml", calibrate.main, ("--cpu", "--output-dir", ".")),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unrelated_file_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The calibration would measure for a minute; it refuses before."""
    there, main, words = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("text")
    Path(there).write_text("unrelated")
    assert main(list(words)) == 2
    assert "--overwrite" in capsys.readouterr().err and Path(there).read_text() == "unrelated"


@pytest.mark.parametrize("name", ["train_tokenizer", "preprocess_data", "make_slurm", "plot_schedule", "draw_layouts"])
def test_overwrite_replaces_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, main, words = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("text")
    Path(there).write_text("unrelated")
    assert main([*words, "--overwrite"]) == 0
    assert Path(there).read_bytes() != b"unrelated"


@pytest.mark.parametrize("spelling", ["a_text_document", "{}/a_text_document", "linked/a_text_document", "link"])
def test_a_merge_does_not_replace_its_input(spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_jsonl(Path("a.jsonl"), documents())
    for name in "ab":
        assert run(source, Path(name)) == 0
    Path("linked").symlink_to(tmp_path)
    for suffix in (".bin", ".idx", ".manifest.json"):
        Path(f"link{suffix}").symlink_to(f"a_text_document{suffix}")
    before = corpus(Path("a"))
    words = ["--input", "a_text_document", "b_text_document", "--output-prefix", spelling.format(tmp_path)]
    assert merge_datasets.main([*words, "--overwrite"]) == 2
    assert corpus(Path("a")) == before


def test_programs_with_a_file_for_input_and_output_refuse_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(GPT, "c.yaml")
    write_jsonl(Path("t.json"), documents(2))
    Path("m.jsonl").write_text('{"a": 1}\n')
    assert plot_schedule.main(["--schedule", "gpipe", "-p", "2", "-m", "2", "--output", "s.csv"]) == 0
    refused: Sequence[tuple[Callable[[Sequence[str]], int], str]] = (
        (plan.main, "--config c.yaml --cluster selene --world-size 8 --output ./c.yaml"),
        (plan.main, "--predict m.jsonl --output ../{}/m.jsonl"),
        (make_slurm.main, "--config c.yaml --cluster selene --nodes 128 --output {}/../c.yaml"),
        (plot_schedule.main, "--schedule file --input s.csv --output ./s.csv"),
        (train_tokenizer.main, "--input t.json --type char --output-prefix ./t"),
    )
    Path(tmp_path.name).mkdir()
    for main, words in refused:
        before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        assert main([*words.format(tmp_path.name).split(), "--overwrite"]) == 2
        assert "also an input" in capsys.readouterr().err, words
        assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


def test_a_finished_job_is_not_done_again_over_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", documents())
    assert run(source, tmp_path / "x") == 0
    capsys.readouterr()
    assert run(source, tmp_path / "x") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.ledger*"))
    assert run(source, tmp_path / "x", "--overwrite") == 0
