"""SVG pictures of rectangles and words, byte for byte the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

INK, GREY = "#1c2530", "#6b7582"
PAPER, EMPTY = "#ffffff", "#eef1f4"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


class Rect(NamedTuple):
    """Rectangle: left, top, width and height, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        """Centre of the rectangle."""
        return self.x + self.width / 2, self.y + self.height / 2


class Canvas:
    """Picture on white paper with a title and a line below it; later shapes are drawn over earlier ones."""

    def __init__(self, width: float, height: float, title: str, below: str, top: float = 30) -> None:
        self._size, self._title = (width, height), title
        self._shapes = list[str]()
        self.text((24, top), title, 17, INK, "bold")
        self.text((24, top + 20), below, 12, GREY)

    def rect(self, at: Rect, fill: str, stroke: str = PAPER, width: float = 1.0) -> None:
        """Add a rectangle; a fill of `none` leaves what is below visible."""
        places = " ".join(
            f'{name}="{number(value)}"' for name, value in zip(("x", "y", "width", "height"), at, strict=True)
        )
        self._shapes.append(f'<rect {places} rx="2" fill="{fill}" stroke="{stroke}" stroke-width="{number(width)}"/>')

    def text(self, at: tuple[float, float], words: str, size: float = 12, colour: str = INK, style: str = "") -> None:
        """Add words that start here; the style `middle` or `end` puts their middle or end here, `bold` is bold."""
        kinds = style.split()
        anchor = "".join(f' text-anchor="{kind}"' for kind in kinds if kind in ("middle", "end"))
        weight = ' font-weight="600"' if "bold" in kinds else ""
        x, y = map(number, at)
        self._shapes.append(
            f'<text x="{x}" y="{y}" font-size="{number(size)}" fill="{colour}"{anchor}{weight}>{escape(words)}</text>'
        )

    def legend(self, at: tuple[float, float], entries: Sequence[tuple[str, str, str]]) -> None:
        """Add boxes with words in one line: (fill, stroke, words); widths are estimated from the letters."""
        x, y = at
        for fill, stroke, words in entries:
            self.rect(Rect(x, y - 10, 13, 12), fill, stroke, 1.5)
            self.text((x + 19, y), words, 12)
            x += 42 + 6.3 * len(words)

    def document(self) -> str:
        """Return the SVG file."""
        width, height = map(number, self._size)
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img">',
                f"<title>{escape(self._title)}</title>",
                f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
                *self._shapes,
                "</svg>\n",
            )
        )


def number(value: float) -> str:
    """Return a number with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
