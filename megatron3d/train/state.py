"""Everything that training changes, built from a configuration on any mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron3d.comm.process_comm import Comm, ProcessComm
from megatron3d.config.derive import make_mesh, make_pipeline, overlap_of, tensor_mode, vocab_multiple
from megatron3d.config.run_spec import resolve_architecture
from megatron3d.config.schema import Config
from megatron3d.data.corpus.stream import Stream
from megatron3d.errors import UserError
from megatron3d.hardware.apex import fused_norms
from megatron3d.model.architecture import Architecture
from megatron3d.model.compile import Compiler
from megatron3d.model.gpt import GPT, axis_sets, links
from megatron3d.model.init import initialize
from megatron3d.model.layers import Norm, is_opaque
from megatron3d.model.recompute_spec import recompute_of
from megatron3d.optim.optimizer import Optimizer
from megatron3d.optim.precision import PRECISIONS, LossScale
from megatron3d.parallel.mesh import DATA
from megatron3d.pipeline.executor import PipelineExecutor
from megatron3d.zero import Buffers, Sharding


@dataclass
class TrainState:
    """Model, buffers and optimizer; `iteration` steps are done, and `consumed_samples` sequences are used up.

    Attributes:
        stream: what is trained on where that is a dataset as it is; checkpoints remember where it is read on.
    """

    model: GPT
    buffers: Buffers
    optimizer: Optimizer
    loss_scale: LossScale
    executor: PipelineExecutor
    iteration: int = 0
    consumed_samples: int = 0
    stream: Stream | None = None


def connect(config: Config, vocab_size: int, world_size: int, rank: int) -> tuple[Architecture, ProcessComm]:
    """The model's numbers for a vocabulary, and this rank's groups for everything that it will communicate."""
    mode, mesh = tensor_mode(config.parallel), make_mesh(config.parallel, world_size, rank)
    arch = resolve_architecture(config.model, config.model.vocab_size or vocab_size, vocab_multiple(mode))
    pipeline = make_pipeline(config, arch, mesh)
    return arch, ProcessComm(mesh, axis_sets(arch, mode, mesh), links(arch, pipeline))


def build_state(
    config: Config, arch: Architecture, comm: Comm, device: torch.device, has_values: bool = True
) -> TrainState:
    """A fresh state; initial values depend on the seed and the model only.  Without values they are left out."""
    pipeline = make_pipeline(config, arch, comm.mesh)
    if config.train.cpu_offloading and device.type == "cpu":
        raise UserError("train.cpu_offloading=true: this run computes on the host; use false, or a GPU")
    recompute, overlap, mode = recompute_of(config.train), overlap_of(config.parallel), tensor_mode(config.parallel)
    chunk, splits = config.train.loss_chunk_tokens, pipeline.splits_backward
    model = GPT(arch, mode, comm, pipeline, chunk, recompute, overlap, splits)
    loss_scale = LossScale(config.train, device)
    buffers = Buffers(
        model,
        model.stage_specs,
        comm,
        PRECISIONS[config.train.precision].model,
        device,
        bucket_bytes=config.train.bucket_mb * 2**20,
        main_grads=model.main_grads,
        sharding=Sharding.of_stage(config.parallel.zero_stage, comm.mesh.nontrivial(DATA[1:])),
        blocks=model.blocks(),
        reduce_dtype=torch.bfloat16 if config.train.grad_reduce_in_bf16 else None,
    )
    if config.train.norm_implementation == "apex":
        kernels = fused_norms([device])
        for norm in (module for module in model.modules() if isinstance(module, Norm)):
            norm.kernels = kernels
    if config.train.compile:
        compiler = Compiler(comm.mesh.rank, is_opaque)
        for layer in model.layers.values():
            compiler.block(layer)
    for name, start, values in buffers.held("main") if has_values else ():
        initialize(buffers.specs[name], values, comm.mesh, config.train.seed, start)
    buffers.publish()
    if overlap.weight_gather:
        model.prefetch_weights(buffers.make_whole)
    optimizer = Optimizer(buffers, config.optimizer, loss_scale)
    return TrainState(model, buffers, optimizer, loss_scale, PipelineExecutor(model, pipeline))
