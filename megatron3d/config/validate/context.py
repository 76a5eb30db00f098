"""Rules of context parallelism: every length of a sequence is a whole number of chunks, two per context rank."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts, near_multiples

SIZE, WARMUP = "parallel.context_parallel_size", "train.seq_length_warmup"


def context_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per length that the context ranks cannot split."""
    size, model = facts.config.parallel.context_parallel_size, facts.config.model
    if size == 1:
        return
    step = 2 * size
    if model.seq_length % step:
        yield (
            f"{facts.named(SIZE)}: model.seq_length={model.seq_length} is not a multiple of {step}, two chunks for "
            f"each of {size} ranks; use model.seq_length {one_of(near_multiples(step, model.seq_length))}, or another "
            "context_parallel_size"
        )
        return
    warmup = facts.config.train.seq_length_warmup
    if warmup is not None and (warmup[0] % step or warmup[1] % step):
        first = min(max(warmup[0] // step, 1) * step, model.seq_length)
        yield (
            f"{facts.named(WARMUP)}: start and increment must be multiples of {step}, two chunks of a sequence for "
            f"each of the {size} context ranks; use for example [{first},{step},{warmup[2]}]"
        )
