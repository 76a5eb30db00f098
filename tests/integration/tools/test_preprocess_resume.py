"""Fact: a preprocessing job that is killed, or finds the disk full, at any time resumes to the same bytes."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.preprocess_jobs import BYTES, ROOT, corpus, documents, run, write_jsonl
from tools import merge_datasets


def command(source: Path, prefix: Path, *more: str) -> list[str]:
    words = ["--input", str(source), "--output-prefix", str(prefix), "--workers", "1", "--ledger-interval", "0"]
    return [sys.executable, "tools/preprocess_data.py", *words, *BYTES, *more]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


KILLS = """
import os, random, signal, sys, time
from tools import preprocess_data
draw, kills, finished = random.Random(3), 0, 0
while kills < 20 or not finished:
    began, tool = time.monotonic(), os.fork()
    if tool == 0:
        os._exit(preprocess_data.main(sys.argv[2:]))
    if kills < 20:
        time.sleep(draw.uniform(0, float(sys.argv[1])))
        os.kill(tool, signal.SIGKILL)
    _, status = os.waitpid(tool, 0)
    kills += os.WIFSIGNALED(status)
    finished = not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) == 0
    assert finished or os.WIFSIGNALED(status), status
"""


def test_bytes_survive_kills_at_random_moments(tmp_path: Path) -> None:
    """Kill the job twenty times at seeded random times, mostly while it resumes from the previous kill."""
    source, began = write_jsonl(tmp_path / "a.jsonl", documents(20_000)), time.monotonic()
    assert run(source, tmp_path / "expected") == 0
    whole = time.monotonic() - began
    words = command(source, tmp_path / "x", "--overwrite")[2:]  # an attempt may end before it is killed
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(whole / 2), *words],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert corpus(tmp_path / "x") == corpus(tmp_path / "expected")
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.ledger*"))


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", documents(20_000))
    words = [*command(source, tmp_path / "x"), "--workers", "2"]
    tool = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, start_new_session=True)
    while not (tmp_path / "x.ledger.jsonl").exists() or b"piece" not in (tmp_path / "x.ledger.jsonl").read_bytes():
        assert tool.poll() is None, "it was killed too late"
        time.sleep(0.01)
    tool.kill()
    tool.wait()
    deadline = time.monotonic() + 60
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(tool.pid, 0)
            time.sleep(0.05)


def test_a_full_disk_is_reported_and_the_job_resumes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", documents(20_000))
    assert run(source, tmp_path / "expected") == 0

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))

    done = subprocess.run(
        command(source, tmp_path / "x"),
        cwd=ROOT,
        env=ENVIRONMENT,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "cannot be written (File too large)" in done.stderr, done.stderr
    assert not (tmp_path / "x_text_document.idx").exists() and (tmp_path / "x.ledger.jsonl").exists()
    assert run(source, tmp_path / "x") == 0
    assert corpus(tmp_path / "x") == corpus(tmp_path / "expected")


def test_another_job_does_not_resume_from_a_log(
    source: Path, expected: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.ledger.jsonl").write_text('{"--json-keys": ["body"]}\n')
    assert run(source, tmp_path / "x") == 2
    assert "another --json-keys" in capsys.readouterr().err
    assert run(source, tmp_path / "x", "--restart") == 0
    assert corpus(tmp_path / "x") == expected


@pytest.mark.parametrize("moment", ["sha256", "_flush", "_write_index"])
def test_a_job_killed_between_two_renames_resumes(
    moment: str, source: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise SystemExit(moment)

    with monkeypatch.context() as patched:
        patched.setattr(f"megatron3d.data.token_files.writer.{moment}", die)
        with pytest.raises(SystemExit):
            run(source, tmp_path / "x")
    assert not (tmp_path / "x_text_document.idx").exists()
    assert run(source, tmp_path / "x") == 0
    assert corpus(tmp_path / "x") == expected


def test_a_disk_that_fills_during_a_merge_leaves_nothing(
    source: Path, expected: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--input", f"{source.parent}/expected_text_document", "--output-prefix", str(tmp_path / "x")]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(expected[".bin"]) // 2, hard))
    try:
        assert merge_datasets.main(words) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written (File too large)" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_the_manifest_leaves_nothing(
    source: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(file: BinaryIO) -> None:
        if ".manifest.json" in str(file.name):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megatron3d.data.token_files.writer._flush", fill)
    words = ["--input", f"{source.parent}/expected_text_document", "--output-prefix", str(tmp_path / "x")]
    assert merge_datasets.main(words) == 2 and not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of a job that was killed before the final rename, with a resume log of many lines."""
    folder = tmp_path_factory.mktemp("killed")
    write_jsonl(folder / "a.jsonl", documents())
    assert run(folder / "a.jsonl", folder / "expected") == 0

    def die(*_: object) -> None:
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("megatron3d.data.preprocess.encode.BATCH_BYTES", 3000)
        patch.setattr("megatron3d.data.preprocess.job.publish", die)
        run(folder / "a.jsonl", folder / "x", "--ledger-interval", "0")
    assert len((folder / "x.ledger.jsonl").read_bytes().splitlines()) > 20
    return folder


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_prefix_of_log_and_files_resumes_to_the_same_bytes(
    killed: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Truncate each file at any byte, or append garbage to it."""
    folder = tmp_path_factory.mktemp("again")
    for path in killed.glob("x*"):
        content = path.read_bytes()
        kept = data.draw(st.integers(0, len(content)), label=path.name)
        more = data.draw(st.sampled_from([b"", b"\0\xff", b'{"a": 1}\n']))
        may_follow = kept > 0 if path.suffix == ".jsonl" else kept == len(content)  # tokens come before their log line
        (folder / path.name).write_bytes(content[:kept] + (more if may_follow else b""))
    assert run(killed / "a.jsonl", folder / "x") == 0
    assert corpus(folder / "x") == corpus(killed / "expected")
    assert len(list(folder.iterdir())) == 3


@settings(deadline=None, max_examples=30)
@given(place=st.integers(0, 10**6), digit=st.sampled_from(b"0123456789"))
def test_a_changed_digit_of_the_ledger_changes_no_token(
    killed: Path, tmp_path_factory: pytest.TempPathFactory, place: int, digit: int
) -> None:
    """A damaged first line may be refused, which names --restart; the documents of later lines are encoded again."""
    folder = tmp_path_factory.mktemp("again")
    for path in killed.glob("x*"):
        shutil.copy(path, folder)
    ledger = bytearray(b"".join((killed / "x.ledger.jsonl").read_bytes().splitlines(keepends=True)[:3]))
    digits = [index for index, character in enumerate(ledger) if chr(character).isdigit()]
    ledger[digits[place % len(digits)]] = digit
    (folder / "x.ledger.jsonl").write_bytes(ledger)
    if run(killed / "a.jsonl", folder / "x") == 2:
        assert digits[place % len(digits)] < ledger.index(b"\n") and not list(folder.glob("x*.idx"))
        assert run(killed / "a.jsonl", folder / "x", "--restart") == 0
    assert corpus(folder / "x") == corpus(killed / "expected")


def test_a_damaged_line_of_the_ledger_is_told(killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in killed.glob("x*"):
        shutil.copy(path, tmp_path)
    lines = (tmp_path / "x.ledger.jsonl").read_bytes().splitlines(keepends=True)
    lines[5] = lines[5].replace(b'"position": ', b'"position": 1')
    (tmp_path / "x.ledger.jsonl").write_bytes(b"".join(lines))
    assert run(killed / "a.jsonl", tmp_path / "x") == 0
    assert "x.ledger.jsonl: damaged from line 6 on" in capsys.readouterr().err
    assert corpus(tmp_path / "x") == corpus(killed / "expected")


def test_a_pipe_in_the_way_is_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "x.ledger.jsonl")
    assert run(source, tmp_path / "x") == 2
    assert "cannot be written (Not a regular file)" in capsys.readouterr().err


def test_a_ledger_without_checksums_is_refused(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in killed.glob("x*"):
        shutil.copy(path, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "x.ledger.jsonl").read_text().splitlines()]
    old = [{key: value for key, value in row.items() if key != "crc32"} for row in rows]
    (tmp_path / "x.ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    before = sorted(tmp_path.iterdir())
    assert run(killed / "a.jsonl", tmp_path / "x") == 2
    message = capsys.readouterr().err
    assert "no valid checksum" in message and "--restart" in message and sorted(tmp_path.iterdir()) == before
    assert run(killed / "a.jsonl", tmp_path / "x", "--restart") == 0
    assert corpus(tmp_path / "x") == corpus(killed / "expected")


@pytest.mark.parametrize("name", ["bin", "lengths", "documents"])
def test_a_changed_byte_of_what_was_written_is_refused(
    name: str, killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in killed.glob("x*"):
        shutil.copy(path, tmp_path)
    path = tmp_path / f"x_text_document.{name}.partial"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run(killed / "a.jsonl", tmp_path / "x") == 2
    message = capsys.readouterr().err
    assert "damaged since it was written" in message and "--restart" in message
    assert not list(tmp_path.glob("*.idx")) and not list(tmp_path.glob("*.bin"))
    assert run(killed / "a.jsonl", tmp_path / "x", "--restart") == 0
    assert corpus(tmp_path / "x") == corpus(killed / "expected")
