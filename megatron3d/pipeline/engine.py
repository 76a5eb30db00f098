"""Runs a rank's lowered list: computes, posts receives where they stand, sends without waiting, and forgets early.

    0F2  takes what 0RECV_F2 brought (or the stage before it on this rank made), keeps the graph of its result
    0B2  takes the gradient, frees the graph, hands the input's gradient on;  0I2 and 0W2 are its two halves

Only the residual shard that a rank holds crosses a boundary; ranks that hold the same shard send a part of it each, and
join the parts at the other end (Narayanan et al. 2021, arXiv:2104.04473, section 4.1, for every mode).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron3d.comm.process_comm import Comm, Pending, ready
from megatron3d.ops.wgrad_queue import WgradQueue
from megatron3d.parallel.mesh import Axes
from megatron3d.parallel.p2p import Link
from megatron3d.pipeline.actions import RECEIVES, SENDS, Action, ActionKind
from megatron3d.pipeline.lower import peer_rank, send_recv_after

Compute = Callable[[int, Tensor | None, int], Tensor]
Observer = Callable[[Action], contextlib.AbstractContextManager[None]]


def no_observer(_: object) -> contextlib.AbstractContextManager[None]:
    """No watch."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class ActivationTransfer:
    """What crosses from stage to stage: the residual shard of a rank, `copies` being the axes that hold equal ones."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    copies: Axes
    comm: Comm

    @property
    def part_numel(self) -> int:
        """Elements that one rank sends, with what fills up the last part."""
        numel, ranks = torch.Size(self.shape).numel(), self.comm.mesh.size(self.copies)
        return -(-numel // ranks)

    def part(self, x: Tensor) -> Tensor:
        """My share of sending `x`."""
        flat, size = x.reshape(-1), self.part_numel
        start = self.comm.mesh.index(self.copies) * size
        mine = flat[start : start + size]
        return mine if len(mine) == size else F.pad(mine, (0, size - len(mine)))

    def receive(self, link: Link) -> Pending:
        """Begin to receive the same share; waiting joins all of them."""
        pending = self.comm.receive(torch.empty(self.part_numel, dtype=self.dtype, device=self.device), link)

        def finish() -> Tensor:
            whole = self.comm.all_gather(pending.wait(), self.copies, dim=0).wait()
            return whole[: torch.Size(self.shape).numel()].view(self.shape)

        return Pending(finish)


# Sends under way at one time: gloo never says that one is over, and each keeps its tensor.
MAX_SENDS_IN_FLIGHT = 4


class Graph(NamedTuple):
    """What is kept of a forward: its input, whose gradient is wanted, and where backward begins."""

    x_MH: Tensor | None
    end: GradientEdge


class Engine:
    """Executes the lowered list of one rank.

    Args:
        actions: my list.
        where: the pipeline rank of every stage.
        compute: (stage, input or None, microbatch) -> output; a loss at the last stage.
        reduce: called with a stage when its weight gradients are complete.
        wgrads: queue that defers weight gradients, where the schedule splits the backward.

    Attributes:
        peak_in_flight: most graphs that were kept at one time.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        where: Sequence[int],
        compute: Compute,
        boundary: ActivationTransfer,
        reduce: Callable[[int], None] = lambda stage: None,
        wgrads: WgradQueue | None = None,
    ) -> None:
        self._actions, self._where = actions, dict(enumerate(where))
        self._compute, self._boundary, self._reduce, self._wgrads = compute, boundary, reduce, wgrads
        self._received: dict[Action, Pending] = {}
        self._made: dict[Action, Tensor] = {}
        self._leaving: list[Pending] = []
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._late: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._results: dict[int, Tensor] = {}
        self.peak_in_flight = 0

    def run(self, watch: Observer = no_observer) -> Mapping[int, Tensor]:
        """Do the whole list, once; outputs of the last stage by microbatch, without their graphs.

        What an action waits for is there when its watch begins.
        """
        for action in self._actions:
            arrived = self._wait_for(action)
            with watch(action):
                _DO[action.kind](self, action, arrived)
            self._leaving = [sent for sent in self._leaving if not sent.is_done()]
            while len(self._leaving) > MAX_SENDS_IN_FLIGHT:
                self._leaving.pop(0).wait()
            self.peak_in_flight = max(self.peak_in_flight, len(self._graphs) + len(self._late))
        for sent in self._leaving:
            sent.wait()
        assert not (self._received or self._made or self._graphs or self._late), "a schedule left work undone"
        return self._results

    def _wait_for(self, action: Action) -> Tensor | None:
        """What another stage made for a computation; None where it needs nothing."""
        kind, stage, mb = action
        if kind not in _ARRIVES or stage == (0 if kind is ActionKind.F else len(self._where) - 1):
            return None
        return self._received.pop(Action(_ARRIVES[kind], stage, mb)).wait()

    def _forward(self, action: Action, x_MH: Tensor | None) -> None:
        _, stage, mb = action
        assert mb is not None, f"{action} names no microbatch"
        if x_MH is not None and torch.is_grad_enabled():
            x_MH.requires_grad_()
        y = self._compute(stage, x_MH, mb)
        if y.requires_grad:
            self._graphs[stage, mb] = Graph(x_MH, get_gradient_edge(y))
        if stage + 1 == len(self._where):
            self._results[mb] = y.detach()
        else:
            self._hand_on(action, y.detach())

    def _backward(self, action: Action, dy: Tensor | None) -> None:
        _, stage, mb = action
        assert mb is not None, f"{action} names no microbatch"
        x_MH, end = self._graphs.pop((stage, mb))
        torch.autograd.backward([end], [torch.ones_like(self._results[mb]) if dy is None else dy])
        if self._wgrads is not None:
            self._wgrads.flush()
        if x_MH is not None:
            assert x_MH.grad is not None, f"{action} gave its input no gradient"
            self._hand_on(action, x_MH.grad)

    def _input_grads(self, action: Action, dy: Tensor | None) -> None:
        assert self._wgrads is not None and action.mb is not None, f"nothing defers weight gradients: {action}"
        with self._wgrads.defer() as late:
            self._backward(action, dy)
        self._late[action.stage, action.mb] = late

    @torch.no_grad()
    def _late_weight_grads(self, action: Action, _: None) -> None:
        assert self._wgrads is not None and action.mb is not None, f"nothing defers weight gradients: {action}"
        late = self._late.pop((action.stage, action.mb))[::-1]
        while late:
            late.pop()()
        self._wgrads.flush()

    def _hand_on(self, action: Action, x: Tensor) -> None:
        """To the SEND that follows, or to the neighbouring stage on this rank."""
        moved = send_recv_after(action, self._where)
        if moved is not None:
            self._made[moved.send] = x
        else:
            self._received[_arrival(action)] = ready(x)

    def _link(self, action: Action) -> Link:
        mine, other = self._where[action.stage], peer_rank(action, self._where)
        return Link("pipeline", min(mine, other), max(mine, other))

    def _send(self, action: Action, _: None) -> None:
        boundary = self._boundary
        self._leaving.append(boundary.comm.send(boundary.part(self._made.pop(action)), self._link(action)))

    def _receive(self, action: Action, _: None) -> None:
        self._received[action] = self._boundary.receive(self._link(action))


def _arrival(action: Action) -> Action:
    """The RECV by which the next computation would get what this one made."""
    forward = action.kind is ActionKind.F
    return Action(ActionKind.RECV_F if forward else ActionKind.RECV_B, action.stage + (1 if forward else -1), action.mb)


# What a computation waits for, and what each action does with it.
_ARRIVES = {ActionKind.F: ActionKind.RECV_F, ActionKind.B: ActionKind.RECV_B, ActionKind.I: ActionKind.RECV_B}
_DO: Mapping[ActionKind, Callable[[Engine, Action, Any], None]] = {
    ActionKind.F: Engine._forward,
    ActionKind.B: Engine._backward,
    ActionKind.I: Engine._input_grads,
    ActionKind.W: Engine._late_weight_grads,
    ActionKind.REDUCE: lambda engine, action, _: engine._reduce(action.stage),
    **dict.fromkeys(SENDS, Engine._send),
    **dict.fromkeys(RECEIVES, Engine._receive),
}
