"""Parser of command lines, and of the numbers in them: bounded, and with messages of bounded length."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import NoReturn

from megatron3d.runtime.limits import MAX_NUMBER, MAX_QUOTED, shorten, whole_number


class ToolParser(argparse.ArgumentParser):
    """Parser of a program's command line, which ends the program with exit code 2 and a short message."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, each word of it shortened, and exit with code 2."""
        words = re.sub(rf"\S{{{MAX_QUOTED},}}", lambda word: shorten(word[0]), message)
        super().error(shorten(words, 10 * MAX_QUOTED))


def whole(least: int = 0, most: int = MAX_NUMBER) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`, for argparse."""

    def parse(text: str) -> int:
        number = whole_number(text)
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{shorten(text)} is not a whole number of {least} to {most}")
        return number

    return parse


def real(least: float = 0.0, most: float = MAX_NUMBER) -> Callable[[str], float]:
    """Return a parser of numbers from `least` to `most`, for argparse; neither nan nor infinity is one."""

    def parse(text: str) -> float:
        try:
            number = float(text) if text.isascii() else math.nan
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{shorten(text)} is not a number of {least:g} to {most:g}")
        return number

    return parse


positive = whole(1)
