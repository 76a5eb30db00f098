"""Start-up time: wall time from the quickstart's command until training reports iteration 1, by launcher, in turns.

python benchmarks/startup.py --output benchmarks/results/startup.json      # after scripts/quickstart.sh
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from common.corpus import write_random_bytes
from common.report import show, write

CONFIG = "configs/quickstart.yaml"
PROGRAM = ["pretrain_gpt.py", "--config", CONFIG]
# How ranks are started: each by itself, or forked from one process that has imported torch (the quickstart's way).
LAUNCHERS: Mapping[str, Callable[[int], list[str]]] = {
    "torchrun": lambda processes: [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(processes), *PROGRAM),
    ],
    "launch_local.sh": lambda processes: ["bash", "scripts/launch_local.sh", str(processes), *PROGRAM[1:]],
}
QUICK = ["data.tokenizer_type=ByteTokenizer", "data.tokenizer_model=null", "train.precision=fp32"]


def main(argv: Sequence[str] | None = None) -> int:
    """Start several times; report the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        data = list[str]()
        if args.quick:
            args.rounds, args.processes = 1, 1
            data = [f"data.data_path={write_random_bytes(Path(folder) / 'corpus')}", *QUICK]
        turns = [
            {name: first_step_s(launch(args.processes), data) for name, launch in LAUNCHERS.items()}
            for _ in range(args.rounds)
        ]
    rows = []
    for name in LAUNCHERS:
        seconds = [turn[name] for turn in turns]
        times = {"median_s": statistics.median(seconds), "worst_s": max(seconds)}
        rows.append({"launcher": name, "processes": args.processes, **times})
    show("start to first step of the quickstart model", rows)
    if args.output:
        write(args.output, rows, seconds=turns)
    return 0


def first_step_s(launch: list[str], data: list[str]) -> float:
    """Return the seconds from the launch to the console line of iteration 1."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [f"checkpoint.save={folder}", f"checkpoint.load={folder}"]
        overrides = ["logging.log_interval=1", "train.exit_interval=1", *data, *folders]
        begin = time.perf_counter()
        command = [*launch, *overrides]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None, "stdout is a pipe"
            for line in process.stdout:
                if " iteration " in line:
                    seconds = time.perf_counter() - begin
                    process.communicate()
                    return seconds
            assert process.stderr is not None, "stderr is a pipe"
            raise SystemExit(process.stderr.read())


if __name__ == "__main__":
    sys.exit(main())
