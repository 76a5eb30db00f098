"""Training that goes on when ranks are lost: fewer ranks, another layout, the same global batch.

    train  ->  ranks are lost  ->  agree, plan, connect  ->  build in the new layout, load  ->  train
                                        |
                                        spares wait, and take the place of the next rank that is lost

The order of samples is a function of their index, so that the same global batches follow in any layout.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron3d.checkpoint.held import Held, hand_over
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.read import Resolved
from megatron3d.config.run_spec import RunSpec
from megatron3d.data.tokenizers.tokenizer import build_tokenizer
from megatron3d.errors import ExitCode, RunFailed
from megatron3d.forecast.search.nearby import describe_layout, differences, nearby_layout, with_changes
from megatron3d.parallel.mesh import DATA, Mesh
from megatron3d.runtime.epochs import Epoch
from megatron3d.runtime.joining import write_meeting
from megatron3d.runtime.members import RanksLost
from megatron3d.runtime.process import Runtime, lost_rank
from megatron3d.runtime.program import StartupPhases, StopSignal
from megatron3d.train.build import build_run
from megatron3d.train.loop import train
from megatron3d.train.monitor.reports import report_end
from megatron3d.train.restore import held_state
from megatron3d.train.run import Run


class Training:
    """One process's part in a run, through all losses of ranks.

    Attributes:
        run: the run in its present layout; None before it is built, and while this process is spare.
    """

    def __init__(self, resolved: Resolved, here: Runtime, phases: StartupPhases, stop: StopSignal) -> None:
        self._first, self._resolved, self._here, self._phases, self._stop = resolved, resolved, here, phases, stop
        self._spec: RunSpec | None = None
        self._began_at = 0
        self._held: Held = ()
        self.run: Run | None = None
        if here.members is not None:
            here.members.stop_spare(stop.is_requested)

    def close(self) -> None:
        """Close the metrics, and release the folder."""
        if self.run is not None:
            self.run.close()

    def finish(self) -> int:
        """Train to the run's end, also if ranks are lost meanwhile; return the exit code."""
        members = self._here.members
        found = self._regroup(made_progress=False) if members is not None and members.is_new else None
        while not isinstance(found, ExitCode):
            code = self._train(found)
            if code is not None:
                return code
            found = self._regroup(self._let_go())
        return found

    def _let_go(self) -> bool:
        """Keep what can be restored of a run that has lost ranks, and end the rest; return whether it made a step."""
        run, self.run = self.run, None
        if run is None:  # lost before it was built, and `_held` is still that of the run before
            return False
        self._held = what_is_held(run, self._here)
        if self._here.members is not None:
            self._here.members.follow(lambda: None)
        run.close()
        return run.state.iteration > self._began_at

    def _train(self, epoch: Epoch | None) -> int | None:
        """Build the run and train; return None where ranks are lost and others can go on."""
        here, members = self._here, self._here.members
        try:
            self.run = run = build_run(self._resolved, here, self._phases, self._held if epoch else None)
            self._held = ()
            if members is not None:
                members.follow(lambda: place_of(run))
            self._spec, self._began_at = run.spec, run.state.iteration
            if here.rank == 0:
                self._tell_ready(run, epoch)
                self._tell_where(run)
            code = train(run, self._stop, goes_on=epoch is not None)
            if here.rank == 0:
                print("\n".join(f"> {line}" for line in report_end(run)), flush=True)
            if members is not None:
                members.end(code)
            return code
        except Exception as error:
            if members is None or not members.is_loss(error, lost_rank(error) is not None):
                raise
        return None

    def _tell_ready(self, run: Run, epoch: Epoch | None) -> None:
        """Say that training begins, or goes on: in words and, after a loss, as a row of the metrics."""
        if epoch is None:
            print(f"> ready after {self._phases.total_s:.2f} s; training", flush=True)
            return
        members = self._here.members
        assert members is not None and run.metrics is not None, "rank 0 of an elastic run tells"
        spent = dict(self._phases.durations)
        connect_s = members.connect_s + spent.pop("process groups")
        restore_s = spent.pop("model and optimizer") + spent.pop("checkpoint")
        seconds = {**epoch.seconds, "connect": connect_s, "restore": restore_s, "rest": sum(spent.values())}
        details = {
            "lost": list(epoch.lost),
            "slow": list(epoch.slow),
            "joined": list(epoch.new),
            "members": list(epoch.members),
            "spares": list(epoch.spares),
            "lost_at": members.lost_at_s,
            "seconds": {name: round(each, 3) for name, each in seconds.items()},
            "layout": describe_layout(run.spec),
            **{name: epoch.layout[name] for name in ("before", "slowdown", "is_predicted") if name in epoch.layout},
        }
        run.metrics.replan(run.state.iteration, _message(epoch, run, sum(seconds.values())), details)

    def _tell_where(self, run: Run) -> None:
        """Write to the run's folder where processes find it that join."""
        if self._here.members is not None and run.config.checkpoint.save is not None:
            meeting = self._here.members.meeting(self._first.config.model_dump(mode="json"))
            write_meeting(Path(run.config.checkpoint.save), meeting)

    def _regroup(self, made_progress: bool) -> Epoch | ExitCode:
        """Find out who is left, and connect with them; as a spare, wait until this process gets a rank."""
        members = self._here.members
        assert members is not None, "only an elastic run goes on"
        while True:
            members.keep(bool(self._held))
            try:
                found = members.regroup(self._plan, made_progress, self._hand_over)
            except RanksLost as lost:
                print(f"> {lost}", file=sys.stderr, flush=True)
                made_progress = False
                continue
            if isinstance(found, Epoch):
                self._here = self._here.in_epoch()
                config = with_changes(self._first.config, found.layout.get("changes", {}))
                self._resolved = replace(self._first, config=config)
                self._phases = StartupPhases(printing=self._here.rank == 0)
            return found

    def _hand_over(self, rank: int, num_ranks: int, num_kept: int) -> bool:
        """Give the first ranks what others have in memory that leave; return whether this one has something then."""
        held = hand_over(self._held, ProcessComm(Mesh(((DATA[-1], num_ranks),), rank), ()), num_kept)
        self._held = held if rank < num_kept else ()
        return bool(self._held)

    def _unbuilt(self) -> RunSpec:
        """Return the run in its present layout, which this process has not had a rank in."""
        members, config = self._here.members, self._first.config
        assert members is not None, "only an elastic run goes on"
        vocab_size = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model).vocab_size
        config = with_changes(config, members.epoch.layout.get("changes", {}))
        return RunSpec(config, len(members.epoch.members), vocab_size)

    def _plan(self, num_ranks: int) -> tuple[int, Mapping[str, Any]]:
        """Return the number of ranks, and the layout, for the processes that there are.

        With as many as at the launch that is the layout that the run was launched in.
        """
        config, members, present = self._first.config, self._here.members, self._spec or self._unbuilt()
        assert members is not None, "only an elastic run goes on"
        is_whole = num_ranks >= members.num_launched
        near = RunSpec(config, members.num_launched, present.vocab_size) if is_whole else present
        chosen = nearby_layout(near, num_ranks, config.logging.cluster, present=present)
        return chosen.num_ranks, {
            "changes": differences(self._first.config, chosen.config),
            "before": describe_layout(present),
            "slowdown": chosen.slowdown,
            "is_predicted": chosen.is_predicted,
        }


def place_of(run: Run) -> tuple[int, bool]:
    """Return the steps of a run, and whether its state is complete."""
    return run.state.iteration, run.state.update.is_complete()


def what_is_held(run: Run, here: Runtime) -> Held:
    """Return the boxes of every step that this rank has in memory, of which a half-done update leaves none.

    Where kernels run on after their collectives were aborted, it must not have changed since the loss was noticed.
    """
    assert here.members is not None, "only an elastic run goes on"
    is_usable = here.device.type == "cpu" or place_of(run) == here.members.place_at_loss
    live = held_state(run.state, run.identity) if is_usable else ()
    if run.memory is None:
        return live
    with contextlib.suppress(RunFailed):  # of the copy that the loss has interrupted
        run.memory.wait()
    return (*live, *run.memory.held())


def _message(epoch: Epoch, run: Run, seconds: float) -> str:
    """Return what was lost, and how the run goes on, in words."""
    what = {"lost processes": epoch.lost, "slow": epoch.slow, "joined": epoch.new}
    changes = "; ".join(f"{name}: {', '.join(map(str, numbers))}" for name, numbers in what.items() if numbers)
    now = f"{run.runtime.world_size} ranks, {describe_layout(run.spec)}"
    spares = f", {len(epoch.spares)} spare" * bool(epoch.spares)
    slowdown = f"; a step takes {epoch.layout['slowdown']:.2f} times as long" if "slowdown" in epoch.layout else ""
    predicted = ", as predicted" if epoch.layout.get("is_predicted") else ", if it scales with the ranks"
    return (
        f"{changes}; training goes on from iteration {run.state.iteration} after {seconds:.1f} s "
        f"on {now}{spares}{slowdown}{predicted * bool(slowdown)}"
    )
