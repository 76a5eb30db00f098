"""Losses of each recipe of fp8 next to bf16's: a model of 10.7M parameters on characters of Shakespeare.

    python benchmarks/shakespeare_fp8.py --input tinyshakespeare.txt --output benchmarks/results/shakespeare_fp8.json \
        --plot benchmarks/results/shakespeare_fp8.png
    python benchmarks/shakespeare_fp8.py --input tinyshakespeare.txt --runs blockwise --seeds 1 2 3

The model is that of nanoGPT's GPU setting without dropout: six layers of width 384, whose linears all multiply in fp8.
Every run has the same batches and the same schedule.  The validation loss at the end, over the same samples, should be
within 0.5 % of bf16's, in the mean over seeds of the initialization and the batches.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from common.report import write
from matplotlib.figure import Figure
from shakespeare_char import prepare, prepare_quick, train

from megatron3d.linear.fp8_plan import RECIPES

BF16 = "bf16"
RUNS: Mapping[str, Sequence[str]] = {
    BF16: (),
    **{name: ("train.fp8=e4m3", f"train.fp8_recipe={name}") for name in RECIPES},
    "blockwise, hybrid": ("train.fp8=hybrid", "train.fp8_recipe=blockwise"),
}
NUM_ITERS, QUICK_ITERS, EVAL_ITERS = 1000, 2, 50
MODEL = ("model.num_layers=6", "model.hidden_size=384", "model.num_attention_heads=6", "model.seq_length=128")
SCHEDULE = ("train.micro_batch_size=4", "train.global_batch_size=4", "train.precision=bf16", "optimizer.lr=1e-3")
QUICK = ("model.num_layers=1", "model.hidden_size=128", "model.num_attention_heads=2", "model.seq_length=128")


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the corpus, train by each recipe, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, help="the text")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--iters", type=int, default=NUM_ITERS)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS], help="bf16 is always one of them")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1234])
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="picture of the losses by iteration")
    args = parser.parse_args(argv)
    if not (args.input or args.quick):
        parser.error("the following arguments are required: --input")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare_quick(folder) if args.quick else prepare(args.input, folder)
        num_iters, eval_iters = (QUICK_ITERS, 1) if args.quick else (args.iters, EVAL_ITERS)
        shared = [*(QUICK if args.quick else MODEL), *SCHEDULE, "model.hidden_dropout=0"]
        shared += [f"train.train_iters={num_iters}", f"optimizer.lr_decay_iters={num_iters}"]
        shared += [f"train.eval_interval={max(num_iters // 10, 1)}", f"train.eval_iters={eval_iters}"]

        def curve(job: tuple[str, int]) -> list[dict[str, Any]]:
            run, seed = job
            keys = [*shared, *RUNS[run], f"train.seed={seed}"]
            found: list[dict[str, Any]] = train(data, folder / f"{run.replace(', ', '_')}_{seed}", keys)
            print(f"{run}, seed {seed}: validation loss {final_loss(found):.4f}", flush=True)
            return found

        jobs = [(run, seed) for seed in args.seeds for run in RUNS if run in (BF16, *args.runs)]
        with ThreadPoolExecutor(args.parallel) as pool:
            curves = dict(zip(jobs, pool.map(curve, jobs), strict=True))
    final = {run: mean(final_loss(curves[run, seed]) for seed in args.seeds) for run, _ in jobs}
    for run, loss in final.items():
        print(f"{run}: {loss:.4f}, {100 * (loss / final[BF16] - 1):+.2f} % of bf16's")
    if args.output:
        rows = [
            {
                "run": run,
                "seed": seed,
                "iteration": row["iteration"],
                **{key: row[key] for key in ("lm_loss", "validation_loss") if key in row},
            }
            for (run, seed), some in curves.items()
            for row in some
        ]
        write(args.output, rows, final=final)
    if args.plot:
        plot({run: some for (run, seed), some in curves.items() if seed == args.seeds[0]}).savefig(args.plot, dpi=100)
    return 0


def final_loss(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the last validation loss."""
    return float([row["validation_loss"] for row in rows if "validation_loss" in row][-1])


def plot(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Return the training losses and validation losses by iteration, and the latter relative to bf16's."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    losses, ratios = figure.subplots(1, 2)
    base = {row["iteration"]: row["validation_loss"] for row in curves[BF16] if "validation_loss" in row}
    for run, rows in curves.items():
        found = {row["iteration"]: row["validation_loss"] for row in rows if "validation_loss" in row}
        losses.plot(list(found), list(found.values()), marker=".", label=run)
        ratios.plot(list(found), [100 * (found[at] / base[at] - 1) for at in found], marker=".")
    losses.set(xlabel="iteration", ylabel="validation loss")
    ratios.set(xlabel="iteration", ylabel="% above bf16's")
    losses.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
