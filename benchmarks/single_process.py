"""Tokens per second of one process: our training step, a plain PyTorch GPT, and Hugging Face's GPT2LMHeadModel.

python benchmarks/single_process.py [--sizes 3M 30M] [--precisions fp32 bf16] [--output benchmarks/results/NAME.json]

All contestants start from the same weights, see the same tokens, and are interleaved within one run.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from common.report import Row, interleaved, milliseconds, show, times_faster, write
from common.shapes import SIZES, Size
from peers.contestants import CONTESTANTS, Step
from torch import Tensor

OURS = next(iter(CONTESTANTS))


def check_same_loss(steps: Mapping[str, Step], tokens: Tensor, precision: str) -> None:
    """Check that the first loss of every contestant is equal, within the rounding of bf16."""
    losses = {name: float(step(tokens)) for name, step in steps.items()}
    tolerance = {"fp32": 1e-4, "bf16": 1e-2}[precision]
    spread = max(losses.values()) - min(losses.values())
    assert spread < tolerance, f"the contestants compute different losses: {losses}"
    print(f"first losses agree within {spread:.1e}: {losses}")


def peak_memory_bytes(contestant: str, size: Size, precision: str, num_threads: int) -> int:
    """Return the growth of a fresh process's resident set, from before the model is built to the peak of two steps."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_growth, contestant, size, precision, num_threads).result()


def _growth(contestant: str, size: Size, precision: str, num_threads: int) -> int:
    """Return the growth of this process's peak resident set; a tiny model runs first to load libraries.

    Uses Linux's own high-water mark, reset before; getrusage would also count the parent process.
    """
    torch.set_num_threads(num_threads)
    CONTESTANTS[contestant](SIZES["tiny"], precision)(SIZES["tiny"].tokens())
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes()["VmRSS"]
    step, tokens = CONTESTANTS[contestant](size, precision), size.tokens()
    for _ in range(2):
        step(tokens)
    return _resident_bytes()["VmHWM"] - before


def _resident_bytes() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[0] in ("VmRSS:", "VmHWM:")}


def measure(size_name: str, precision: str, names: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """Return a row per contestant."""
    size = SIZES[size_name]
    tokens = size.tokens()
    steps = {name: CONTESTANTS[name](size, precision) for name in names}
    check_same_loss(steps, tokens, precision)
    turns = interleaved({name: partial(step, tokens) for name, step in steps.items()}, options.rounds, options.warmup)
    return [
        {
            "size": size_name,
            "precision": precision,
            "contestant": name,
            "tokens_per_s": size.num_tokens / statistics.median(turn.wall_s for turn in turns[name]),
            "ours_over_this": times_faster(turns, OURS, name),
            **milliseconds(turns[name]),
            "peak_memory_mb": None
            if options.no_memory
            else peak_memory_bytes(name, size, precision, options.threads) / 1e6,
        }
        for name in names
    ]


def main() -> None:
    """Measure, print, write."""
    options = arguments()
    torch.set_num_threads(options.threads)
    names = [name for name in CONTESTANTS if options.fused_peer or "fused" not in name]
    rows: list[Row] = []
    for size in options.sizes:
        for precision in options.precisions:
            found = measure(size, precision, names, options)
            show(f"{size}, {precision}, {options.threads} threads", found)
            rows += found
    if options.output:
        shapes = {name: vars(SIZES[name]) for name in options.sizes}
        write(options.output, rows, threads=options.threads, rounds=options.rounds, sizes=shapes)


def arguments() -> argparse.Namespace:
    """Parse the options; `--quick` is a round of the tiny size without memory."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["3M", "30M"])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps per contestant; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fused-peer", action="store_true", help="also the plain GPT with torch's fused AdamW")
    parser.add_argument("--no-memory", action="store_true", help="leave out the fresh process per contestant")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds = ["tiny"], 1
        options.warmup, options.no_memory = 1, True
    return options


if __name__ == "__main__":
    main()
