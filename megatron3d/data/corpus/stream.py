"""Samples of a Hugging Face dataset as it is: its texts are encoded while they are read, without token files.

    sample i = tokens [w S, w S + S] of lane i mod K,   w = i div K
    lane k   = the documents of its rows, each with its end token, epoch after epoch
    rows     = of n shards every K-th one from k on; where there are fewer than lanes, every c-th row of shard k mod n,
               which c lanes share.  In each epoch shards come in another order, and so do the rows of each block

A sample is a function of (seed, dataset, i), as one of a token file is, so that layouts and restarts change nothing.
Finding where a window begins takes reading all before it; a Cursor, kept for the last windows and in checkpoints, is
such a place, so that reading goes on there at once.  Records that are left out count in it, so that their number, too,
is a function of the samples that are used up.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron3d.data.permutation import Indices, permutation_keys, permute
from megatron3d.data.preprocess.encode import KEPT_FAULTS, EncodedBatch, EncoderSpec, encode_batch
from megatron3d.data.preprocess.hub_datasets import num_shards, open_shard
from megatron3d.data.preprocess.input_chunks import InputChunk
from megatron3d.data.preprocess.records import Record
from megatron3d.data.token_files.indexed import Tokens
from megatron3d.errors import UserError

KEPT_READS = 3
"""Cursors of so many batches are kept: the one that is read ahead, this one, and the one before."""


class Cursor(NamedTuple):
    """Where a window begins in its lane.

    Attributes:
        shard: how many of the lane's shards are used up in this epoch, `row` the first of the lane's rows of the block
            in this one, `place` the documents used up of the block, and `token` the tokens used up of the next one.
        check: a checksum of these tokens.
        num_bad: records of the lane that were left out before this document.
    """

    epoch: int = 0
    shard: int = 0
    row: int = 0
    place: int = 0
    token: int = 0
    check: int = 0
    num_bad: int = 0


@dataclass(frozen=True)
class StreamedDataset:
    """The documents of a dataset, as lanes.

    Attributes:
        name: as hub.HubName reads it.
        shuffle_rows: rows of a block.
        seed: of the order; None keeps that of the dataset.
        faults: what is wrong with the first records that were left out.
    """

    name: str
    num_shards: int
    num_lanes: int
    shuffle_rows: int
    seed: int | None
    encoder: EncoderSpec
    faults: list[str] = field(default_factory=list)

    def documents(self, lane: int, at: Cursor) -> Iterator[tuple[Cursor, Tokens]]:
        """The documents of a lane without end, from a place on, with their places; raises UserError without any."""
        num_bad = at.num_bad
        while True:
            is_empty = at == Cursor(at.epoch, num_bad=at.num_bad)
            for number, shard in islice(enumerate(self._shards(lane, at.epoch)), at.shard, None):
                here = at if number == at.shard else Cursor(at.epoch, number)
                for place, encoded in self._of_shard(lane, shard, here):
                    if encoded.columns[0][0].size:
                        is_empty = False
                        yield place._replace(num_bad=num_bad), encoded.columns[0][0]
                    num_bad += encoded.num_bad
                    if encoded.faults and len(self.faults) < KEPT_FAULTS:  # met again in later epochs
                        self.faults.extend(fault for fault in encoded.faults if fault not in self.faults)
            if is_empty:
                raise UserError(
                    f"{self.name}: lane {lane} of data.stream_lanes={self.num_lanes} has no text under "
                    f"{self.encoder.keys[0]!r}; use fewer lanes, or another data.stream_key"
                )
            at = Cursor(at.epoch + 1, num_bad=num_bad)

    def _shards(self, lane: int, epoch: int) -> list[int]:
        shards = range(lane % self.num_shards, self.num_shards, self.num_lanes)
        return [shards[place] for place in self._order(len(shards), f"shards of lane {lane}", epoch)]

    def _of_shard(self, lane: int, shard: int, at: Cursor) -> Iterator[tuple[Cursor, EncodedBatch]]:
        sharing = len(range(shard, self.num_lanes, self.num_shards)) or 1
        mine, done = lane // self.num_shards, at.place
        rows = enumerate(open_shard(self.name, shard, self.num_shards, at.row * sharing), at.row * sharing)
        for row in count(at.row, self.shuffle_rows):
            last: int | None = None
            block: list[tuple[int, Mapping[str, Any]]] = []
            for last, fields in islice(rows, self.shuffle_rows * sharing):
                block += [(last, fields)] if last % sharing == mine else []
            if last is None:
                return
            order = self._order(len(block), f"rows from {row} of shard {shard}", at.epoch)
            for place, chosen in islice(enumerate(order), done, None):
                encoded = encode_batch(self.encoder, [self._record(shard, *block[chosen])])
                yield Cursor(at.epoch, at.shard, row, place), encoded
            done = 0

    def _order(self, size: int, what: str, epoch: int) -> Sequence[int]:
        if self.seed is None or not size:
            return range(size)
        keys = permutation_keys(f"{what} {self.seed}", np.full(size, epoch))
        return [int(place) for place in permute(np.arange(size), size, keys)]

    def first_text(self, shard: int) -> str:
        """The first text of a shard; raises UserError where its first row, or none that may stand for it, has one."""
        fault: UserError | None = None
        for row, fields in islice(enumerate(open_shard(self.name, shard, self.num_shards, 0)), self.shuffle_rows):
            try:
                return str([self._record(shard, row, fields).texts(self.encoder.keys)])
            except UserError as error:
                fault = fault or UserError(f"{error}{self.encoder.remedy}")
                if not self.encoder.skip_bad:
                    break
        if fault is not None:
            raise fault
        return str([])

    def _record(self, shard: int, row: int, fields: Mapping[str, Any]) -> Record:
        return Record(InputChunk("dataset", self.name, shard, self.num_shards, 0), row, row + 1, fields, 0)


class Lane:
    """The windows of one lane; one after another they are read on, others from the nearest cursor before.

    Attributes:
        cursors: where some windows begin.
    """

    def __init__(self, rows: StreamedDataset, number: int, seq_length: int) -> None:
        self._rows, self._number, self._seq_length = rows, number, seq_length
        self.cursors: dict[int, Cursor] = {0: Cursor()}
        self._at = -1

    def window(self, wanted: int) -> Tokens:
        """Tokens [w S, w S + S]; raises UserError where the dataset is no longer what a cursor was made of."""
        if wanted != self._at:
            self._go_to(max(window for window in self.cursors if window <= wanted))
        while True:
            tokens = self._advance()
            if self._at == wanted + 1:
                return tokens

    def forget_before(self, window: int) -> None:
        """Give up cursors, but the first and the last one."""
        for old in [old for old in sorted(self.cursors)[1:-1] if old < window]:
            del self.cursors[old]

    def _go_to(self, window: int) -> None:
        at, self._at = self.cursors[window], window
        self._documents = self._rows.documents(self._number, at)
        self._held: deque[tuple[Cursor, Tokens]] = deque()
        self._num_held = 0
        if at.token:
            place, tokens = next(self._documents)
            if place != at._replace(token=0, check=0) or zlib.crc32(tokens[: at.token].tobytes()) != at.check:
                raise UserError(
                    f"{self._rows.name}: has changed since the run began, in shard {at.shard} of lane {self._number}; "
                    "go on with the dataset as it was, or begin anew in another checkpoint.save"
                )
            self._hold(at, tokens[at.token :])

    def _hold(self, at: Cursor, tokens: Tokens) -> None:
        if len(tokens):
            self._held.append((at, tokens))
            self._num_held += len(tokens)

    def _advance(self) -> Tokens:
        """The next window; all but its last token are used up."""
        while self._num_held <= self._seq_length:
            self._hold(*next(self._documents))
        parts, rest = [], self._seq_length
        while rest:
            at, tokens = self._held.popleft()
            parts.append(tokens[:rest])
            if len(tokens) > rest:
                used = at._replace(token=at.token + rest, check=zlib.crc32(tokens[:rest].tobytes(), at.check))
                self._held.appendleft((used, tokens[rest:]))
            rest -= len(parts[-1])
        self._num_held -= self._seq_length
        self._at += 1
        self.cursors[self._at] = self._held[0][0]
        return np.concatenate([*parts, self._held[0][1][:1]])


class StreamedSamples:
    """Samples 0, 1, ... of a dataset without end."""

    def __init__(self, rows: StreamedDataset, seq_length: int) -> None:
        self.rows, self._seq_length = rows, seq_length
        self._lanes = [Lane(rows, number, seq_length) for number in range(rows.num_lanes)]
        self._lows: deque[int] = deque(maxlen=KEPT_READS)

    @property
    def sources(self) -> tuple[Any, ...]:
        """Token files: none."""
        return ()

    @property
    def contents(self) -> list[list[object]]:
        """What decides the samples, as far as it is looked at: the first rows; raises UserError if they are no text."""
        rows = self.rows
        values: list[object] = [rows.num_shards, rows.num_lanes, rows.shuffle_rows, rows.encoder.keys]
        values += [rows.first_text(shard) for shard in sorted({0, rows.num_shards - 1})]
        return [[hashlib.sha256(str(values).encode()).hexdigest(), 1]]

    def read(self, samples: Indices) -> npt.NDArray[np.int64]:
        """[samples, seq_length + 1] tokens; raises UserError for a row that is no text, unless such are left out."""
        windows, lanes = np.divmod(samples, self.rows.num_lanes)
        self._lows.append(int(windows.min()))
        tokens = np.empty((len(samples), self._seq_length + 1), np.int64)
        for place in np.argsort(samples, kind="stable").tolist():
            tokens[place] = self._lanes[lanes[place]].window(int(windows[place]))
        for lane in self._lanes:
            lane.forget_before(min(self._lows))
        return tokens

    def place(self, sample: int) -> str:
        """Where a sample comes from, for a person."""
        window, lane = divmod(sample, self.rows.num_lanes)
        return f"{self.rows.name}, window {window} of lane {lane}"

    def cursors(self, consumed_samples: int) -> dict[str, tuple[int, ...]]:
        """By lane where its first sample from so many on begins, as far as this rank knows."""
        found = {str(lane): self._lanes[lane].cursors.get(w) for lane, w in self._next_windows(consumed_samples) if w}
        return {lane: tuple(cursor) for lane, cursor in found.items() if cursor is not None}

    def num_bad(self, consumed_samples: int) -> tuple[int, ...]:
        """By lane the records that were left out in so many samples, 0 where this rank does not know."""
        found = (self._lanes[lane].cursors.get(window) for lane, window in self._next_windows(consumed_samples))
        return tuple(cursor.num_bad if cursor else 0 for cursor in found)

    def go_on(self, consumed_samples: int, cursors: Mapping[str, Sequence[int]]) -> None:
        """Know where samples from so many on begin."""
        for lane, window in self._next_windows(consumed_samples):
            if str(lane) in cursors:
                self._lanes[lane].cursors[window] = Cursor(*cursors[str(lane)])

    def _next_windows(self, consumed_samples: int) -> Iterator[tuple[int, int]]:
        lanes = self.rows.num_lanes
        return ((lane, max(-(-(consumed_samples - lane) // lanes), 0)) for lane in range(lanes))

    def consumed_tokens(self, spans: Iterable[tuple[int, int, int]]) -> Mapping[str, float]:
        """Nothing: there is only one dataset."""
        return {}

    def describe(self) -> str:
        """For the start of a run."""
        rows = self.rows
        return (
            f"{rows.name}: read as a stream of {rows.num_shards} shards in {rows.num_lanes} lanes; how often is not "
            "known before"
        )


def open_stream(
    name: str, num_lanes: int, shuffle_rows: int, seed: int | None, encoder: EncoderSpec
) -> StreamedDataset:
    """The lanes of a dataset; raises UserError where it cannot be opened."""
    return StreamedDataset(name, num_shards(name), num_lanes, shuffle_rows, seed, encoder)
