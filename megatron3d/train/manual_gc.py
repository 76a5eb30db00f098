"""Python's garbage collection at chosen iterations, on all ranks after the same step (Megatron-LM's --manual-gc).

By itself Python collects when it has made enough objects, at another time on each rank: with a thousand ranks one of
them is collecting in nearly every step, and all wait for it.  Objects that the start has made are not
looked at again.
"""

from __future__ import annotations

import gc
from types import TracebackType

from megatron3d.config.schema import TrainConfig


class ManualGc:
    """While entered, collects garbage only in `after_step`, as `train.manual_gc` says; else changes nothing."""

    def __init__(self, config: TrainConfig) -> None:
        self._is_manual, self._interval = config.manual_gc, config.manual_gc_interval

    def __enter__(self) -> ManualGc:
        if self._is_manual:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def after_step(self, iteration: int) -> None:
        """Collect if `iteration` is a multiple of `train.manual_gc_interval`."""
        if self._is_manual and self._interval and iteration % self._interval == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_manual:
            gc.unfreeze()
            gc.enable()
