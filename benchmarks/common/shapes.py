"""Sizes, configurations and tokens that the benchmarks train on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.recording import Recorder
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.data.loader import Microbatch
from megatron3d.parallel.layout import span
from megatron3d.pipeline.engine import Observer, no_observer
from megatron3d.train.state import TrainState, build_state, connect
from megatron3d.train.step import StepSettings, train_step

CPU = torch.device("cpu")
LR, SEED = 1e-4, 1234


@dataclass(frozen=True)
class Size:
    """A GPT-2 without dropout, and the global batch of `num_microbatches` microbatches."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    seq_length: int
    batch_size: int
    num_microbatches: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of one step."""
        return self.batch_size * self.seq_length

    def config(self, precision: str, parallel: Mapping[str, Any] | None = None) -> Config:
        """Return our configuration of this size; AdamW has torch's defaults, so that all contestants do the same."""
        model = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "seq_length": self.seq_length,
        }
        micro_batch_size = self.batch_size // self.num_microbatches
        train = {"micro_batch_size": micro_batch_size, "global_batch_size": self.batch_size, "precision": precision}
        optimizer = {"lr": LR, "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.01, "clip_grad": 1.0}
        parallel = dict(parallel or {})
        return Config.model_validate({"model": model, "train": train, "optimizer": optimizer, "parallel": parallel})

    def spec(self, config: Config, world_size: int = 1, rank: int = 0) -> RunSpec:
        """Return the run of a configuration; the vocabulary needs no padding in any of the sizes."""
        return RunSpec(config, world_size, self.vocab_size, rank)

    def tokens(self) -> Tensor:
        """Return random tokens [batch, seq + 1], the same for every contestant."""
        generator = torch.Generator().manual_seed(SEED)
        return torch.randint(self.vocab_size, (self.batch_size, self.seq_length + 1), generator=generator)


SIZES: Mapping[str, Size] = {
    "tiny": Size(2, 64, 4, 512, 64, 2),
    "3M": Size(4, 256, 4, 2048, 256, 8),
    "3M, 8 heads": Size(4, 256, 8, 2048, 256, 8),
    "30M": Size(8, 512, 8, 8192, 256, 4),
}


class Ours:
    """megatron3d's training step, on one process or many, as `pretrain_gpt.py` calls it."""

    def __init__(
        self, size: Size, config: Config, world_size: int = 1, rank: int = 0, device: torch.device = CPU
    ) -> None:
        spec, self.device = size.spec(config, world_size, rank), device
        self.recorder = Recorder(connect(spec))
        self.state: TrainState = build_state(spec, self.recorder, device)
        self.settings = StepSettings(SEED, size.num_tokens, size.batch_size)
        low, high = span(config.train.micro_batch_size, spec.mode.batch_axes, spec.mesh)
        self.parts = [
            (slice(first + low, first + high), first)
            for first in range(0, size.batch_size, config.train.micro_batch_size)
        ]

    def step(self, tokens: Tensor, observer: Observer = no_observer) -> Tensor:
        """Make a step on `tokens` of the global batch; return the loss before the update."""
        batch = [Microbatch(tokens[rows].to(self.device), first) for rows, first in self.parts]
        return train_step(self.state, batch, LR, self.settings, observer=observer).loss

    def weights(self) -> dict[str, Tensor]:
        """Return the full parameters by path, in a world of one process."""
        buffers = self.state.buffers
        shapes = {name: spec.local_shape(self.recorder.mesh) for name, spec in buffers.specs.items()}
        return {name: values.detach().view(shapes[name]) for name, _, values in buffers.shards("main")}
