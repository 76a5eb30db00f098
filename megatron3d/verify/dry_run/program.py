"""`pretrain_gpt.py --dry-run`: run the ranks that differ in several processes, and report."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from megatron3d.config.cli import Arguments, resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.errors import UserError
from megatron3d.parallel.parallel_state import ParallelState
from megatron3d.pipeline.lower import lower
from megatron3d.runtime.files import write_figure
from megatron3d.runtime.limits import shorten, whole_number
from megatron3d.runtime.process import num_cores
from megatron3d.verify.dry_run.agree import disagreements
from megatron3d.verify.dry_run.plot import figure
from megatron3d.verify.dry_run.run import RankDryRun, run_rank, with_few_microbatches
from megatron3d.verify.dry_run.show import report
from megatron3d.verify.dry_run.totals import StepTotals, step_totals

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
    named: Mapping[str, Iterable[int]] = {"all": range(world_size), "pipeline": state.pipeline_parallel_group}
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
