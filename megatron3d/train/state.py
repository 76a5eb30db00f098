"""Training state: model, buffers and optimizer, built from a configuration on any mesh."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.data.corpus.stream import StreamedSamples
from megatron3d.errors import RunFailed, UserError
from megatron3d.hardware.apex import fused_norms
from megatron3d.model.compile import Compiler
from megatron3d.model.gpt import GPT
from megatron3d.model.layers import is_opaque
from megatron3d.model.params import initialize
from megatron3d.ops.norm import TORCH_NORMS
from megatron3d.optim.optimizer import Optimizer
from megatron3d.optim.precision import PRECISIONS, LossScale
from megatron3d.optim.qk_clip import QKClip
from megatron3d.optim.rule_spec import in_groups
from megatron3d.parallel.mesh import DATA
from megatron3d.pipeline.engine import PipelineExecutor
from megatron3d.runtime.machine import group_timeout
from megatron3d.zero import Buffers


class UpdateMark:
    """Marks the time in which a state is of no step: its update has begun, and is not complete on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_open = device, False
        self._end: torch.Event | None = None

    def begin(self) -> None:
        """Note that the update begins."""
        self._is_open = True

    def end(self) -> None:
        """Note that the update is enqueued, and that the state counts it."""
        self._is_open = False
        if self._device.type != "cpu":
            self._end = torch.Event(self._device)
            self._end.record()

    def is_complete(self) -> bool:
        """Return whether weights, optimizer state and counters are all of one step.

        Where a collective of an accelerator hangs, this must be asked before its group is aborted: kernels that are
        enqueued behind it go on then, with whatever is in its memory.
        """
        return not self._is_open and (self._end is None or self._end.query())


@dataclass
class TrainState:
    """Model, buffers and optimizer after `iteration` steps, in which `consumed_samples` sequences were consumed.

    Attributes:
        spec: the run that this is the state of.
        stream: the streamed dataset if one is trained on; checkpoints store the position in it.
        model_type: that of the Hugging Face folder that the weights come from; empty: they come from none.
        changes: options of the model that continuations have changed, as checkpoints store them.
        update: whether an update is half done.
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
    changes: Sequence[dict[str, Any]] = ()
    update: UpdateMark = field(default_factory=lambda: UpdateMark(torch.device("cpu")))


def connect(spec: RunSpec) -> ProcessComm:
    """Create this rank's process groups and links, for everything that the run communicates."""
    state, minutes = spec.parallel_state, spec.config.train.distributed_timeout_minutes
    timeout = group_timeout(60 * minutes)
    return ProcessComm(state.mesh, state.group_axes, state.links, timeout, exposed=spec.exposed_axes)


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
        recompute=spec.recompute,
        overlap=spec.overlap,
        splits_backward=splits,
        norm_kernels=norms,
        compiles=compiles,
        context_exchange=config.parallel.cp_comm_type,
        fp8=spec.fp8,
        records_logits=config.optimizer.qk_clip,
    )
    model.routers.allocate(device)
    loss_scale = LossScale(config.train, device)
    buffers = Buffers(
        model,
        model.stage_specs,
        comm,
        PRECISIONS[config.train.precision],
        device,
        bucket_bytes=spec.bucket_bytes(on_gpu=device.type != "cpu"),
        main_grads=model.main_grads,
        sharding=spec.sharding,
        units=model.fsdp_units(),
        in_groups=partial(in_groups, config.optimizer),
        reduce_dtype=torch.bfloat16 if config.train.grad_reduce_in_bf16 else None,
        axes_dtype=torch.bfloat16 if spec.narrow_wgrad else None,
        stored=model.stored_weights() if config.train.fp8_param_gather else {},
    )
    if compiles:
        _compile(model, config)
    for name, start, values in buffers.shards("main") if has_values and initializes else ():
        initialize(buffers.specs[name], values, comm.mesh, config.train.seed, start)
    buffers.publish()
    if spec.overlap.weight_gather:
        model.prefetch_weights(buffers.unshard)
    qk_clip = None if model.logits is None else QKClip(model.logits, buffers, spec.arch, config.optimizer)
    optimizer = Optimizer(buffers, config.optimizer, loss_scale, qk_clip)
    executor = PipelineExecutor(model, spec.pipeline)
    return TrainState(spec, model, buffers, optimizer, loss_scale, executor, update=UpdateMark(device))


def _compile(model: GPT, config: Config) -> None:
    compiler = Compiler(
        partial(is_opaque, packs_documents=config.data.reset_attention_mask),
        has_one_length=config.train.seq_length_warmup is None,
    )
    for layer in (*model.layers.values(), *(module.layer for _, module in model.modules_ahead)):
        compiler.block(layer)


_PIECE = 2**20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(values: Tensor) -> int:
    """Return a checksum of `values` [n], equal for equal bits: the sum of word * (2 index + 1) modulo 2^64."""
    words, total = values.view(_WORDS[values.element_size()]), torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        places = torch.arange(start, start + len(piece), device=values.device)
        total += (piece * (2 * places + 1)).sum()
    return int(total)


def check_replicas(state: TrainState) -> None:
    """Compare the weights of data-parallel replicas bit by bit; raise RunFailed on all ranks if some differ.

    Memory and CPUs fail silently (Hochschild et al. 2021, "Cores that don't count"), and one corrupt replica spoils the
    all-reduced gradients of all.  With ZeRO 3 only the replicas of HSDP hold copies.
    """
    buffers, comm = state.buffers, state.model.comm
    buffers.settle()
    mode = state.model.mode
    copies = DATA[:1] if buffers.sharding.params else (*DATA, *mode.context)
    axes = comm.mesh.without(copies, (*mode.experts, *mode.etensor))
    weights = [flat.main if buffers.sharding.params else flat.params for flat in buffers.flat_buffers]
    mine = [digest(values.detach()) for values in weights]
    place = tuple(comm.mesh.coord(axis) for axis in comm.mesh.without(comm.mesh.names, axes))
    notes = comm.gather_object((place, mine, socket.gethostname()))
    problems = comm.broadcast_object(notes and list(_differing(dict(enumerate(notes)))))
    if problems:
        raise RunFailed(f"iteration {state.iteration}: " + "; ".join(problems))


def _differing(notes: Mapping[int, tuple[tuple[int, ...], list[int], str]]) -> Iterator[str]:
    places: dict[tuple[int, ...], list[int]] = {}
    for rank, (place, _, _) in notes.items():
        places.setdefault(tuple(place), []).append(rank)
    for ranks in places.values():
        counts = Counter(tuple(notes[rank][1]) for rank in ranks)
        common, count = counts.most_common(1)[0]
        odd = ranks if 2 * count <= len(ranks) else [rank for rank in ranks if tuple(notes[rank][1]) != common]
        if len(counts) > 1:
            named = ", ".join(f"rank {rank} (host {notes[rank][2]})" for rank in odd)
            others = [rank for rank in ranks if rank not in odd]
            against = f"not those of ranks {', '.join(map(str, others))}" if others else "not the same"
            yield f"the weights of {named} are {against}, which are replicas: a device corrupted bits"
