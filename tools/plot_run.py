"""Plot the metrics of one or several runs as curves in a picture, or of one run as an HTML page.

python tools/plot_run.py --load RUN [RUN ...] --output curves.png
python tools/plot_run.py --load RUN --output run.html --refresh 10      # again every 10 s, until the run ends
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.runtime.arguments import ToolParser, add_load, add_overwrite, require_free, whole
from megatron3d.runtime.files import replace_file
from megatron3d.runtime.program import parse_first, run_tool


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="plot_run", description=__doc__.partition("\n")[0])
    add_load(parser, "checkpoint.save of a run", "+")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="picture or .html to write")
    parser.add_argument(
        "--refresh", type=whole(1, 86_400), metavar="SECONDS", help="draw again, until the runs have ended"
    )
    add_overwrite(parser)
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

import matplotlib

matplotlib.use("Agg")

from megatron3d.viz.curves import draw, read_run
from megatron3d.viz.report import is_finished, report

PAGE = ".html"


def plot(arguments: argparse.Namespace) -> None:
    """Write the plot and print its path; with `--refresh` update it until the run ends."""
    folders, output = arguments.load, arguments.output
    if output.suffix == PAGE and len(folders) > 1:
        raise UserError(f"--output={output}: a page is of one run, and these are {len(folders)}; use .png")
    require_free("--output", [output], overwrite=arguments.overwrite)
    goes_on = write(folders, output, arguments.refresh)
    what = "report of" if output.suffix == PAGE else "curves of"
    print(f"{output}: {what} {len(folders)} run(s)", flush=True)
    while goes_on:
        time.sleep(arguments.refresh)
        goes_on = write(folders, output, arguments.refresh)


def write(folders: Sequence[Path], output: Path, refresh_s: int | None) -> bool:
    """Replace the output file, in the format of its suffix; return whether it needs further updates."""
    runs = {str(folder): read_run(folder) for folder in folders}
    goes_on = refresh_s is not None and not all(map(is_finished, runs.values()))
    page = report(folders[0], refresh_s if goes_on else None) if output.suffix == PAGE else None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(output) as file:
            if page is None:
                draw(runs).savefig(file, dpi=120, format=output.suffix.removeprefix("."))
            else:
                file.write(page.encode())
    except (OSError, ValueError) as error:
        raise UserError(f"--output={output}: cannot be written: {error}") from error
    return goes_on


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(plot, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
