"""Batch size and sequence length of each global batch, as functions of the consumed samples when it begins.

    size(c) = min(end, start + increment floor(c n / samples)),   n = (end - start) / increment

Neither layout nor restart changes them.  The batch size follows Megatron-LM's rampup_batch_size
(megatron/core/num_microbatches_calculator.py).  The sequence length truncates each sample (Li et al. 2021,
arXiv:2108.06084, section 4): its later tokens are not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Batch(NamedTuple):
    """Number of sequences of a global batch, and the number of tokens of each that are trained on."""

    num_samples: int
    seq_length: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole batch that are trained on."""
        return self.num_samples * self.seq_length


@dataclass(frozen=True)
class Ramp:
    """Growth from `start` by `increment` in even steps to `end`, which is reached after `num_samples` samples."""

    start: int
    increment: int
    num_samples: int
    end: int

    @property
    def num_steps(self) -> int:
        """Number of increments."""
        return (self.end - self.start) // self.increment

    def at(self, consumed_samples: int) -> int:
        """Return the size after the consumed samples."""
        return self.start + self.increment * min(consumed_samples * self.num_steps // self.num_samples, self.num_steps)

    def next_change(self, consumed_samples: int) -> int | None:
        """Return the number of samples after which the size changes next; None: it stays."""
        step = consumed_samples * self.num_steps // self.num_samples
        return None if step >= self.num_steps else -(-(step + 1) * self.num_samples // self.num_steps)


def make_ramp(given: tuple[int, int, int] | None, end: int) -> Ramp:
    """Make the ramp of a key's value, [start, increment, samples]; None for one that is at its end throughout."""
    return Ramp(*given, end) if given else Ramp(end, 1, 1, end)


class IterationRange(NamedTuple):
    """Consecutive iterations with equal batches: first sample, number of iterations (None: without end), batch."""

    first_sample: int
    num_iterations: int | None
    batch: Batch


@dataclass(frozen=True)
class Batches:
    """The global batch of every iteration."""

    size: Ramp
    length: Ramp

    def at(self, consumed_samples: int) -> Batch:
        """Return the batch that begins after the consumed samples."""
        return Batch(self.size.at(consumed_samples), self.length.at(consumed_samples))

    @property
    def last(self) -> Batch:
        """The batch at the end of both ramps."""
        return Batch(self.size.end, self.length.end)

    def runs(self) -> Iterator[IterationRange]:
        """Yield all iterations, in order."""
        first = 0
        while True:
            batch = self.at(first)
            changes = [change for ramp in (self.size, self.length) if (change := ramp.next_change(first)) is not None]
            if not changes:
                yield IterationRange(first, None, batch)
                return
            count = -(-(min(changes) - first) // batch.num_samples)
            yield IterationRange(first, count, batch)
            first += count * batch.num_samples

    def consumed_samples(self, num_iterations: int) -> int:
        """Return the samples that the first iterations consume."""
        for run in self.runs():
            if run.num_iterations is None or num_iterations <= run.num_iterations:
                return run.first_sample + num_iterations * run.batch.num_samples
            num_iterations -= run.num_iterations
        raise AssertionError("the last run has no end")

    def num_iterations(self, num_samples: int) -> int:
        """Return the iterations of a run of `num_samples`, as Megatron-LM's `update_train_iters` counts them.

        The last samples are not trained on if they fill no batch.  A run that ends on the ramp of the batch size has
        one more batch, with which it passes `num_samples`.
        """
        if not self.size.num_steps:
            return num_samples // self.size.end
        count, last = 0, min(self.size.num_samples, num_samples)
        for run in self.runs():
            begun = (last - run.first_sample) // run.batch.num_samples + 1
            if run.num_iterations is None or begun <= run.num_iterations:
                rest = num_samples - run.first_sample - begun * run.batch.num_samples
                return count + begun + max(rest, 0) // self.size.end
            count += run.num_iterations
        raise AssertionError("the last run has no end")

    def spans(self, num_samples: int) -> Iterator[tuple[int, int, int]]:
        """Yield spans of the first samples with one sequence length: first sample, end, length."""
        begin, length = 0, self.length.at(0)
        for run in self.runs():
            if run.first_sample >= num_samples:
                break
            if run.batch.seq_length != length:
                yield begin, run.first_sample, length
                begin, length = run.first_sample, run.batch.seq_length
        yield begin, num_samples, length

    def num_tokens(self, num_samples: int) -> int:
        """Return the tokens that are trained on in the first samples."""
        return sum((stop - start) * length for start, stop, length in self.spans(num_samples))
