"""State of routers between steps, and what they count in one: tables of a row for each router of the model.

    forward of each microbatch     counts += choices of this rank's tokens      (once, recomputed layers too)
    after the last microbatch      counts of all ranks are summed               (one all-reduce for all layers)
    update                         bias += rate * sign(mean count - count)      (Wang et al. 2024, arXiv:2408.15664)
                                   load  = count / tokens, for the next step's balance loss

The counts are those of the global batch, so that bias and load are equal in every layout.
Letters: L routers, M tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.experts.plan import GLOBAL, Balance
from megatron3d.experts.router import counts_of
from megatron3d.model.spec import (
    COUNTS_BESIDES,
    EXPERT_BIAS,
    LOAD,
    Architecture,
    counts_each_step,
    counts_shape,
    router_names,
)
from megatron3d.parallel.mesh import PIPELINE, Mesh


def is_first(mesh: Mesh) -> bool:
    """Return whether this rank is the first of those that hold the same state of routers, its pipeline rank's."""
    return not any(mesh.coord(axis) for axis in mesh.names if axis != PIPELINE)


class RouterCounts(NamedTuple):
    """What all routers counted in a step, over all ranks, in fp64.

    Attributes:
        choices_LE: tokens that chose each expert, dropped ones included.
        losses: sum over tokens of each loss, without its factor.
        entropy_L: sum over tokens of the entropy, in nats, of their scores, once these are divided by their sum.
        dropped_L: choices that a capacity of experts dropped.
        bias_L2: least and largest bias of the choice in this step.
    """

    choices_LE: Tensor
    losses: Mapping[str, Tensor]
    entropy_L: Tensor
    dropped_L: Tensor
    bias_L2: Tensor

    def rows(self, topk: int, has_bias: bool) -> list[dict[str, float]]:
        """Return for each router its largest load, mean entropy, share of choices dropped, losses, and range of its
        bias."""
        total_L = self.choices_LE.sum(-1)
        largest_L = self.choices_LE.amax(-1) * self.choices_LE.shape[1] / total_L
        columns = {
            "max_load": largest_L.tolist(),
            "entropy": (self.entropy_L * topk / total_L).tolist(),
            "dropped": (self.dropped_L / total_L).tolist(),
        }
        columns |= {name: (sum_L * topk / total_L).tolist() for name, sum_L in self.losses.items()}
        if has_bias:
            columns |= dict(zip(("bias_min", "bias_max"), self.bias_L2.T.tolist(), strict=True))
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


class RouterState:
    """Biases and loads of this pipeline rank's routers, and counts of the step; `allocate` creates the tensors.

    Attributes:
        names: routers of the whole model, one row of the counts each.
        choices: each router's name, the places of tokens in the global batch, and their experts, where a caller wants
            them; None: they are not kept.
    """

    def __init__(self, arch: Architecture) -> None:
        self.names, self._experts, self._balance = router_names(arch), arch.experts, arch.balance or Balance()
        self._counts_shape, self._counts_each_step = counts_shape(arch), counts_each_step(arch)
        self._held: list[str] = []
        self._tables: dict[str, Tensor] = {}
        self._counts: Tensor | None = None
        self._held_L = torch.zeros(0, dtype=torch.int64)  # rows of the counts, on the device: a list would be copied
        self._is_counting = self._is_watching = False
        self.choices: list[tuple[str, Tensor, Tensor]] | None = None

    def add(self, name: str) -> None:
        """Add a router of this pipeline rank."""
        assert name in self.names, f"{name} is none of the routers {self.names}"
        self._held.append(name)

    def allocate(self, device: torch.device) -> None:
        """Create the state of the first step: no bias, and an even load."""
        if self._experts is None:
            return
        shape = len(self._held), self._experts.num_experts
        self._held_L = torch.tensor([self.names.index(name) for name in self._held], dtype=torch.int64, device=device)
        self._counts = torch.zeros(self._counts_shape, dtype=torch.float64, device=device)
        if self._experts.has_expert_bias:
            self._tables[EXPERT_BIAS] = torch.zeros(shape, device=device)
        if GLOBAL in self._balance.losses:
            self._tables[LOAD] = torch.full(shape, self._experts.topk / shape[1], device=device)

    def tables(self) -> Mapping[str, Tensor]:
        """Return each table [L, E] in fp32: `expert_bias`, `load`, where there are some."""
        return self._tables if self._held else {}

    def rows(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield each router's name, table and row [E]."""
        for table, values_LE in self.tables().items():
            yield from ((name, table, values_E) for name, values_E in zip(self._held, values_LE, strict=True))

    def row(self, name: str, table: str) -> Tensor | None:
        """Return the row [E] of one router; None where its model has no such table."""
        values = self._tables.get(table)
        return None if values is None else values[self._held.index(name)]

    def begin_step(self, is_watched: bool) -> None:
        """Count from now on, where a table needs it or the step is watched, and then entropies as well."""
        self._is_watching = is_watched
        self._is_counting = self._counts is not None and (is_watched or self._counts_each_step)
        if self._is_counting and self._counts is not None:
            self._counts.zero_()

    def count(self, name: str, chosen_MK: Tensor, scores_ME: Tensor) -> None:
        """Count the choices of a microbatch's tokens on this rank."""
        if not self._is_counting or self._counts is None:
            return
        row, num_experts = self._counts[self.names.index(name)], scores_ME.shape[1]
        row[:num_experts] += counts_of(chosen_MK.flatten().sort().values, num_experts)
        if self._is_watching:
            row[-4] += torch.special.entr(scores_ME / scores_ME.sum(-1, keepdim=True)).sum()

    def add_losses(self, name: str, losses: Callable[[], Sequence[Tensor]]) -> None:
        """Add the sums over a microbatch's tokens on this rank of the losses, in order, where the step is watched."""
        if self._is_counting and self._is_watching and self._counts is not None and self._balance.logged:
            columns = slice(-COUNTS_BESIDES - len(self._balance.logged), -COUNTS_BESIDES)
            self._counts[self.names.index(name), columns] += torch.stack(list(losses()))

    def count_dropped(self, name: str, kept_MK: Tensor) -> None:
        """Count the choices of a microbatch's tokens on this rank that no expert takes."""
        if self._is_counting and self._counts is not None:
            self._counts[self.names.index(name), -3] += (~kept_MK).sum()

    def reduce(self, comm: Comm) -> RouterCounts | None:
        """End the step's counting and return the counts of all ranks; None where nothing was counted."""
        if not self._is_counting or self._counts is None:
            return None
        self._is_counting = False
        mine = self._counts.clone()
        if (bias_LE := self.tables().get(EXPERT_BIAS)) is not None and is_first(comm.mesh):
            mine[self._held_L, -2:] = torch.stack((bias_LE.amin(-1), bias_LE.amax(-1)), -1).to(mine.dtype)
        total = comm.all_reduce(mine, comm.mesh.names).wait()
        choices_LE, rest = total.tensor_split((mine.shape[1] - COUNTS_BESIDES - len(self._balance.logged),), dim=1)
        losses = dict(zip(self._balance.logged, rest.T, strict=False))
        return RouterCounts(choices_LE, losses, total[:, -4], total[:, -3], total[:, -2:])

    def update(self, counts: RouterCounts | None, skipped: Tensor) -> None:
        """Move biases towards an even load, and keep the load; where a step is skipped (1.0) both stay."""
        if counts is None or not self.tables():
            return
        mine_LE, done = counts.choices_LE[self._held_L], 1 - skipped
        total_L1 = mine_LE.sum(-1, keepdim=True)
        if (bias_LE := self._tables.get(EXPERT_BIAS)) is not None:
            bias_LE += self._balance.bias_update_rate * done * (total_L1 - mine_LE * mine_LE.shape[1]).sign().float()
        if (load_LE := self._tables.get(LOAD)) is not None and self._experts is not None:
            now_LE = (mine_LE * self._experts.topk / total_L1).to(load_LE.dtype)
            load_LE.copy_(torch.where(done > 0, now_LE, load_LE))
