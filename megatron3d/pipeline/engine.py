"""Engine of one pipeline rank: runs its lowered list with autograd, overlapping send/recv with computation.

    0F2  takes the input that 0RECV_F2 received (or that this rank computed), and keeps the autograd graph of its output
    0B2  takes the output's gradient, frees the graph, and passes on the input's gradient;  0I2 and 0W2 are its halves

Only the rank's shard of the residual stream crosses a stage boundary.  Ranks that replicate it send one part each and
all-gather on the receiving side ("scatter/gather", Narayanan et al. 2021, arXiv:2104.04473, section 4.1).

    schedule of all ranks  ->  lower (adds send, recv, gradient reduction)  ->  Engine runs the list of this rank
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
from megatron3d.linear.main_grad import WgradQueue
from megatron3d.model.gpt import GPT
from megatron3d.model.microbatch import Pass
from megatron3d.parallel.layout import box, box_shape
from megatron3d.parallel.mesh import PIPELINE, Axes, Link
from megatron3d.pipeline.actions import (
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    forward_only,
    keep_first_microbatches,
)
from megatron3d.pipeline.lower import lower, peer_rank, send_recv_after, send_recv_of
from megatron3d.pipeline.schedules import Pipeline

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
            self._received[send_recv_of(action).receive] = completed(x)

    def _link(self, action: Action) -> Link:
        rank, peer = self._owners[action.stage], peer_rank(action, self._owners)
        return Link(PIPELINE, min(rank, peer), max(rank, peer))

    def _send(self, action: Action, _: None) -> None:
        self._sends_in_flight.append(self._transfer.send(self._to_send.pop(action), self._link(action)))

    def _receive(self, action: Action, _: None) -> None:
        self._received[action] = self._transfer.receive(self._link(action))


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


class PipelineExecutor:
    """Runs forward and backward passes of microbatches through the pipeline stages of this rank and its peers.

    Attributes:
        peak_in_flight: largest number of (stage, microbatch) graphs kept at the same time in the last training step.
    """

    def __init__(self, model: GPT, pipeline: Pipeline) -> None:
        self.model, self.pipeline = model, pipeline
        self.peak_in_flight = 0
        self._rank = model.comm.mesh.coord(PIPELINE)
        self._training_lists: dict[int, Sequence[Action]] = {}
        self._forward_lists: dict[int, Sequence[Action]] = {}

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the schedule of a step of `num_microbatches`, at most as many as the pipeline's schedule has."""
        return keep_first_microbatches(self.pipeline.schedule, num_microbatches)

    def train(self, passes: Sequence[Pass], reduce: Callable[[int], None], observer: Observer = no_observer) -> Tensor:
        """Run forward and backward of all microbatches; return this rank's share of the loss [1 + modules].

        The losses of the modules of multi-token prediction follow the model's.  The shares are 0 on ranks without the
        last stage.  `reduce` is called with the index of each stage of this rank when its gradients are complete.
        """
        if len(passes) not in self._training_lists:
            self._training_lists[len(passes)] = lower(self.schedule(len(passes)))[self._rank]
        engine = self._engine(self._training_lists[len(passes)], passes, reduce)
        results = engine.run(observer)
        self.peak_in_flight = engine.peak_in_flight
        return self._sum_losses(results, passes)

    @torch.no_grad()
    def evaluate(self, passes: Sequence[Pass]) -> Tensor:
        """Return this rank's share of the losses, as `train` does, forward only."""
        return self._sum_losses(self._forward(passes), passes)

    @torch.no_grad()
    def logits(self, tokens_BS: Tensor, position: int) -> Tensor:
        """Return the logits [B, V] of the token after `position` in each sequence, on every pipeline rank."""
        at, model = self.model.begin_sampling(tokens_BS), self.model
        results = self._forward([at])
        return self._shared(
            results[0][:, position] if results else model.zeros(at.num_sequences, model.arch.vocab_size)
        )

    @torch.no_grad()
    def extend(self, at: Pass) -> None:
        """Add the tokens of an extending pass to the KV cache (prefill)."""
        self._forward([at])

    @torch.no_grad()
    def next_logits(self, at: Pass, count: int) -> Tensor:
        """Return the logits [B, count, V] after the first tokens of each sequence of an extending pass (decode)."""
        results, model = self._forward([at]), self.model
        wanted_BSV = results[0][:, :count] if results else model.zeros(at.num_sequences, count, model.arch.vocab_size)
        return self._shared(wanted_BSV)

    @torch.no_grad()
    def draft(
        self, depth: int, x_MH: Tensor | None, at: Pass, lasts: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run module `depth` of multi-token prediction over tokens of an extending pass.

        Args:
            x_MH: output of the module before on the last stage's ranks; for the first module final hidden states.
            lasts: for each sequence the place in the pass of the token whose logits are wanted.

        Returns:
            the module's output on the last stage's ranks, and logits [len(lasts), V] on every pipeline rank if the
            pass ends in logits.
        """
        model, logits_BSV = self.model, None
        if model.stages[-1].has_head:
            if depth == 0:
                model.drop_prefetched_weights()
            _, module = model.modules_ahead[depth]
            x_MH, logits_BSV = module.draft(x_MH, at, model.embedding_weight, model.head_weight)
        if not at.has_end:
            return x_MH, None
        wanted_BV = model.zeros(len(lasts), model.arch.vocab_size)
        if logits_BSV is not None:
            wanted_BV = logits_BSV[range(len(lasts)), list(lasts)].contiguous()
        return x_MH, self._shared(wanted_BV)

    @torch.no_grad()
    def score(self, at: Pass, labels_BS: Tensor) -> Tensor:
        """Return [B, S, 2] on every rank: log probability of each label, and 1 where it is the likeliest token."""
        results = self._forward([at])
        scores_BSK = self.model.zeros(*labels_BS.shape, 2)
        if results:
            logits_BSV = results[0]
            log_probs = logits_BSV.log_softmax(-1).gather(-1, labels_BS.unsqueeze(-1)).squeeze(-1)
            is_likeliest = (logits_BSV.argmax(-1) == labels_BS).to(log_probs.dtype)
            scores_BSK = torch.stack((log_probs, is_likeliest), dim=-1)
        return self._shared(scores_BSK)

    def _shared(self, x: Tensor) -> Tensor:
        """Return the last stage's `x`, which is 0 on ranks of others, on all ranks that must go on alike.

        Ranks that share experts must run equally often.  Their rows have other places in the experts' GEMMs, so that
        they may differ in rounding, and with it in the token that they choose: all take what the first one has.
        """
        comm, mode = self.model.comm, self.model.mode
        x = comm.all_reduce(x.contiguous(), (PIPELINE,)).wait()
        for axes in (mode.experts, mode.etensor):
            if axes:
                x = comm.all_reduce(torch.zeros_like(x) if comm.mesh.index(axes) else x, axes).wait()
        return x

    def _forward(self, passes: Sequence[Pass]) -> Mapping[int, Tensor]:
        if len(passes) not in self._forward_lists:
            self._forward_lists[len(passes)] = lower(forward_only(self.pipeline.schedule, len(passes)))[self._rank]
        return self._engine(self._forward_lists[len(passes)], passes).run()

    def _sum_losses(self, results: Mapping[int, Tensor], passes: Sequence[Pass]) -> Tensor:
        if not results:
            return self.model.zeros(1 + len(passes[0].ahead))
        return torch.stack([results[mb] for mb in range(len(passes))]).sum(0).reshape(-1)

    def _engine(
        self, actions: Sequence[Action], passes: Sequence[Pass], reduce: Callable[[int], None] = lambda stage: None
    ) -> Engine:
        model, stages = self.model, self.pipeline.stages
        model.drop_prefetched_weights()

        def compute(stage: int, x_MH: Tensor | None, mb: int) -> Tensor:
            y: Tensor = model(stages[stage], x_MH, passes[mb])
            return y

        transfer = self._transfer(passes[0])
        return Engine(actions, self.pipeline.owners, compute, transfer, reduce, model.wgrads)

    def _transfer(self, at: Pass) -> ActivationTransfer:
        model, layout = self.model, self.model.mode.residual
        mesh, param = model.comm.mesh, model.like
        whole = at.num_sequences * at.seq_length, model.arch.hidden_size
        copies = mesh.nontrivial(model.mode.copies)
        return ActivationTransfer(box_shape(box(whole, layout, mesh)), param.dtype, param.device, copies, model.comm)
