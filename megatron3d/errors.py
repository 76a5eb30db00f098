"""Errors in user input, shown as one message per problem without a traceback; the exit code is 2."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """One or more problems, each a sentence with the field, the value, the rule and a change that works."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    @classmethod
    def collect(cls, problems: Iterable[str]) -> None:
        """Raise one error with all problems, if there are any."""
        found = tuple(problems)
        if found:
            raise cls(*found)
