"""Run microbatches through the pipeline for training, evaluation and generation.

schedule of all ranks  ->  lower (adds send, recv, gradient reduction)  ->  Engine runs the list of this rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron3d.model.gpt import GPT
from megatron3d.model.microbatch import Pass
from megatron3d.parallel.layout import box, box_shape
from megatron3d.pipeline.actions import Action, Schedule, forward_only, keep_first_microbatches
from megatron3d.pipeline.engine import ActivationTransfer, Engine, Observer, no_observer
from megatron3d.pipeline.lower import lower
from megatron3d.pipeline.spec import Pipeline


class PipelineExecutor:
    """Runs forward and backward passes of microbatches through the pipeline stages of this rank and its peers.

    Attributes:
        peak_in_flight: largest number of (stage, microbatch) graphs kept at the same time in the last training step.
    """

    def __init__(self, model: GPT, pipeline: Pipeline) -> None:
        self.model, self.pipeline = model, pipeline
        self.peak_in_flight = 0
        self._rank = model.comm.mesh.coord("pipeline")
        self._training_lists: dict[int, Sequence[Action]] = {}
        self._forward_lists: dict[int, Sequence[Action]] = {}

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the schedule of a step of `num_microbatches`, at most as many as the pipeline's schedule has."""
        return keep_first_microbatches(self.pipeline.schedule, num_microbatches)

    def train(self, passes: Sequence[Pass], reduce: Callable[[int], None], observer: Observer = no_observer) -> Tensor:
        """Run forward and backward of all microbatches; return this rank's share of the loss [1 + modules].

        The losses of the modules of multi-token prediction follow the model's.  The shares are 0 on ranks without the
        last stage.  `reduce` is called with the index of each stage of this rank
        when its gradients are complete.
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
        x = comm.all_reduce(x.contiguous(), ("pipeline",)).wait()
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
        mesh, param = model.comm.mesh, next(model.parameters())
        whole = at.num_sequences * at.seq_length, model.arch.hidden_size
        copies = mesh.nontrivial(model.mode.copies)
        return ActivationTransfer(box_shape(box(whole, layout, mesh)), param.dtype, param.device, copies, model.comm)
