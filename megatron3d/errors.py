"""What a person typed or supplied is wrong: shown as one message per problem, without a traceback, exit code 2."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """One or more problems, each a sentence with the field, the value, the rule and a change that works."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    @classmethod
    def collect(cls, problems: Iterable[str]) -> None:
        """Raise if there is any problem."""
        found = tuple(problems)
        if found:
            raise cls(*found)
