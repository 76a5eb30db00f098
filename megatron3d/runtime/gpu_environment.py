"""Environment of a process that computes on a GPU: what torch and NCCL read when they start, unless the user set it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

# NCCL's own monitor would end a process without a verdict before the watchdog speaks.
MONITOR_GRACE_S = 60.0


@dataclass(frozen=True)
class Variable:
    """Environment variable with its value in a run; `others` are further names under which a user may set it.

    Attributes:
        fact: its name in the startup report; None where it is not worth a line.
    """

    name: str
    value: str
    others: tuple[str, ...] = ()
    fact: str | None = None

    def chosen(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the name and value that the user has set."""
        return next(((name, environ[name]) for name in (self.name, *self.others) if name in environ), None)


def variables(timeout_s: float) -> tuple[Variable, ...]:
    """Return the variables of a run whose watchdog waits for `timeout_s`."""
    return (
        # Segments of fixed sizes leave holes when sizes change (evaluation, ramps, offload); expandable ones are mapped
        # page by page.
        Variable("PYTORCH_ALLOC_CONF", "expandable_segments:True", ("PYTORCH_CUDA_ALLOC_CONF",), "GPU allocator"),
        Variable("TORCH_FR_BUFFER_SIZE", "2000", ("TORCH_NCCL_TRACE_BUFFER_SIZE",), "collectives in flight recorder"),
        Variable("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{timeout_s + MONITOR_GRACE_S:.0f}"),
    )


def set_up(environ: MutableMapping[str, str], timeout_s: float) -> dict[str, str]:
    """Set what the user has not set, and return the settings for the startup report by name."""
    report: dict[str, str] = {}
    for variable in variables(timeout_s):
        set_by_user = variable.chosen(environ)
        if set_by_user is None:
            environ[variable.name] = variable.value
        if variable.fact:
            report[variable.fact] = variable.value if set_by_user is None else f"{set_by_user[1]} ({set_by_user[0]})"
    return report
