"""Measure this machine and store its rates as the cluster `local_gpu`, or `local` for its CPU, for tools/plan.py.

python tools/calibrate.py --network eos
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.runtime import process
from megatron3d.runtime.arguments import ToolParser, add_overwrite, real, require_free
from megatron3d.runtime.program import parse_first, run_tool

PRECISION = "bf16"


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="calibrate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="default: the package's hardware/")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU, although there is a GPU")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default=PRECISION, help="of GPUs")
    parser.add_argument(
        "--network", metavar="NAME", help="cluster with the links between nodes, or of a machine with one GPU"
    )
    parser.add_argument("--seconds", type=real(0.001, 3600), default=1.0, help="for each measurement")
    add_overwrite(parser)
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.forecast.time.hardware import FOLDER, load_accelerator, load_cluster


def run(arguments: argparse.Namespace) -> None:
    """Measure and write the files."""
    folder, seconds = arguments.output_dir or FOLDER, arguments.seconds
    (folder / "clusters").mkdir(parents=True, exist_ok=True)  # measuring takes minutes
    num_gpus = 0 if arguments.cpu else process.num_gpus()
    name = "local_gpu" if num_gpus else "local"
    sheets = [folder / f"{name}.yaml", folder / "clusters" / f"{name}.yaml"]
    require_free("--output-dir", sheets, overwrite=arguments.overwrite)
    if num_gpus:
        from tools.calibrate_gpus import calibrate_gpus

        paths = calibrate_gpus(folder, num_gpus, arguments.precision, arguments.network, budget_s=seconds)
    else:
        if arguments.network or arguments.precision != PRECISION:
            raise UserError("--network and --precision: for GPUs only, of which torch sees none here; leave them out")
        from tools.calibrate_cpu import calibrate

        paths = calibrate(folder, seconds)
    load_accelerator(paths[0].stem, folder)
    load_cluster(paths[1].stem, folder / "clusters")
    print("\n".join(f"wrote {path}" for path in paths))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(run, make_parser(), argv)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds tools.calibrate_cpu and tools.calibrate_gpus
    sys.exit(main())
