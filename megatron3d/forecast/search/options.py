"""Every layout that the planner can choose: tensor modes x shapes, pipelines, ZeRO, microbatch sizes, recomputation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron3d.attention.context.plan import BOTH, GATHER, HEADS, RING
from megatron3d.config.schema import Config
from megatron3d.model.spec import Architecture
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, Shape, factorizations
from megatron3d.parallel.modes.mode import Mode
from megatron3d.pipeline.schedules import ONE_F_ONE_B, SCHEDULES

# Larger tensor-parallel and pipeline sizes never pay off on the clusters that we know.
MAX_TENSOR, MAX_PIPELINE = 64, 64
MAX_MICRO_BATCH, MAX_VIRTUAL = 16, 12
# More ranks of an expert lie outside a node.
MAX_SPLIT = 8
RECOMPUTATIONS = (None, "selective", "full")
# With fewer positions per context rank, data-parallel ranks are as good in memory and communicate less.
MIN_POSITIONS = 8192


@dataclass(frozen=True, order=True)
class TensorChoice:
    """A tensor-parallel mode with form and shape."""

    mode: str
    form: str
    shape: Shape

    @property
    def size(self) -> int:
        """Number of tensor-parallel ranks."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        names = MODES[self.mode].axis_names
        axes = "·".join(f"{name}{size}" for name, size in zip(names, self.shape, strict=True))
        return f"{self.mode} {self.form} {axes}" if self.size > 1 else "no TP"


@dataclass(frozen=True, order=True)
class ContextChoice:
    """Context ranks, how they exchange keys and values, and of `a2a+p2p` the ranks of each."""

    size: int = 1
    exchange: str = GATHER
    hierarchy: tuple[int, ...] = ()

    def __str__(self) -> str:
        sizes = " ".join((self.exchange, *("·".join(map(str, self.hierarchy)),) * bool(self.hierarchy)))
        return f"CP {self.size} {sizes}"


WHOLE = ContextChoice()


@dataclass(frozen=True, order=True)
class ExpertChoice:
    """Ranks that the experts of a layer are distributed over, and ranks that split each expert."""

    size: int = 1
    split: int = 1

    def __str__(self) -> str:
        return f"EP {self.size}" + f" ETP {self.split}" * (self.split > 1)


TOGETHER = ExpertChoice()


@dataclass(frozen=True, order=True)
class LayoutChoice:
    """Layout of a run, and the other choices that the planner makes."""

    tensor: TensorChoice
    pipeline: int = 1
    schedule: str = ONE_F_ONE_B
    virtual: int = 1
    zero_stage: int = 0
    micro_batch_size: int = 1
    recompute: str | None = None
    context: ContextChoice = WHOLE
    experts: ExpertChoice = TOGETHER

    def apply_to(self, config: Config) -> Config:
        """Return a configuration with these choices; nothing is validated."""
        parallel = {
            "tensor_parallel_mode": self.tensor.mode,
            "tensor_parallel_form": self.tensor.form,
            "tensor_parallel_shape": self.tensor.shape,
            "tensor_model_parallel_size": self.tensor.size,
            "sequence_parallel": False,
            "context_parallel_size": self.context.size,
            "cp_comm_type": self.context.exchange,
            "hierarchical_context_parallel_sizes": self.context.hierarchy or None,
            "expert_model_parallel_size": self.experts.size,
            "expert_tensor_parallel_size": self.experts.split,
            "moe_token_dispatcher_type": config.parallel.moe_token_dispatcher_type if self.experts.size > 1 else None,
            "pipeline_model_parallel_size": self.pipeline,
            "pipeline_schedule": self.schedule,
            "pipeline_schedule_file": None,
            "pipeline_model_parallel_layout": None,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "zero_stage": self.zero_stage,
        }
        recompute = {"recompute_modules": None, "recompute_method": None, "recompute_num_layers": None}
        train = {"micro_batch_size": self.micro_batch_size, "recompute_granularity": self.recompute, **recompute}
        return config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update=parallel),
                "train": config.train.model_copy(update=train),
            }
        )

    def __str__(self) -> str:
        virtual = f" v{self.virtual}" if self.virtual > 1 else ""
        pipeline = f"PP {self.pipeline} {self.schedule}{virtual}" if self.pipeline > 1 else "no PP"
        again = f", recompute {self.recompute}" if self.recompute else ""
        context = f", {self.context}" if self.context.size > 1 else ""
        context += f", {self.experts}" if self.experts != TOGETHER else ""
        return f"{self.tensor}{context}, {pipeline}, ZeRO {self.zero_stage}, microbatch {self.micro_batch_size}{again}"


# Ranks, schedule and stages per rank; and all fields of a LayoutChoice, in order.
PipelineShape = tuple[int, str, int]
LayoutFields = tuple[TensorChoice, int, str, int, int, int, str | None, ContextChoice, ExpertChoice]


class PipelineShare(NamedTuple):
    """What bounds depend on besides schedule, microbatch size and recomputation: ranks, microbatches and ZeRO stage."""

    pipeline: int
    data: int
    num_microbatches: int
    zero_stage: int


def divisors(number: int) -> list[int]:
    """Return all divisors, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def tensor_choices(num_ranks: int, modes: Iterable[str] = tuple(MODES)) -> Iterator[TensorChoice]:
    """Yield every form and shape of the modes on at most `num_ranks` ranks, equivalent ones once."""
    seen: set[object] = set()
    for size in divisors(num_ranks):
        if size > MAX_TENSOR:
            return
        for mode in modes if size > 1 else MODES:
            for shape in factorizations(size, len(MODES[mode].axis_names)):
                for form, build in MODES[mode].forms.items():
                    same = signature(build(shape))
                    if same not in seen:
                        seen.add(same)
                        yield TensorChoice(mode, form, shape)


def context_sizes(num_ranks: int, seq_length: int) -> Sequence[int]:
    """Return the numbers of context ranks that divide the ranks, and leave each `MIN_POSITIONS` of a sequence."""
    sizes = _powers(2, seq_length // MIN_POSITIONS)
    return [1, *(size for size in sizes if num_ranks % size == 0 and seq_length % (2 * size) == 0)]


def context_choices(num_ranks: int, arch: Architecture, tensor: TensorChoice, node: int) -> Iterator[ContextChoice]:
    """Yield the numbers of context ranks with every exchange that the model allows.

    With `a2a+p2p` heads move among as many neighbours as a node of `node` ranks has next to their tensor ranks.
    """
    mode = MODES[tensor.mode].forms[tensor.form](tensor.shape)
    heads = arch.num_attention_heads // Mesh(mode.axes).size(mode.inner[1])
    for size in context_sizes(num_ranks, arch.seq_length):
        if size == 1:
            yield WHOLE
            continue
        yield from (ContextChoice(size, GATHER), ContextChoice(size, RING))
        if heads % size == 0:
            yield ContextChoice(size, HEADS)
        inner = max(_powers(1, min(node // tensor.size, size // 2)), default=1)
        if inner > 1 and heads % inner == 0:
            yield ContextChoice(size, BOTH, (inner, size // inner))


def expert_choices(arch: Architecture, num_tensor: int, num_ranks: int) -> Iterator[ExpertChoice]:
    """Yield how experts may be distributed over `num_ranks` ranks: whole ones, or split over the tensor ranks."""
    yield TOGETHER
    if arch.experts is None:
        return
    for split in sorted({1, num_tensor}):
        if split > MAX_SPLIT or arch.experts.ffn_hidden_size % split:
            continue
        sizes = (size for size in divisors(arch.experts.num_experts) if num_ranks % (size * split) == 0)
        yield from (choice for size in sizes if (choice := ExpertChoice(size, split)) != TOGETHER)


def signature(mode: Mode) -> object:
    """Return a value that is equal for equivalent modes.

    Names of axes, axes of size 1, and axes that only split the batch do not matter: data parallelism splits it as well,
    and ZeRO can shard over it.
    """
    mesh = Mesh(mode.axes)
    plans = mode.expand.on(mesh), mode.contract.on(mesh)
    used = {axis for plan in plans for axes in (plan.k, plan.n, plan.x, plan.w, plan.y) for axis in axes}
    place = {axis: index for index, axis in enumerate(axis for axis in mesh.nontrivial(mesh.names) if axis in used)}
    numbered = []
    for plan in plans:
        split = tuple(tuple(place[axis] for axis in axes if axis in place) for axes in (plan.m, plan.k, plan.n))
        moved = tuple(tuple((place[axis], dim) for axis, dim in table.items()) for table in (plan.x, plan.w, plan.y))
        numbered.append((split, moved))
    return tuple(mesh.sizes[axis] for axis in place), tuple(numbered)


def pipelines(num_ranks: int, num_layers: int) -> Iterator[PipelineShape]:
    """Yield each pipeline as its number of ranks, schedule, and stages per rank."""
    for ranks in divisors(num_ranks):
        if ranks > min(MAX_PIPELINE, num_layers):
            return
        if ranks == 1:
            yield 1, ONE_F_ONE_B, 1
            continue
        for name, entry in SCHEDULES.items():
            highest = min(entry.max_virtual or MAX_VIRTUAL, num_layers // ranks)
            yield from ((ranks, name, v) for v in _virtual(entry.min_virtual, highest, num_layers / ranks))


def _virtual(low: int, high: int, layers_per_rank: float) -> Iterator[int]:
    """Yield the numbers of stages per rank: powers of two, and those that divide a rank's layers evenly."""
    powers = set(_powers(low, high))
    yield from (v for v in range(low, high + 1) if v in powers or layers_per_rank % v == 0)


def _powers(low: int, high: int) -> Iterator[int]:
    while low <= high:
        yield low
        low *= 2


def microbatch_sizes(per_data_rank: int) -> Sequence[int]:
    """Return the powers of two that divide a data-parallel rank's part of the global batch."""
    return [n for n in _powers(1, MAX_MICRO_BATCH) if per_data_rank % n == 0]
