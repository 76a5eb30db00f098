"""Writes the SLURM job of a configuration on a cluster, from scripts/slurm/pretrain.sbatch.

    python tools/make_slurm.py --config configs/gpt3-175b.yaml --cluster selene --nodes 128 --output gpt3.sbatch

The configuration is checked for that many ranks first; --dry-run shows the file instead of writing it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron3d.analysis.cost_model.hardware import Cluster, load_cluster
from megatron3d.config.cli import resolve
from megatron3d.config.report import batch_arithmetic
from megatron3d.config.run_spec import RunSpec
from megatron3d.errors import UserError
from megatron3d.launch.requeue import run_folder
from megatron3d.launch.script import CONTAINERS, Options, Settings, fill, options
from megatron3d.runtime.tool_main import positive, run_tool

TEMPLATE = Path(__file__).parents[1] / "scripts" / "slurm" / "pretrain.sbatch"


def make(arguments: argparse.Namespace) -> None:
    """Check, fill in, write or show."""
    cluster = load_cluster(arguments.cluster)
    num_ranks = arguments.nodes * cluster.node_ranks
    config = resolve(arguments.config, arguments.overrides, num_ranks, elsewhere=True).config
    run_folder(config)
    what = f"{arguments.config} on {arguments.nodes} nodes of {cluster.name}:"
    settings = Settings(
        options=sbatch_options(arguments, cluster),
        setup=(*cluster.slurm.setup, *arguments.setup),
        python=tuple((arguments.python or ("python" if arguments.container else ".venv/bin/python")).split()),
        container=container(arguments),
        arguments=("--config", str(arguments.config), *arguments.overrides),
        remarks=(what, *batch_arithmetic(RunSpec(config, num_ranks)).splitlines()),
    )
    text = fill(TEMPLATE.read_text(encoding="utf-8"), settings)
    if arguments.dry_run:
        print(text, end="")
        return
    path = arguments.output or Path(f"{arguments.config.stem}.sbatch")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror}); use a folder of yours") from error
    print(f"wrote {path}: sbatch {path}")


def sbatch_options(arguments: argparse.Namespace, cluster: Cluster) -> Options:
    """The usual ones, those of the cluster, those that were typed; a later one replaces an earlier one."""
    usual = dict(options(arguments.nodes, cluster.node_ranks, arguments.time, arguments.warn))
    usual["job-name"] = arguments.config.stem
    if cluster.cores is not None:  # its ranks are processors
        del usual["gpus-per-node"]
    typed = (text.partition("=") for text in arguments.sbatch)
    return usual | dict(cluster.slurm.options) | {name: value if equals else None for name, equals, value in typed}


def container(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What stands before the program; raises UserError where a container is not described."""
    if arguments.container is None and (arguments.image or arguments.mount):
        raise UserError(f"--image, --mount: of no container; add --container {' or '.join(CONTAINERS)}")
    if arguments.container is None:
        return ()
    if arguments.image is None:
        raise UserError(f"--container {arguments.container}: of which image? add --image, such as megatron3d.sqsh")
    return CONTAINERS[arguments.container](arguments.image, arguments.mount)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the tool."""
    parser = argparse.ArgumentParser(prog="make_slurm", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="of the run, saving to and loading from one folder")
    add("--cluster", required=True, metavar="NAME", help="a file of megatron3d/hardware/clusters, or a path")
    add("--nodes", type=positive, required=True, metavar="N")
    add("--time", default="24:00:00", metavar="LIMIT", help="of each start; default: %(default)s")
    add("--warn", type=positive, default=600, metavar="S", help="seconds before it, to save; default: %(default)s")
    add("--sbatch", action="append", default=[], metavar="NAME=VALUE", help="an option of sbatch; may be repeated")
    add("--setup", action="append", default=[], metavar="LINE", help="of shell, before the start; may be repeated")
    add("--python", metavar="COMMAND", help="default: .venv/bin/python, and python in a container")
    add("--container", choices=CONTAINERS, help="run everything in one; default: none")
    add("--image", help="of the container: a .sqsh or .sif file, or a name that it takes")
    add("--mount", action="append", default=[], metavar="FOLDER", help="in the container too; may be repeated")
    add("--output", type=Path, metavar="FILE", help="default: the configuration's name with .sbatch")
    add("--dry-run", action="store_true", help="show the file instead")
    add("overrides", nargs="*", metavar="section.key=value")
    return run_tool(make, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
