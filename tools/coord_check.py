"""Check that activations do not grow with the width: coordinate check of muP (`model.mup_base_hidden_size`).

The model of a configuration is trained in several widths on one batch of random tokens, on one process.  Printed is,
for each kind of module, the change of its output since initialization (rms), and with which power of the width it
grows: about 0 with muP, more without.  `--output` plots it.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron3d.config.cli import ConfigParser
from megatron3d.errors import ExitCode, UserError
from megatron3d.runtime import process
from megatron3d.runtime.arguments import add_overwrite, require_free, whole
from megatron3d.runtime.program import parse_first


def make_parser() -> ConfigParser:
    """Return the parser of `--config FILE [--widths N ...] [--steps N] [--output FILE] [section.key=value ...]`."""
    parser = ConfigParser("coord_check.py", __doc__.split(":")[0])
    parser.add_argument("--config", type=Path, required=True, help="the run whose model and learning rate are taken")
    parser.add_argument(
        "--widths",
        type=whole(1, 10**6),
        nargs="+",
        default=[64, 128, 256, 512],
        help="values of model.hidden_size; heads keep their size",
    )
    parser.add_argument("--steps", type=whole(1, 100), default=4, help="training steps")
    parser.add_argument("--output", type=Path, help="figure to write: .png, .svg or .pdf")
    add_overwrite(parser)
    parser.add_overrides("values that replace those in the file")
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.validate.rules import check
from megatron3d.model.linear_spec import num_parameters
from megatron3d.runtime.files import write_figure
from megatron3d.verify.coordinates import changes, growth, plot, with_width

VOCAB_SIZE, MAX_PARAMETERS = 256, 10**9


def main(argv: Sequence[str] | None = None) -> int:
    """Train each width, print the sizes, and plot them."""
    args = make_parser().parse_args(argv)
    config = read_config(args.config, args.overrides).config
    widths = sorted(set(args.widths))
    if len(widths) < 2:
        raise UserError(f"--widths {widths[0]}: one width shows no growth; give two or more")
    if args.output:
        require_free("--output", [args.output], overwrite=args.overwrite)
    vocab_size, heads = config.model.vocab_size or VOCAB_SIZE, config.model.num_attention_heads
    size = config.model.hidden_size // heads
    UserError.collect(
        f"--widths {width}: no whole number of heads of {size} channels; use a multiple of {size}"
        for width in widths
        if width * heads % config.model.hidden_size
    )
    configs = {width: with_width(config, width) for width in widths}
    UserError.collect(problem for each in configs.values() for problem in check(each, 1, vocab_size))
    largest = num_parameters(RunSpec(configs[widths[-1]], 1, vocab_size).arch)
    if largest > MAX_PARAMETERS:
        why = f"a model of {largest:.3g} parameters, more than {MAX_PARAMETERS:.0e} for one process"
        raise UserError(f"--widths {widths[-1]}: {why}; use smaller widths, or fewer layers")
    found = {}
    for width, each in configs.items():
        found[width] = changes(each, vocab_size, args.steps)
        print(f"width {width}: {', '.join(f'{kind} {sizes[-1]:.3g}' for kind, sizes in found[width].items())}")
    powers = ", ".join(f"{kind} {power:+.2f}" for kind, power in growth(found).items())
    print(f"grows with the width to the power of: {powers}")
    if args.output:
        base = config.model.mup_base_hidden_size
        write_figure(args.output, plot(found, "without muP" if base is None else f"muP, base width {base}"), dpi=100)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(process.run_program(main))
