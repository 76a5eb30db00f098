"""The data axis: who holds which parameters and gradients, and how gradients are summed (ZeRO stages 0 to 3).

              gradients                                           parameters
    stage 0   all-reduced                                         whole, updated everywhere
    stage 1   reduce-scattered when the last microbatch is in     whole; updated parts are gathered under the forward
    stage 2   reduce-scattered after each microbatch, added up    as in stage 1
    stage 3   as in stage 2                                       gathered for a block's forward and backward

Every transfer is begun as soon as its data are there and waited for when its result is needed.  Sums are kept in fp32
or better, beside parameters of lower precision.  (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023,
arXiv:2304.11277.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron3d.comm.interface import Comm
from megatron3d.ops.main_grad import MainGrads
from megatron3d.parallel.layout import ParamSpec
from megatron3d.parallel.mesh import DATA
from megatron3d.parallel.sharding import Sharding
from megatron3d.zero.flat_buffer import Block, Flat, make_flats
from megatron3d.zero.grad_reduction import Reduction
from megatron3d.zero.hooks import wait_for_blocks, watch_blocks

EVERYTHING = Sharding()


class Buffers:
    """Memory of a model's parameters and gradients.

    Args:
        model: a module whose parameters have no memory yet; they get it here.
        stage_specs: of its parameters by path, for each stage of the pipeline that the module holds.
        dtype: of the parameters that the network uses; sums and the optimizer's copy are fp32 or better.
        bucket_bytes: gradients are summed in pieces of about so many bytes.
        sharding: what is shared out, over which axes.
        blocks: the pieces of the network, in the order of the forward pass; every parameter is in some.
        reduce_dtype: of gradients on their way; None: as they are summed.
        main_grads: registry in which each parameter's gradient buffer is entered; None: one of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_specs: Mapping[int, Mapping[str, ParamSpec]],
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: float,
        sharding: Sharding = EVERYTHING,
        blocks: Sequence[Block] = (),
        reduce_dtype: torch.dtype | None = None,
        main_grads: MainGrads | None = None,
    ) -> None:
        self.comm, self.sharding, self._reduce_dtype = comm, sharding, reduce_dtype
        self.specs = {name: spec for specs in stage_specs.values() for name, spec in specs.items()}
        block_of = {name: block.path for block in blocks for name in self.specs if block.has(name)}
        assert not sharding.axes or block_of.keys() == self.specs.keys(), "some parameters are in no block"
        self.flats = make_flats(stage_specs, block_of, sharding, comm.mesh, dtype, device, bucket_bytes)
        # A sum waits for the one before where it has memory of its own, or where a second transfer follows the first.
        is_grouped = bool(sharding.axes) and comm.mesh.sizes[DATA[0]] > 1
        self._takes_turns = sharding.grads or reduce_dtype is not None or is_grouped
        self._num_microbatches = 1
        self._reductions: list[Reduction] = []
        registry = main_grads or MainGrads()
        for flat in self.flats:
            for name in flat.spans:
                self._give_memory(model, flat, name, registry)
            if sharding.params:
                flat.forget()
        self._flats_of = {
            block.path: [flat for flat in self.flats if any(map(block.has, flat.spans))] for block in blocks
        }
        if sharding.axes:
            (watch_blocks if sharding.params else wait_for_blocks)(self, blocks)

    def _give_memory(self, model: nn.Module, flat: Flat, name: str, main_grads: MainGrads) -> None:
        owner, _, leaf = name.rpartition(".")
        param = flat.param(name, self.specs[name].local_shape(self.comm.mesh))
        setattr(model.get_submodule(owner), leaf, param)
        main_grads.register(param, _MainGradView(self, flat, name, param.shape))

    def begin_step(self, num_microbatches: int) -> None:
        """Gradients of so many microbatches will come; the first of each parameter replaces that of the last step."""
        self._num_microbatches = num_microbatches
        for flat in self.flats:
            flat.begin_step()

    def count_grad(self, flat: Flat) -> None:
        """Begin to reduce when gradients are complete: of all microbatches, or of one where they are shared out."""
        flat.num_arrived += 1
        if flat.num_arrived % (flat.num_uses * (1 if self.sharding.grads else self._num_microbatches)):
            return
        if self._takes_turns:
            self._advance()
        self._reductions.append(Reduction(flat, self.comm, self._reduce_dtype))

    def _advance(self) -> None:
        """Take each sum that is under way one transfer further."""
        self._reductions = [reduction for reduction in self._reductions if not reduction.advance()]

    def check_stage(self, stage: int) -> None:
        """Hold that the sums of a stage's gradients are under way, now that its last microbatch is through."""
        for flat in self.flats:
            missing = flat.num_uses * self._num_microbatches - flat.num_arrived if flat.stage == stage else 0
            assert missing == 0, f"{missing} gradients of stage {stage} never arrived: of {', '.join(flat.spans)}"

    def reduce_grads(self) -> None:
        """Wait until every gradient is summed over its axes (the gradient rule), and over its holders."""
        for stage in {flat.stage for flat in self.flats}:
            self.check_stage(stage)
        while self._reductions:
            self._advance()
        for flat in self.flats:
            if flat.kind.link is not None:
                self.comm.all_reduce_pair(flat.grad, flat.kind.link).wait()

    def square_norm(self) -> Tensor:
        """My part of the squared global gradient norm: local squares over the number of copies (the norm rule)."""
        return torch.stack([square_sum(flat.grad) / flat.kind.copies for flat in self.flats]).sum()

    def publish(self) -> None:
        """Give the network what the optimizer has updated: parts are gathered in the order in which they are used."""
        self.settle()
        for flat in self.flats:
            if self.sharding.params:
                flat.forget()
            else:
                self._gather(flat)

    def settle(self) -> None:
        """Wait until nothing is on its way to the network: then `main` may be written."""
        for flat in self.flats:
            self._wait(flat)

    def _gather(self, flat: Flat) -> None:
        flat.remember()
        flat.gathering = self.comm.all_gather_into(flat.raw, self.sharding.axes)

    def _wait(self, flat: Flat) -> None:
        if flat.gathering is not None:
            flat.gathering.wait()
            flat.gathering = None

    def unshard(self, path: str) -> None:
        """Begin to gather what the block `path` needs, unless that is whole or on its way."""
        for flat in self._flats_of[path]:
            if not flat.is_whole:
                self._gather(flat)

    def wait(self, path: str) -> None:
        """Wait until all that a block needs is whole."""
        for flat in self._flats_of[path]:
            self._wait(flat)

    def make_whole(self, path: str) -> None:
        """Both."""
        self.unshard(path)
        self.wait(path)

    def reshard(self, path: str) -> None:
        """Forget what a block needed, where parameters are shared out."""
        for flat in self._flats_of[path] if self.sharding.params else ():
            flat.forget()

    def held(self, which: str) -> Iterator[tuple[str, int, Tensor]]:
        """Of every parameter: its name, the first element that I hold, and all these of `which` ("main", "grad")."""
        for flat in self.flats:
            for name in flat.spans:
                start, where = flat.held(name)
                yield name, start, getattr(flat, which)[where]


@dataclass(frozen=True)
class _MainGradView:
    """main_grad of one parameter: a view of its flat buffer of gradients."""

    buffers: Buffers
    flat: Flat
    name: str
    shape: torch.Size

    def open(self) -> tuple[Tensor, bool]:
        return self.flat.main_grad(self.name, self.shape)

    def close(self) -> None:
        self.buffers.count_grad(self.flat)


def square_sum(flat: Tensor, row: int = 4096) -> Tensor:
    """Sum of squares in two levels, without a temporary of the same size.

    torch adds a norm over everything one by one on a CPU: 3e-3 off for 30 million fp32 values, 1e-7 in rows.
    """
    whole = len(flat) // row * row
    rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, row), dim=1)
    rest: Tensor = torch.linalg.vector_norm(flat[whole:])
    return rows.square().sum() + rest.square()
