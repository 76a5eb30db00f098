"""Weight gradients between their GEMM and main_grad: reductions in flight, and whole wgrads that are deferred.

    backward of layer i     dgrad GEMM | wgrad GEMM | dgrad GEMM of layer i-1 | ...
    reduction of dW_i                               | in flight               | added to main_grad

Overlapping the reduction with the backward of the preceding layers is ORS of Singh et al. 2024 (arXiv:2305.13525,
section 5); deferring the wgrad to fill pipeline bubbles is from Qi et al. 2023 (arXiv:2401.10241).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from megatron3d.comm.interface import Pending
from megatron3d.ops.main_grad import MainGrads


class WgradQueue:
    """Weight gradients on their way to main_grad.

    Args:
        main_grads: buffers that the gradients are added to.
        overlaps_reduction: keep the reduction of one dW in flight until the next one starts, or until `flush`.
    """

    def __init__(self, main_grads: MainGrads, overlaps_reduction: bool = False) -> None:
        self._main_grads, self._overlaps = main_grads, overlaps_reduction
        self._deferred: list[Callable[[], None]] | None = None
        self._in_flight: tuple[Tensor, Pending] | None = None

    @contextlib.contextmanager
    def defer(self) -> Iterator[list[Callable[[], None]]]:
        """Collect the wgrads of the backward in the body; call them later in order, and `flush` after the last."""
        deferred: list[Callable[[], None]] = []
        self._deferred = deferred
        yield deferred
        self._deferred = None

    @property
    def is_deferring(self) -> bool:
        """Return whether the body of `defer` is running."""
        return self._deferred is not None

    def submit(self, w: Tensor, compute: Callable[[], Pending | None]) -> Pending | None:
        """Compute the gradient of `w` now, or later where wgrads are deferred.

        Args:
            compute: multiplies and starts the reduction; returns None where the GEMM accumulated in main_grad.

        Returns:
            dW for autograd; None where the queue, or `compute`, adds it to main_grad.
        """
        if self._deferred is not None:
            self._deferred.append(partial(self._compute, w, compute))
        elif self._overlaps:
            self._compute(w, compute)
        else:
            return compute()
        return None

    def _compute(self, w: Tensor, compute: Callable[[], Pending | None]) -> None:
        reduction = compute()
        self.flush()
        self._in_flight = None if reduction is None else (w, reduction)
        if not self._overlaps:
            self.flush()

    def flush(self) -> None:
        """Wait for the reduction in flight and add it to main_grad; to be called at the end of each backward."""
        if self._in_flight is not None:
            (w, reduction), self._in_flight = self._in_flight, None
            self._main_grads.add(w, reduction.wait())
