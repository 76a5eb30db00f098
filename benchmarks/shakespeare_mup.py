"""Best learning rate by width, with muP and without: characters of Shakespeare, in the manner of nanoGPT's CPU setting.

    python benchmarks/shakespeare_mup.py --input tinyshakespeare.txt --output benchmarks/results/shakespeare_mup.json \
        --plot benchmarks/results/shakespeare_mup.png

Two layers of three widths with heads of 32 channels, whose learning rates are factors of 2 apart.  With muP the
narrowest width is that of the base model, so that its best rate should be that of the others.  The optimum between the
rates is that of a parabola through the best one and its neighbours.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.report import write
from matplotlib.figure import Figure
from shakespeare_char import prepare, prepare_quick, train

WIDTHS, HEAD, NUM_ITERS = (64, 128, 256), 32, 200
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
MUP, STANDARD = "muP", "standard"
QUICK_ITERS = 4
Losses = dict[tuple[str, int, float], float]


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the corpus, train each width with each rate, and print the best rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, help="the text")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="picture of the losses by learning rate")
    args = parser.parse_args(argv)
    if not (args.input or args.quick):
        parser.error("the following arguments are required: --input")
    widths, rates, num_iters = (WIDTHS[:2], RATES[:1], QUICK_ITERS) if args.quick else (WIDTHS, RATES, NUM_ITERS)
    found: Losses = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare_quick(folder) if args.quick else prepare(args.input, folder)
        for kind, width, rate in ((k, w, r) for k in (MUP, STANDARD) for w in widths for r in rates):
            loss = validation_loss(data, folder / f"{kind}{width}_{rate}", kind, width, rate, num_iters)
            print(f"{kind}, width {width}, learning rate {rate:g}: {loss:.4f}", flush=True)
            found[kind, width, rate] = loss
    best = {kind: {width: best_rate(found, kind, width) for width in widths} for kind in (MUP, STANDARD)}
    between = {kind: {width: optimum(found, kind, width) for width in widths} for kind in best}
    for kind, of_widths in best.items():
        spread = math.log2(max(of_widths.values()) / min(of_widths.values()))
        shown = ", ".join(f"{width}: {rate:.2g}" for width, rate in between[kind].items())
        print(f"{kind}: best rates {of_widths}, {spread:g} factors of 2 apart; optimum between the rates {shown}")
    rows = [{"kind": k, "width": w, "lr": lr, "validation_loss": loss} for (k, w, lr), loss in found.items()]
    if args.output:
        write(args.output, rows, best=best, optimum_between_rates=between, iterations=num_iters)
    if args.plot:
        plot(found, widths).savefig(args.plot, dpi=100)
    return 0


def best_rate(found: Losses, kind: str, width: int) -> float:
    """Return the learning rate with the lowest loss."""
    return min((rate for k, w, rate in found if (k, w) == (kind, width)), key=lambda rate: found[kind, width, rate])


def optimum(found: Losses, kind: str, width: int) -> float:
    """Return the rate at the vertex of the parabola, over the logarithm of the rate; the best one at an end."""
    rates = sorted(rate for k, w, rate in found if (k, w) == (kind, width))
    place = rates.index(best_rate(found, kind, width))
    if not 0 < place < len(rates) - 1:
        return rates[place]
    before, here, after = (found[kind, width, rates[each]] for each in range(place - 1, place + 2))
    return float(rates[place] * 2 ** ((before - after) / (2 * (before - 2 * here + after))))


def validation_loss(data: list[str], folder: Path, kind: str, width: int, rate: float, num_iters: int) -> float:
    """Return the validation loss after the last iteration."""
    model = [f"model.hidden_size={width}", f"model.num_attention_heads={width // HEAD}", "model.num_layers=2"]
    model += [f"model.mup_base_hidden_size={WIDTHS[0]}"] if kind == MUP else []
    schedule = [f"train.train_iters={num_iters}", f"optimizer.lr_decay_iters={num_iters}"]
    schedule += [f"train.eval_interval={num_iters}", f"optimizer.lr_warmup_iters={num_iters // 10}"]
    typed = [f"optimizer.lr={rate}", f"optimizer.min_lr={rate / 10}", "model.hidden_dropout=0"]
    rows = train(data, folder, [*model, *schedule, *typed])
    (*_, last) = (row["validation_loss"] for row in rows if "validation_loss" in row)
    return last


def plot(found: Mapping[tuple[str, int, float], float], widths: Sequence[int]) -> Figure:
    """Return curves of the loss over the learning rate, one for each width, next to each other with and without muP."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, kind in zip(panels, (STANDARD, MUP), strict=True):
        for width in widths:
            pairs = sorted((rate, loss) for (k, w, rate), loss in found.items() if (k, w) == (kind, width))
            (line,) = panel.plot(*zip(*pairs, strict=True), marker=".", label=f"width {width}")
            rate = best_rate(dict(found), kind, width)
            panel.plot([rate], [found[kind, width, rate]], marker="o", color=line.get_color())
        panel.set(xscale="log", xlabel="learning rate", title=kind)
    panels[0].set_ylabel("validation loss")
    panels[0].legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
