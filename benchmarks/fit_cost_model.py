"""Fit the cost model's terms to published runs, judge them in k folds, and write them to `fitted.yaml`.

    python benchmarks/fit_cost_model.py --samples FOLDER

FOLDER has `nanotron_h100_sample.csv` (runs of nanotron behind the Ultrascale playbook) and `vtrain_a100_sample.csv`
(runs of Megatron-LM on one node, published with vTrain); the other rows are the tables of the tests, and
`llm_foundry.csv` beside this file.  Of each fold the terms are fitted to the other rows alone.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, quantiles

import numpy as np
from fit.fit_memory import TERMS as MEMORY_TERMS
from fit.fit_memory import fit_memory
from fit.fit_rows import Run, declared_rows
from fit.fit_sample import NANOTRON, write_sample

from megatron3d.forecast.time.practices import FITTED, ON, FittedTerms, fitted_terms
from megatron3d.forecast.time.step import SimulatedStep, step_time

HEADER = "# Written by benchmarks/fit_cost_model.py; docs/validation.md says how well it does.  Do not edit.\n"
# Scale of each term's search, its prior (the neutral value) and its bounds.
SCALES = {
    "products": (0.2, 1.0, 0.7, 1.5),
    "attention": (0.5, 1.0, 0.5, 4.0),
    "memory": (0.3, 1.0, 0.6, 3.0),
    "hidden_tax": (0.3, 0.0, 0.0, 1.0),
    "host_layer_us": (2000.0, 0.0, 0.0, 2e4),
    "host_tensor_us": (500.0, 0.0, 0.0, 2e4),
    "host_nodes": (0.3, 0.0, 0.0, 2.0),
    "degraded_host_us": (2000.0, 0.0, 0.0, 2e4),
    "degraded_host_tensor_us": (1000.0, 0.0, 0.0, 2e4),
    "call_us": (50.0, 0.0, 0.0, 2e3),
    "hop_us": (20.0, 0.0, 0.0, 1e3),
    "inner": (0.5, 1.0, 0.5, 6.0),
    "outer": (0.5, 1.0, 0.5, 8.0),
    "fall": (0.3, 0.0, 0.0, 2.0),
    "jitter": (0.02, 0.0, 0.0, 0.1),
}
# Where a search starts: a floor below all layers would not show in any derivative.
START = {"host_layer_us": 1.5, "host_tensor_us": 0.5, "host_nodes": 0.5, "call_us": 0.5}
START |= {"degraded_host_us": 0.5, "degraded_host_tensor_us": 0.5}
# The terms that a practice's rows can tell apart.
TERMS = {
    "Megatron-LM, 2021": ("memory", "host_layer_us", "host_tensor_us", "call_us", "inner"),
    "PyTorch FSDP": ("attention", "memory", "hidden_tax", "host_layer_us", "call_us", "outer", "jitter"),
    "PyTorch FSDP on a100": ("products", "attention", "memory", "hidden_tax", "jitter"),
    "PyTorch FSDP on h100": ("products", "attention", "memory", "hidden_tax", "jitter"),
    "nanotron": (
        *("attention", "memory", "hidden_tax", "host_layer_us", "host_tensor_us"),
        *("degraded_host_us", "degraded_host_tensor_us", "host_nodes"),
        *("call_us", "hop_us", "inner", "outer", "fall", "jitter"),
    ),
}
# Runs that take more than this times as long as predicted, or as much less, are told apart: next to them, others of
# nearly the same layout are not.
FAR = 1.6
HUBER, RIDGE, ROUNDS = 0.1, 0.05, 6
Vector = np.ndarray


@dataclass(frozen=True)
class Fit:
    """Terms of a practice as a vector in units of their scales."""

    names: tuple[str, ...]

    def terms(self, vector: Vector) -> FittedTerms:
        """Return the terms of a vector, within their bounds."""
        found = {}
        for name, value in zip(self.names, vector, strict=True):
            scale, prior, low, high = SCALES[name]
            found[name] = min(max(prior + scale * float(value), low), high)
        return FittedTerms.model_validate(found)

    def errors(self, vector: Vector, runs: Sequence[Run]) -> Vector:
        """Return the logarithms of measured over predicted step times."""
        terms = self.terms(vector)
        return np.array([math.log(run.measured_s / predicted_s(run.step, terms)) for run in runs])

    def fitted(self, runs: Sequence[Run], start: Vector) -> Vector:
        """Return the vector with the least Huber loss and ridge, by Gauss-Newton steps with numerical derivatives."""
        best, at = self.errors(start, runs), start
        damping = 0.1
        for _ in range(ROUNDS):
            steps = 0.05 * np.eye(len(at))
            slopes = np.stack([(self.errors(at + step, runs) - best) / 0.05 for step in steps], axis=1)
            weights = 1 / np.maximum(1, np.abs(best) / HUBER)
            curve = (slopes.T * weights) @ slopes + (RIDGE + damping) * np.eye(len(at))
            tried = at - np.linalg.solve(curve, (slopes.T * weights) @ best + RIDGE * at)
            found = self.errors(tried, runs)
            if _loss(found, tried) < _loss(best, at):
                better = _loss(best, at) - _loss(found, tried)
                best, at, damping = found, self._inside(tried), damping / 4
                if better < 1e-3 * _loss(best, at):
                    break
            else:
                damping *= 10
        return at

    def _inside(self, vector: Vector) -> Vector:
        terms = self.terms(vector)
        return np.array([(getattr(terms, name) - SCALES[name][1]) / SCALES[name][0] for name in self.names])


def _loss(errors: Vector, vector: Vector) -> float:
    sizes = np.abs(errors)
    huber = np.where(sizes < HUBER, sizes**2 / 2, HUBER * (sizes - HUBER / 2))
    return float(huber.sum() + RIDGE * (vector**2).sum() / 2)


def predicted_s(step: SimulatedStep, terms: FittedTerms) -> float:
    """Return the step time with these terms in place of those of the step's machine."""
    machine = step.machine
    machine = replace(
        machine,
        device=replace(machine.device, fitted=terms),
        network=replace(machine.network, fitted=terms),
        profile=replace(machine.profile, fitted=terms),
    )
    return step_time(replace(step, machine=machine)).step_s


def fit_practice(runs: Sequence[Run], names: tuple[str, ...], folds: int) -> tuple[FittedTerms, Vector]:
    """Return the terms fitted to all runs of a practice, and each run's error when its fold is held out."""
    fit = Fit(names)
    start = np.array([START.get(name, 0.0) for name in names])
    everything = fit.fitted(runs, start)
    errors = np.zeros(len(runs))
    for fold in range(folds):
        out = [place for place in range(len(runs)) if place % folds == fold]
        if out:
            rest = [run for place, run in enumerate(runs) if place % folds != fold]
            errors[out] = fit.errors(fit.fitted(rest, start), [runs[place] for place in out])
    low, *_, high = quantiles(np.exp(errors), n=10)
    spread = (round(min(low, 1.0), 3), round(max(high, 1.0), 3))
    rounded = {name: float(f"{getattr(fit.terms(everything), name):.3g}") for name in names}
    return FittedTerms.model_validate({**rounded, "spread": spread}), errors


def regrets(runs: Sequence[Run], errors: Vector) -> list[float]:
    """Return, of each choice among at least three layouts, how much slower the predicted best is than the best."""
    choices = defaultdict(list)
    for run, error in zip(runs, errors, strict=True):
        choices[run.choice].append((run.measured_s / math.exp(error), run.measured_s))
    several = [rows for rows in choices.values() if len(rows) >= 3]
    return [min(rows)[1] / min(measured for _, measured in rows) - 1 for rows in several]


def ranks(values: Sequence[float]) -> Vector:
    """Return the place of each value in their order."""
    return np.argsort(np.argsort(values))


def table_line(name: str, runs: Sequence[Run], errors: Vector) -> str:
    """Return a line of docs/validation.md: positive errors are predictions that are too fast."""
    percent = [100 * (math.exp(error) - 1) for error in errors]
    sizes = list(map(abs, percent))
    measured = [run.measured_s for run in runs]
    order = float(np.corrcoef(ranks(measured), ranks(list(np.array(measured) / np.exp(errors))))[0, 1])
    lost = [100 * each for each in regrets(runs, errors)]
    told = f"{mean(lost):.1f} % / {max(lost):.1f} % of {len(lost)}" if lost else "-"
    cells = (f"{mean(sizes):.1f} %", f"{median(sizes):.1f} %", f"{max(sizes):.0f} %", f"{median(percent):+.1f} %")
    return f"| {name} | {len(runs)} | {' | '.join(cells)} | {order:.3f} | {told} |"


def lines(practices: dict[str, list[Run]], folds: int, keep: Callable[[str, FittedTerms], None]) -> Iterator[str]:
    """Yield the table's lines, before and after the fit, and hand the terms of each practice to `keep`."""
    yield "| rows | number | mean | median | worst | bias | rank correlation | regret, mean / worst |"
    yield "| :-- | --: | --: | --: | --: | --: | --: | --: |"
    for name, runs in practices.items():
        unfitted = Fit(())
        yield table_line(f"{name}, unfitted", runs, unfitted.errors(np.zeros(0), runs))
        terms, errors = fit_practice(runs, TERMS[name], folds)
        keep(name, terms)
        groups = dict.fromkeys(run.group for run in runs)
        for group in groups:
            chosen = [place for place, run in enumerate(runs) if run.group == group]
            told = f"{name}, {folds} folds: {group}" if len(groups) > 1 else f"{name}, {folds} folds"
            yield table_line(told, [runs[place] for place in chosen], errors[chosen])
            near = [place for place in chosen if abs(errors[place]) < math.log(FAR)]
            if far := len(chosen) - len(near):
                yield table_line(
                    f"{told}, without {far} off by more than {FAR}", [runs[place] for place in near], errors[near]
                )


def main() -> None:
    """Fit the terms of the samples, or of a few made-up runs without a change of the package."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=Path, metavar="FOLDER", help="of the two CSV files")
    parser.add_argument("--output", type=Path, default=FITTED, metavar="FILE", help="default: the package's own")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--practices", nargs="+", choices=list(TERMS), default=list(TERMS))
    parser.add_argument("--only-memory", action="store_true", help="keep the terms of time that the package has")
    parser.add_argument("--quick", action="store_true", help="a few made-up runs, which only show that it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.practices, arguments.folds = ["nanotron"], 2
        with tempfile.TemporaryDirectory() as folder:
            arguments.samples, arguments.output = write_sample(Path(folder)), Path(folder) / FITTED.name
            fit(arguments)
    elif not arguments.samples:
        parser.error("the following arguments are required: --samples")
    else:
        fit(arguments)


def fit(arguments: argparse.Namespace) -> None:
    """Fit and print as the arguments say."""
    found = dict(fitted_terms()) if arguments.only_memory else times_of(arguments)
    if "nanotron" in found:
        terms, told = fit_memory(arguments.samples / NANOTRON, arguments.folds)
        found["nanotron"] = found["nanotron"].model_copy(update=terms)
        print(told)
    text = HEADER + "".join(written(name, terms) for name, terms in sorted(found.items()))
    arguments.output.write_text(text, encoding="utf-8")


def times_of(arguments: argparse.Namespace) -> dict[str, FittedTerms]:
    """Return the fitted terms of time by practice, and print the table."""
    practices: dict[str, list[Run]] = defaultdict(list)
    for run in declared_rows(arguments.samples):
        kind = next((name for name in TERMS if name.startswith(run.practice + ON) and run.is_on(name)), None)
        for name in {run.practice, kind} & {*arguments.practices}:
            practices[name or ""].append(run)
    found: dict[str, FittedTerms] = {}
    for line in lines(practices, arguments.folds, found.__setitem__):
        print(line, flush=True)
    return found


def written(name: str, terms: FittedTerms) -> str:
    """Return the line of a practice in the file."""
    memory = (*MEMORY_TERMS, "memory_spread") if terms.activation_memory > 1 else ()
    values = {key: getattr(terms, key) for key in (*TERMS[name], "spread", *memory)}
    shown = ", ".join(f"{key}: {list(value) if isinstance(value, tuple) else value}" for key, value in values.items())
    return f"{name if ',' not in name else repr(name)}: {{{shown}}}\n"


if __name__ == "__main__":
    main()
