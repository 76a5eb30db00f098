"""Errors in user input, shown as one message per problem without a traceback; the exit code is 2."""

from __future__ import annotations

from collections.abc import Iterable

from megatron3d.errors.foreign_text import one_line

MAX_PROBLEMS = 100


class UserError(ValueError):
    """One or more problems, each a sentence with the field, the value, the rule and a change that works.

    Each becomes one line of bounded length without control characters, whatever names and values it quotes; of very
    many, only the first `MAX_PROBLEMS` are kept.
    """

    def __init__(self, *problems: str) -> None:
        lines = [one_line(problem) for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append(f"and {len(problems) - MAX_PROBLEMS:,} more problems: correct these first")
        super().__init__(*lines)
        self.problems = tuple(lines)

    def __str__(self) -> str:
        return "\n".join(self.problems)

    @classmethod
    def of(cls, error: OSError) -> UserError:
        """Return the error for a file that cannot be read or written."""
        return cls(f"{error.filename or 'a file'}: {error.strerror or error}")

    @classmethod
    def collect(cls, problems: Iterable[str]) -> None:
        """Raise one error with all problems, if there are any."""
        found = tuple(problems)
        if found:
            raise cls(*found)
