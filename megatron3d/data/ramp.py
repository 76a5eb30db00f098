"""How large each global batch is, by the samples that are used up when it begins: neither layout nor restart matters.

    size(c) = start + increment floor(c n / samples),   n = (end - start) / increment,   never above its end

The number of sequences follows Megatron-LM's rampup_batch_size (megatron/core/num_microbatches_calculator.py).  The
length that is trained on cuts each sample (Li et al. 2021, arXiv:2108.06084, section 4): its later tokens are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Batch(NamedTuple):
    """The sequences of a global batch, and how many tokens of each are trained on."""

    num_samples: int
    seq_length: int

    @property
    def num_tokens(self) -> int:
        """Of the whole batch."""
        return self.num_samples * self.seq_length


@dataclass(frozen=True)
class Ramp:
    """From `start` by `increment` in even steps to `end`, which is reached when `num_samples` are used up."""

    start: int
    increment: int
    num_samples: int
    end: int

    @property
    def num_steps(self) -> int:
        """How often it grows."""
        return (self.end - self.start) // self.increment

    def at(self, consumed_samples: int) -> int:
        """The size when so many samples are used up."""
        return self.start + self.increment * min(consumed_samples * self.num_steps // self.num_samples, self.num_steps)

    def next_change(self, consumed_samples: int) -> int | None:
        """Samples after which it is another one than now; None: it stays."""
        step = consumed_samples * self.num_steps // self.num_samples
        return None if step >= self.num_steps else -(-(step + 1) * self.num_samples // self.num_steps)


def make_ramp(given: tuple[int, int, int] | None, end: int) -> Ramp:
    """The ramp of a key, [start, increment, samples]; without one all is as at its end."""
    return Ramp(*given, end) if given else Ramp(end, 1, 1, end)


class IterationRange(NamedTuple):
    """Iterations that are alike: the first one's first sample, how many they are (None: without end), their batches."""

    first_sample: int
    num_iterations: int | None
    batch: Batch


@dataclass(frozen=True)
class Batches:
    """The global batch of every iteration."""

    size: Ramp
    length: Ramp

    def at(self, consumed_samples: int) -> Batch:
        """The batch that begins when so many samples are used up."""
        return Batch(self.size.at(consumed_samples), self.length.at(consumed_samples))

    @property
    def last(self) -> Batch:
        """What all batches are in the end."""
        return Batch(self.size.end, self.length.end)

    def runs(self) -> Iterator[IterationRange]:
        """All iterations, in order."""
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
        """Samples that the first iterations use up."""
        for run in self.runs():
            if run.num_iterations is None or num_iterations <= run.num_iterations:
                return run.first_sample + num_iterations * run.batch.num_samples
            num_iterations -= run.num_iterations
        raise AssertionError("the last run has no end")

    def spans(self, num_samples: int) -> Iterator[tuple[int, int, int]]:
        """Of the first samples, runs of such as are cut to one length: the first one, the one after, the length."""
        begin, length = 0, self.length.at(0)
        for run in self.runs():
            if run.first_sample >= num_samples:
                break
            if run.batch.seq_length != length:
                yield begin, run.first_sample, length
                begin, length = run.first_sample, run.batch.seq_length
        yield begin, num_samples, length

    def num_tokens(self, num_samples: int) -> int:
        """Tokens that are trained on in the first samples."""
        return sum((stop - start) * length for start, stop, length in self.spans(num_samples))
