"""When training has gone wrong: back to the last good checkpoint, and past the data of that window.

What counts as wrong is configured: so many steps in a row without an update, or a loss that is far from its neighbours,

    (loss - median) / (1.4826 * median absolute deviation)  >  rollback_loss_spike_score

over the last `rollback_window` losses, which for normal losses is in standard deviations.  Going back to a checkpoint
from before and skipping some hundred batches is what PaLM's authors did by hand (Chowdhery et al. 2022,
arXiv:2204.02311, section 5.1).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from megatron3d.checkpoint.publish import finished_checkpoints, move_tracker_back
from megatron3d.checkpoint.verify import newest_intact
from megatron3d.comm.run_on_all_ranks import run_on_all_ranks
from megatron3d.config.schema import TrainConfig
from megatron3d.train.checkpointing import load_state
from megatron3d.train.state import TrainState

LEAST = 16
NORMAL = 1.4826


class Judge:
    """Watches losses; every rank comes to the same judgement, since all see the same numbers.

    Attributes:
        num_rollbacks: since the start.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.rollback_window)
        self._skipped = 0
        self.num_rollbacks = 0

    @property
    def is_watching(self) -> bool:
        """Whether anything would be judged: only then has a step's loss to be waited for."""
        return bool(self._config.rollback_nonfinite_steps or self._config.rollback_loss_spike_score)

    def see(self, loss: float, skipped: bool) -> tuple[int, str] | None:
        """For how many steps it has gone wrong, this one included, and in what way; None where all is well."""
        most, score = self._config.rollback_nonfinite_steps, self._config.rollback_loss_spike_score
        if skipped or not math.isfinite(loss):
            self._skipped += 1
            if self._skipped != most:
                return None
            self._skipped = 0
            return most, f"{most} steps in a row had a loss or gradients that are not finite"
        self._skipped = 0
        found = self._score(loss)
        if score is not None and found > score:
            return 1, f"a loss of {loss:.6g} is {found:.1f} deviations above the last {len(self._losses)} ones"
        self._losses.append(loss)
        return None

    def _score(self, loss: float) -> float:
        if len(self._losses) < LEAST:
            return 0.0
        median = statistics.median(self._losses)
        deviation = NORMAL * statistics.median(abs(each - median) for each in self._losses)
        return (loss - median) / deviation if deviation else 0.0


def roll_back(root: Path | None, state: TrainState, identity: Mapping[str, JsonValue], wrong: tuple[int, str]) -> str:
    """Load the newest good checkpoint from before it went wrong, but go on with the samples after; what was done, in
    words.  Raises RuntimeError, on all ranks, where there is no such checkpoint.
    """
    comm, (steps, reason), here, next_sample = state.model.comm, wrong, state.iteration, state.consumed_samples

    def choose() -> bool:
        earlier = [iteration for iteration in (finished_checkpoints(root) if root else ()) if iteration <= here - steps]
        if root and earlier:
            move_tracker_back(root, max(earlier))
        return bool(earlier)

    found = run_on_all_ranks(comm, lambda: choose() if comm.mesh.rank == 0 else False)
    folder = newest_intact(root, comm)[0] if root and comm.broadcast_object(found and found[0]) else None
    if folder is None:
        where = f"{root} holds no good checkpoint from before" if root else "checkpoint.save names no folder"
        raise RuntimeError(f"iteration {here}: {reason}, and {where} to go back to")
    load_state(folder, state, identity)
    first, state.consumed_samples = state.consumed_samples, next_sample
    return f"{reason}: back from iteration {here} to {state.iteration}, skipping samples {first} to {next_sample - 1}"
