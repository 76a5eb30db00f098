"""Measure this machine and store its rates as the cluster `local`, for tools/plan.py and predictions of runs.

python tools/calibrate.py
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron3d.analysis.cost_model.hardware import FOLDER, load_accelerator, load_cluster
from megatron3d.runtime.arguments import ToolParser, real
from megatron3d.runtime.tool_main import run_tool


def run(arguments: argparse.Namespace) -> None:
    """Measure and write the files."""
    from megatron3d.analysis.calibrate import calibrate

    (arguments.output_dir / "clusters").mkdir(parents=True, exist_ok=True)  # measuring takes minutes
    paths = calibrate(arguments.output_dir, arguments.seconds)
    load_accelerator("local", arguments.output_dir)
    load_cluster("local", arguments.output_dir / "clusters")
    print("\n".join(f"wrote {path}" for path in paths))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = ToolParser(prog="calibrate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--output-dir", type=Path, default=FOLDER, metavar="DIR", help="default: the package's hardware/"
    )
    parser.add_argument("--seconds", type=real(0.001, 3600), default=1.0, help="for each measurement (default: 1)")
    return run_tool(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
