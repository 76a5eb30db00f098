"""Draw the blocks of X, W and Y that each rank stores in a tensor-parallel mode, and the collectives, as SVG.

python tools/draw_layouts.py --mode 3d --shape 2 3 4 --rank 7 --output 3d.svg
python tools/draw_layouts.py --output docs/pictures          # every picture of the documentation, into a folder
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.runtime.arguments import MAX_RANKS, ToolParser, add_overwrite, require_free, whole
from megatron3d.runtime.files import write_text
from megatron3d.runtime.program import parse_first, run_tool

# Pictures of the documentation: ranks of a mode, and the coloured rank.
NUM_RANKS, RANK = 8, 5


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="draw_layouts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", choices=MODES, help="default: every picture of the documentation")
    parser.add_argument("--form", help="default: the mode's first")
    parser.add_argument("--shape", type=whole(1, MAX_RANKS), nargs="+", metavar="N", help=f"default: {NUM_RANKS} ranks")
    parser.add_argument("--rank", type=whole(0, MAX_RANKS), default=RANK, help="the coloured rank")
    parser.add_argument("--output", type=Path, required=True, help="a file; without --mode a folder")
    add_overwrite(parser)
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.viz.layouts import layout_picture
from megatron3d.viz.overviews import data_flows_picture, schedules_picture
from megatron3d.viz.positions import positions_picture
from megatron3d.viz.zero_memory import zero_memory_picture

MOST_RANKS = 64


def every_picture() -> Iterator[tuple[str, str]]:
    """Yield name and content of every picture of the documentation."""
    for name, entry in MODES.items():
        for form in entry.forms:
            mode = build_mode(name, form, entry.default_shape(NUM_RANKS))
            yield f"{name}-{form}.svg", layout_picture(mode, form, RANK)
    yield "zero.svg", zero_memory_picture()
    yield "schedules.svg", schedules_picture()
    yield "data_flows.svg", data_flows_picture()
    yield "positions.svg", positions_picture()


def one_picture(arguments: argparse.Namespace) -> str:
    """Return the picture of the given mode; raise UserError with every wrong argument."""
    entry = MODES[arguments.mode]
    form, axes = arguments.form or next(iter(entry.forms)), entry.axis_names
    shape = tuple(arguments.shape or entry.default_shape(NUM_RANKS))
    ranks, forms = math.prod(shape), ", ".join(entry.forms)
    problems = []
    if len(shape) != len(axes):
        problems.append(
            f"--shape {' '.join(map(str, shape))}: {arguments.mode} has the axes {', '.join(axes)}; give "
            f"{len(axes)} numbers"
        )
    elif ranks > MOST_RANKS:
        problems.append(f"--shape: {ranks} ranks are too many to draw; use at most {MOST_RANKS}")
    elif not 0 <= arguments.rank < ranks:
        problems.append(f"--rank {arguments.rank}: the shape has ranks 0 to {ranks - 1}")
    if form not in entry.forms:
        problems.append(f"--form {form}: {arguments.mode} has {forms}")
    UserError.collect(problems)
    return layout_picture(build_mode(arguments.mode, form, shape), form, arguments.rank)


def draw(arguments: argparse.Namespace) -> None:
    """Write one picture, or every picture of the documentation."""
    output = arguments.output
    if arguments.mode:
        files = {output: one_picture(arguments)}
    else:
        files = {output / name: text for name, text in every_picture()}
    require_free("--output", files, overwrite=arguments.overwrite)
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); use another") from error
    print(f"{output}: {len(files)} picture(s)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(draw, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
