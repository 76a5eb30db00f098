"""Rules of sliding windows."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.config.validate.facts import Facts


def window_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per key of windows that is unused or impossible."""
    model = facts.config.model
    where, pattern = facts.named("model.window_size"), facts.arch.window_pattern
    if model.window_size is not None:
        left, right = model.window_size
        if right != 0:
            yield f"{where}: attention is causal, so that no key after the query is seen; use [{max(left, 1)}, 0]"
        if left < 1:
            yield f"{where}: a query would see no key before itself; use [127, 0], or another first number above 0"
    if model.window_attn_skip_freq is None:
        return
    where = facts.named("model.window_attn_skip_freq")
    if model.window_size is None:
        yield f"{where}: no layer has a window; set model.window_size, or leave it out"
    elif len(pattern) > model.num_layers:
        yield f"{where}: longer than model.num_layers={model.num_layers}; use {model.num_layers} or less"
    elif not any(pattern):
        yield f"{where}: no layer has the window; use 2, or another number above 1"
    elif all(pattern):
        yield f"{where}: every layer has the window; leave it out"
