"""nanoGPT's published CPU setting: seconds of its own script and of ours in turns, and validation losses over seeds.

    python benchmarks/nanogpt.py --nanogpt PATH --input tinyshakespeare.txt --output benchmarks/results/nanogpt.json

PATH is a clone of github.com/karpathy/nanoGPT; without it only ours is timed.  Both train 2000 iterations, evaluate
every 250, and are timed from start to exit.  nanoGPT evaluates training data as well, and saves when its loss improves.
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

from report import Row, show, write
from shakespeare_char import prepare, validation_loss

# The arguments of nanoGPT's README for a laptop's CPU.
SETTING = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=10 --block_size=64 --batch_size=12 --n_layer=4 "
    "--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train each seed with both programs in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="tinyshakespeare, 1,115,394 characters")
    parser.add_argument("--nanogpt", type=Path, help="clone of nanoGPT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare(args.input, folder)
        clone = copy_of(args.nanogpt, args.input, folder / "nanogpt") if args.nanogpt else None
        for place, seed in enumerate(args.seeds):
            programs = {"megatron3d": partial(validation_loss, data, seed, folder / f"seed{seed}")}
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
    """Return the median time, the mean loss and the speed-up of ours per contestant."""
    times = {name: [row["seconds"] for row in rows if row["contestant"] == name] for name in ("megatron3d", "nanoGPT")}
    return [
        {
            "contestant": name,
            "seconds": statistics.median(seconds),
            "mean_loss": statistics.mean(row["loss"] for row in rows if row["contestant"] == name),
            "ours_over_this": statistics.median(b / a for a, b in zip(times["megatron3d"], seconds, strict=True)),
        }
        for name, seconds in times.items()
        if seconds
    ]


if __name__ == "__main__":
    sys.exit(main())
