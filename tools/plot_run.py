"""Draws the curves of one or several runs from their metrics.jsonl: loss, learning rate, gradient norm, tokens/s.

python tools/plot_run.py RUN_FOLDER [RUN_FOLDER ...] --output curves.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron3d.cli import run_tool
from megatron3d.errors import UserError
from megatron3d.metrics.journal import FILE_NAME, read_journal

Rows = list[dict[str, Any]]

PANELS = {
    "loss": ("lm_loss", "validation_loss"),
    "learning rate": ("learning_rate",),
    "gradient norm": ("grad_norm",),
    "tokens per second": ("tokens_per_s",),
}
STYLES = {"validation_loss": "o--"}


def plot(arguments: argparse.Namespace) -> None:
    """Read every run, draw, and say where the picture is."""
    runs = {str(folder): read_run(folder) for folder in arguments.run_folders}
    save(draw(runs), arguments.output)
    print(f"{arguments.output}: curves of {len(runs)} run(s)")


def read_run(folder: Path) -> Rows:
    """The rows of a run's metrics.jsonl."""
    path = folder / FILE_NAME
    rows = read_journal(path)
    if not any("lm_loss" in row for row in rows):
        raise UserError(f"{path}: holds no training step yet; give a run that has logged at least one")
    return rows


def draw(runs: Mapping[str, Rows]) -> Figure:
    """One panel per quantity, one colour per run."""
    figure, grid = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axes, (title, keys) in zip(grid.flat, PANELS.items(), strict=True):
        for number, (name, rows) in enumerate(runs.items()):
            for key in keys:
                curve(axes, rows, key, f"C{number}", name)
        axes.set_title(title)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
    grid.flat[0].legend(fontsize="small")
    return figure


def curve(axes: Axes, rows: Rows, key: str, colour: str, name: str) -> None:
    """One quantity of one run; a quantity that was never logged leaves no trace."""
    points = [(row["iteration"], row[key]) for row in rows if row.get(key) is not None]
    if points:
        kind = " (validation)" if key == "validation_loss" else ""
        axes.plot(*zip(*points, strict=True), STYLES.get(key, "-"), color=colour, label=name + kind, markersize=4)


def save(figure: Figure, output: Path) -> None:
    """Write the picture in the format of its name."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--output={output}: cannot be written: {error}") from error
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the tool."""
    parser = argparse.ArgumentParser(prog="plot_run", description=__doc__.partition("\n")[0])
    parser.add_argument("run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="checkpoint.save of a run")
    parser.add_argument(
        "--output", type=Path, default=Path("curves.png"), help="picture to write; default: %(default)s"
    )
    return run_tool(plot, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
