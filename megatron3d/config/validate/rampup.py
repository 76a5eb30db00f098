"""Rules of batch-size and sequence-length ramps: each value on the way is divisible among ranks and microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts, near_divisors, plain

BATCH, LENGTH = "train.rampup_batch_size", "train.seq_length_warmup"
MAX_STEPS = 10_000
ENDS = {BATCH: "train.global_batch_size", LENGTH: "model.seq_length"}


def ramp_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per ramp whose steps do not reach the final value exactly."""
    batches = facts.spec.batches
    for key, ramp in ((BATCH, batches.size), (LENGTH, batches.length)):
        way, end = ramp.end - ramp.start, plain(facts.config, ENDS[key])
        if way // ramp.increment > MAX_STEPS:
            yield (
                f"{facts.named(key)}: {way // ramp.increment} steps of {ramp.increment} to {end}, more than "
                f"{MAX_STEPS}; use steps of {-(-way // MAX_STEPS)} or more"
            )
        elif way < 0:
            yield f"{facts.named(key)}: starts above {end}; use a start of 1 to {ramp.end}"
        elif way % ramp.increment:
            yield (
                f"{facts.named(key)}: from {ramp.start} in steps of {ramp.increment} it does not reach {end}; "
                f"use steps of {one_of(near_divisors(way, ramp.increment))}"
            )


def ramp_batch_problems(facts: Facts, step: int) -> Iterator[str]:
    """Yield a message if a batch size on the ramp is not a multiple of `step` sequences, a microbatch per data rank."""
    train = facts.config.train
    if train.rampup_batch_size is None or train.global_batch_size % step:
        return
    start, increment, samples = train.rampup_batch_size
    if start % step or increment % step:
        first = min(max(start // step, 1) * step, train.global_batch_size)
        yield (
            f"{facts.named(BATCH)}: start and increment must be multiples of micro_batch_size {train.micro_batch_size} "
            f"x data parallel {step // train.micro_batch_size} = {step}; use for example [{first},{step},{samples}]"
        )


def ramp_length_problems(facts: Facts, step: int) -> Iterator[str]:
    """Yield a message if, for a length on the ramp, the tokens of a microbatch are not a multiple of `step`."""
    train = facts.config.train
    if train.seq_length_warmup is None or (train.micro_batch_size * facts.config.model.seq_length) % step:
        return
    start, increment, samples = train.seq_length_warmup
    least = step // math.gcd(step, train.micro_batch_size)
    if start % least or increment % least:
        first = min(max(start // least, 1) * least, facts.config.model.seq_length)
        yield (
            f"{facts.named(LENGTH)}: start and increment must be multiples of {least}, so that micro_batch_size "
            f"{train.micro_batch_size} x length is a multiple of the {step} ranks that split tokens; use for example "
            f"[{first},{least},{samples}]"
        )
