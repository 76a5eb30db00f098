"""Totals of a rank's whole step, from the microbatches that were run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron3d.parallel.mesh import Axes
from megatron3d.pipeline.actions import Action, ActionKind
from megatron3d.verify.dry_run.run import ActionCounts, RankDryRun


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
