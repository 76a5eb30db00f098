"""Baseline of the pipeline benchmark: torch.distributed.pipelining runs our stages in place of our `PipelineExecutor`.

Everything else of a step is the same on both sides: the layers, the loss, main_grad, the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from megatron3d.model.gpt import GPT
from megatron3d.model.microbatch import Pass
from megatron3d.model.stage_plan import Stage
from megatron3d.pipeline.engine import Observer, no_observer
from megatron3d.pipeline.schedules import Pipeline

PEERS: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class StageModule(nn.Module):
    """A stage as torch calls it, with the number of the microbatch next to its input."""

    def __init__(self, executor: TorchExecutor, stage: Stage) -> None:
        super().__init__()
        self.model, self.stage = executor.model, stage
        self.passes_of = lambda: executor.passes

    def forward(self, x: Tensor, mb: Tensor) -> Tensor:
        y: Tensor = self.model(self.stage, None if self.stage.has_embedding else x, self.passes_of()[int(mb)])
        return y


class TorchExecutor:
    """Replacement of `TrainState.executor` that runs `PEERS[name]` on this rank's stages."""

    def __init__(self, model: GPT, pipeline: Pipeline, name: str, num_tokens: int) -> None:
        self.model, self.pipeline = model, pipeline
        self.passes = list[Pass]()
        self._stages = [self._stage(stage, num_tokens) for stage in model.stages]
        self._microbatches = len({action.mb for action in pipeline.schedule[0]})
        kind, settings = PEERS[name], {"loss_fn": _loss, "scale_grads": False}
        if issubclass(kind, PipelineScheduleMulti):
            self._schedule = kind(self._stages, self._microbatches, **settings)  # type: ignore[arg-type]
        else:
            self._schedule = kind(self._stages[0], self._microbatches, **settings)  # type: ignore[arg-type, assignment]

    def _stage(self, stage: Stage, num_tokens: int) -> PipelineStage:
        """Build a stage with given shapes; torch's shape inference would run a backward of no microbatch."""
        param = next(self.model.parameters())
        residual = param.new_empty(num_tokens, self.model.arch.hidden_size, requires_grad=True)
        x = torch.arange(1) if stage.has_embedding else residual
        y = param.new_empty((), requires_grad=True) if stage.has_head else residual
        num_stages = len(self.pipeline.stages)
        return PipelineStage(StageModule(self, stage), stage.index, num_stages, param.device, x, y)

    def train(self, passes: Sequence[Pass], reduce: Callable[[int], None], observer: Observer = no_observer) -> Tensor:
        """Run a step like `PipelineExecutor.train` of a model without modules; torch's engine has no observer."""
        assert observer is no_observer, "the peer's engine cannot be watched"
        self.passes = list(passes)
        numbers, losses = torch.arange(self._microbatches), list[Tensor]()
        inputs = (numbers,) if self._stages[0].is_first else ()
        target = numbers if self._stages[-1].is_last else None
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False, mb=numbers)
        for stage in self._stages:
            reduce(stage.stage_index)
        return torch.stack(losses).sum().reshape(1).detach() if losses else self.model.zeros(1)


def _loss(share: Tensor, _: Tensor) -> Tensor:
    """Return the last stage's output, which is the loss."""
    return share
