"""Muon next to AdamW in nanoGPT's CPU setting: the validation loss of AdamW, and Muon's after 75 % of the iterations.

    python benchmarks/shakespeare_muon.py --input tinyshakespeare.txt --output benchmarks/results/shakespeare_muon.json

Both rules are tuned first: the learning rate with the lowest loss of one seed, of factors of 2.  Every run has the
whole schedule, down to a tenth of its learning rate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from common.report import write
from shakespeare_char import prepare, prepare_quick, train

RATES: Mapping[str, Sequence[float]] = {
    "adam": (1e-3, 2e-3, 4e-3, 8e-3),
    "muon": (2e-3, 4e-3, 8e-3, 16e-3),
}
NUM_ITERS: Mapping[str, int] = {"adam": 2000, "muon": 1500}
QUICK_ITERS = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the corpus, tune both rules, and train each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, help="the text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if not (args.input or args.quick):
        parser.error("the following arguments are required: --input")
    rates = {rule: some[:1] for rule, some in RATES.items()} if args.quick else RATES
    found: dict[tuple[str, float, int], float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare_quick(folder) if args.quick else prepare(args.input, folder)
        first, *others = [1] if args.quick else args.seeds

        def run(rule: str, rate: float, seed: int) -> None:
            num_iters = QUICK_ITERS if args.quick else NUM_ITERS[rule]
            loss = validation_loss(data, folder / f"{rule}{rate}_{seed}", rule, rate, seed, num_iters)
            print(f"{rule}, learning rate {rate:g}, seed {seed}, {num_iters} iterations: {loss:.4f}", flush=True)
            found[rule, rate, seed] = loss

        for rule, rate in ((rule, rate) for rule, some in rates.items() for rate in some):
            run(rule, rate, first)
        best = {rule: min(some, key=lambda rate: found[rule, rate, first]) for rule, some in rates.items()}
        for rule, seed in ((rule, seed) for rule in best for seed in others):
            run(rule, best[rule], seed)
    means = {rule: mean_loss(found, rule, best[rule]) for rule in best}
    rows = [{"rule": r, "lr": lr, "seed": s, "validation_loss": loss} for (r, lr, s), loss in found.items()]
    for rule, mean in means.items():
        print(f"{rule}, learning rate {best[rule]:g}, {NUM_ITERS[rule]} iterations: mean {mean:.4f}")
    if args.output:
        write(args.output, rows, best=best, means=means, iterations=NUM_ITERS)
    return 0


def mean_loss(found: Mapping[tuple[str, float, int], float], rule: str, rate: float) -> float:
    """Return the mean over seeds."""
    return statistics.mean(_losses(found, rule, rate))


def _losses(found: Mapping[tuple[str, float, int], float], rule: str, rate: float) -> Iterable[float]:
    return (loss for (each, lr, _), loss in found.items() if (each, lr) == (rule, rate))


def validation_loss(data: list[str], folder: Path, rule: str, rate: float, seed: int, num_iters: int) -> float:
    """Return the validation loss after the last iteration."""
    schedule = [f"train.train_iters={num_iters}", f"optimizer.lr_decay_iters={num_iters}"]
    typed = [f"optimizer.optimizer={rule}", f"optimizer.lr={rate}", f"optimizer.min_lr={rate / 10}"]
    rows = train(data, folder, [*schedule, *typed, f"train.seed={seed}"])
    (*_, last) = (row["validation_loss"] for row in rows if "validation_loss" in row)
    return last


if __name__ == "__main__":
    sys.exit(main())
