"""Write the SLURM job script of a configuration on a cluster, from scripts/slurm/pretrain.sbatch.

    python tools/make_slurm.py --config configs/gpt3-175b.yaml --cluster selene --nodes 128 --output gpt3.sbatch

The configuration is checked for that number of ranks first; --dry-run prints the script instead of writing it.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron3d.config.cli import ConfigParser
from megatron3d.errors import UserError
from megatron3d.launch.script import CONTAINERS, JobSettings, Options, fill_template, options
from megatron3d.runtime.arguments import MAX_RANKS, add_overwrite, positive, require_free, whole
from megatron3d.runtime.files import write_text
from megatron3d.runtime.program import parse_first, run_tool


def make_parser() -> ConfigParser:
    """Return the parser of the command line."""
    parser = ConfigParser("make_slurm", (__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="configuration; saves to and loads from one folder",
    )
    add("--cluster", required=True, metavar="NAME", help="a file of megatron3d/hardware/clusters, or a path")
    add(
        "--nodes",
        type=whole(1, MAX_RANKS),
        required=True,
        metavar="N",
        help="nodes of the cluster, with all their GPUs",
    )
    add(
        "--spares",
        type=whole(0, MAX_RANKS),
        default=0,
        metavar="K",
        help="nodes beyond those, which take the place of an unfit node, or of one that a launch has lost a rank on",
    )
    add("--time", default="24:00:00", metavar="LIMIT", help="time limit of each launch")
    add(
        "--warn",
        type=positive,
        default=600,
        metavar="S",
        help="seconds for saving before the limit",
    )
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of sbatch, removed by an empty value; may be repeated",
    )
    add("--setup", action="append", default=[], metavar="LINE", help="shell line that runs first; may be repeated")
    add("--python", metavar="COMMAND", help="default: .venv/bin/python, and python in a container")
    add("--container", choices=CONTAINERS, help="run everything in a container; default: none")
    add("--image", help="image of the container: a .sqsh or .sif file, or a name")
    add(
        "--mount",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder mounted in the container; may be repeated",
    )
    add("--output", type=Path, metavar="FILE", help="default: the configuration's name with .sbatch")
    add_overwrite(parser)
    add("--dry-run", action="store_true", help="print the script instead")
    parser.add_overrides("values that replace those in the file")
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.config.report import batch_arithmetic
from megatron3d.config.resolve import resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.time.hardware import Cluster, load_cluster
from megatron3d.launch.requeue import run_folder

TEMPLATE = Path(__file__).parents[1] / "scripts" / "slurm" / "pretrain.sbatch"


def make(arguments: argparse.Namespace) -> None:
    """Check the configuration, and write or print the script."""
    path = arguments.output or Path(f"{arguments.config.stem}.sbatch")
    if not arguments.dry_run:
        require_free("--output", [path], [arguments.config], arguments.overwrite)
    cluster = load_cluster(arguments.cluster)
    num_ranks = arguments.nodes * cluster.node_ranks
    counted_by = f"--nodes of {cluster.node_ranks} ranks each"
    config = resolve(arguments.config, arguments.overrides, num_ranks, elsewhere=True, counted_by=counted_by).config
    run_folder(config)
    spares = f" and {arguments.spares} spare" * (arguments.spares > 0)
    what = f"{arguments.config} on {arguments.nodes} nodes{spares} of {cluster.name}:"
    settings = JobSettings(
        options=sbatch_options(arguments, cluster, outlives=config.train.elastic),
        setup=(*cluster.slurm.setup, *arguments.setup),
        python=tuple((arguments.python or ("python" if arguments.container else ".venv/bin/python")).split()),
        container=container(arguments),
        arguments=("--config", str(arguments.config), *arguments.overrides),
        spares=arguments.spares,
        elastic=config.train.elastic,
        remarks=(what, *batch_arithmetic(RunSpec(config, num_ranks)).splitlines()),
    )
    text = fill_template(TEMPLATE.read_text(encoding="utf-8"), settings)
    if arguments.dry_run:
        print(text, end="")
        return
    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror}); use a folder that you own") from error
    print(f"wrote {path}: sbatch {path}")


def sbatch_options(arguments: argparse.Namespace, cluster: Cluster, *, outlives: bool = False) -> Options:
    """Return the default options, updated by those of the cluster and then by those of the command line.

    A job that `outlives` a node that fails is not ended with it.
    An empty value (`--sbatch exclusive=`, or "" in the file of a cluster) removes an option.
    """
    defaults = dict(options(arguments.nodes + arguments.spares, cluster.node_ranks, arguments.time, arguments.warn))
    defaults["job-name"] = arguments.config.stem
    if outlives:
        defaults["no-kill"] = None
    if cluster.cores is not None:  # the ranks of this cluster compute on CPUs, and share its nodes
        for name in ("gpus-per-node", "cpus-per-task", "exclusive"):
            del defaults[name]
    typed = (text.partition("=") for text in arguments.sbatch)
    chosen = defaults | dict(cluster.slurm.options) | {name: value if equals else None for name, equals, value in typed}
    return {name: value for name, value in chosen.items() if value != "" or not name}


def container(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the words before the program; raises UserError if the container is incompletely described."""
    if arguments.container is None and (arguments.image or arguments.mount):
        raise UserError(f"--image, --mount: there is no container; add --container {' or '.join(CONTAINERS)}")
    if arguments.container is None:
        return ()
    if arguments.image is None:
        raise UserError(f"--container {arguments.container}: no image; add --image, for example megatron3d.sqsh")
    return CONTAINERS[arguments.container](arguments.image, arguments.mount)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(make, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
