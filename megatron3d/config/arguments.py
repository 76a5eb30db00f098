"""Parser of a command line with options and `section.key=value`, in any order."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise

from megatron3d.config.suggest import nearest, nearest_key, value_of
from megatron3d.runtime.arguments import ToolParser
from megatron3d.runtime.limits import shorten


class ConfigParser(ToolParser):
    """Parser with `section.key=value` as positional arguments, which names the key that an unknown option is here."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(program, description=description, allow_abbrev=False)

    def add_overrides(self, about: str) -> None:
        """Add `overrides`, a list of `section.key=value`."""
        self.add_argument("overrides", nargs="*", metavar="section.key=value", help=about)

    def parse_args(  # type: ignore[override]  # argparse also takes objects of other classes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse options and overrides in any order; exit with code 2 and one message for all unknown options."""
        words = sys.argv[1:] if args is None else list(args)
        typed, unknown = self.parse_known_intermixed_args(words, namespace)
        following = dict(pairwise([*words, "-"]))
        if problems := [self._problem(word, following.get(word, "-")) for word in unknown if word.startswith("-")]:
            self.error("\n".join(problems))
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return typed

    def _problem(self, word: str, after: str) -> str:
        """Return what to write in place of an unknown option, which the word `after` follows."""
        flag, equals, given = word.partition("=")
        section, _, name = flag.lstrip("-").rpartition(".")
        value = value_of(name) or given or ("VALUE" if equals or after.startswith("-") or "=" in after else after)
        own, key = nearest(flag, self._option_string_actions, 0.88), nearest_key(section, name)
        if own or key:
            return f"{shorten(word)}: no option of this program; use {own or f'{key}={shorten(value)}'}"
        return f"{shorten(word)}: no option of this program; --help lists them, docs/configuration.md the keys"
