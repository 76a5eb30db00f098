"""A pipeline of toy stages with a simple memory formula, arbitrary valid schedules for it, and watched transfers.

y = x + sum over f of sin(sin(sin(x W^T)))[f];  the last stage ends in a mean squared error
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron3d.comm.interface import Comm, Pending
from megatron3d.linear.main_grad import MainGrads, WgradQueue
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Axes, Link, Mesh
from megatron3d.pipeline.actions import Action, ActionKind, Schedule, completed_by, stage_to_rank
from megatron3d.pipeline.engine import ActivationTransfer, Engine, Observer, no_observer
from megatron3d.pipeline.lower import lower
from tests.support.dependencies import dependencies
from tests.support.matmuls import linear
from tests.support.shards import normal
from tests.support.turn_ranks import make_comm, run_turns

TOKENS, HIDDEN, WIDER = 3, 5, 8
T = TypeVar("T")


class Toy(nn.Module):
    """Stage of `depth` layers; each saves three wide tensors, of which its deferred weight gradient needs one."""

    def __init__(self, stage: int, comm: Comm, wgrads: WgradQueue | None, depth: int, wider: int) -> None:
        super().__init__()
        self.comm, self.wgrads = comm, wgrads
        seeds = [100 * stage + index for index in range(depth)]
        self.weights = nn.ParameterList([normal(wider * HIDDEN, HIDDEN, seed=seed) / HIDDEN for seed in seeds])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            wide = linear(x, weight, None, MatmulPlan(), self.comm, self.wgrads)
            x = x + wide.sin().sin().sin().unflatten(1, (-1, HIDDEN)).mean(1)
        return x


class ToyPipeline:
    """Results of a rank of the toy pipeline: losses by microbatch, weight gradients by stage and layer."""

    def __init__(
        self,
        schedule: Schedule,
        comm: Any,
        copies: Axes = (),
        tokens: int = TOKENS,
        depth: int = 1,
        wider: int = WIDER,
    ) -> None:
        rank, self.where = comm.mesh.coord("pipeline"), tuple(stage_to_rank(schedule).values())
        self.tokens, wgrads = tokens, WgradQueue(MainGrads())
        self.stages = {
            stage: Toy(stage, comm, wgrads, depth, wider) for stage, owner in enumerate(self.where) if owner == rank
        }
        self.reduced: list[int] = []
        transfer = ActivationTransfer((tokens, HIDDEN), torch.float64, torch.device("cpu"), copies, comm)
        actions = lower(schedule)[rank]
        self.engine = Engine(actions, self.where, self.compute, transfer, self.reduced.append, wgrads)

    def compute(self, stage: int, x: Tensor | None, mb: int) -> Tensor:
        return compute(self.stages[stage], x, mb, self.tokens, stage == len(self.where) - 1)

    def run(self, observer: Observer = no_observer) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        losses = self.engine.run(observer)
        assert sorted(self.reduced) == sorted(self.stages), f"reduced {self.reduced} of stages {list(self.stages)}"
        return dict(losses), gradients(self.stages)


def compute(stage: nn.Module, x: Tensor | None, mb: int, tokens: int, is_last: bool) -> Tensor:
    """Run a rank's schedule; a microbatch's input and target are functions of its number."""
    y: Tensor = stage(normal(tokens, HIDDEN, seed=10_000 + mb) if x is None else x)
    return (y - normal(tokens, HIDDEN, seed=20_000 + mb)).square().mean() if is_last else y


def gradients(stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    found = {}
    for index, stage in stages.items():
        for name, weight in stage.named_parameters():
            assert weight.grad is not None, f"stage {index} has no gradient"
            found[f"{index}.{name}"] = weight.grad
    return found


def reference(num_stages: int, m: int, tokens: int = TOKENS) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Compute the reference by autograd alone, one microbatch after another."""
    comm: Any = None
    stages = {stage: Toy(stage, comm, None, 1, WIDER) for stage in range(num_stages)}
    losses = {}
    for mb in range(m):
        x = None
        for index, stage in stages.items():
            x = compute(stage, x, mb, tokens, index == num_stages - 1)
        assert x is not None, "there is a stage"
        x.backward()
        losses[mb] = x.detach()
    return losses, gradients(stages)


def any_schedule(choose: random.Random, where: Sequence[int], m: int) -> Schedule:
    """Draw a valid schedule of stages on the ranks `where`: any order of computations, some backwards split."""
    n = len(where)
    todo = {Action(ActionKind.F, stage, mb) for stage in range(n) for mb in range(m)}
    for stage in range(n):
        for mb in range(m):
            todo |= {Action(kind, stage, mb) for kind in choose.choice(((ActionKind.B,), (ActionKind.I, ActionKind.W)))}
    done: set[Action] = set()
    ranks: list[list[Action]] = [[] for _ in set(where)]
    while todo:
        able = sorted(action for action in todo if done.issuperset(dependencies(action, n)))
        action = choose.choice(able)
        todo.remove(action)
        done |= set(completed_by(action))
        ranks[where[action.stage]].append(action)
    return tuple(map(tuple, ranks))


def process_comm(mesh: Mesh, schedule: Schedule, copies: Axes) -> Comm:
    """Return a communicator with a link for every two ranks with neighbouring stages."""
    pairs = {tuple(sorted(pair)) for pair in pairwise(stage_to_rank(schedule).values()) if len(set(pair)) > 1}
    return make_comm(mesh, [copies], [Link("pipeline", *pair) for pair in pairs])


class WatchedComm:
    """`Comm` of a rank of a pipeline that records its transfers.

    Attributes:
        events: the transfers posted and waited for, in order.
        unwaited: number of sends and receives posted and not yet waited for.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self.mesh = comm, comm.mesh
        self.events: list[str] = []
        self.unwaited = {"send": 0, "receive": 0}

    def _watch(self, what: str, pending: Pending) -> Pending:
        self.events.append(what)
        self.unwaited[what] += 1

        def finish() -> Tensor:
            self.events.append(f"wait for {what}")
            self.unwaited[what] -= 1
            return pending.wait()

        return Pending(finish, pending.is_done)

    def send(self, x: Tensor, link: Link) -> Pending:
        return self._watch("send", self._comm.send(x, link))

    def receive(self, out: Tensor, link: Link) -> Pending:
        return self._watch("receive", self._comm.receive(out, link))

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        return self._comm.all_gather(x, axes, dim)


def run_watched(schedule: Schedule, rank: Callable[[WatchedComm], T]) -> list[T]:
    """Run every rank of a schedule in turns and return their results; raise the first exception of any rank."""

    def work(index: int, num_ranks: int) -> T:
        return rank(WatchedComm(process_comm(Mesh((("pipeline", num_ranks),), index), schedule, ())))

    return run_turns(work, len(schedule))
