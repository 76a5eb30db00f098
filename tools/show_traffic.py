"""Prints what every tensor-parallel mode sends for a transformer layer, forward and backward, as a Markdown table.

python tools/show_traffic.py --hidden-size 12288 --seq-length 2048 --micro-batch-size 16 --world-size 8 64

The numbers are closed forms (megatron3d/parallel/matmul_plan.py); tests compare them with recorded collectives.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron3d.errors import UserError
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.parallel.modes.mode import Mode
from megatron3d.runtime.arguments import MAX_RANKS, ToolParser, shorten, whole, whole_number
from megatron3d.runtime.program import parse_first, run_tool


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="show_traffic", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hidden-size", type=whole(1, 10**7), required=True, help="of the layer")
    parser.add_argument("--ffn-hidden-size", type=whole(1, 10**7), help="default: 4 times the hidden size")
    parser.add_argument("--seq-length", type=whole(1, 10**7), required=True, help="tokens of a sequence")
    parser.add_argument("--micro-batch-size", type=whole(1, 10**7), required=True, help="sequences")
    parser.add_argument(
        "--world-size",
        type=whole(1, MAX_RANKS),
        nargs="+",
        required=True,
        metavar="N",
        help="ranks, all of them tensor-parallel",
    )
    parser.add_alias("--num-ranks", "--world-size")
    parser.add_argument(
        "--shape", type=parse_shape, nargs="+", default=[], metavar="MODE=AxBxC", help="beside the default ones"
    )
    parser.add_argument("--bytes-per-element", type=whole(1, 10**7), default=2, help="2: of bf16")
    return parser


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse `2.5d=4x4x4` into a mode's name and its axes' sizes."""
    name, _, sizes = text.partition("=")
    if name not in MODES:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: the modes are {', '.join(MODES)}")
    shape = tuple(whole_number(size) or 0 for size in sizes.split("x")[:10])
    axes = MODES[name].axis_names
    if len(shape) != len(axes) or min(shape) < 1:
        example = "x".join("2" for _ in axes)
        raise argparse.ArgumentTypeError(
            f"{shorten(text)}: {name} has {len(axes)} axes {', '.join(axes)}, as in {name}={example}"
        )
    return name, shape


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.model.linear_spec import linear_sizes
from megatron3d.parallel.layout import Layout
from megatron3d.parallel.matmul_plan import MatmulPlan, Traffic, traffic

HEADER = ("ranks", "mode", "form", "shape", "residual", "weights", "calls", "GB sent", "of 1-D", "GB over each axis")
ALIGN = ("--:", ":--", ":--", ":--", "--:", "--:", "--:", "--:", "--:", ":--")


@dataclass(frozen=True)
class Layer:
    """Sizes of a transformer layer's matmuls for one microbatch."""

    sequences: int
    seq_length: int
    hidden_size: int
    ffn_hidden_size: int
    itemsize: int

    def matmuls(self, mode: Mode) -> Iterator[tuple[str, MatmulPlan, int, int]]:
        """Yield name, plan, N and K of the four linears."""
        hidden = self.hidden_size
        for path, linear in linear_sizes(hidden, self.ffn_hidden_size, hidden, hidden, is_gated=False).items():
            yield path.rpartition(".")[2], linear.plan(mode), linear.num_outputs, linear.num_inputs

    def traffic(self, mode: Mode) -> list[Traffic]:
        """Return every collective of forward and backward."""
        mesh, tokens = Mesh(mode.axes), self.sequences * self.seq_length
        steps = [traffic(plan, mesh, tokens, n, k, self.itemsize) for _, plan, n, k in self.matmuls(mode)]
        return [step for matmul in steps for step in matmul]

    def problems(self, mode: Mode, label: str) -> Iterator[str]:
        """Yield every size that the mode's axes do not divide."""
        mesh, tokens = Mesh(mode.axes), self.sequences * self.seq_length
        yield from _undivided(f"{label}: --micro-batch-size", self.sequences, mesh.size(mode.batch_axes))
        for name, plan, n, k in self.matmuls(mode):
            stored = ((plan.x_layout, (tokens, k)), (plan.w_layout, (n, k)), (plan.y_layout, (tokens, n)))
            for layout, shape in stored:
                for size, axes in zip(shape, layout, strict=True):
                    yield from _undivided(f"{label}: a dimension of {name}", size, mesh.size(axes))


def _undivided(what: str, size: int, ranks: int) -> Iterator[str]:
    if size % ranks:
        yield f"{what}={size} is split over {ranks} ranks; use a multiple of {ranks}"


def rows(layer: Layer, num_ranks: int, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for every mode, shape and form, relative to the first."""
    first = 0.0
    for name, entry in MODES.items():
        asked = [shape for mode, shape in shapes if mode == name and math.prod(shape) == num_ranks]
        for shape in dict.fromkeys((entry.default_shape(num_ranks), *asked)):
            for form in entry.forms:
                mode = build_mode(name, form, shape)
                label = "·".join(map(str, shape))
                if problems := list(dict.fromkeys(layer.problems(mode, f"{name} {label}"))):
                    raise UserError(*problems)
                steps = layer.traffic(mode)
                total = math.fsum(step.wire_bytes for step in steps)
                first = first or total
                shares = (share(mode, mode.residual), share(mode, mode.expand.w_layout))
                relative = f"{total / first:.2f}" if first else "-"
                sent = (str(len(steps)), gigabytes(total), relative, by_axis(steps))
                yield str(num_ranks), name, form, label, *shares, *sent


def share(mode: Mode, layout: Layout) -> str:
    """Return the fraction of a tensor that a rank stores."""
    parts = math.prod(Mesh(mode.axes).size(axes) for axes in layout)
    return "1" if parts == 1 else f"1/{parts}"


def by_axis(steps: Sequence[Traffic]) -> str:
    """Return the bytes by the axes that they are sent along."""
    sums: dict[str, float] = {}
    for step in steps:
        axes = "·".join(step.axes)
        sums[axes] = sums.get(axes, 0.0) + step.wire_bytes
    return ", ".join(f"{axes} {gigabytes(sums[axes])}" for axes in sorted(sums))


def gigabytes(wire_bytes: float) -> str:
    """Return 10^9 bytes with two decimals."""
    return f"{wire_bytes / 1e9:.2f}"


def show(arguments: argparse.Namespace) -> None:
    """Print the table."""
    for name, shape in arguments.shape:
        if math.prod(shape) not in arguments.world_size:
            given = "x".join(map(str, shape))
            raise UserError(f"--shape {name}={given}: has {math.prod(shape)} ranks; add that number to --world-size")
    ffn = arguments.ffn_hidden_size or 4 * arguments.hidden_size
    sizes = (arguments.micro_batch_size, arguments.seq_length, arguments.hidden_size, ffn, arguments.bytes_per_element)
    lines = [row for num_ranks in arguments.world_size for row in rows(Layer(*sizes), num_ranks, arguments.shape)]
    for cells in (HEADER, ALIGN, *lines):
        print(f"| {' | '.join(cells)} |")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(show, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
