"""Samples of token files: of one split of a corpus, of several corpora in the order of a blend, and for an evaluation.

sample i of a blend = sample j of source s,   (s, j) = blend(i);   sample j = the window that samples.py defines
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron3d.data.corpus.blend import Blend
from megatron3d.data.corpus.samples import Split, sample_offsets
from megatron3d.data.corpus.spec import check_token_ids
from megatron3d.data.permutation import Indices
from megatron3d.data.token_files.indexed import BLOCK, IndexedDataset


@dataclass(frozen=True)
class TokenFileSamples:
    """Samples 0, 1, ... of one split, without end, epoch after epoch; shuffled unless seed is None."""

    dataset: IndexedDataset
    split: Split
    seq_length: int
    vocab_size: int
    seed: int | None

    @property
    def num_windows(self) -> int:
        """Number of distinct samples: the length of an epoch."""
        return self.split.num_windows(self.seq_length)

    def read(self, samples: Indices) -> npt.NDArray[np.int64]:
        """Return [samples, seq_length + 1] tokens; raises UserError for a token id beyond the vocabulary."""
        offsets = sample_offsets(self.split, self.seq_length, self.seed, samples)
        tokens = self.dataset.windows(offsets, self.seq_length + 1)
        unsigned = tokens.view(f"<u{tokens.itemsize}")  # a negative id becomes a large one
        if unsigned.max(initial=0) >= self.vocab_size:
            row, column = np.argwhere(unsigned >= self.vocab_size)[0]
            wrong = int(tokens[row, column])
            found = f"token {offsets[row] + column} has id {wrong}"
            check_token_ids(self.dataset.prefix, wrong, wrong, self.vocab_size, found)
        return tokens.astype(np.int64)


@dataclass(frozen=True)
class EvaluationWindows:
    """A range as consecutive samples in which every token but the first is predicted once, or the first `most` of them.

    Sample i = tokens [i S, i S + S] of the range.  Positions behind its end hold -1: no label, and an ignored input.
    """

    dataset: IndexedDataset
    split: Split
    seq_length: int
    vocab_size: int
    most: int | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples that are not empty."""
        num_samples = -(-(self.split.num_tokens - 1) // self.seq_length)
        return min(num_samples, self.most or num_samples)

    @property
    def span(self) -> tuple[int, int]:
        """First and end of the corpus's tokens that are predicted."""
        first = self.split.first_token + 1
        return first, min(first + self.num_samples * self.seq_length, self.split.first_token + self.split.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are predicted."""
        first, last = self.span
        return last - first

    def read(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return [samples, seq_length + 1] tokens, -1 where there is none; raises UserError beyond the vocabulary."""
        rows = np.full((len(samples), self.seq_length + 1), -1, np.int64)
        for row, sample in zip(rows, samples.tolist(), strict=True):
            first = self.split.first_token + sample * self.seq_length
            last = min(first + self.seq_length + 1, self.span[1])
            if last - first > 1:
                tokens = self.dataset.tokens(first, last)
                low, high = int(tokens.min()), int(tokens.max())
                check_token_ids(self.dataset.prefix, low, high, self.vocab_size)
                row[: len(tokens)] = tokens
        return rows

    def count_bytes(self, bytes_of_token: npt.NDArray[np.int64]) -> int:
        """Return the bytes of text that the predicted tokens stand for."""
        first, last = self.span
        blocks = (self.dataset.tokens(start, min(start + BLOCK, last)) for start in range(first, last, BLOCK))
        return sum(int(bytes_of_token[block].sum()) for block in blocks)


@dataclass(frozen=True)
class BlendedSamples:
    """Samples of one or several corpora in the order of a blend."""

    sources: tuple[TokenFileSamples, ...]
    blend: Blend

    def read(self, samples: Indices) -> npt.NDArray[np.int64]:
        """Return [samples, seq_length + 1] tokens; raises UserError for a token id beyond the vocabulary."""
        sources, positions = self.blend.locate(samples)
        tokens = np.empty((len(samples), self.sources[0].seq_length + 1), np.int64)
        for source in np.unique(sources).tolist():
            rows = sources == source
            tokens[rows] = self.sources[source].read(positions[rows])
        return tokens

    @property
    def contents(self) -> list[list[object]]:
        """Values that identify the samples: the fingerprint and weight of each corpus."""
        return [[fingerprint(each.dataset), part] for each, part in zip(self.sources, self.blend.parts, strict=True)]

    def place(self, sample: int) -> str:
        """Return where a sample comes from, for a message."""
        sources, places = self.blend.locate(np.array([sample]))
        source = self.sources[int(sources[0])]
        (offset,) = sample_offsets(source.split, source.seq_length, source.seed, places).tolist()
        return f"{source.dataset.prefix} from token {offset}, epoch {int(places[0]) // source.num_windows}"

    def describe(self, num_samples: int, max_epochs: float) -> Iterator[str]:
        """Yield lines for the start of a run: what it will read of each corpus, with a warning for many epochs."""
        parts = self.blend.parts
        for source, part, count in zip(self.sources, parts, self.blend.counts(num_samples), strict=True):
            name, epochs = source.dataset.prefix, count / source.num_windows
            share = f"{100 * (part / sum(parts)):.4g} % " if len(parts) > 1 else ""
            yield f"{name}: {share}{count} samples to read, of {source.num_windows}: {epochs:.4g} epochs"
            if epochs > max_epochs:
                yield (
                    f"WARNING: {name} is read {epochs:.3g} times, more than data.max_epochs={max_epochs:g}; "
                    "give it less weight, add text, or train for fewer iterations"
                )

    def consumed_tokens(self, spans: Iterable[tuple[int, int, int]]) -> Mapping[str, float]:
        """Return the metric of each corpus's tokens in spans (first sample, end, trained length); {} for one corpus."""
        totals = dict.fromkeys([f"consumed_tokens/{source.dataset.prefix}" for source in self.sources], 0.0)
        for start, stop, length in spans if len(self.sources) > 1 else ():
            for name, before, after in zip(totals, self.blend.counts(start), self.blend.counts(stop), strict=True):
                totals[name] += (after - before) * length
        return totals if len(self.sources) > 1 else {}


def fingerprint(data: IndexedDataset) -> str:
    """Return sha256 of a corpus's counts, dtype, and 64 evenly spread runs of 1024 tokens."""
    digest = hashlib.sha256(f"{data.num_documents} {data.num_tokens} {data.dtype.str}".encode())
    for start in np.linspace(0, max(0, data.num_tokens - 1024), 64).astype(np.int64).tolist():
        digest.update(data.tokens(start, min(start + 1024, data.num_tokens)).tobytes())
    return digest.hexdigest()
