"""A range of a corpus as consecutive samples in which every token but the first is predicted exactly once.

sample i = tokens [i S, i S + S] of the range; positions behind its end hold -1: no label, and an ignored input
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron3d.data.corpus.samples import Split
from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.errors import UserError

BLOCK = 2**20


@dataclass(frozen=True)
class EvaluationWindows:
    """All samples of a range, or the first `most` of them; the last may be short, all further ones are empty."""

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
                self._check(tokens)
                row[: len(tokens)] = tokens
        return rows

    def count_bytes(self, bytes_of_token: npt.NDArray[np.int64]) -> int:
        """Return the bytes of text that the predicted tokens stand for."""
        first, last = self.span
        blocks = (self.dataset.tokens(start, min(start + BLOCK, last)) for start in range(first, last, BLOCK))
        return sum(int(bytes_of_token[block].sum()) for block in blocks)

    def _check(self, tokens: npt.NDArray[np.generic]) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise UserError(
                f"data.data_path={self.dataset.prefix}: its token ids are {low} to {high}, outside the vocabulary of "
                f"{self.vocab_size}; use a corpus that was made with this model's tokenizer"
            )
