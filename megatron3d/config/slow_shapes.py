"""Sizes that make a GPU slow: tensor cores read tiles of 64 columns, and fused attention heads of multiples of 8.

Published runs with other sizes take up to 1.5 times as long (NVIDIA, Matrix Multiplication Background User's Guide,
"requirements to use tensor cores").
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.config.run_spec import RunSpec
from megatron3d.model.linears import layer_linears
from megatron3d.parallel.layout import span

COLUMNS, HEAD = 64, 8
# Precisions that tensor cores compute in tiles.
_NARROW = ("bf16", "fp16")


def slow_shapes(spec: RunSpec) -> Iterator[str]:
    """Yield a line for each size of a valid run that is slow on GPUs, with the next size that is not."""
    if spec.config.train.precision not in _NARROW:
        return
    head = spec.arch.kv_channels
    if head % HEAD:
        yield (
            f"slow on GPUs: heads of {head} channels are not a multiple of {HEAD}; "
            f"model.kv_channels={_up(head, HEAD)} is the next that is"
        )
    sizes: dict[int, list[str]] = {}
    for name, linear in layer_linears(spec.arch).items():
        plan = linear.plan(spec.mode).on(spec.mesh)
        for features, axes in ((linear.num_inputs, plan.k), (linear.num_outputs, plan.n)):
            low, high = span(features, axes, spec.mesh)
            if (high - low) % COLUMNS:
                sizes.setdefault(high - low, []).append(name)
    for size, names in sizes.items():
        less = f"{size // COLUMNS * COLUMNS:,} or " if size > COLUMNS else ""
        yield (
            f"slow on GPUs: a rank's {size:,} features of {', '.join(dict.fromkeys(names))} are not a multiple of "
            f"{COLUMNS}, as {less}{_up(size, COLUMNS):,} would be"
        )


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
