"""`pretrain_gpt.py --dry-run`: run the ranks that differ in several processes, and report.

Plot the memory of ranks over a dry run: bytes by kind, and the peak during each action.

weights | main weights | gradients | optimizer | activations           ___ most during an action
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron3d.config.cli import Arguments, resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.errors import UserError
from megatron3d.forecast.memory.table import BYTES, align_columns, unit_for
from megatron3d.parallel.mesh import PIPELINE
from megatron3d.parallel.parallel_state import ParallelState
from megatron3d.pipeline.lower import lower
from megatron3d.runtime.arguments import shorten, whole_number
from megatron3d.runtime.files import write_figure
from megatron3d.runtime.process import num_cores
from megatron3d.verify.dry_run import (
    RankDryRun,
    StepTotals,
    disagreements,
    run_rank,
    step_totals,
    with_few_microbatches,
)

# Of more ranks than that some are drawn, the first and the last among them.
MAX_PANELS = 8


def figure(runs: Sequence[RankDryRun], sums: Sequence[StepTotals]) -> Figure:
    """Return a figure with a panel per rank, all on one scale of bytes."""
    count = min(len(runs), MAX_PANELS)
    shown = [round(place * (len(runs) - 1) / max(1, count - 1)) for place in range(count)]
    picture = Figure(figsize=(10, 1 + 2 * len(shown)), layout="constrained")
    unit, size = unit_for(max(each.peak for each in sums), BYTES)
    panels: list[Axes] = list(picture.subplots(len(shown), 1, squeeze=False, sharey=True)[:, 0])
    for axes, place in zip(panels, shown, strict=True):
        _draw(axes, runs[place], sums[place], size)
        axes.set_title(f"rank {runs[place].rank}: most {sums[place].peak / size:,.1f} {unit}, at {sums[place].peak_at}")
        axes.set_ylabel(unit)
    panels[-1].set_xlabel("actions of the step, the update last")
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    return picture


def _draw(axes: Axes, run: RankDryRun, sums: StepTotals, size: float) -> None:
    """Draw the bytes after each action, stacked by kind, and the peak during it."""
    kept = sum(run.between.values())
    kinds = {kind: len(sums.peaks) * [held] for kind, held in run.between.items()}
    kinds["activations"] = [max(0, held - kept) for held in (*sums.timeline, kept)]
    places = range(len(sums.peaks))
    heights = [[held / size for held in series] for series in kinds.values()]
    axes.stackplot(places, heights, labels=list(kinds), step="mid")
    axes.step(places, [peak / size for peak in sums.peaks], where="mid", color="black", label="most during it")
    axes.margins(x=0.005)


OPERATIONS = {"GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15}


def report(runs: Sequence[RankDryRun], sums: Sequence[StepTotals]) -> str:
    """Return all tables."""
    busiest = max(range(len(runs)), key=lambda index: sums[index].flops)
    lines = [*rank_table(runs, sums), "", f"collectives of rank {runs[busiest].rank} in a step, sent over rings:"]
    return "\n".join(f"> {line}".rstrip() for line in [*lines, *call_table(sums[busiest])])


def rank_table(runs: Sequence[RankDryRun], sums: Sequence[StepTotals]) -> list[str]:
    """Return a line per rank."""
    unit, size = unit_for(max(each.peak for each in sums), BYTES)
    operations, one = unit_for(max(each.flops for each in sums), OPERATIONS)
    kinds = list(runs[0].between)
    header = ("rank", "stage rank", "parameters", operations, "calls", f"sent {unit}", *kinds, "activations")
    rows = [
        (
            str(run.rank),
            str(run.coord),
            f"{run.parameters:,}",
            f"{each.flops / one:,.1f}",
            f"{sum(each.calls.values()):,}",
            f"{sum(each.sent.values()) / size:,.1f}",
            *(f"{run.between[kind] / size:,.1f}" for kind in kinds),
            f"{each.activations / size:,.1f}",
            f"{each.moment / size:,.1f}",
            f"{each.peak / size:,.1f}",
            each.peak_at,
        )
        for run, each in zip(runs, sums, strict=True)
    ]
    return align_columns([(*header, "moment", f"peak {unit}", "at"), *rows])


def call_table(sums: StepTotals) -> list[str]:
    """Return a line per collective and axes."""
    unit, size = unit_for(max(sums.sent.values(), default=0), BYTES)
    rows = [
        (what, "·".join(axes), f"{count:,}", f"{sums.sent[what, axes] / size:,.3f}", "")
        for (what, axes), count in sorted(sums.calls.items())
    ]
    return align_columns([("collective", "axes", "calls", unit, ""), *rows]) if rows else ["none"]


# Ranks of one dry run, each of which takes a good part of a second.
MAX_CHOSEN = 10_000


def dry_run(spec: RunSpec, ranks: Sequence[int]) -> list[RankDryRun]:
    """Run the step of several ranks, in several processes if that is faster."""
    few = with_few_microbatches(spec)
    workers = min(num_cores(), -(-len(ranks) // 4))
    if workers == 1:
        return [run_rank(few.on_rank(rank)) for rank in ranks]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(run_rank, few.on_rank(rank)) for rank in ranks]
        return [future.result() for future in futures]


def chosen_ranks(text: str, state: ParallelState) -> list[int]:
    """Return the ranks that `--ranks` names."""
    world_size = state.world_size
    named: Mapping[str, Iterable[int]] = {"all": range(world_size), PIPELINE: state.pipeline_parallel_group}
    ranks = set(named[text]) if text in named else {whole_number(part.strip()) for part in text.split(",")}
    chosen = sorted(rank for rank in ranks if rank is not None and 0 <= rank < world_size)
    if len(chosen) < len(ranks):
        rule = f"must be pipeline, all, or ranks of 0 to {world_size - 1}; use --ranks 0"
        raise UserError(f"--ranks {shorten(text)}: {rule}")
    if len(chosen) > MAX_CHOSEN:
        raise UserError(f"--ranks {shorten(text)}: {len(chosen)} ranks, more than {MAX_CHOSEN}; use --ranks 0")
    return chosen


def run_dry(arguments: Arguments, environ_world_size: int) -> int:
    """Run and print; return exit code 0, or 1 if ranks disagree.  Raises UserError."""
    world_size = arguments.world_size or environ_world_size
    config = resolve(arguments.config, arguments.overrides, world_size, elsewhere=True).config
    vocab_size = config.model.vocab_size
    if vocab_size is None:
        vocab_size = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model).vocab_size
    spec = RunSpec(config, world_size, vocab_size)
    runs = dry_run(spec, chosen_ranks(arguments.ranks, spec.parallel_state))
    lists = lower(spec.schedule)
    sums = [step_totals(run, lists[run.coord]) for run in runs]
    print(report(runs, sums))
    if arguments.picture:
        draw(arguments.picture, runs, sums)
    problems = disagreements(runs, spec.parallel_state)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"> {len(runs)} ranks agree on every call to every group that two or more of them are in")
    return int(bool(problems))


def draw(path: Path, runs: Sequence[RankDryRun], sums: Sequence[StepTotals]) -> None:
    """Write the plot of memory.  Raises UserError if the file cannot be written."""
    try:
        write_figure(path, figure(runs, sums))
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {path}: {error}; use a file such as memory.svg in a folder that exists") from error
    print(f"> drew {path}")
