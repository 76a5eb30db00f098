"""Changes of a run's ranks that no loss forces: slow ones are left out, and processes that wait to join are let in."""

from __future__ import annotations

from megatron3d.config.run_spec import RunSpec
from megatron3d.errors import RunFailed
from megatron3d.forecast.search.nearby import nearby_layout
from megatron3d.train.monitor.stragglers import SlowRanks
from megatron3d.train.run import Run


class RankChanges:
    """Looks after each step whether a run would be faster on other ranks."""

    def __init__(self, run: Run) -> None:
        self._run, self._num_refused = run, 0

    def after_step(self, slow: SlowRanks, *, at_checkpoint: bool) -> None:
        """Leave this epoch of an elastic run where another one is faster: raises RanksLost, on all ranks.

        Args:
            at_checkpoint: a checkpoint was made after this step, so that processes may join.
        """
        run, members = self._run, self._run.runtime.members
        leaves = bool(slow.ranks) and run.config.train.on_straggler == "replan"
        if members is None or not (leaves or at_checkpoint) or run.state.iteration == run.spec.train_iters:
            return
        wish = (leaves and slow.gains, at_checkpoint and self._can_grow()) if run.runtime.rank == 0 else None
        leaves, grows = run.comm.broadcast_object(wish)
        if not (leaves or grows):
            return
        for saver in (run.saver, run.memory):  # their connections end with the epoch
            if saver:
                saver.wait()
        ranks = ", ".join(map(str, slow.ranks))
        members.change(f"slow: {ranks}" if leaves else "others join", slow.ranks if leaves else ())

    def _can_grow(self) -> bool:
        """Return whether a layout uses more ranks, with those that wait to join; only rank 0 knows."""
        run, members = self._run, self._run.runtime.members
        assert members is not None, "only an elastic run grows"
        num_waiting = members.num_waiting()
        if num_waiting <= self._num_refused:
            return False
        self._num_refused = num_waiting
        return grows_to(
            run.spec,
            run.runtime.world_size + members.num_spares + num_waiting,
            members.num_launched,
            run.config.logging.cluster,
        )


def grows_to(spec: RunSpec, num_ranks: int, num_launched: int, cluster: str | None) -> bool:
    """Return whether `num_ranks` processes have a layout on more ranks than the present one."""
    if spec.world_size < num_launched <= num_ranks:
        return True
    try:
        return nearby_layout(spec, num_ranks, cluster).num_ranks > spec.world_size
    except RunFailed:
        return False
