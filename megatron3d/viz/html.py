"""The few pieces of HTML that a page is made of; whatever is given is text and stays text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape

import matplotlib
from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #222; }
h1 { margin-bottom: 0.2rem; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; margin: 0.6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.8rem; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
th { border-bottom: 1px solid #999; } svg { max-width: 100%; height: auto; } .note { color: #666; }
.bad { color: #b00020; font-weight: 600; } summary { cursor: pointer; }
"""
# Nothing is loaded from anywhere, whatever stands in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, body: Iterable[str], refresh_s: int | None = None) -> str:
    """A whole document, which a browser reads again every `refresh_s` seconds."""
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{refresh}'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading, and what stands below it."""
    return "\n".join((f"<h2>{escape(title)}</h2>", *parts))


def note(text: str, kind: str = "note") -> str:
    """A paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Cells as text."""

    def row(cells: Sequence[object], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(str(cell))}</{kind}>" for cell in cells) + "</tr>"

    return "\n".join(("<table>", row(header, "th"), *(row(cells, "td") for cells in rows), "</table>"))


def details(summary: str, inner: str) -> str:
    """Something that is unfolded by a click."""
    return f"<details><summary>{escape(summary)}</summary>\n{inner}\n</details>"


def svg(figure: Figure) -> str:
    """A figure as an element, its words as text."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg")
    return svg_element(buffer.getvalue())


def svg_element(document: str) -> str:
    """The element of an SVG file."""
    return document[document.index("<svg") :]
