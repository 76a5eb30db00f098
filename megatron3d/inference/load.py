"""Loading of a checkpoint for inference: the run's configuration in any layout, and the model with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron3d.checkpoint.publish import resolve, run_folder
from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ParallelConfig
from megatron3d.config.validate.facts import Facts
from megatron3d.config.validate.layout import file_problems
from megatron3d.config.validate.rules import check
from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.errors import UserError
from megatron3d.pipeline.engine import PipelineExecutor
from megatron3d.pipeline.schedules import load_schedule, num_microbatches
from megatron3d.runtime.process import Runtime
from megatron3d.train.checkpointing import load_weights
from megatron3d.train.state import TrainState, build_state, connect

__all__ = ["read_run", "resolve", "restore", "restore_state"]

DISPATCHER = "moe_token_dispatcher_type"


def read_run(folder: Path, overrides: Sequence[str], world_size: int, micro_batch_size: int | None = None) -> Config:
    """Return the configuration for inference of a run: under a launcher with the run's layout, else for one process.

    A microbatch has `micro_batch_size` sequences (None: as few as the tensor axes allow), and a step has the smallest
    number of microbatches that the schedule allows.  Raises UserError with every problem.
    """
    config = read_config(run_folder(folder) / "config.yaml", overrides).config
    if world_size == 1 and not any(text.startswith("parallel.") for text in overrides):
        config = config.model_copy(update={"parallel": ParallelConfig()})
    asks = any(text.startswith(f"parallel.{DISPATCHER}=") for text in overrides)
    if config.parallel.expert_model_parallel_size == 1 and not asks:  # the run's dispatcher has nothing to do
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={DISPATCHER: None})})
    spec = RunSpec(config, world_size)
    rows = micro_batch_size or spec.tensor_size
    step = rows * max(spec.sizes.data, 1)
    config = _with_batch(config, rows, step)
    UserError.collect(check(config, world_size))
    if spec.has_schedule_file:  # the file determines the number of microbatches
        config = _with_batch(config, rows, step * num_microbatches(load_schedule(spec.schedule_file)))
        UserError.collect(file_problems(Facts(config, world_size)))
    return config


def _with_batch(config: Config, micro_batch_size: int, global_batch_size: int) -> Config:
    """Return the configuration with other batch sizes and uncompiled, since shapes change with every token.

    Weights are not stored in fp8: latent attention reads some as they are.
    """
    batch = {"micro_batch_size": micro_batch_size, "global_batch_size": global_batch_size}
    others = {"compile": False, "fp8_param_gather": False}
    return config.model_copy(update={"train": config.train.model_copy(update=batch | others)})


def restore(
    config: Config, tokenizer: Tokenizer, folder: Path, here: Runtime, weights: str = "model"
) -> PipelineExecutor:
    """Return this rank's model with the checkpoint's weights; raises UserError if the checkpoint does not fit it.

    Args:
        weights: what is taken as the weights, as the option --weights of tools names it.
    """
    return restore_state(config, tokenizer, folder, here, weights).executor


def restore_state(
    config: Config, tokenizer: Tokenizer, folder: Path, here: Runtime, weights: str = "model"
) -> TrainState:
    """Return the state of which `restore` returns the model, into which weights of other checkpoints can be loaded."""
    spec = RunSpec(config, here.world_size, tokenizer.vocab_size, here.rank)
    comm = connect(spec)
    state = build_state(spec, comm, here.device)
    if here.watchdog is not None:
        here.watchdog.follow(lambda: None, comm.log.status)
    load_weights(folder, state, {"tokenizer": tokenizer.fingerprint}, weights)
    return state
