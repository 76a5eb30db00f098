"""Text of tokens as they are generated: whole characters only, up to a stop string.

    token      "caf"   C3   A9   " ST"   "ONE"   " STO"   "P!"        with the stop string "STOP"
    shown      "caf"        "é"  " "     "STONE" " "                  and the text ends here

The first byte of a character waits for the others, and what may be the start of a stop string for what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.inference.sampling import Text

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string in it, or all of it."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def num_held_back(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the start of a stop string."""
    starts = (stop[:length] for stop in stops for length in range(1, len(stop)))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


class Continuation:
    """What the tokens that a text gets from now on say; every rank must update it after the same tokens.

    Args:
        stops: strings at which the text is done; it ends before the first of them.
        show: called with each further piece of the text, as soon as it cannot change any more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: Text,
        stops: Sequence[str] = (),
        show: Callable[[str], None] = lambda piece: None,
    ) -> None:
        assert all(stops), "a stop string has a character"
        self._tokenizer, self._text, self._stops, self._show = tokenizer, text, stops, show
        self.prompt = tokenizer.decode(text.tokens)
        self.shown = ""
        self.is_stopped = False

    def update(self) -> None:
        """Show what the text's newest token completes; the text is done where that is a stop string."""
        if self.is_stopped:
            return
        new = self._new()
        before = cut(new, self._stops)
        self.is_stopped = before != new
        if self.is_stopped:
            self._text.is_done = True
        else:
            before = before.rstrip(UNFINISHED)
            before = before[: len(before) - num_held_back(before, self._stops)]
        self._extend(before)

    def finish(self) -> str:
        """Show what has waited for tokens that do not come; return the whole continuation."""
        if not self.is_stopped:
            self._extend(self._new())
        return self.shown

    def _new(self) -> str:
        return self._tokenizer.decode(self._text.tokens)[len(self.prompt) :]

    def _extend(self, text: str) -> None:
        if piece := text[len(self.shown) :]:
            self.shown += piece
            self._show(piece)
