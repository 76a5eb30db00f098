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
    """Runs the passes of microbatches through the pipeline, of which the model holds this rank's stages.

    Attributes:
        peak_in_flight: most graphs of a stage and a microbatch that the last training step kept at one time.
    """

    def __init__(self, model: GPT, pipeline: Pipeline) -> None:
        self.model, self.pipeline, self.peak_in_flight = model, pipeline, 0
        self._rank = model.comm.mesh.coord("pipeline")
        self._training: dict[int, Sequence[Action]] = {}
        self._sampling: dict[int, Sequence[Action]] = {}

    def schedule(self, num_microbatches: int) -> Schedule:
        """What all ranks compute in a step of so many microbatches, at most those of the pipeline's schedule."""
        return keep_first_microbatches(self.pipeline.schedule, num_microbatches)

    def train(self, passes: Sequence[Pass], reduce: Callable[[int], None], watch: Observer = no_observer) -> Tensor:
        """Forward and backward of every microbatch; my share of the loss, 0 where the last stage is elsewhere.

        `reduce` is called with the index of each of my stages when its gradients are complete.
        """
        if len(passes) not in self._training:
            self._training[len(passes)] = lower(self.schedule(len(passes)))[self._rank]
        engine = self._engine(self._training[len(passes)], passes, reduce)
        results = engine.run(watch)
        self.peak_in_flight = engine.peak_in_flight
        return self._total(results, passes)

    @torch.no_grad()
    def evaluate(self, passes: Sequence[Pass]) -> Tensor:
        """My share of the loss, forward only."""
        return self._total(self._forward(passes), passes)

    @torch.no_grad()
    def logits(self, tokens_BS: Tensor, position: int) -> Tensor:
        """Logits [B, V] of what follows `position` in each sequence of the microbatch, the same on every rank."""
        at = self.model.begin_sampling(tokens_BS)
        return self._everywhere(self._forward([at]), at, position)

    @torch.no_grad()
    def extend(self, at: Pass) -> None:
        """Keep what attention needs of an extending pass."""
        self._forward([at])

    @torch.no_grad()
    def next_logits(self, at: Pass) -> Tensor:
        """Logits [B, V] of what follows the first token of each sequence of an extending pass, on every rank."""
        return self._everywhere(self._forward([at]), at, 0)

    @torch.no_grad()
    def score(self, at: Pass, labels_BS: Tensor) -> Tensor:
        """[B, S, 2] of every sequence of an extending pass: log probability of its label, and 1 if none is likelier."""
        results = self._forward([at])
        scores_BSK = self.model.zeros(*labels_BS.shape, 2)
        if results:
            logits_BSV = results[0]
            log_probs = logits_BSV.log_softmax(-1).gather(-1, labels_BS.unsqueeze(-1)).squeeze(-1)
            is_likeliest = (logits_BSV.argmax(-1) == labels_BS).to(log_probs.dtype)
            scores_BSK = torch.stack((log_probs, is_likeliest), dim=-1)
        return self.model.comm.all_reduce(scores_BSK, ("pipeline",)).wait()

    def _everywhere(self, results: Mapping[int, Tensor], at: Pass, position: int) -> Tensor:
        """Logits of a position on every rank of the pipeline."""
        model = self.model
        last_BV = results[0][:, position] if results else model.zeros(at.num_sequences, model.arch.vocab_size)
        return model.comm.all_reduce(last_BV, ("pipeline",)).wait()

    def _forward(self, passes: Sequence[Pass]) -> Mapping[int, Tensor]:
        if len(passes) not in self._sampling:
            self._sampling[len(passes)] = lower(forward_only(self.pipeline.schedule, len(passes)))[self._rank]
        return self._engine(self._sampling[len(passes)], passes).run()

    def _total(self, results: Mapping[int, Tensor], passes: Sequence[Pass]) -> Tensor:
        return torch.stack([results[mb] for mb in range(len(passes))]).sum() if results else self.model.zeros()

    def _engine(
        self, actions: Sequence[Action], passes: Sequence[Pass], reduce: Callable[[int], None] = lambda stage: None
    ) -> Engine:
        model, stages = self.model, self.pipeline.stages
        model.drop_prefetched_weights()

        def compute(stage: int, x_MH: Tensor | None, mb: int) -> Tensor:
            y: Tensor = model(stages[stage], x_MH, passes[mb])
            return y

        boundary = self._boundary(passes[0])
        return Engine(actions, self.pipeline.owners, compute, boundary, reduce, model.wgrads)

    def _boundary(self, at: Pass) -> ActivationTransfer:
        model, layout = self.model, self.model.mode.residual
        mesh, param = model.comm.mesh, next(model.parameters())
        whole = at.num_sequences * at.seq_length, model.arch.hidden_size
        copies = mesh.nontrivial(model.mode.copies)
        return ActivationTransfer(box_shape(box(whole, layout, mesh)), param.dtype, param.device, copies, model.comm)
