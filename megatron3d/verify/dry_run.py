"""Dry run of a training step on any ranks of any world (`pretrain_gpt.py --dry-run`): FLOPs, collectives and memory.

Real and dry runs differ in three things: the process group is fake, tensors are fake (FakeTensorMode), and a recorder
wraps the communicator.  All microbatches but the first and the last are alike: of many, four are run, and the totals of
the step are extrapolated from them.  The collectives that the members of each group issue are compared: on a cluster,
a difference is a deadlock.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron3d.comm.recording import RecordedCall, Recorder
from megatron3d.config.cli import Arguments
from megatron3d.config.resolve import resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.data.loader import Microbatch
from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.errors import UserError
from megatron3d.forecast.memory.step_spec import typical_documents
from megatron3d.forecast.memory.table import BYTES, align_columns, unit_for
from megatron3d.parallel.layout import span
from megatron3d.parallel.mesh import PIPELINE, Axes
from megatron3d.parallel.parallel_state import ParallelState
from megatron3d.pipeline.actions import Action, ActionKind
from megatron3d.pipeline.lower import lower
from megatron3d.runtime.arguments import shorten, whole_number
from megatron3d.runtime.files import write_figure
from megatron3d.runtime.process import fake_world, num_cores
from megatron3d.train.state import TrainState, build_state, connect
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.flop_memory_meter import FlopMemoryMeter

# The first, the last, and two between them, which are equal, as tests check.
NUM_MICROBATCHES = 4
Calls = Counter[tuple[str, Axes]]


class ActionCounts(NamedTuple):
    """FLOPs, collectives and bytes sent of one action or gap; change and peak of live bytes."""

    flops: int
    calls: Calls
    sent: Counter[tuple[str, Axes]]
    kept: int
    peak: int


@dataclass
class RankDryRun:
    """One rank's dry run.

    Attributes:
        parameters: number of parameters that it holds, padding included.
        between: bytes that it holds between steps, by kind.
        held: bytes when the first action begins.
        actions: counts of each action, in order; those of work outside of actions have the action None.
        peak_update: peak bytes after the last action.
        entries: its collectives and transfers, in order.
    """

    rank: int
    coord: int
    parameters: int
    between: Mapping[str, int]
    held: int = 0
    actions: list[tuple[Action | None, ActionCounts]] = field(default_factory=list)
    peak_update: int = 0
    entries: list[RecordedCall] = field(default_factory=list)


def with_few_microbatches(spec: RunSpec) -> RunSpec:
    """Return the run with as few microbatches as represent all others.

    A schedule from a file needs all of them.  So does ZeRO 2 with split backwards, where gradients are not reduced at
    the same position of each microbatch.
    """
    few = spec.with_microbatches(min(spec.num_microbatches, NUM_MICROBATCHES))
    if spec.has_schedule_file or (spec.config.parallel.zero_stage >= 2 and few.pipeline.splits_backward):
        return spec
    return few


def run_rank(spec: RunSpec, is_logged: bool = False) -> RankDryRun:
    """Return one dry step of the rank `spec.rank`; a logged one also counts what routers choose."""
    with fake_world(spec.rank, spec.world_size) if spec.world_size > 1 else contextlib.nullcontext(), FakeTensorMode():
        recorder = Recorder(connect(spec))
        state = build_state(spec, recorder, torch.device("cpu"), has_values=False)
        return measure_step(state, recorder, microbatches(spec), is_logged)


def microbatches(spec: RunSpec) -> list[Microbatch]:
    """Return the microbatches of a step, all tokens being 0; in each, documents are as in the typical sequences."""
    train, mesh = spec.config.train, spec.mesh
    arch = spec.arch
    low, high = span(train.micro_batch_size, spec.mode.batch_axes, mesh)
    parallel = spec.parallel_state
    step = train.micro_batch_size * parallel.data_parallel_size
    firsts = range(parallel.data_parallel_rank * train.micro_batch_size, train.global_batch_size, step)
    typical = typical_documents(spec) or ((),)
    documents = tuple(typical[row % len(typical)] for row in range(low, high))
    starts = documents if spec.config.data.reset_attention_mask else None
    shape = high - low, arch.seq_length + 1
    return [Microbatch(torch.zeros(shape, dtype=torch.int64), first, starts) for first in firsts]


def measure_step(
    state: TrainState, recorder: Recorder, batch: Sequence[Microbatch], is_logged: bool = False
) -> RankDryRun:
    """Run one step of a built state, with or without values, and count."""
    shared = state.buffers.sharding.params
    resized = [flat.params for flat in state.buffers.flat_buffers] if shared else []
    # Nothing here may hold these tensors: a step that shards gradients frees those of the step before.
    meter = FlopMemoryMeter(chain(*tensors_by_kind(state).values(), (each.tokens for each in batch)), resized)
    parameters = sum(flat.size for flat in state.buffers.flat_buffers)
    between = {kind: num_bytes(tensors) for kind, tensors in tensors_by_kind(state).items()}
    run = RankDryRun(state.spec.rank, state.spec.parallel_state.pipeline_parallel_rank, parameters, between)
    recorder.calls.clear()
    recorder.entries.clear()
    notes = _ActionRecorder(meter, recorder, run)
    train = state.spec.config.train
    num_tokens, packing = train.global_batch_size * state.model.arch.seq_length, state.spec.packing(0)
    settings = StepSettings(train.seed, num_tokens, train.global_batch_size, packing)
    with meter:
        train_step(state, batch, 1e-4, settings, observer=notes.observe, watches_routers=is_logged)
    notes.close(None)
    run.peak_update, run.entries = run.actions[-1][1].peak, recorder.entries
    return run


def tensors_by_kind(state: TrainState) -> dict[str, list[Tensor]]:
    """Return the tensors that a rank holds between steps, by kind."""
    flats, optimizer = state.buffers.flat_buffers, state.optimizer
    mains = [flat.main for flat in flats if not flat.is_view]
    return {
        "weights": [tensor for flat in flats for tensor in flat.weights],
        "main weights": mains,
        "gradients": [flat.grad if flat.full_grad is None else flat.full_grad for flat in flats],
        "optimizer": optimizer.state_values,
    }


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class _ActionRecorder:
    """Splits the counts of a meter and a communication recorder by action."""

    def __init__(self, meter: FlopMemoryMeter, recorder: Recorder, run: RankDryRun) -> None:
        self._meter, self._recorder = meter, recorder
        self._run = run
        run.held = meter.num_bytes
        self._mark()

    def _mark(self) -> None:
        self._flops, self._calls = self._meter.flops, len(self._recorder.calls)
        self._held = self._meter.num_bytes
        self._meter.reset_peak()

    @contextlib.contextmanager
    def observe(self, what: Action | str) -> Iterator[None]:
        """Record an action with the wait before it; phases are not actions."""
        if not self._run.actions and not isinstance(what, str):
            self.close(None)
        yield
        if not isinstance(what, str):
            self.close(what)

    def close(self, action: Action | None) -> None:
        """Attribute the counts since the last call to an action; None: to work outside of actions."""
        new = self._recorder.calls[self._calls :]
        calls = Counter((call.collective, call.axes) for call in new)
        sent: Counter[tuple[str, Axes]] = Counter()
        for call in new:
            sent[call.collective, call.axes] += call.wire_bytes  # type: ignore[assignment]
        kept, peak = self._meter.num_bytes - self._held, self._meter.peak_bytes - self._held
        self._run.actions.append((action, ActionCounts(self._meter.flops - self._flops, calls, sent, kept, peak)))
        self._mark()


@dataclass(frozen=True)
class StepTotals:
    """Counts of a rank's whole step, with all its microbatches.

    Attributes:
        peak: peak of live bytes, in the action `peak_at`; at that time `moment` are the transient bytes of the action,
            and `activations` the others beyond those that are held between steps.
        timeline: live bytes after each action; `peaks` are the peaks during each action, and in the optimizer step.
    """

    flops: int
    calls: Mapping[tuple[str, Axes], int]
    sent: Mapping[tuple[str, Axes], float]
    peak: int
    peak_at: str
    activations: int
    moment: int
    timeline: Sequence[int]
    peaks: Sequence[int]


def step_totals(run: RankDryRun, actions: Sequence[Action]) -> StepTotals:
    """Return the totals of a rank's action list; a microbatch that was not run counts as the second one.

    Raises RuntimeError where microbatches between the first and the last differ.
    """
    every = _all_counts({action: done for action, done in run.actions if action is not None}, actions)
    rest = [done for action, done in run.actions if action is None]
    calls, sent = Counter[tuple[str, Axes]](), Counter[tuple[str, Axes]]()
    for each in [*rest, *every]:
        calls.update(each.calls)
        sent.update(each.sent)
    held, timeline = run.held + rest[0].kept, list[int]()
    peaks = list[tuple[int, int, int, str]]()
    for action, each in zip(actions, every, strict=True):
        peaks.append((held + each.peak, held, each.peak, str(action)))
        held += each.kept
        timeline.append(held)
    peaks.append((held + run.peak_update, held, run.peak_update, "update"))
    peak, at, moment, name = max(peaks, key=lambda item: item[0])
    flops = sum(each.flops for each in [*rest, *every])
    tops = [each[0] for each in peaks]
    return StepTotals(flops, calls, sent, peak, name, at - sum(run.between.values()), moment, timeline, tops)


def _all_counts(known: Mapping[Action, ActionCounts], actions: Sequence[Action]) -> list[ActionCounts]:
    """Return the counts of every action, given those of the first microbatches and of the last one."""
    last = max(action.mb for action in known if action.mb is not None)
    num = max(action.mb for action in actions if action.mb is not None)
    # A microbatch leaves nothing behind; what the second one seems to, others take away with their own.
    left: Counter[int] = Counter()
    for action, found in known.items():
        left[action.stage] += found.kept * (action.mb == 1)
    for action, found in known.items() if num != last else ():
        if action.mb == 2 and last > 2 and (found.flops, found.calls) != (second := known[action._replace(mb=1)])[:2]:
            raise RuntimeError(f"{action} does {found[:2]}, the microbatch before {second[:2]}")

    def counts(action: Action) -> ActionCounts:
        if action.mb is None or action.mb == 0 or num == last:
            return known[action]
        if action.mb == num:
            return known[action._replace(mb=last)]
        found = known[action._replace(mb=1)]
        is_over = action.kind in (ActionKind.B, ActionKind.W)
        return found._replace(kept=found.kept - left[action.stage]) if is_over else found

    return [counts(action) for action in actions]


def disagreements(runs: Sequence[RankDryRun], state: ParallelState) -> list[str]:
    """Return the first difference of each pair of group members, or of the two ends of a link."""
    found = list[str]()
    lists: dict[tuple[int, ...], dict[int, list[tuple[str, tuple[int, ...], str]]]] = {}
    for run in runs:
        here = state.mesh.at(run.rank)
        for what, where, shape, dtype in run.entries:
            group = tuple(sorted(here.ranks(where))) if isinstance(where, tuple) else where.ranks(here)
            if not isinstance(where, tuple) and run.rank == group[1]:
                what = {"send": "receive", "receive": "send"}.get(what, what)
            lists.setdefault(group, {}).setdefault(run.rank, []).append((what, shape, dtype))
    present = {run.rank for run in runs}
    for group, by_rank in lists.items():
        ranks = [rank for rank in group if rank in present]
        first = by_rank.get(ranks[0], [])
        for other in ranks[1:]:
            found += _difference(ranks[0], first, other, by_rank.get(other, []))
    return found


def _difference(rank: int, mine: Sequence[object], other: int, theirs: Sequence[object]) -> Iterator[str]:
    for number, (one, two) in enumerate(zip(mine, theirs, strict=False), 1):
        if one != two:
            yield f"ranks {rank} and {other} would hang: call {number} between them is {one} on one, {two} on the other"
            return
    if len(mine) != len(theirs):
        counts = f"rank {rank} makes {len(mine)} calls, rank {other} {len(theirs)}"
        yield f"ranks {rank} and {other} would hang: {counts} to the same group"


# Of more ranks than that some are drawn, the first and the last among them.
MAX_PANELS = 8


def figure(runs: Sequence[RankDryRun], sums: Sequence[StepTotals]) -> Figure:
    """Return a figure with a panel per rank, all on one scale of bytes."""
    count = min(len(runs), MAX_PANELS)
    shown = [round(place * (len(runs) - 1) / max(1, count - 1)) for place in range(count)]
    picture = Figure(figsize=(10, 1 + 2 * len(shown)), layout="constrained")
    unit, size = unit_for(max(each.peak for each in sums), BYTES)
    panels: list[Panel] = list(picture.subplots(len(shown), 1, squeeze=False, sharey=True)[:, 0])
    for axes, place in zip(panels, shown, strict=True):
        _draw(axes, runs[place], sums[place], size)
        axes.set_title(f"rank {runs[place].rank}: most {sums[place].peak / size:,.1f} {unit}, at {sums[place].peak_at}")
        axes.set_ylabel(unit)
    panels[-1].set_xlabel("actions of the step, the update last")
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    return picture


def _draw(axes: Panel, run: RankDryRun, sums: StepTotals, size: float) -> None:
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
