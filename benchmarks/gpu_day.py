"""Everything that a GPU can show in ten minutes: `python benchmarks/gpu_day.py --output runs/gpu_day`.

Each section is a process with a time limit of its own; its JSON lines are on disk as soon as it prints them, and the
table after each section, so that an interrupted run keeps what it has.  Sections come in the order of what a person
needs first, and any of them runs alone by `--sections`.  Only the standard library is needed here: packages that the
GPU's machine lacks may lie in `wheels/`, which is not committed, for the Python of that machine:

    pip download --only-binary :all: --python-version 3.12 --platform manylinux2014_x86_64 -d wheels pydantic pyyaml

A second command runs what ten minutes have no room for, `--sections steps,ranks,nccl,program,switches,overlap,queue`,
and a third compares recipes of fp8, `--sections fp8`; `--cpu --quick` shows that it all works without a GPU;
`--two-nodes HOST:PORT --node-rank N`, on each of two nodes, measures the network and trains over it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "wheels"
END_S = 5.0  # for the table
MAX_FILES, MAX_FILE_BYTES = 8, 16 * 2**20
Row = dict[str, Any]


class Section(NamedTuple):
    """A program of this repository and its arguments, its limit in seconds, what it shows, and its environment."""

    limit_s: int
    program: tuple[str, ...]
    shows: str
    environ: tuple[str, ...] = ()


def _measured(limit_s: int, name: str, shows: str, *environ: str) -> Section:
    return Section(limit_s, ("benchmarks/gpu/gpu_sections.py", name), shows, environ)


def _tested(limit_s: int, tests: str, shows: str) -> Section:
    several = ("-n", "auto")  # processes: most of the time goes into float64 on the CPU and into compilers
    without = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # the latter warns about several processes
    return Section(limit_s, ("-m", "pytest", "tests/gpu", *several, *without, "-k", tests), shows)


SECTIONS: Mapping[str, Section] = {
    "hardware": _measured(25, "hardware", "versions, bandwidth of a copy, the largest GEMM, attention kernel"),
    "tests": _tested(80, "test_kernels or not_wait", "kernels against the CPU; the host does not wait in a step"),
    "8b": _measured(70, "8b", "shape of the 8B with fewer layers: step time, MFU, memory against prediction"),
    "1b": _measured(55, "1b", "the same of the 1B"),
    "124m": _measured(45, "124m", "the same of the 124M"),
    "profile": _measured(75, "profile", "the kernels that take most of a step, eager and compiled, and its trace"),
    "kernels": _measured(60, "kernels", "rates of the cost model, fp8, documents and experts; the accelerator's sheet"),
    "numbers": _measured(80, "numbers", "200 steps in bf16 against the same steps in fp32, on bytes of source code"),
    # The last one gets the rest.
    "layouts": _measured(600, "layouts", "ranks that share the GPU against one process, in float64"),
}
SECOND: Mapping[str, Section] = {
    "steps": _tested(200, "test_steps", "steps of every model, compiled, against the CPU"),
    "ranks": _measured(90, "ranks", "single ranks of large layouts: time of each action, memory against prediction"),
    "nccl": _measured(30, "nccl", "a subgroup's timeout, barrier, flight recorder", "TORCH_FR_BUFFER_SIZE=2000"),
    "program": _measured(90, "program", "pretrain_gpt.py: stopped, resumed, and never stopped; stall of a save"),
    "switches": _measured(120, "switches", "switches against their baselines, in turns"),
    "overlap": _measured(30, "overlap", "whether a copy on a side stream runs during a GEMM, by stream priority"),
    "queue": _measured(30, "overlap", "the same with a single hardware queue", "CUDA_DEVICE_MAX_CONNECTIONS=1"),
}
# A command of its own: GEMMs, quantization and steps of each recipe of fp8.
THIRD: Mapping[str, Section] = {
    "fp8": _measured(540, "fp8", "recipes of fp8 against bf16: GEMMs by role, quantization, MFU of the 8B shape"),
}
# A CPU is there for as long as it takes.
CPU_TIMES = 4
# In place of the tests of a section: one that is quick.
QUICK_TESTS: Mapping[str, str] = {"tests": "bit or gemm", "steps": "dropout_masks"}


# What two nodes add: gradients, tokens, activations and matmuls over the network, each with its overlap.
_TRACED = "logging.trace_iterations=[15]"
_TENSOR_8 = ("parallel.tensor_model_parallel_size=8", "parallel.sequence_parallel=true")
TWO: Mapping[str, Sequence[str]] = {
    "zero1": ("parallel.zero_stage=1",),
    "zero3": ("parallel.zero_stage=3",),
    "tensor8": _TENSOR_8,
    "async-tp": (*_TENSOR_8, "parallel.tp_comm_overlap=true"),
    "3d": (
        "parallel.tensor_parallel_mode=3d",
        "parallel.tensor_model_parallel_size=8",
        "parallel.sequence_parallel=false",
        "train.micro_batch_size=2",
    ),
    "1f1b": ("parallel.pipeline_model_parallel_size=2", _TRACED),
    "zb-v": ("parallel.pipeline_model_parallel_size=2", "parallel.pipeline_schedule=zb-v", _TRACED),
}
NETWORK = "network"


def two_nodes(args: argparse.Namespace) -> dict[str, Section]:
    """Return this node's sections: the network, then 24 steps of each layout on bytes of the program's own source.

    Each has a port of its own, so that a node that comes late does not meet the section before.
    """
    host, _, port = args.two_nodes.partition(":")
    ranks, sections = 1 if args.quick else 8, dict[str, Section]()
    launcher = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks))
    for place, name in enumerate((NETWORK, *TWO)):
        node = ("--node-rank", str(args.node_rank), "--master-addr", host, "--master-port", str(int(port) + place))
        shows = "bandwidth, and first use of every communicator" if name == NETWORK else "step time and bubble"
        program = network(args, ranks) if name == NETWORK else layout(args, name)
        sections[name] = Section(240, (*launcher, *node, *program), f"{shows}, measured and predicted")
    return sections


def network(args: argparse.Namespace, ranks: int) -> tuple[str, ...]:
    """Return the program that measures the network between two nodes."""
    options = ("--cluster", args.cluster, "--node-ranks", str(ranks), "--json")
    return ("benchmarks/network.py", *flags_of(args), *options)


def layout(args: argparse.Namespace, name: str) -> tuple[str, ...]:
    """Return the program that trains in a layout of `TWO`."""
    program = ("benchmarks/gpu/gpu_program.py", *flags_of(args), "--output", str(args.output / name))
    steps = ("train.train_iters=24", f"train.global_batch_size={16 if args.quick else 128}")
    return (*program, f"logging.cluster={args.cluster}", *steps, *TWO[name])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {**SECTIONS, **SECOND, **THIRD}
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "gpu_day", help="folder of the results; two nodes share it"
    )
    parser.add_argument(
        "--sections", help=f"of {', '.join(known)}, separated by commas; of two nodes: {', '.join(TWO)}"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="limit of the whole command, the table included")
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU")
    parser.add_argument("--quick", action="store_true", help="small sizes, which only show that it works")
    parser.add_argument("--two-nodes", metavar="HOST:PORT", help="address of node 0; ports from this one on are used")
    parser.add_argument("--node-rank", type=int, choices=(0, 1), default=0)
    parser.add_argument(
        "--cluster", default="dgx_h200", help="with --two-nodes: a file of megatron3d/hardware/clusters"
    )
    args = parser.parse_args(argv)
    args.end_s = time.monotonic() + 60 * args.minutes - END_S
    args.folder = args.output / f"node{args.node_rank}" if args.two_nodes else args.output
    args.known = two_nodes(args) if args.two_nodes else known
    args.names = args.sections.split(",") if args.sections else list(args.known if args.two_nodes else SECTIONS)
    if unknown := set(args.names) - set(args.known):
        parser.error(f"--sections {', '.join(sorted(unknown))}: use some of {', '.join(args.known)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections and print the table; return 1 if one of them failed."""
    args = parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "log.txt").unlink(missing_ok=True)
    rows: list[Row] = []
    with (args.folder / "results.jsonl").open("w", encoding="utf-8") as results:
        packages, left_out = unpacked_wheels()
        write(results, {"section": "run", **facts(argv), "wheels_left_out": left_out})
        for name in args.names:
            rows += run_section(name, args, packages, results)
            (args.folder / "table.txt").write_text("\n".join(table_lines(rows)) + "\n", encoding="utf-8")
    print("\n".join(table_lines(rows)))
    for line in trim(args.folder):
        print(line)
    return int(any(row.get("exit_code", 0) != 0 for row in rows))


def facts(argv: Sequence[str] | None) -> Row:
    """Return the command, the date, the commit and the machine."""
    commit = "unknown"
    with contextlib.suppress(OSError):  # a machine without git
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = found.stdout.strip() or commit
    command = shlex.join(["python", "benchmarks/gpu_day.py", *(sys.argv[1:] if argv is None else argv)])
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"command": command, "date": when, "commit": commit, "machine": platform.platform(), "cores": os.cpu_count()}


def unpacked_wheels(folder: Path = WHEELS) -> tuple[Path | None, list[str]]:
    """Unpack the wheels that travel with the repository; return their folder, and which are not for this Python.

    A machine without pip unpacks them as well.
    """
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    into, left_out = folder / f"unpacked-{version}", list[str]()
    files = sorted(folder.glob("*.whl"))
    for path in files:
        python, abi, platforms = path.stem.split("-")[-3:]
        is_pure = abi == "none" and "py3" in python.split(".") and platforms == "any"
        is_built = f"cp{version}" in python.split(".") or abi == "abi3"
        if not is_pure and not (is_built and platform.machine() in platforms):
            left_out.append(path.name)
            continue
        try:
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(into)
        except (OSError, zipfile.BadZipFile) as error:
            left_out.append(f"{path.name}: {error}")
    return (into if into.exists() else None), left_out


def python_of(packages: Path | None, *environ: str) -> list[str]:
    """Return the command of a Python that imports from this repository, `packages`, and what PYTHONPATH names."""
    mine = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks", *([packages] if packages else []))))
    return [
        "sh",
        "-c",
        'PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}" exec env "$@"',
        mine,
        *environ,
        sys.executable,
        "-u",
    ]


def command_of(name: str, args: argparse.Namespace, packages: Path | None) -> list[str]:
    """Return the command of a section."""
    section: Section = args.known[name]
    prefix = [*python_of(packages, *section.environ), *section.program]
    if name in QUICK_TESTS:
        return [*prefix, *(["--on-cpu"] if args.cpu else []), *(["-k", QUICK_TESTS[name]] if args.quick else [])]
    if args.two_nodes:
        return prefix
    return [*prefix, *flags_of(args), "--output", str(args.output)]


def flags_of(args: argparse.Namespace) -> list[str]:
    """Return the options that all programs have, as typed."""
    return [f"--{flag}" for flag in ("cpu", "quick") if getattr(args, flag)]


def run_section(name: str, args: argparse.Namespace, packages: Path | None, results: Any) -> Iterator[Row]:
    """Run a section; write and yield the rows that it prints, and at its end one with exit code and seconds."""
    begin = time.monotonic()
    limit_s = min(args.known[name].limit_s * (CPU_TIMES if args.cpu else 1), args.end_s - begin)
    if limit_s < 1:
        yield write(
            results, {"section": name, "exit_code": -1, "last_line": f"no time left of --minutes {args.minutes}"}
        )
        return
    child = subprocess.Popen(
        command_of(name, args, packages),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = threading.Timer(limit_s, end, [child])
    timer.start()
    last = ""
    assert child.stdout is not None, "the output is a pipe"
    with (args.folder / "log.txt").open("a", encoding="utf-8") as log, child.stdout as lines:
        for line in lines:
            log.write(f"[{name}] {line}")
            if row := parsed(line):
                yield write(results, {"section": name, **row})
            else:
                last = line.strip() or last
    code = child.wait()
    timer.cancel()
    took_s = time.monotonic() - begin
    summary = {"exit_code": code, "seconds": round(took_s, 1), "timed_out": took_s > limit_s, "last_line": last}
    yield write(results, {"section": name, **summary})


def parsed(line: str) -> Row | None:
    """Return the row of a line, None if it is none: libraries print lines with braces as well."""
    with contextlib.suppress(ValueError):
        row = json.loads(line) if line.startswith("{") else None
        return row if isinstance(row, dict) else None
    return None


def end(child: subprocess.Popen[str]) -> None:
    """End a section and all processes that it has started, also those that torchrun puts into sessions of their own."""
    for pid in descendants(child.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return a process and all that it and its children have started, parents first."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:  # grows while it is read
        found += parents.get(each, [])
    return found


def write(results: Any, row: Row) -> Row:
    """Append a row to the results, on disk at once."""
    results.write(json.dumps(row) + "\n")
    results.flush()
    os.fsync(results.fileno())
    return row


def table_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table: a line for each row, its section first."""
    for row in rows:
        section, *values = (f"{key}={_short(value)}" for key, value in row.items())
        yield f"{section.partition('=')[2]:10} {'  '.join(values)}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def trim(folder: Path) -> Iterator[str]:
    """Remove what is too much to bring home; yield a line for each file removed."""
    names = {"results.jsonl": 0, "table.txt": 1, "log.txt": 2}
    files = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: names.get(path.name, 3))
    for place, path in enumerate(files):
        if place >= MAX_FILES or path.stat().st_size > MAX_FILE_BYTES:
            yield f"removed {path.name}: {path.stat().st_size / 2**20:.0f} MiB; {MAX_FILES} files of 16 MiB are kept"
            path.unlink()


if __name__ == "__main__":
    sys.exit(main())
