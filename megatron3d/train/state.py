"""Training state: model, buffers and optimizer, built from a configuration on any mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from megatron3d.comm.interface import Comm
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.run_spec import RunSpec
from megatron3d.data.corpus.stream import StreamedSamples
from megatron3d.errors import UserError
from megatron3d.hardware.apex import fused_norms
from megatron3d.model.compile import Compiler
from megatron3d.model.gpt import GPT
from megatron3d.model.init import initialize
from megatron3d.model.layers import is_opaque
from megatron3d.ops.norm import TORCH_NORMS
from megatron3d.optim.loss_scale import LossScale
from megatron3d.optim.optimizer import Optimizer
from megatron3d.optim.precision import PRECISIONS
from megatron3d.pipeline.executor import PipelineExecutor
from megatron3d.runtime.backends import group_timeout
from megatron3d.zero import Buffers


@dataclass
class TrainState:
    """Model, buffers and optimizer after `iteration` steps, in which `consumed_samples` sequences were consumed.

    Attributes:
        spec: the run that this is the state of.
        stream: the streamed dataset if one is trained on; checkpoints store the position in it.
        model_type: that of the Hugging Face folder that the weights come from; empty: they come from none.
    """

    spec: RunSpec
    model: GPT
    buffers: Buffers
    optimizer: Optimizer
    loss_scale: LossScale
    executor: PipelineExecutor
    iteration: int = 0
    consumed_samples: int = 0
    stream: StreamedSamples | None = None
    model_type: str = ""


def connect(spec: RunSpec) -> ProcessComm:
    """Create this rank's process groups and links, for everything that the run communicates."""
    state, minutes = spec.parallel_state, spec.config.train.distributed_timeout_minutes
    return ProcessComm(state.mesh, state.group_axes, state.links, group_timeout(60 * minutes))


def build_state(
    spec: RunSpec, comm: Comm, device: torch.device, has_values: bool = True, initializes: bool = True
) -> TrainState:
    """Build model, buffers and optimizer.

    Args:
        has_values: tensors have values; without them, as in a dry run, nothing is compiled or initialized.
        initializes: parameters get their initial values, a function of the seed; otherwise the caller fills them.
    """
    config = spec.config
    if config.train.cpu_offloading and device.type == "cpu":
        raise UserError("train.cpu_offloading=true: this run computes on the CPU; use false, or a GPU")
    chunk = spec.loss_chunk(device.type != "cpu")
    splits = spec.pipeline.splits_backward
    norms = fused_norms([device]) if config.train.norm_implementation == "apex" else TORCH_NORMS
    compiles = has_values and spec.compiles(on_gpu=device.type != "cpu")
    model = GPT(
        spec.arch,
        spec.mode,
        comm,
        spec.pipeline,
        chunk,
        spec.recompute,
        spec.overlap,
        splits,
        norms,
        compiles,
        config.parallel.cp_comm_type,
    )
    model.routers.allocate(device)
    loss_scale = LossScale(config.train, device)
    buffers = Buffers(
        model,
        model.stage_specs,
        comm,
        PRECISIONS[config.train.precision].model,
        device,
        bucket_bytes=spec.bucket_bytes(on_gpu=device.type != "cpu"),
        main_grads=model.main_grads,
        sharding=spec.sharding,
        units=model.fsdp_units(),
        reduce_dtype=torch.bfloat16 if config.train.grad_reduce_in_bf16 else None,
        axes_dtype=torch.bfloat16 if config.train.tp_grad_reduce_in_bf16 else None,
    )
    if compiles:
        compiler = Compiler(partial(is_opaque, packs_documents=spec.config.data.reset_attention_mask))
        for layer in (*model.layers.values(), *(module.layer for _, module in model.modules_ahead)):
            compiler.block(layer)
    for name, start, values in buffers.shards("main") if has_values and initializes else ():
        initialize(buffers.specs[name], values, comm.mesh, config.train.seed, start)
    buffers.publish()
    if spec.overlap.weight_gather:
        model.prefetch_weights(buffers.unshard)
    optimizer = Optimizer(buffers, config.optimizer, loss_scale)
    return TrainState(spec, model, buffers, optimizer, loss_scale, PipelineExecutor(model, spec.pipeline))
