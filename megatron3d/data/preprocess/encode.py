"""Documents to token ids on several processes, in order and with bounded memory: the result is that of one process."""

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
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron3d.data.preprocess.records import Record
from megatron3d.data.preprocess.split_text import Cut, cutter, parts, sentence_splitter
from megatron3d.data.token_files.indexed import Tokens, token_dtype
from megatron3d.data.token_files.writer import CONTINUES, ENDS_DOCUMENT, ENDS_SEQUENCE
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron3d.errors import UserError

BATCH_BYTES = 1 << 18
"""Text per task: large against the cost of sending it, small against memory."""
TASKS_PER_WORKER = 3
KEPT_FAULTS = 5
"""Bad records of a batch that are told of one by one; finding their lines takes time."""
Ints = npt.NDArray[Any]


@dataclass(frozen=True)
class EncoderSpec:
    """What a worker needs to turn documents into tokens.

    Attributes:
        fingerprint: of the tokenizer.
        remedy: what else than to correct it can be done about a bad record.
    """

    tokenizer_type: str
    tokenizer_model: str | None
    fingerprint: str
    keys: tuple[str, ...]
    append_eod: bool
    split_sentences: bool = False
    skip_bad: bool = False
    remedy: str = ""


@dataclass(frozen=True)
class EncodedBatch:
    """A batch of documents.

    Attributes:
        columns: per key all tokens, the length of each run of tokens, and how it ends; empty texts are left out.
        num_bad: records that were left out, and `faults` of some.
    """

    num_documents: int
    num_bytes: int
    columns: tuple[tuple[Tokens, Ints, Ints], ...]
    num_bad: int
    faults: tuple[str, ...]


Batch = tuple[EncodedBatch, int, int]
"""What was encoded, the number of the piece that its last record is of, and where in it the next one begins."""


def encode(
    encoder: EncoderSpec, records: Iterable[tuple[int, Record]], num_workers: int
) -> Generator[Batch, None, None]:
    """Batches of encoded documents in the order of `records`, each with the number of its piece.

    Raises UserError that names a bad document.
    """
    if num_workers == 1:
        for number, batch in _batches(records):
            yield encode_batch(encoder, batch), number, batch[-1].after
        return
    with ExitStack() as stack:
        pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _end_with_parent)
        stack.callback(pool.shutdown, cancel_futures=True)
        pending: deque[tuple[Future[EncodedBatch], int, int, int]] = deque()
        for number, batch in _batches(records):
            with _deferred_interrupts():  # a task may start a worker
                future = pool.submit(encode_batch, encoder, batch)
            pending.append((future, number, batch[-1].after, sum(map(_size, batch))))
            while len(pending) > 1 and _is_full(pending, num_workers):
                yield _result(pending)
        while pending:
            yield _result(pending)


def _end_with_parent() -> None:
    """A worker whose parent is killed would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def _is_full(pending: Sequence[tuple[Future[EncodedBatch], int, int, int]], num_workers: int) -> bool:
    tasks = TASKS_PER_WORKER * num_workers
    return len(pending) >= tasks or sum(size for *_, size in pending) > 2 * tasks * BATCH_BYTES


def _result(pending: deque[tuple[Future[EncodedBatch], int, int, int]]) -> Batch:
    future, number, after, _ = pending.popleft()
    try:
        return future.result(), number, after
    except BrokenProcessPool as error:
        raise UserError(
            "--workers: a worker process was killed, by the system where memory ran out; use fewer, or a smaller "
            "--max-record-mb"
        ) from error


@contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """Processes started in here never see Ctrl-C, so that none prints a traceback; this one sees it afterwards.

    They inherit the blocked signal; here another thread may still take it, hence the handler that only notes it.
    """
    noted: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, handler)
        if noted:
            signal.raise_signal(signal.SIGINT)


def _size(record: Record) -> int:
    content = record.content
    if isinstance(content, bytes | str):
        return len(content)
    return 0 if isinstance(content, UserError) else sum(len(v) for v in content.values() if isinstance(v, str))


def _batches(records: Iterable[tuple[int, Record]]) -> Iterator[tuple[int, list[Record]]]:
    """Records of about BATCH_BYTES, all of one piece or of neighbours, with the number of the last one's."""
    batch: list[Record] = []
    num_bytes, last = 0, 0
    for last, record in records:
        batch.append(record)
        num_bytes += _size(record) + 256
        if num_bytes >= BATCH_BYTES:
            yield last, batch
            batch, num_bytes = [], 0
    if batch:
        yield last, batch


@dataclass
class _Tools:
    """What a worker makes once."""

    tokenizer: Tokenizer
    cut: Cut
    split: Callable[[str], Sequence[str]]


@lru_cache(maxsize=1)
def _tools(encoder: EncoderSpec) -> _Tools:
    tokenizer = build_tokenizer(encoder.tokenizer_type, encoder.tokenizer_model)
    if tokenizer.fingerprint != encoder.fingerprint:
        raise UserError(f"--tokenizer-model {encoder.tokenizer_model}: changed while it was in use; start again")
    split = sentence_splitter() if encoder.split_sentences else lambda text: (text,)
    return _Tools(tokenizer, cutter(tokenizer.encode), split)


@dataclass
class _Column:
    """The runs of tokens of one key."""

    runs: list[Tokens] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    def packed(self, dtype: np.dtype[Any]) -> tuple[Tokens, Ints, Ints]:
        """All tokens, lengths, marks."""
        lengths = np.array([len(run) for run in self.runs], np.int64)
        return np.concatenate([np.empty(0, dtype), *self.runs]), lengths, np.array(self.marks, np.int8)


def encode_batch(encoder: EncoderSpec, batch: list[Record]) -> EncodedBatch:
    """The tokens of records, in this process; raises UserError that names a bad one."""
    tools = _tools(encoder)
    columns = tuple(_Column() for _ in encoder.keys)
    faults: list[str] = []
    num_bad = 0
    for record in batch:
        try:
            texts = record.texts(encoder.keys)
            runs = [_encode_text(encoder, tools, record, text) for text in texts]
        except UserError as error:
            if not encoder.skip_bad or not record.is_whole:
                raise UserError(f"{error}{encoder.remedy}") from error
            num_bad += 1
            faults += [str(error)] if len(faults) < KEPT_FAULTS else []
            continue
        for column, (arrays, marks) in zip(columns, runs, strict=True):
            column.runs += arrays
            column.marks += marks
    return EncodedBatch(
        num_documents=sum(record.ends for record in batch) - num_bad,
        num_bytes=sum(record.num_bytes for record in batch),
        columns=tuple(column.packed(token_dtype(tools.tokenizer.vocab_size)) for column in columns),
        num_bad=num_bad,
        faults=tuple(faults),
    )


def _encode_text(encoder: EncoderSpec, tools: _Tools, record: Record, text: str) -> tuple[list[Tokens], list[int]]:
    """Runs of tokens and how each ends; an empty text has none."""
    arrays: list[Tokens] = []
    marks: list[int] = []
    for part in parts(text, tools.cut) if text else ():
        for sentence in tools.split(part):
            arrays.append(_ids(tools.tokenizer, record, sentence))
            marks.append(ENDS_SEQUENCE)
        marks[-1] = CONTINUES
    if arrays and record.ends:
        marks[-1] = ENDS_DOCUMENT
        if encoder.append_eod:
            assert tools.tokenizer.eod is not None, "--append-eod was accepted for a tokenizer without such a token"
            arrays[-1] = np.append(arrays[-1], arrays[-1].dtype.type(tools.tokenizer.eod))
    return arrays, marks


def _ids(tokenizer: Tokenizer, record: Record, text: str) -> Tokens:
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
