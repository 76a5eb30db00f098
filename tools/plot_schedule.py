"""Print a pipeline schedule and its bubble as text, and write it as a figure, a trace or a CSV file.

python tools/plot_schedule.py --schedule zb-v -p 4 -m 8 --costs F=1,B=2,I=1,W=1,comm=0.1 --output zb-v.png

The ending selects the output: .png, .svg or .pdf a figure, .json a trace for ui.perfetto.dev, .csv a schedule that
`--schedule file --input FILE` and torch.distributed.pipelining read.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.pipeline.schedules import FROM_FILE, SCHEDULES, build_schedule, load_schedule, num_microbatches
from megatron3d.runtime.arguments import MAX_RANKS, ToolParser, add_overwrite, require_free, whole
from megatron3d.runtime.files import write_figure, write_text
from megatron3d.runtime.program import parse_first, run_tool


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="plot_schedule", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedule", required=True, metavar="NAME", help=f"{', '.join((*SCHEDULES, FROM_FILE))}")
    parser.add_argument("-p", type=whole(0, MAX_RANKS), help="number of pipeline ranks")
    parser.add_argument("-m", type=whole(), help="number of microbatches")
    parser.add_argument(
        "-v", type=whole(0, MAX_RANKS), help="virtual stages per rank; default: the fewest that the schedule supports"
    )
    parser.add_argument(
        "--costs",
        help="times of the actions of a microbatch on a rank, as in F=1,B=2,I=1,W=1,comm=0.1; default: these, comm=0",
    )
    parser.add_argument("--input", type=Path, metavar="FILE.csv", help="schedule to read with --schedule file")
    parser.add_argument("--output", type=Path, help="file to write: .png, .svg, .pdf, .json, .csv")
    add_overwrite(parser)
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.pipeline.actions import Costs, Schedule, parse_costs
from megatron3d.pipeline.plot import figure, text_picture, trace
from megatron3d.pipeline.simulate import Timeline, num_virtual_stages, peak_activations, simulate
from megatron3d.pipeline.validate import write_schedule

TRACE_UNIT_US = 1000.0

Writer = Callable[[Path, str, Schedule, Timeline], None]


def show(arguments: argparse.Namespace) -> None:
    """Simulate and print a schedule, and write the output file."""
    write = writer(arguments.output) if arguments.output else None
    if write:
        inputs = [arguments.input] if arguments.input else []
        require_free("--output", [arguments.output], inputs, arguments.overwrite)
    costs = parse_costs(arguments.costs) if arguments.costs else Costs()
    schedule = choose_schedule(arguments, costs)
    timeline = simulate(schedule, costs)
    title = f"{arguments.schedule}, p={len(schedule)} m={num_microbatches(schedule)} v={num_virtual_stages(schedule)}"
    print(text_picture(timeline), summary(title, schedule, timeline), sep="\n\n")
    if write:
        try:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            write(arguments.output, title, schedule, timeline)
        except OSError as error:
            raise UserError(f"--output={arguments.output}: cannot be written: {error}") from error
        print(f"written: {arguments.output}")


def choose_schedule(arguments: argparse.Namespace, costs: Costs) -> Schedule:
    """Return the schedule of the given name, or from the given file."""
    name, p = arguments.schedule, arguments.p
    m, v = arguments.m, arguments.v
    if name == FROM_FILE:
        if arguments.input is None:
            raise UserError("--schedule=file: needs the file; add --input FILE.csv")
        schedule = load_schedule(arguments.input, p, m)
        if v not in (None, num_virtual_stages(schedule)):
            raise UserError(
                f"-v={v}: {arguments.input} has {num_virtual_stages(schedule)} stages on a rank; leave out -v"
            )
        return schedule
    if arguments.input is not None:
        raise UserError(f"--input={arguments.input}: is read with --schedule=file only, not {name}; leave out one")
    missing = [f"--schedule={name}: needs {flag}; add {flag} 8" for flag, n in (("-p", p), ("-m", m)) if n is None]
    UserError.collect(missing)
    return build_schedule(name, p, m, v, costs)


def summary(title: str, schedule: Schedule, timeline: Timeline) -> str:
    """Return time, bubble and microbatches in flight as text."""
    v = num_virtual_stages(schedule)
    peaks = " ".join(f"{peak / v:g}" for peak in peak_activations(schedule))
    return "\n".join(
        (
            title,
            f"time {timeline.makespan:g}, of it computing {timeline.busy:g} on average over ranks",
            f"bubble {100 * timeline.bubble_rate:.2f} % of the slowest rank's own {timeline.cost:g}; "
            f"idle {100 * timeline.idle_rate:.2f} % from first start to last end",
            f"most microbatches in flight, by rank: {peaks}",
        )
    )


def write_picture(path: Path, title: str, schedule: Schedule, timeline: Timeline) -> None:
    """Draw a figure in the format of the file's ending."""
    write_figure(path, figure({title: timeline}), dpi=150)


def write_trace(path: Path, title: str, schedule: Schedule, timeline: Timeline) -> None:
    """Write a Chrome trace, in which one unit of the costs is a millisecond."""
    write_text(path, json.dumps(trace({title: timeline}, TRACE_UNIT_US)))


def write_csv(path: Path, title: str, schedule: Schedule, timeline: Timeline) -> None:
    """Write a CSV file with one row per rank."""
    write_schedule(schedule, path)


WRITERS: Mapping[str, Writer] = {
    ".png": write_picture,
    ".svg": write_picture,
    ".pdf": write_picture,
    ".json": write_trace,
    ".csv": write_csv,
}


def writer(output: Path) -> Writer:
    """Return the function that writes files of this ending."""
    if output.suffix not in WRITERS:
        raise UserError(f"--output={output}: what to write follows from the ending; use {', '.join(WRITERS)}")
    return WRITERS[output.suffix]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(show, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
