"""Engine of one pipeline rank: runs its lowered list with autograd, overlapping send/recv with computation.

    0F2  takes the input that 0RECV_F2 received (or that this rank computed), and keeps the autograd graph of its output
    0B2  takes the output's gradient, frees the graph, and passes on the input's gradient;  0I2 and 0W2 are its halves

Only the rank's shard of the residual stream crosses a stage boundary.  Ranks that replicate it send one part each and
all-gather on the receiving side ("scatter/gather", Narayanan et al. 2021, arXiv:2104.04473, section 4.1).
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

from megatron3d.comm.interface import Comm, Pending, completed
from megatron3d.ops.wgrad_queue import WgradQueue
from megatron3d.parallel.mesh import Axes
from megatron3d.parallel.p2p import Link
from megatron3d.pipeline.actions import RECEIVES, SENDS, Action, ActionKind
from megatron3d.pipeline.lower import peer_rank, send_recv_after

Compute = Callable[[int, Tensor | None, int], Tensor]
# Returns the context manager that is entered around an action or, by a training step, around a phase by its name.
Observer = Callable[[Action | str], contextlib.AbstractContextManager[None]]


def no_observer(_: object) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that does nothing."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class ActivationTransfer:
    """Send and receive the residual shard of one microbatch between stages.

    Attributes:
        shape, dtype, device: those of the shard.
        copies: mesh axes over which ranks hold the same shard, so that each of them sends one part of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    copies: Axes
    comm: Comm

    @property
    def part_numel(self) -> int:
        """Elements that one rank sends, padding of the last part included."""
        numel, ranks = torch.Size(self.shape).numel(), self.comm.mesh.size(self.copies)
        return -(-numel // ranks)

    def send(self, x: Tensor, link: Link) -> Pending:
        """Start to send this rank's part of `x`."""
        flat, size = x.reshape(-1), self.part_numel
        start = self.comm.mesh.index(self.copies) * size
        part = flat[start : start + size]
        return self.comm.send(part if len(part) == size else F.pad(part, (0, size - len(part))), link)

    def receive(self, link: Link) -> Pending:
        """Start to receive this rank's part; waiting for it all-gathers the whole shard."""
        pending = self.comm.receive(torch.empty(self.part_numel, dtype=self.dtype, device=self.device), link)

        def finish() -> Tensor:
            whole = self.comm.all_gather(pending.wait(), self.copies, dim=0).wait()
            return whole[: torch.Size(self.shape).numel()].view(self.shape)

        return Pending(finish)


# Most sends in flight: gloo never reports that a send is done, and each keeps its tensor alive.
MAX_SENDS_IN_FLIGHT = 4


class SavedGraph(NamedTuple):
    """Autograd graph of one forward: its input, which needs a gradient, and the edge at which backward starts."""

    x_MH: Tensor | None
    end: GradientEdge


class Engine:
    """Runs the lowered list of one rank.

    Args:
        actions: the list of this rank.
        owners: the pipeline rank of every stage.
        compute: (stage, input or None, microbatch) -> output, which is the loss at the last stage.
        transfer: sends and receives the tensors between stages.
        reduce: called with a stage when its weight gradients are complete.
        wgrads: queue that defers weight gradients, where the schedule splits the backward.

    Attributes:
        peak_in_flight: largest number of graphs kept at the same time, those with deferred weight gradients included.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        owners: Sequence[int],
        compute: Compute,
        transfer: ActivationTransfer,
        reduce: Callable[[int], None] = lambda stage: None,
        wgrads: WgradQueue | None = None,
    ) -> None:
        self._actions, self._owners = actions, dict(enumerate(owners))
        self._compute, self._transfer = compute, transfer
        self._reduce, self._wgrads = reduce, wgrads
        self._received: dict[Action, Pending] = {}
        self._to_send: dict[Action, Tensor] = {}
        self._sends_in_flight: list[Pending] = []
        self._graphs: dict[tuple[int, int], SavedGraph] = {}
        self._deferred_wgrads: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._results: dict[int, Tensor] = {}
        self.peak_in_flight = 0

    def run(self, observer: Observer = no_observer) -> Mapping[int, Tensor]:
        """Run the whole list, once; return the detached outputs of the last stage by microbatch.

        `observer(action)` is entered after the input of the action has arrived.
        """
        for action in self._actions:
            received = self._wait_for_input(action)
            with observer(action):
                _EXECUTE[action.kind](self, action, received)
            self._sends_in_flight = [send for send in self._sends_in_flight if not send.is_done()]
            while len(self._sends_in_flight) > MAX_SENDS_IN_FLIGHT:
                self._sends_in_flight.pop(0).wait()
            self.peak_in_flight = max(self.peak_in_flight, len(self._graphs) + len(self._deferred_wgrads))
        for send in self._sends_in_flight:
            send.wait()
        assert not (self._received or self._to_send or self._graphs or self._deferred_wgrads), (
            "the schedule is incomplete"
        )
        return self._results

    def _wait_for_input(self, action: Action) -> Tensor | None:
        """Return what a computation needs from another stage; None where it needs nothing."""
        kind, stage, mb = action
        if kind not in _INPUT_OF or stage == (0 if kind is ActionKind.F else len(self._owners) - 1):
            return None
        return self._received.pop(Action(_INPUT_OF[kind], stage, mb)).wait()

    def _forward(self, action: Action, x_MH: Tensor | None) -> None:
        _, stage, mb = action
        assert mb is not None, f"{action} names no microbatch"
        if x_MH is not None and torch.is_grad_enabled():
            x_MH.requires_grad_()
        y = self._compute(stage, x_MH, mb)
        if y.requires_grad:
            self._graphs[stage, mb] = SavedGraph(x_MH, get_gradient_edge(y))
        if stage + 1 == len(self._owners):
            self._results[mb] = y.detach()
        else:
            self._pass_on(action, y.detach())

    def _backward(self, action: Action, dy: Tensor | None) -> None:
        _, stage, mb = action
        assert mb is not None, f"{action} names no microbatch"
        x_MH, end = self._graphs.pop((stage, mb))
        torch.autograd.backward([end], [torch.ones_like(self._results[mb]) if dy is None else dy])
        if self._wgrads is not None:
            self._wgrads.flush()
        if x_MH is not None:
            assert x_MH.grad is not None, f"{action} gave its input no gradient"
            self._pass_on(action, x_MH.grad)

    def _dgrad(self, action: Action, dy: Tensor | None) -> None:
        assert self._wgrads is not None and action.mb is not None, f"nothing defers weight gradients: {action}"
        with self._wgrads.defer() as deferred:
            self._backward(action, dy)
        self._deferred_wgrads[action.stage, action.mb] = deferred

    @torch.no_grad()
    def _deferred_wgrad(self, action: Action, _: None) -> None:
        assert self._wgrads is not None and action.mb is not None, f"nothing defers weight gradients: {action}"
        deferred = self._deferred_wgrads.pop((action.stage, action.mb))[::-1]
        while deferred:
            deferred.pop()()
        self._wgrads.flush()

    def _pass_on(self, action: Action, x: Tensor) -> None:
        """Keep the result of a computation for its SEND, or for the next stage where that is on this rank."""
        pair = send_recv_after(action, self._owners)
        if pair is not None:
            self._to_send[pair.send] = x
        else:
            self._received[_matching_receive(action)] = completed(x)

    def _link(self, action: Action) -> Link:
        rank, peer = self._owners[action.stage], peer_rank(action, self._owners)
        return Link("pipeline", min(rank, peer), max(rank, peer))

    def _send(self, action: Action, _: None) -> None:
        self._sends_in_flight.append(self._transfer.send(self._to_send.pop(action), self._link(action)))

    def _receive(self, action: Action, _: None) -> None:
        self._received[action] = self._transfer.receive(self._link(action))


def _matching_receive(action: Action) -> Action:
    """Return the RECV that would bring the result of `action` to the next computation on another rank."""
    forward = action.kind is ActionKind.F
    return Action(ActionKind.RECV_F if forward else ActionKind.RECV_B, action.stage + (1 if forward else -1), action.mb)


# The receive that provides a computation's input, and the method that executes each kind of action.
_INPUT_OF = {ActionKind.F: ActionKind.RECV_F, ActionKind.B: ActionKind.RECV_B, ActionKind.I: ActionKind.RECV_B}
_EXECUTE: Mapping[ActionKind, Callable[[Engine, Action, Any], None]] = {
    ActionKind.F: Engine._forward,
    ActionKind.B: Engine._backward,
    ActionKind.I: Engine._dgrad,
    ActionKind.W: Engine._deferred_wgrad,
    ActionKind.REDUCE: lambda engine, action, _: engine._reduce(action.stage),
    **dict.fromkeys(SENDS, Engine._send),
    **dict.fromkeys(RECEIVES, Engine._receive),
}
