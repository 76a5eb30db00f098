"""Encode documents on several processes, in order and in bounded memory: the result is that of one process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron3d.data.preprocess.readers import Record, Split, exact_split, sections, sentence_splitter
from megatron3d.data.token_files.indexed import Tokens, token_dtype
from megatron3d.data.token_files.writer import CONTINUES, ENDS_DOCUMENT, ENDS_SEQUENCE
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron3d.errors import ExitCode, UserError

BATCH_BYTES = 1 << 18
"""Text per task: large against the cost of sending it, small against memory."""
TASKS_PER_WORKER = 3
MAX_FAULTS = 5
"""Bad records of a batch that are described; finding the line of one takes time."""
Ints = npt.NDArray[Any]


@dataclass(frozen=True)
class EncoderSpec:
    """Everything a worker process needs to encode documents.

    Attributes:
        fingerprint: fingerprint of the tokenizer; a worker that reads another tokenizer raises.
        remedy: end of the error about a bad record: alternatives to correcting it.
        begin: tokens before the text of every document.
    """

    tokenizer_type: str
    tokenizer_model: str | None
    fingerprint: str
    keys: tuple[str, ...]
    append_eod: bool
    split_sentences: bool = False
    skip_bad: bool = False
    remedy: str = ""
    begin: tuple[int, ...] = ()


@dataclass(frozen=True)
class EncodedBatch:
    """The tokens of a batch of documents.

    Attributes:
        columns: per key, all tokens, the length of each run of tokens, and how the run ends; empty texts have none.
        num_bad: number of records that were left out; `faults` describes some of them.
        chunk: number of the chunk that holds the last record; `after` is the position after that record.
    """

    num_documents: int
    num_bytes: int
    columns: tuple[tuple[Tokens, Ints, Ints], ...]
    num_bad: int
    faults: tuple[str, ...]
    chunk: int
    after: int


class _Task(NamedTuple):
    future: Future[EncodedBatch]
    num_bytes: int


def encode(
    spec: EncoderSpec, records: Iterable[tuple[int, Record]], num_workers: int
) -> Generator[EncodedBatch, None, None]:
    """Yield batches of encoded documents in the order of `records`, which come with the numbers of their chunks.

    Raises UserError that names a bad document.
    """
    if num_workers == 1:
        for chunk, batch in _batches(records):
            yield encode_batch(spec, batch, chunk)
        return
    with ExitStack() as stack:
        pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _exit_with_parent)
        stack.callback(pool.shutdown, cancel_futures=True)
        pending, max_tasks = deque[_Task](), TASKS_PER_WORKER * num_workers
        max_bytes = 2 * max_tasks * BATCH_BYTES
        for chunk, batch in _batches(records):
            with _deferred_interrupts():  # submit may start a worker
                future = pool.submit(encode_batch, spec, batch, chunk)
            pending.append(_Task(future, sum(map(_size, batch))))
            while len(pending) > 1 and (len(pending) >= max_tasks or sum(t.num_bytes for t in pending) > max_bytes):
                yield _result(pending.popleft())
        while pending:
            yield _result(pending.popleft())


def _exit_with_parent() -> None:
    """End this worker when its parent is killed, instead of waiting for the next task."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def wait() -> None:
        parent.join()
        os._exit(ExitCode.CRASH)

    Thread(target=wait, daemon=True).start()


def _result(task: _Task) -> EncodedBatch:
    try:
        return task.future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "--workers: a worker process was killed, by the system where memory ran out; use fewer, or a smaller "
            "--max-record-mb"
        ) from error


@contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, so that none prints a traceback; this process handles it afterwards.

    Children inherit the blocked signal; another thread of this process may still receive it, so a handler records it.
    """
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


def _size(record: Record) -> int:
    content = record.content
    if isinstance(content, bytes | str):
        return len(content)
    return 0 if isinstance(content, UserError) else sum(len(v) for v in content.values() if isinstance(v, str))


def _batches(records: Iterable[tuple[int, Record]]) -> Iterator[tuple[int, list[Record]]]:
    """Yield records in batches of about BATCH_BYTES, each with the number of its last record's chunk."""
    batch: list[Record] = []
    num_bytes = chunk = 0
    for chunk, record in records:
        batch.append(record)
        num_bytes += _size(record) + 256
        if num_bytes >= BATCH_BYTES:
            yield chunk, batch
            batch, num_bytes = [], 0
    if batch:
        yield chunk, batch


class _Tools(NamedTuple):
    tokenizer: Tokenizer
    split: Split
    sentences: Callable[[str], Sequence[str]]


@lru_cache(maxsize=1)
def _tools(spec: EncoderSpec) -> _Tools:
    """Return the tokenizer and splitter of this process, loaded once."""
    tokenizer = build_tokenizer(spec.tokenizer_type, spec.tokenizer_model)
    if tokenizer.fingerprint != spec.fingerprint:
        raise UserError(f"--tokenizer-model {spec.tokenizer_model}: changed while it was in use; start again")
    sentences = sentence_splitter() if spec.split_sentences else lambda text: (text,)
    return _Tools(tokenizer, exact_split(tokenizer.encode), sentences)


@dataclass
class _Column:
    """The runs of tokens of one key, and how each run ends."""

    runs: list[Tokens] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    def packed(self, dtype: np.dtype[Any]) -> tuple[Tokens, Ints, Ints]:
        """Return all tokens, the lengths of the runs, and their marks."""
        lengths = np.array([len(run) for run in self.runs], np.int64)
        return np.concatenate([np.empty(0, dtype), *self.runs]), lengths, np.array(self.marks, np.int8)


def encode_batch(spec: EncoderSpec, batch: list[Record], chunk: int = 0) -> EncodedBatch:
    """Encode records in this process, the last one of chunk number `chunk`; raises UserError that names a bad one."""
    tools = _tools(spec)
    columns = tuple(_Column() for _ in spec.keys)
    faults: list[str] = []
    num_bad = 0
    for record in batch:
        try:
            texts = record.texts(spec.keys)
            encoded = [_encode_text(spec, tools, record, text) for text in texts]
        except UserError as error:
            if not spec.skip_bad or not record.is_whole:
                raise UserError(f"{error}{spec.remedy}") from error
            num_bad += 1
            faults += [str(error)] if len(faults) < MAX_FAULTS else []
            continue
        for column, added in zip(columns, encoded, strict=True):
            column.runs += added.runs
            column.marks += added.marks
    return EncodedBatch(
        num_documents=sum(record.ends for record in batch) - num_bad,
        num_bytes=sum(record.num_bytes for record in batch),
        columns=tuple(column.packed(token_dtype(tools.tokenizer.vocab_size)) for column in columns),
        num_bad=num_bad,
        faults=tuple(faults),
        chunk=chunk,
        after=batch[-1].after,
    )


def _encode_text(spec: EncoderSpec, tools: _Tools, record: Record, text: str) -> _Column:
    """Encode one text; an empty text has no runs."""
    column = _Column()
    for section in sections(text, tools.split) if text else ():
        for sentence in tools.sentences(section):
            column.runs.append(_token_ids(tools.tokenizer, record, sentence))
            column.marks.append(ENDS_SEQUENCE)
        column.marks[-1] = CONTINUES
    if column.runs and record.begins:
        column.runs[0] = np.concatenate([np.array(spec.begin, column.runs[0].dtype), column.runs[0]])
    if column.runs and record.ends:
        column.marks[-1] = ENDS_DOCUMENT
        if spec.append_eod:
            assert tools.tokenizer.eod is not None, "--append-eod was accepted for a tokenizer without such a token"
            column.runs[-1] = np.append(column.runs[-1], column.runs[-1].dtype.type(tools.tokenizer.eod))
    return column


def _token_ids(tokenizer: Tokenizer, record: Record, text: str) -> Tokens:
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        ids = np.array(tokenizer.encode(text), np.int64)
    except UserError as error:
        raise UserError(f"{record.place}: {error}") from error
    if ids.size and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
        raise UserError(
            f"{record.place}: the tokenizer gives id {ids.max()}, but says that it has {tokenizer.vocab_size} tokens; "
            "its model file is damaged, make it again"
        )
    return ids.astype(dtype)
