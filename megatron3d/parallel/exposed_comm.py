"""Name of exposed communication: the time that a rank waits for collectives over certain mesh axes."""

from __future__ import annotations

from megatron3d.parallel.mesh import Axes

_PREFIX, _SEPARATOR = "along ", "·"


class ExposedComm(str):
    """Exposed communication over `axes`, as a key in tables of times; `along x·y` in metrics.jsonl and on the console.

    It is a str, so that such tables have text keys; ask `isinstance` and `axes` instead of reading the text.
    """

    axes: Axes

    def __new__(cls, axes: Axes) -> ExposedComm:
        """Return the name for these axes."""
        name = super().__new__(cls, _PREFIX + _SEPARATOR.join(axes))
        name.axes = axes
        return name

    def __reduce__(self) -> tuple[type[ExposedComm], tuple[Axes]]:
        return ExposedComm, (self.axes,)

    @staticmethod
    def from_log(name: str) -> str:
        """Return a key of metrics.jsonl as ExposedComm if it names axes, else unchanged."""
        return ExposedComm(tuple(name.removeprefix(_PREFIX).split(_SEPARATOR))) if name.startswith(_PREFIX) else name
