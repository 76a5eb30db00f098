"""Samples of a Hugging Face dataset without token files: its texts are encoded while they are read.

    sample i = tokens [w S, w S + S] of lane i mod K,   w = i div K
    lane k   = the documents of its rows, each with its end token, epoch after epoch
    rows     = every K-th of the n shards, from k on; if n < K, every c-th row of shard k mod n, which c lanes read.
               Each epoch shuffles the shards of a lane, and the rows within each block, in another order

Like those of token files, a sample is a function of (seed, dataset, i): layouts and restarts change nothing.  To find
the start of a window, everything before it must be read; a Cursor stores such a place.  Cursors are kept for the last
windows and in checkpoints.  They count the records that were left out, so that this number, too, is a function of the
consumed samples.
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

from megatron3d.data.corpus.plan import ALONE, Blend, Indices, permutation_keys, permute
from megatron3d.data.preprocess.encode import MAX_FAULTS, EncodedBatch, EncoderSpec, encode_batch
from megatron3d.data.preprocess.inputs import InputChunk, open_shard
from megatron3d.data.preprocess.readers import Record
from megatron3d.data.token_files.indexed import Tokens
from megatron3d.errors import UserError

KEPT_BATCHES = 3
"""Number of batches whose cursors are kept: the prefetched one, the current one and the one before."""


class Cursor(NamedTuple):
    """The place in a lane where a window begins.

    Attributes:
        shard: number of the lane's shards that are consumed in this epoch.
        row: first of the lane's rows of the current block in that shard.
        place: number of consumed documents of the block.
        token: number of consumed tokens of the next document; `check` is their checksum.
        num_bad: number of the lane's records that were left out before this document.
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
    """The documents of a dataset, divided into lanes.

    Attributes:
        name: as `inputs.parse_name` parses it.
        shuffle_rows: number of rows that are shuffled together, a block.
        seed: of the shuffle; None keeps the order of the dataset.
        faults: descriptions of the first records that were left out.
    """

    name: str
    num_shards: int
    num_lanes: int
    shuffle_rows: int
    seed: int | None
    encoder: EncoderSpec
    faults: list[str] = field(default_factory=list)

    def documents(self, lane: int, at: Cursor) -> Iterator[tuple[Cursor, Tokens]]:
        """Yield the documents of a lane without end, from a place on, with their places; raises UserError if none."""
        num_bad, shards = at.num_bad, range(lane % self.num_shards, self.num_shards, self.num_lanes)
        while True:
            is_empty = at == Cursor(at.epoch, num_bad=at.num_bad)
            order = self._order(len(shards), f"shards of lane {lane}", at.epoch)
            for number, index in islice(enumerate(order), at.shard, None):
                here = at if number == at.shard else Cursor(at.epoch, number)
                for place, encoded in self._shard_documents(lane, shards[index], here):
                    if encoded.columns[0][0].size:
                        is_empty = False
                        yield place._replace(num_bad=num_bad), encoded.columns[0][0]
                    num_bad += encoded.num_bad
                    if encoded.faults and len(self.faults) < MAX_FAULTS:  # later epochs meet them again
                        self.faults.extend(fault for fault in encoded.faults if fault not in self.faults)
            if is_empty:
                raise UserError(
                    f"{self.name}: lane {lane} of data.stream_lanes={self.num_lanes} has no text under "
                    f"{self.encoder.keys[0]!r}; use fewer lanes, or another data.stream_key"
                )
            at = Cursor(at.epoch + 1, num_bad=num_bad)

    def _shard_documents(self, lane: int, shard: int, at: Cursor) -> Iterator[tuple[Cursor, EncodedBatch]]:
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
        """Return the first text of a shard; raises UserError if its first row, or with skip_bad any, has none."""
        fault: UserError | None = None
        num_rows = self.shuffle_rows if self.encoder.skip_bad else 1
        for row, fields in islice(enumerate(open_shard(self.name, shard, self.num_shards, 0)), num_rows):
            try:
                return str([self._record(shard, row, fields).texts(self.encoder.keys)])
            except UserError as error:
                fault = fault or UserError(f"{error}{self.encoder.remedy}")
        if fault is not None:
            raise fault
        return str([])

    def _record(self, shard: int, row: int, fields: Mapping[str, Any]) -> Record:
        return Record(InputChunk("dataset", self.name, shard, self.num_shards, 0), row, row + 1, fields, 0)


class Lane:
    """The windows of one lane: reads on for the next one, and from the nearest earlier cursor for any other.

    Attributes:
        cursors: the start of some windows, by number.
    """

    def __init__(self, rows: StreamedDataset, number: int, seq_length: int) -> None:
        self._rows, self._number = rows, number
        self._seq_length = seq_length
        self.cursors: dict[int, Cursor] = {0: Cursor()}
        self._at = -1

    def window(self, wanted: int) -> Tokens:
        """Return tokens [w S, w S + S]; raises UserError where the dataset has changed since a cursor was made."""
        if wanted != self._at:
            self._go_to(max(window for window in self.cursors if window <= wanted))
        while True:
            tokens = self._advance()
            if self._at == wanted + 1:
                return tokens

    def forget_before(self, window: int) -> None:
        """Drop the cursors before a window, except the first and the last one."""
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
                    "go on with the dataset as it was, or start from scratch in another checkpoint.save"
                )
            self._hold(at, tokens[at.token :])

    def _hold(self, at: Cursor, tokens: Tokens) -> None:
        if len(tokens):
            self._held.append((at, tokens))
            self._num_held += len(tokens)

    def _advance(self) -> Tokens:
        """Return the next window, and consume all of its tokens but the last."""
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


class DatasetSamples:
    """Samples 0, 1, ... of one streamed dataset, without end."""

    def __init__(self, rows: StreamedDataset, seq_length: int) -> None:
        self.rows, self.seq_length = rows, seq_length
        self._lanes = [Lane(rows, number, seq_length) for number in range(rows.num_lanes)]
        self._lows: deque[int] = deque(maxlen=KEPT_BATCHES)

    @property
    def fingerprint(self) -> str:
        """Value that identifies the samples, from the first rows; raises UserError if these have no text."""
        rows = self.rows
        values: list[object] = [rows.num_shards, rows.num_lanes, rows.shuffle_rows, rows.encoder.keys]
        values += [rows.first_text(shard) for shard in sorted({0, rows.num_shards - 1})]
        return hashlib.sha256(str(values).encode()).hexdigest()

    def read(self, samples: Indices) -> npt.NDArray[np.int64]:
        """Return [samples, seq_length + 1] tokens; raises UserError for a row without text unless such are left out."""
        windows, lanes = np.divmod(samples, self.rows.num_lanes)
        self._lows.append(int(windows.min()))
        tokens = np.empty((len(samples), self.seq_length + 1), np.int64)
        for place in np.argsort(samples, kind="stable").tolist():
            tokens[place] = self._lanes[lanes[place]].window(int(windows[place]))
        for lane in self._lanes:
            lane.forget_before(min(self._lows))
        return tokens

    def place(self, sample: int) -> str:
        """Return where a sample comes from, for a message."""
        window, lane = divmod(sample, self.rows.num_lanes)
        return f"{self.rows.name}, window {window} of lane {lane}"

    def cursors(self, consumed_samples: int) -> Iterator[Cursor | None]:
        """Yield for each lane the start of its next window after the consumed samples, where this rank knows it."""
        return (lane.cursors.get(window) for lane, window in self._next_windows(consumed_samples))

    def go_on(self, consumed_samples: int, cursors: Sequence[Sequence[int] | None]) -> None:
        """Restore the starts of the next windows after the consumed samples."""
        for (lane, window), cursor in zip(self._next_windows(consumed_samples), cursors, strict=True):
            if cursor is not None:
                lane.cursors[window] = Cursor(*cursor)

    def _next_windows(self, consumed_samples: int) -> Iterator[tuple[Lane, int]]:
        lanes = self.rows.num_lanes
        return ((each, max(-(-(consumed_samples - lane) // lanes), 0)) for lane, each in enumerate(self._lanes))

    def describe(self) -> str:
        """Return a line for the start of a run."""
        rows = self.rows
        shards = f"{rows.num_shards} shards in {rows.num_lanes} lanes"
        return f"{rows.name}: read as a stream of {shards}; how often is not known before"


class StreamedSamples:
    """Samples 0, 1, ... of one or several streamed datasets in the order of a blend, without end."""

    def __init__(self, datasets: Sequence[StreamedDataset], seq_length: int, blend: Blend = ALONE) -> None:
        self.seq_length, self.datasets, self._blend = seq_length, datasets, blend
        self._streams = [DatasetSamples(rows, seq_length) for rows in datasets]

    @property
    def sources(self) -> tuple[Any, ...]:
        """The token files that are read: none."""
        return ()

    @property
    def num_lanes(self) -> int:
        """Number of lanes of all datasets."""
        return sum(rows.num_lanes for rows in self.datasets)

    @property
    def faults(self) -> list[str]:
        """Descriptions of the first records that were left out so far."""
        return [fault for rows in self.datasets for fault in rows.faults]

    @property
    def contents(self) -> list[list[object]]:
        """Values that identify the samples, with the weight of each dataset; raises UserError if one has no text."""
        return [[each.fingerprint, part] for each, part in zip(self._streams, self._blend.parts, strict=True)]

    def read(self, samples: Indices) -> npt.NDArray[np.int64]:
        """Return [samples, seq_length + 1] tokens; raises UserError for a row without text unless such are left out."""
        sources, positions = self._blend.locate(samples)
        tokens = np.empty((len(samples), self.seq_length + 1), np.int64)
        for source in np.unique(sources).tolist():
            rows = sources == source
            tokens[rows] = self._streams[source].read(positions[rows])
        return tokens

    def place(self, sample: int) -> str:
        """Return where a sample comes from, for a message."""
        sources, positions = self._blend.locate(np.array([sample]))
        return self._streams[int(sources[0])].place(int(positions[0]))

    def cursors(self, consumed_samples: int) -> dict[str, tuple[int, ...]]:
        """Return by lane the start of its next window after the consumed samples, where this rank knows it."""
        return {
            self._lane(source, lane): tuple(cursor)
            for source, cursors in enumerate(self._next(consumed_samples))
            for lane, cursor in enumerate(cursors)
            if cursor not in (None, Cursor())
        }

    def num_bad(self, consumed_samples: int) -> tuple[int, ...]:
        """Return by lane the number of records left out among the consumed samples, 0 where this rank does not know."""
        found = (cursor for cursors in self._next(consumed_samples) for cursor in cursors)
        return tuple(cursor.num_bad if cursor else 0 for cursor in found)

    def go_on(self, consumed_samples: int, cursors: Mapping[str, Sequence[int]]) -> None:
        """Restore the starts of the next windows after the consumed samples."""
        for source, (stream, consumed) in enumerate(self._consumed(consumed_samples)):
            stream.go_on(consumed, [cursors.get(self._lane(source, lane)) for lane in range(stream.rows.num_lanes)])

    def _lane(self, source: int, lane: int) -> str:
        return str(lane) if len(self._streams) == 1 else f"{source}.{lane}"

    def _consumed(self, consumed_samples: int) -> Iterator[tuple[DatasetSamples, int]]:
        return zip(self._streams, self._blend.counts(consumed_samples), strict=True)

    def _next(self, consumed_samples: int) -> Iterator[list[Cursor | None]]:
        return (list(stream.cursors(consumed)) for stream, consumed in self._consumed(consumed_samples))

    def consumed_tokens(self, spans: Iterable[tuple[int, int, int]]) -> Mapping[str, float]:
        """Return the metric of each dataset's tokens in spans (first sample, end, trained length); {} for one alone."""
        return self._blend.consumed_tokens([rows.name for rows in self.datasets], spans)

    def describe(self, num_samples: int, _max_epochs: float) -> Iterator[str]:
        """Yield lines for the start of a run."""
        parts = self._blend.parts
        for stream, part, number in zip(self._streams, parts, self._blend.counts(num_samples), strict=True):
            share = f"; {number} samples, {100 * part / sum(parts):.4g} %" if len(parts) > 1 else ""
            yield stream.describe() + share
