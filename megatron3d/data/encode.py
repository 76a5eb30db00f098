"""Documents to token ids on several processes, in order and with bounded memory: the result is that of one process."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megatron3d.data.documents import Record
from megatron3d.data.indexed import Tokens, token_dtype
from megatron3d.data.tokenizer import Tokenizer, build_tokenizer
from megatron3d.errors import UserError

BATCH_BYTES = 1 << 18
"""Text per task: large against the cost of sending it, small against memory."""
TASKS_PER_WORKER = 3


@dataclass(frozen=True)
class Encoder:
    """What a worker needs to turn documents into tokens; the fingerprint is that of the tokenizer."""

    tokenizer_type: str
    tokenizer_model: str | None
    fingerprint: str
    keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class Encoded:
    """A batch of documents: per key their tokens one after another and the length of each; empty texts are left out."""

    num_documents: int
    num_bytes: int
    columns: tuple[tuple[Tokens, npt.NDArray[np.int32]], ...]


def encode(encoder: Encoder, records: Iterable[Record], num_workers: int) -> Generator[Encoded, None, None]:
    """Batches of encoded documents in the order of `records`; raises UserError that names a bad document."""
    if num_workers == 1:
        for batch in _batches(records):
            yield _encode_batch(encoder, batch)
        return
    with ExitStack() as stack:
        pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"))
        stack.callback(pool.shutdown, cancel_futures=True)
        pending: deque[Future[Encoded]] = deque()
        for batch in _batches(records):
            with _deferred_interrupts():  # a task may start a worker
                pending.append(pool.submit(_encode_batch, encoder, batch))
            if len(pending) == TASKS_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


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


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    num_bytes = 0
    for record in records:
        batch.append(record)
        num_bytes += len(record.content)
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


@lru_cache(maxsize=1)
def _tokenizer(encoder: Encoder) -> Tokenizer:
    tokenizer = build_tokenizer(encoder.tokenizer_type, encoder.tokenizer_model)
    if tokenizer.fingerprint != encoder.fingerprint:
        raise UserError(f"--tokenizer-model {encoder.tokenizer_model}: changed while it was in use; start again")
    return tokenizer


def _encode_batch(encoder: Encoder, batch: list[Record]) -> Encoded:
    tokenizer = _tokenizer(encoder)
    dtype = token_dtype(tokenizer.vocab_size)
    columns: list[list[Tokens]] = [[] for _ in encoder.keys]
    for record in batch:
        for column, text in zip(columns, record.texts(encoder.keys), strict=True):
            if text:
                column.append(np.array(_encode_text(encoder, tokenizer, record, text), dtype))
    return Encoded(
        num_documents=len(batch),
        num_bytes=sum(len(record.content) for record in batch),
        columns=tuple(
            (np.concatenate([np.empty(0, dtype), *column]), np.array([len(ids) for ids in column], np.int32))
            for column in columns
        ),
    )


def _encode_text(encoder: Encoder, tokenizer: Tokenizer, record: Record, text: str) -> list[int]:
    try:
        ids = tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"{record.place}: {error}") from error
    if encoder.append_eod:
        assert tokenizer.eod is not None, "--append-eod was accepted for a tokenizer without such a token"
        ids.append(tokenizer.eod)
    return ids
