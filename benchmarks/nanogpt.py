"""nanoGPT's published CPU setting: seconds of its own script and of ours in turns, and validation losses over seeds.

    python benchmarks/nanogpt.py --nanogpt PATH --input tinyshakespeare.txt --output benchmarks/results/nanogpt.json

PATH is a clone of github.com/karpathy/nanoGPT; without it only ours is timed.  Both train 2000 iterations, evaluate
every 250, and are timed from start to exit.  nanoGPT evaluates training data as well, and saves when its loss improves.
It computes in fp32 on CPUs; ours is timed in fp32, as the configuration has it, and in bf16 (`train.precision`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common.report import Row, show, write
from shakespeare_char import prepare, prepare_quick, validation_loss

OURS = {f"megatron3d {precision}": [f"train.precision={precision}"] for precision in ("fp32", "bf16")}

# The arguments of nanoGPT's README for a laptop's CPU.
SETTING = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=10 --block_size=64 --batch_size=12 --n_layer=4 "
    "--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train each seed with both programs in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, help="tinyshakespeare, 1,115,394 characters")
    parser.add_argument("--nanogpt", type=Path, help="clone of nanoGPT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    contestants = OURS
    if not (args.input or args.quick):
        parser.error("the following arguments are required: --input")
    if args.quick:
        args.seeds, args.nanogpt = [1], None
        contestants = dict([*OURS.items()][:1])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare_quick(folder) if args.quick else prepare(args.input, folder)
        clone = copy_of(args.nanogpt, args.input, folder / "nanogpt") if args.nanogpt else None
        for place, seed in enumerate(args.seeds):
            programs = {
                name: partial(validation_loss, data + precision, seed, folder / f"{name} seed {seed}".replace(" ", "_"))
                for name, precision in contestants.items()
            }
            if clone is not None:
                programs["nanoGPT"] = partial(nanogpt_loss, clone)
            for contestant in sorted(programs, reverse=place % 2 == 1):
                begin = time.perf_counter()
                loss = programs[contestant]()
                rows.append(
                    {"contestant": contestant, "seed": seed, "seconds": time.perf_counter() - begin, "loss": loss}
                )
                print(rows[-1], flush=True)
    found = summary(rows)
    show("nanoGPT's CPU setting", found)
    if args.output:
        write(args.output, rows, summary=found)
    return 0


def copy_of(clone: Path, text: Path, into: Path) -> Path:
    """Return a copy of the clone with its own data files for `text`."""
    shutil.copytree(clone, into, ignore=shutil.ignore_patterns(".git"))
    data = into / "data" / "shakespeare_char"
    shutil.copy(text, data / "input.txt")  # otherwise prepare.py would download it
    subprocess.run([sys.executable, "prepare.py"], cwd=data, check=True, capture_output=True)
    return into


def nanogpt_loss(clone: Path) -> float:
    """Train with nanoGPT's script; return its last validation loss.  Its seed is fixed."""
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *SETTING.split()]
    done = subprocess.run(command, cwd=clone, check=True, capture_output=True, text=True)
    return float(re.findall(r"val loss ([\d.]+)", done.stdout)[-1])


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return per contestant the median time, the mean loss, and the median of nanoGPT's time / its own."""
    names = sorted({row["contestant"] for row in rows})
    times = {name: [row["seconds"] for row in rows if row["contestant"] == name] for name in names}
    return [
        {
            "contestant": name,
            "seconds": statistics.median(times[name]),
            "mean_loss": statistics.mean(row["loss"] for row in rows if row["contestant"] == name),
            "times_as_fast_as_nanogpt": statistics.median(
                b / a for a, b in zip(times[name], times["nanoGPT"], strict=True)
            )
            if "nanoGPT" in times
            else None,
        }
        for name in names
    ]


if __name__ == "__main__":
    sys.exit(main())
