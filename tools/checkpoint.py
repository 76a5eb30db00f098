"""Inspect, verify, compare and average checkpoints of any layout, in one process and with little memory.

    checkpoint.py inspect  --load RUN                print metadata, and number and size of the tensors
    checkpoint.py verify   --load RUN ...            verify every byte with its checksum
    checkpoint.py diff     --load RUN OTHER          print metadata and tensors that differ; exit code 1 where any does
    checkpoint.py average  --load RUN ... --save NEW save the mean of the weights as a checkpoint of weights

RUN is the folder of a run, which stands for its newest checkpoint (for verify: all), or an iter_ folder.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron3d.errors import ExitCode, UserError, one_line
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime import process
from megatron3d.runtime.arguments import CHECKPOINT, ToolParser, add_load, require_free, whole
from megatron3d.runtime.program import parse_first


def make_parser() -> ToolParser:
    """Return the parser of the command and its folders."""
    parser = ToolParser(
        "checkpoint.py", description="Inspect, verify, compare and average checkpoints.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("inspect", help="print metadata and sizes of a checkpoint")
    add_load(one, CHECKPOINT)
    one.add_argument("--tensors", action="store_true", help="list every tensor")
    every = commands.add_parser("verify", help="verify every byte with its checksum")
    add_load(every, f"{CHECKPOINT}; of a run, all are verified", "+")
    every.add_argument("--workers", type=whole(1, 1000), default=4, help="number of files read in parallel")
    two = commands.add_parser("diff", help="print the differences between two checkpoints")
    add_load(two, CHECKPOINT, 2)
    many = commands.add_parser("average", help="save the mean of the weights of several checkpoints")
    add_load(many, CHECKPOINT, "+")
    many.add_argument("--save", type=Path, required=True, help="folder of the new run")
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.checkpoint.compare import describe_differences, flatten, mean_pieces
from megatron3d.checkpoint.index import FILE_NAME, Index, read_index
from megatron3d.checkpoint.publish import FolderLock, candidates, resolve
from megatron3d.checkpoint.store import save, verify
from megatron3d.comm.objects import GroupObjects

EXIT_DIFFERENT = 1
ALONE = Mesh((("data", 1),))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands."""
    args = make_parser().parse_args(argv)
    return COMMANDS[args.command](args)


def show(args: argparse.Namespace) -> int:
    """Print metadata, sizes and, with --tensors, every tensor."""
    folder = resolve(args.load)
    index = read_index(folder)
    print(f"{folder}: {index.format}, version {index.version}, iteration {index.iteration}")
    for name, value in flatten(index).items():
        print(one_line(f"  {name} = {json.dumps(value)}"))
    for kind, (tensors, elements, num_bytes) in sizes(index).items():
        print(one_line(kind) + f": {tensors} tensors, {elements:,} elements, {num_bytes / 2**20:,.1f} MiB")
    files = {stored.file for tensor in index.tensors.values() for stored in tensor.boxes}
    boxes = sum(len(tensor.boxes) for tensor in index.tensors.values())
    print(f"{boxes} boxes in {len(files)} files")
    for name, tensor in index.tensors.items() if args.tensors else ():
        print(f"  {one_line(name)} {list(tensor.shape)} {tensor.dtype}, boxes: {len(tensor.boxes)}")
    return ExitCode.DONE


def sizes(index: Index) -> Mapping[str, tuple[int, int, int]]:
    """Return the number of tensors, elements and bytes of the weights and of each moment."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, tensor in index.tensors.items():
        kind = ".".join(name.split(".")[: 2 if name.startswith("optimizer.") else 1])
        tensors, elements, num_bytes = found.get(kind, (0, 0, 0))
        numel = math.prod(tensor.shape)
        bits = int("".join(filter(str.isdigit, tensor.dtype)) or 8)
        found[kind] = tensors + 1, elements + numel, num_bytes + numel * bits // 8
    return found


def check(args: argparse.Namespace) -> int:
    """Print each intact checkpoint; raise UserError with all damage of the others."""
    problems: list[str] = []
    for root in args.load:
        alone = (root / FILE_NAME).is_file() or root.name.startswith("iter_")
        folders = [root] if alone else [folder for folder, _ in candidates(root)]
        if not folders:
            problems.append(f"{root}: there is no checkpoint; give the folder of a run, or one of its iter_ folders")
        for folder in folders:
            found = verify_with(args.workers, folder)
            problems += [problem if str(folder) in problem else f"{folder}: {problem}" for problem in found]
            if not found:
                print(f"{folder}: complete and undamaged", flush=True)
    UserError.collect(problems)
    return ExitCode.DONE


def verify_with(num_workers: int, folder: Path) -> list[str]:
    """Return each damage of a checkpoint once; several threads read its files."""
    with ThreadPoolExecutor(num_workers) as threads:
        parts = threads.map(lambda part: verify(folder, (part, num_workers)), range(num_workers))
        return list(dict.fromkeys(problem for part in parts for problem in part))


def compare(args: argparse.Namespace) -> int:
    """Print the differences."""
    first, second = map(resolve, args.load)
    num_found = 0
    for line in describe_differences(first, second):
        print(one_line(line), flush=True)
        num_found += 1
    print(f"{num_found} differences" if num_found else "equal")
    return EXIT_DIFFERENT if num_found else ExitCode.DONE


def average(args: argparse.Namespace) -> int:
    """Save the mean of the weights with the iteration and the config.yaml of the last checkpoint."""
    folders = [resolve(load) for load in args.load]
    UserError.collect(problem for folder in folders for problem in verify_with(1, folder))
    pieces, last = list(mean_pieces(folders)), read_index(folders[-1])
    if (args.save / FILE_NAME).exists() or any(args.save.glob("iter_*")):
        raise UserError(f"--save {args.save}: has a checkpoint already; name a new folder")
    require_free("--save", [args.save / "config.yaml"])
    args.save.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(args.save)
    try:
        folder = save(args.save, last.iteration, pieces, last.meta, GroupObjects(ALONE))
        if (config := folders[-1].parent / "config.yaml").is_file():
            shutil.copy(config, args.save / config.name)
    finally:
        lock.release()
    print(f"mean of {len(folders)} checkpoints: {folder}")
    return ExitCode.DONE


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "inspect": show,
    "verify": check,
    "diff": compare,
    "average": average,
}

if __name__ == "__main__":
    sys.exit(process.run_program(main))
