"""Fact: a run's metrics survive restarts: numbers return from metrics.jsonl bit for bit, each iteration once.

The console keeps Megatron's words, and every sink gets every number.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron3d.config.schema import Config, LoggingConfig, TrainConfig
from megatron3d.errors import UserError
from megatron3d.metrics import MetricsWriter, StepRecord, process_memory
from megatron3d.metrics.journal import FILE_NAME, Journal, read_journal
from megatron3d.metrics.step_record import evaluation_line, step_line
from megatron3d.metrics.writer import WANDB_ID, TensorboardSink, numbers

RECORD = StepRecord(
    iteration=10,
    consumed_samples=480,
    consumed_tokens=480 * 64,
    lm_loss=1.2345678901234567,
    grad_norm=1.23449,
    learning_rate=6e-4,
    elapsed_ms=123.44,
    remaining_s=3723.6,
    tokens_per_s=24887.4,
    tokens_per_s_per_rank=12443.7,
    tflops_per_s_per_rank=1.5,
    mfu=0.1234,
    hfu=0.2345,
    peak_memory_bytes=1_230_000_000,
    global_batch_size=48,
    seq_length=64,
)
UNSET = {"iteration", "mtp_losses", "loss_scale", "pipeline_bubble", "skipped_records"}


def write(folder: Path, iterations: range, config: Config | None = None, start_iteration: int = 0) -> None:
    writer = MetricsWriter(folder, config or Config(), start_iteration)
    for iteration in iterations:
        writer.step(replace(RECORD, iteration=iteration))
        writer.evaluation(iteration, 1 / iteration)
    writer.close()


def test_the_console_line_has_megatrons_order_and_words() -> None:
    line = step_line(RECORD, train_iters=1000, now=datetime(2026, 11, 21, 0, 10))
    assert line == (
        " [2026-11-21 00:10:00] iteration       10/    1000 | consumed samples:          480 | "
        "elapsed time per iteration (ms): 123.4 | remaining time: 1:02:04 | "
        "tokens per second: 24887 | tokens per second per rank: 12444 | "
        "MFU: 12.3% | learning rate: 6.000000E-04 | global batch size:    48 | lm loss: 1.234568E+00 | "
        "grad norm: 1.234 | number of skipped iterations:   0 | memory (GB): 1.23 |"
    )


def test_the_loss_scale_is_printed_next_to_the_loss() -> None:
    line = step_line(replace(RECORD, loss_scale=65536.0), 10, datetime(2026, 1, 1))
    assert "| lm loss: 1.234568E+00 | loss scale: 65536.0 | grad norm" in line


def test_an_unknown_peak_leaves_mfu_out_and_nan_stays_visible() -> None:
    line = step_line(replace(RECORD, mfu=None, lm_loss=math.nan), 10, datetime(2026, 1, 1))
    assert "MFU" not in line
    assert "| lm loss: NaN |" in line
    assert evaluation_line(3, math.inf).startswith(" validation loss at iteration 3 | lm loss value: inf |")


def test_losses_of_multi_token_prediction_have_keys_of_their_own() -> None:
    ahead = replace(RECORD, mtp_losses=(2.0, 3.0))
    assert {key: ahead.row[key] for key in ahead.row.keys() - RECORD.row.keys()} == {"mtp_1 loss": 2, "mtp_2 loss": 3}
    line = step_line(ahead, 10, datetime(2026, 1, 1))
    assert "| lm loss: 1.234568E+00 | mtp_1 loss: 2.000000E+00 | mtp_2 loss: 3.000000E+00 | grad norm" in line
    assert evaluation_line(3, 1.0, (2.0,)).endswith("| lm loss PPL: 2.718282E+00 | mtp_1 loss value: 2.000000E+00 |")


def test_the_perplexity_is_bounded_as_in_megatron() -> None:
    assert evaluation_line(100, 1.0) == (
        " validation loss at iteration 100 | lm loss value: 1.000000E+00 | lm loss PPL: 2.718282E+00 |"
    )
    assert "lm loss PPL: 4.851652E+08 |" in evaluation_line(100, 1000.0)


@given(value=st.floats(width=64))
def test_every_float_is_read_back_bit_for_bit(value: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    journal = Journal(folder, start_iteration=0)
    journal.append({"iteration": 1, "lm_loss": value})
    journal.close()
    back = read_journal(folder / FILE_NAME)[0]["lm_loss"]
    assert struct.pack("d", back) == struct.pack("d", value) or (math.isnan(back) and math.isnan(value))


def test_rows_hold_what_the_record_holds(tmp_path: Path) -> None:
    write(tmp_path, range(10, 11))
    text = (tmp_path / FILE_NAME).read_text()
    assert [json.loads(line) for line in text.splitlines()] == [
        RECORD.row,
        {"iteration": 10, "validation_loss": 0.1},
    ]


def test_nan_is_written_as_nan(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, Config())
    writer.step(replace(RECORD, lm_loss=math.nan, mfu=None, hfu=None))
    writer.close()
    text = (tmp_path / FILE_NAME).read_text()
    assert '"lm_loss": NaN' in text
    assert '"mfu": null' in text


class FullDisk:
    """File on a disk with room for `room` more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(content[: self.room])
        self.room -= written
        return int(written)


def test_a_full_disk_costs_rows_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug that this finds: no space for a line of metrics.jsonl ends training with exit code 2."""
    journal = Journal(tmp_path, start_iteration=0)
    disk = FullDisk(journal._file, 30)
    monkeypatch.setattr(journal, "_file", disk)
    for iteration in range(1, 5):
        journal.append({"iteration": iteration})
    assert [row["iteration"] for row in read_journal(tmp_path / FILE_NAME)] == [1]
    disk.room = 10**6
    journal.append({"iteration": 5})
    disk.room = 5
    journal.append({"iteration": 6})
    journal.close()
    text = (tmp_path / FILE_NAME).read_text()
    assert text == '{"iteration": 1}\n{"iteration": 5}\n'
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(FILE_NAME)[2] for line in lines] == [
        " cannot be written: No space left on device; training goes on without",
        " can be written again: 3 of its rows were lost",
        " cannot be written: No space left on device; training goes on without",
        " is closed: 1 of its rows were lost",
    ]


def test_rows_after_an_iteration_are_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path, start_iteration=0)
    for iteration in (1, 2, 2, 3):
        journal.append({"iteration": iteration})
    journal.drop_after(2)
    journal.append({"iteration": 2, "rollback": "a loss was too high"})
    journal.close()
    assert [row["iteration"] for row in read_journal(tmp_path / FILE_NAME)] == [1, 2, 2, 2]


@given(done=st.integers(0, 8), start=st.integers(0, 8), torn=st.booleans())
def test_a_resumed_run_never_repeats_an_iteration(
    done: int, start: int, torn: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write(folder, range(1, done + 1))
    if torn:
        with (folder / FILE_NAME).open("a") as file:
            file.write('{"iteration": 9, "lm_lo')
    write(folder, range(start + 1, 9), start_iteration=start)
    steps = [row["iteration"] for row in read_journal(folder / FILE_NAME) if "lm_loss" in row]
    assert steps == [*range(1, min(done, start) + 1), *range(start + 1, 9)]
    assert {path.name for path in folder.iterdir()} == {FILE_NAME}


def test_launches_are_kept_as_long_as_their_steps(tmp_path: Path) -> None:
    """A launch without steps leaves no record."""
    for start, count in ((0, 3), (2, 2), (4, 0), (4, 1)):
        writer = MetricsWriter(tmp_path, Config(), start)
        writer.start(start, {"train_iters": 5, "time": str(start)})
        for iteration in range(start + 1, start + 1 + count):
            writer.step(replace(RECORD, iteration=iteration))
        writer.close()
    seen = [(row["iteration"], "start" in row) for row in read_journal(tmp_path / FILE_NAME)]
    assert seen == [(0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True), (5, False)]
    write(tmp_path, range(1, 2))
    assert len(read_journal(tmp_path / FILE_NAME)) == 2


def test_nested_numbers_have_joined_names() -> None:
    row = {"a": 1.5, "b": None, "timers": {"x·y": {"max": 2.0, "rank": 3}}, "what": "words"}
    assert dict(numbers(row)) == {"a": 1.5, "timers/x·y/max": 2.0, "timers/x·y/rank": 3}


def test_phase_times_are_printed_as_in_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    writer = MetricsWriter(None, Config(logging=LoggingConfig(timing_log_level=2)))
    writer.step(RECORD, {"timers": {"optimizer": {"min": 1.0, "max": 2.5, "max_rank": 7, "mean": 1.5}}})
    assert capsys.readouterr().out.endswith(
        "(min, max) time across ranks (ms), slowest rank:\n"
        "    optimizer ................................: (1.00, 2.50), 7\n"
    )


def test_a_foreign_journal_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("mine\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: not JSON"):
        MetricsWriter(tmp_path, Config())
    assert (tmp_path / FILE_NAME).read_text() == "mine\n"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        MetricsWriter(tmp_path / "file" / "run", Config())


def test_without_a_folder_only_the_console_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = MetricsWriter(None, Config(train=TrainConfig(train_iters=77)))
    writer.step(RECORD)
    writer.close()
    assert "iteration       10/      77 |" in capsys.readouterr().out


def test_tensorboard_receives_every_number_once(tmp_path: Path) -> None:
    config = Config(logging=LoggingConfig(tensorboard_dir=str(tmp_path / "events")))
    write(tmp_path / "run", range(1, 5), config)
    write(tmp_path / "run", range(3, 5), config, start_iteration=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert set(events.Tags()["scalars"]) == {*asdict(RECORD), "validation_loss"} - UNSET
    assert [event.step for event in events.Scalars("lm_loss")] == [1, 2, 3, 4]


def test_a_full_disk_costs_tensorboard_rows_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs that this finds: the row after a lost one ends the run, or a thread of tensorboard prints a traceback."""
    is_full, write = threading.Event(), RecordWriter.write

    def write_or_fail(writer: RecordWriter, data: bytes) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, data)

    monkeypatch.setattr(RecordWriter, "write", write_or_fail)
    monkeypatch.setattr(TensorboardSink, "RETRY_S", 0.01)
    sink = TensorboardSink(tmp_path, 0)
    for step in range(1, 40):
        is_full.set() if 10 <= step < 30 else is_full.clear()
        sink.log({"loss": float(step)}, step)
        time.sleep(0.02)
    is_full.set()
    sink.log({"loss": 40.0}, 40)
    sink.go_back(5)
    sink.close()
    told = capsys.readouterr()
    assert told.out.count("cannot be written: No space left on device; its rows are lost") == 1
    assert not told.err and told.out.count("\n") == 1, "one line"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        events = EventAccumulator(str(tmp_path)).Reload()
    assert {1, 9, 35, 39} <= {event.step for event in events.Scalars("loss")}


def test_tensorboard_shows_the_last_value_of_an_iteration(tmp_path: Path) -> None:
    """Checked after a rollback within a run, and after a restart from before the end."""
    config = Config(logging=LoggingConfig(tensorboard_dir=str(tmp_path / "events")))
    log_twice(tmp_path / "run", config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm_loss")] == LAST


LAST = [(1, 1.0), (2, 1.0), (3, 2.0), (4, 3.0), (5, 3.0)]


def log_twice(folder: Path, config: Config) -> None:
    """Log iterations 1 to 4, roll back to 2 and log 3 and 4 again; then restart after 3.  The loss is the attempt."""
    writer = MetricsWriter(folder, config)
    for iteration, attempt in ((1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (4, 2)):
        if (iteration, attempt) == (3, 2):
            writer.rollback(2, "a loss was too high")
        writer.step(replace(RECORD, iteration=iteration, lm_loss=float(attempt)))
    writer.close()
    writer = MetricsWriter(folder, config, start_iteration=3)
    for iteration in (4, 5):
        writer.step(replace(RECORD, iteration=iteration, lm_loss=3.0))
    writer.close()
    rows = [row for row in read_journal(folder / FILE_NAME) if "lm_loss" in row]
    assert [(row["iteration"], row["lm_loss"]) for row in rows] == LAST


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Config:
    """Configure wandb as on a computer without a network."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:1")
    return Config(logging=LoggingConfig(wandb_project="p", wandb_mode="offline"))


@pytest.mark.slow
def test_wandb_mode_of_the_environment_is_honoured(
    offline: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug that this finds: the default, online, is passed on, and waits for a login in spite of WANDB_MODE."""
    import wandb

    wandb.teardown()  # a process reads the variable once, and tests before this one have started runs
    monkeypatch.setenv("WANDB_MODE", "offline")
    logging = offline.logging.model_copy(update={"wandb_mode": "online"})
    write(tmp_path, range(1, 2), offline.model_copy(update={"logging": logging}))
    assert list((tmp_path / "wandb").glob("offline-run-*"))


@pytest.mark.slow
def test_wandb_offline_needs_no_network(offline: Config, tmp_path: Path) -> None:
    """A resumed run keeps the wandb id, a run from scratch gets a new one."""
    ids = []
    for start in (0, 2, 0):
        write(tmp_path / "run", range(start + 1, start + 3), offline, start)
        ids.append((tmp_path / "run" / WANDB_ID).read_text().strip())
        assert list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{ids[-1]}/run-{ids[-1]}.wandb"))
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.slow
def test_wandb_keeps_repeated_iterations(offline: Config, tmp_path: Path) -> None:
    """wandb's step counts rows, curves are over iterations, and the last row of an iteration is the latest attempt."""
    log_twice(tmp_path / "run", offline)
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len(files) == 2 and len({path.name for path in files}) == 1
    logs = [wandb_log(path) for path in files]
    rows = [[row(record) for record in log if record.HasField("history")] for log in logs]
    assert [[each["_step"] for each in part] for part in rows] == [[*range(7)], [*range(2)]]
    assert [each["iteration"] for part in rows for each in part] == [1, 2, 3, 4, 2, 3, 4, 4, 5]
    losses = {each["iteration"]: each["lm_loss"] for part in rows for each in part if "lm_loss" in each}
    assert sorted(losses.items()) == LAST
    assert all(each.run.resume for log in logs for each in log if each.HasField("run")), "a sync is to append"
    axes = {each.metric.glob_name: each.metric.step_metric for each in logs[1] if each.HasField("metric")}
    assert axes["*"] == "iteration"


def wandb_log(path: Path) -> list[Any]:
    """Return all records of a launch; a process of wandb may still be writing them when the run is closed."""
    for _ in range(200):
        records = list(wandb_records(path))
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def wandb_records(path: Path) -> Iterator[Any]:
    """Return the records of a .wandb file: 7 bytes, then LevelDB's log of protocol buffers in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full record, or its last fragment
            record, parts = Record.FromString(parts), b""
            yield record


def row(record: Any) -> dict[str, Any]:
    """Return the numbers of a row by name, and wandb's step."""
    named = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
    return named | {"_step": record.history.step.num}


def test_absent_wandb_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = Config(logging=LoggingConfig(wandb_project="mine", tensorboard_dir=str(tmp_path / "events")))
    with pytest.raises(UserError, match=r"logging\.wandb_project=mine: .* pip install wandb"):
        MetricsWriter(tmp_path / "run", config)
    assert list(tmp_path.iterdir()) == []


def test_peak_memory_grows_with_allocations() -> None:
    device = torch.device("cpu")
    before = process_memory(device).peak
    held = torch.ones(before // 4 + 2**24, dtype=torch.float32)
    assert process_memory(device).peak > max(before, held.nbytes)


def test_code_is_part_of_the_memory_and_tensors_are_not_code() -> None:
    before = process_memory(torch.device("cpu"))
    held = torch.ones(2**24)
    after = process_memory(torch.device("cpu"))
    assert 2**24 < before.code < before.peak, "torch's libraries are in memory"
    assert held.nbytes == 2**26 and after.code - before.code < 2**24
