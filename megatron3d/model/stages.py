"""A stage of a pipeline is a run of layers, with the embedding in the first, and norm, head and loss in the last.

embedding | 0 1 2 | 3 4 5 | 6 7 8 | 9 10 | head        12 layers' worth of work: the head counts as what it costs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron3d.model.architecture import Architecture
from megatron3d.model.flops import head_flops_per_token, layer_flops_per_token, layer_weights
from megatron3d.pipeline.actions import Kind


@dataclass(frozen=True)
class Stage:
    """A piece of the model that one rank computes at a time; it may have no layers."""

    index: int
    layers: range
    has_embedding: bool
    has_head: bool

    @staticmethod
    def whole(num_layers: int) -> Stage:
        """The only stage of a model that is not divided."""
        return Stage(0, range(num_layers), has_embedding=True, has_head=True)


def make_stages(counts: Sequence[int]) -> tuple[Stage, ...]:
    """Stages of so many layers each, in the order of the layers."""
    ends, last = list(accumulate(counts)), len(counts) - 1
    return tuple(
        Stage(index, range(end - count, end), has_embedding=index == 0, has_head=index == last)
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def divide(arch: Architecture, num_stages: int, owners: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers of each stage, as even as whole layers allow, and at least one; `owners[stage]` is its rank.

    Layers cost the same, the embedding nothing and the head as many operations as it has.  Each layer goes to the rank
    with the least work, and there to the cheapest stage: no other division has a busiest rank with less work.  Of equal
    stages a later one gets it, since earlier ones hold more activations.
    """
    owners = range(num_stages) if owners is None else owners
    assert arch.num_layers >= num_stages, f"{arch.num_layers} layers are too few for {num_stages} stages"
    layer, head = layer_flops_per_token(arch), head_flops_per_token(arch)
    counts = [1] * num_stages

    def cost(stage: int) -> int:
        return counts[stage] * layer + head * (stage == num_stages - 1)

    def load(rank: int) -> int:
        return sum(cost(stage) for stage in range(num_stages) if owners[stage] == rank)

    for _ in range(arch.num_layers - num_stages):
        counts[min(range(num_stages), key=lambda stage: (load(owners[stage]), cost(stage), -stage))] += 1
    return tuple(counts)


def layer_flops(arch: Architecture) -> Mapping[Kind, int]:
    """Operations of a layer per token: a product has three equal parts, the attention core twice as many backward."""
    product, core = 2 * layer_weights(arch), 4 * arch.num_attention_heads * arch.kv_channels * arch.seq_length
    return {Kind.F: product + core, Kind.I: product + 2 * core, Kind.W: product}


def stage_flops(arch: Architecture, stage: Stage) -> Mapping[Kind, int]:
    """Operations of a stage per token; the head computes its gradients in the forward, with the loss."""
    flops = {kind: len(stage.layers) * count for kind, count in layer_flops(arch).items()}
    head = head_flops_per_token(arch) if stage.has_head else 0
    return {**flops, Kind.F: flops[Kind.F] + head, Kind.B: flops[Kind.I] + flops[Kind.W]}
