"""NodeChoice of the nodes of a SLURM job whose ranks train, where the job has more than they need.

    allocated              n1 n2 n3 n4 n5     of which 1 is spare
    first launch           n1 n2 n3 n4        rank 9, on n2, keeps the others waiting
    next launch            n1 n3 n4 n5        n2 is left out from now on

A node is left out that was found unfit before a launch, or on which a launch of this job has lost a rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from megatron3d.errors import UserError
from megatron3d.metrics.journal import read_lines
from megatron3d.runtime.culprits import FILE_NAME as CULPRITS
from megatron3d.runtime.files import write_text
from megatron3d.runtime.launcher_env import SlurmJob

FILE_NAME = "slurm_nodes.jsonl"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NodeChoice:
    """Line of `slurm_nodes.jsonl` in the run's folder: nodes of a launch, in the order of its ranks.

    Attributes:
        left_out: nodes that this job does not use any more, with reasons.
        num_seen: lines of `culprits.jsonl` that are considered.
    """

    job: int
    requeue: int
    nodes: tuple[str, ...]
    left_out: Mapping[str, str]
    num_seen: int


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Culprit:
    """Line of `culprits.jsonl`: ranks of any launch, or a node that was unfit for a launch of a job."""

    time: float
    ranks: Annotated[tuple[int, ...], Field(max_length=10**6)] = ()
    world_size: Annotated[int, Field(ge=1)] = 1
    node: str = ""
    why: str = ""
    job: int = 0
    requeue: int = 0


CHOICE, CULPRIT = TypeAdapter(NodeChoice), TypeAdapter(Culprit)


def choose_nodes(root: Path, job: SlurmJob, allocated: Sequence[str], spares: int, elastic: bool) -> NodeChoice:
    """Choose the nodes of this launch, record them, and return them.

    Without enough good nodes an elastic run takes those that there are, and another one also nodes that were blamed,
    but none that this launch has found unfit.  Raises UserError where there are too few, or the folder is read-only.
    """
    culprits = [each for _, each in read_lines(root / CULPRITS, CULPRIT)]
    before = [each for _, each in read_lines(root / FILE_NAME, CHOICE) if each.job == job.job_id]
    last = before[-1] if before else None
    left_out = dict(last.left_out) if last else {}
    left_out |= _blamed(culprits[last.num_seen :], last) if last else {}
    launch = job.job_id, job.num_requeues
    unfit = {each.node: each.why for each in culprits if each.node and (each.job, each.requeue) == launch}
    left_out |= unfit
    wanted = len(allocated) - spares
    good = [node for node in allocated if node not in left_out]
    if len(good) < wanted and not elastic:
        good += [node for node in allocated if node in left_out and node not in unfit]
    if not good or (len(good) < wanted and not elastic):
        reasons = "; ".join(f"{node}: {why}" for node, why in left_out.items())
        raise UserError(f"{wanted} of {len(allocated)} nodes are needed, and only {len(good)} are fit; {reasons}")
    chosen = tuple(node for node in allocated if node in good[:wanted])
    out = {node: why for node, why in left_out.items() if node not in chosen}
    choice = NodeChoice(job.job_id, job.num_requeues, chosen, out, len(culprits))
    _record(root, choice)
    return choice


def _blamed(culprits: Iterable[Culprit], last: NodeChoice) -> dict[str, str]:
    """Return the nodes of the last launch's ranks that were at fault, with reasons."""
    places = {rank: rank * len(last.nodes) // each.world_size for each in culprits for rank in each.ranks}
    reason = "rank {} of launch {} was at fault"
    return {last.nodes[place]: reason.format(rank, last.requeue + 1) for rank, place in places.items()}


def _record(root: Path, choice: NodeChoice) -> None:
    choices = [*(each for _, each in read_lines(root / FILE_NAME, CHOICE)), choice]
    lines = [json.dumps(asdict(each)) + "\n" for each in choices]
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_text(root / FILE_NAME, "".join(lines))
    except OSError as error:
        raise UserError(f"checkpoint.save={root}: cannot be written to ({error.strerror}); use your own") from error
