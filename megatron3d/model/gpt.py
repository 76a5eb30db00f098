"""The GPT: embedding, layers, final norm, and LM head with its loss; a pipeline rank holds some stages of it.

Letters: B sequences, S positions, M tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron3d.attention.context.order import cut_positions, held_positions
from megatron3d.attention.context.plan import CONTEXT_EXCHANGES, TokenOrder
from megatron3d.attention.kv_cache import CacheView, KVCache
from megatron3d.attention.largest_logits import LargestLogits
from megatron3d.attention.rotary import PositionTables, rotary_tables, temperature_table
from megatron3d.comm.interface import Comm
from megatron3d.data.packing import PLAIN, Packing, Starts
from megatron3d.linear.collectives import PrefetchedWeight, prefetch_in_order
from megatron3d.linear.fp8 import Fp8Gemm
from megatron3d.linear.fp8_plan import Fp8
from megatron3d.linear.gemm import NATIVE, Gemm, Operand
from megatron3d.linear.main_grad import MainGrads, WgradQueue
from megatron3d.linear.matmul import CompiledLinears
from megatron3d.linear.overlap_plan import OVERLAP_ALL, TPOverlap
from megatron3d.model.compile import uncompiled
from megatron3d.model.ends import Embedding, LossHead, PredictionModule, inputs_ahead, keep_hidden
from megatron3d.model.experts import ExpertLinear
from megatron3d.model.layers import Layer
from megatron3d.model.microbatch import Pass, Target, local_positions
from megatron3d.model.modules import Build, HiddenDropout, Linear, Norm
from megatron3d.model.param_spec import EMBEDDING, HEAD, stage_specs
from megatron3d.model.router_state import RouterState
from megatron3d.model.spec import NO_RECOMPUTE, Architecture, Recompute, rotaries, temperature, widest_window
from megatron3d.model.stage_plan import Stage, StageAssignment
from megatron3d.ops.norm import TORCH_NORMS, NormKernels
from megatron3d.ops.plan import LossChunk
from megatron3d.ops.recompute import ActivationOffload, KeptResults, recomputed
from megatron3d.parallel.layout import ParamSpec
from megatron3d.parallel.mesh import PIPELINE
from megatron3d.parallel.modes.mode import Mode
from megatron3d.zero import FsdpUnit, StoredWeight

ActivationHook = Callable[[str, Tensor], None]
Fp8Hook = Callable[[str, str, Tensor, Operand], None]


def _no_hook(path: str, x_MH: Tensor) -> None: ...


class GPT(nn.Module):
    """Stages of a GPT that this pipeline rank holds; `zero.Buffers` allocates their parameters.

    Attributes:
        stage_specs: for each of this rank's stages, the layout of its parameters by their path in the module tree.
        logits: largest logits of attention, where passes record them.
        routers: state of the routers, without memory: its `allocate` is to be called before the first pass.
    """

    def __init__(
        self,
        arch: Architecture,
        mode: Mode,
        comm: Comm,
        assignment: StageAssignment,
        loss_chunk: LossChunk,
        *,
        recompute: Recompute = NO_RECOMPUTE,
        overlap: TPOverlap = OVERLAP_ALL,
        splits_backward: bool = False,
        norm_kernels: NormKernels = TORCH_NORMS,
        compiles: bool = False,
        context_exchange: str = CONTEXT_EXCHANGES[0],
        gemm: Gemm = NATIVE,
        fp8: Fp8 | None = None,
        records_logits: bool = False,
    ) -> None:
        super().__init__()
        self.arch, self.mode, self.comm = arch, mode, comm
        self.order = TokenOrder.of_mode(mode, comm.mesh, widest_window(arch))
        self.stages: tuple[Stage, ...] = assignment.on_rank(comm.mesh.coord(PIPELINE))
        self.stage_specs = stage_specs(arch, mode, assignment, comm.mesh.coord(PIPELINE))
        overlaps_reduction = overlap.weight_grad and bool(mode.expand.on(comm.mesh).w)
        self.main_grads = MainGrads()
        needs_queue = splits_backward or overlaps_reduction
        self.wgrads = WgradQueue(self.main_grads, overlaps_reduction) if needs_queue else None
        self.routers = RouterState(arch)
        self.logits = LargestLogits() if records_logits else None
        self._build = build = Build(
            arch=arch,
            mode=mode,
            comm=comm,
            specs=self.specs,
            main_grads=self.main_grads,
            wgrads=self.wgrads,
            recompute=recompute,
            overlap=overlap,
            norm_kernels=norm_kernels,
            compiled=CompiledLinears(self.main_grads) if compiles else None,
            context_exchange=context_exchange,
            routers=self.routers,
            gemm=gemm,
            fp8=fp8,
            logits=self.logits,
        )
        self.recompute, self.offload = recompute, ActivationOffload()
        if EMBEDDING in self.specs:
            self.embedding = Embedding("embedding", build)
        if self.stages[0].has_embedding:
            self.embedding_dropout = HiddenDropout("embedding", build)
        self.layers = nn.ModuleDict({str(n): Layer(n, build) for stage in self.stages for n in stage.layers})
        if self.stages[-1].has_head:
            self.final_norm = Norm("final_norm", mode.residual[1], build)
            self.head = LossHead("head", loss_chunk, build)
        num_ahead = arch.mtp_num_layers if self.stages[-1].has_head else 0
        self.mtp = nn.ModuleDict({str(index): PredictionModule(index, loss_chunk, build) for index in range(num_ahead)})
        self._rotary: tuple[PositionTables, ...] = ()
        self._own_rotary: tuple[int, tuple[PositionTables, ...]] = 0, ()
        self._activation_hook: ActivationHook = _no_hook

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        """Layout of each of this rank's parameters by its path in the module tree."""
        return {name: spec for specs in self.stage_specs.values() for name, spec in specs.items()}

    @property
    def head_weight(self) -> Tensor:
        """LM head's weight [V, H]: with tied embeddings the embedding's, if this rank holds it."""
        return self.get_parameter(HEAD if HEAD in self.specs else EMBEDDING)

    @property
    def embedding_weight(self) -> Tensor:
        """Embedding matrix [V, H]: on the last rank of a model with tied embeddings the head's, if it is there."""
        return self.get_parameter(EMBEDDING if EMBEDDING in self.specs else HEAD)

    @property
    def modules_ahead(self) -> list[tuple[str, PredictionModule]]:
        """Modules of multi-token prediction of this rank by index, in the order of the forward pass."""
        return [(index, module) for index, module in self.mtp.items() if isinstance(module, PredictionModule)]

    def fsdp_units(self) -> list[FsdpUnit]:
        """Return the FSDP units of this rank's stages, in the order of the forward pass."""
        found: list[FsdpUnit] = []
        for index, stage in enumerate(self.stages):
            if stage.has_embedding:
                found.append(FsdpUnit("embedding", self.embedding, index, in_backward=False))
            found += [FsdpUnit(f"layers.{n}", self.layers[str(n)], index, in_backward=True) for n in stage.layers]
            if stage.has_head:
                path, table = (
                    next(path for path in order if f"{path}.weight" in self.specs)
                    for order in (("head", "embedding"), ("embedding", "head"))
                )
                found.append(FsdpUnit("final_norm", self.final_norm, index, in_backward=True))
                found.append(FsdpUnit(path, self.head, index, in_backward=False))
                for depth, module in self.modules_ahead:
                    found.append(FsdpUnit(table, module.embedding, index, in_backward=False))
                    found.append(FsdpUnit(f"mtp.{depth}", module, index, in_backward=True))
                    found.append(FsdpUnit(path, module.head, index, in_backward=False))
        return found

    def _prefetched_weights(self, stage: Stage) -> list[tuple[str, PrefetchedWeight]]:
        """Return the FSDP unit and the weight of each linear of a stage, in the order of the forward pass."""
        units = [(f"layers.{n}", self.layers[str(n)]) for n in stage.layers]
        units += [(f"mtp.{depth}", module) for depth, module in self.modules_ahead if stage.has_head]
        linears = [(path, module) for path, unit in units for module in unit.modules() if isinstance(module, Linear)]
        return [(block, weight) for block, linear in linears if (weight := linear.matmul.weight)]

    def prefetch_weights(self, unshard: Callable[[str], None]) -> None:
        """Prefetch each linear's weight during its neighbour's GEMMs; `unshard` all-gathers its FSDP unit first."""
        for stage in self.stages:
            prefetch_in_order([(weight, partial(unshard, block)) for block, weight in self._prefetched_weights(stage)])

    def drop_prefetched_weights(self) -> None:
        """Drop the prefetched weights; must be called whenever weights may have changed."""
        for stage in self.stages:
            for _, weight in self._prefetched_weights(stage):
                weight.drop()

    @property
    def like(self) -> Tensor:
        """A parameter in the network's dtype, which weights that are stored in fp8 are not."""
        return next(param for param in self.parameters() if param.dtype.itemsize > 1)

    def stored_weights(self) -> dict[str, StoredWeight]:
        """Return the weights that multiply in fp8, by path, for buffers that store them so."""
        found = dict[str, StoredWeight]()
        for path, (module, gemm) in self._fp8_linears().items():
            count = module.matmul.num_experts if isinstance(module, ExpertLinear) else 1
            found[f"{path}.weight"] = StoredWeight(gemm, count)
        return found

    def _fp8_linears(self) -> dict[str, tuple[Linear | ExpertLinear, Fp8Gemm]]:
        """Return the linears that multiply in fp8, by path, with their recipes."""
        linears = {path: each for path, each in self.named_modules() if isinstance(each, Linear | ExpertLinear)}
        gemms = {path: each.matmul.gemm for path, each in linears.items()}
        return {path: (linears[path], gemm) for path, gemm in gemms.items() if isinstance(gemm, Fp8Gemm)}

    @contextmanager
    def unquantized(self) -> Iterator[None]:
        """Within the body linears multiply X and W in precision, and no compiled graph runs; for forward alone."""
        linears = self._fp8_linears().values()
        for linear, _ in linears:
            linear.matmul.multiply_by(self._build.gemm)
        try:
            with uncompiled() if self._build.compiled else nullcontext():
                yield
        finally:
            for linear, gemm in linears:
                linear.matmul.multiply_by(gemm)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of a shape, the contribution of a rank without the last stage to a sum of losses or logits."""
        param = self.like
        return param.new_zeros(shape, dtype=torch.promote_types(param.dtype, torch.float32))

    def begin(
        self,
        tokens: Tensor,
        num_tokens: int | Tensor,
        first_sequence: int = 0,
        *,
        key: tuple[int, int] | None = None,
        loss_scale: Tensor | float = 1.0,
        packing: Packing = PLAIN,
        starts: Starts | None = None,
        all_tokens: int = 1,
        num_ahead: Sequence[int | Tensor] = (),
    ) -> Pass:
        """Return the pass of a microbatch that ends in the loss.

        Args:
            tokens: [B, S + 1]; the last token of a sequence is only a label, and negative tokens are ignored as labels.
            num_tokens: valid tokens of the global batch, by which the loss is divided.
            first_sequence: index in the global batch of the microbatch's first sequence.
            key: (seed, iteration) of dropout; None turns it off.
            loss_scale: factor of the gradients, but not of the loss.
            packing: treatment of documents and of tokens that do not count in the loss.
            starts: `packing.starts` of the tokens, which the host must know; default: read from `tokens`.
            all_tokens: tokens of the global batch, masked ones included.
            num_ahead: valid tokens of the global batch for each module of multi-token prediction.
        """
        tokens_BS = tokens[:, :-1].clamp(min=0)
        documents = packing.documents(tokens[:, :-1], packing.starts(tokens) if starts is None else starts)
        num_sequences, seq_length = self._whole_shape(tokens_BS)
        held = held_positions(self.order, seq_length, documents.starts if documents else None, tokens.device)
        cut = partial(local_positions, order=self.order, held=held)
        scale = loss_scale * self.arch.mtp_loss_scaling_factor / max(self.arch.mtp_num_layers, 1)
        return Pass(
            tokens_BL=cut(tokens_BS),
            seq_length=seq_length,
            order=self.order,
            target=Target(cut(packing.labels(tokens)).flatten(), num_tokens, loss_scale, all_tokens),
            num_sequences=num_sequences,
            first_sequence=first_sequence,
            key=key,
            rotary=self._local_rotary(seq_length),
            documents=documents,
            ahead=tuple(inputs_ahead(tokens, cut, packing, num_ahead, scale)),
            held=held,
        )

    def begin_sampling(self, tokens_BS: Tensor) -> Pass:
        """Return the pass of a microbatch [B, S] that ends in its logits."""
        num_sequences, seq_length = self._whole_shape(tokens_BS)
        return Pass(
            tokens_BL=local_positions(tokens_BS, self.order, None),
            seq_length=seq_length,
            order=self.order,
            num_sequences=num_sequences,
            rotary=self._local_rotary(seq_length),
        )

    def begin_extending(
        self, tokens_BS: Tensor, positions_BS: Tensor, ends_B: Tensor, length: int, cache: KVCache, has_logits: bool
    ) -> Pass:
        """Return the pass of new tokens that extends a KV cache.

        Args:
            tokens_BS: new tokens of the sequences that this rank reads.
            positions_BS: positions of the new tokens of the whole microbatch, all below `length`.
            ends_B: position behind the last new token of each sequence that is no padding.
            has_logits: whether the pass ends in logits; if not, it only extends the cache.
        """
        num_sequences, width = positions_BS.shape
        low, high = self.order.sequences(num_sequences, self.mode.inner[0])
        cached = CacheView(cache, positions_BS, positions_BS[low:high], ends_B[low:high], length, has_logits)
        mine_BL, tokens_BL = (cut_positions(t, self.order.chunks(width), 1) for t in (cached.mine_BS, tokens_BS))
        rotary = tuple(tuple(each[mine_BL] for each in tables) for tables in self._rotary_tables(cache.capacity))
        return Pass(
            tokens_BL=tokens_BL,
            seq_length=width,
            order=self.order,
            num_sequences=num_sequences,
            rotary=rotary,
            cached=cached,
        )

    def _whole_shape(self, tokens_BS: Tensor) -> tuple[int, int]:
        """Return the sequences of the whole microbatch and the positions of each, from what this rank reads."""
        return tokens_BS.shape[0] * self.comm.mesh.size(self.mode.batch_axes), tokens_BS.shape[1]

    def _local_rotary(self, seq_length: int) -> tuple[PositionTables, ...]:
        """Return the rotary tables of this rank's positions of sequences without documents, once for all."""
        if self._own_rotary[0] != seq_length:
            chunks, found = self.order.chunks(seq_length), self._rotary_tables(seq_length)
            own = tuple(tuple(cut_positions(each, chunks, dim=0) for each in tables) for tables in found)
            self._own_rotary = seq_length, own
        return self._own_rotary[1]

    def _with_documents(self, at: Pass) -> Pass:
        """Return the pass with the rotary tables of its documents, for all layers of one stage.

        They are per sequence: made here, those of one stage's pass are in memory, not those of all microbatches.
        """
        if at.documents is None:
            return at
        if (mine_BL := at.document_positions_BL) is not None:
            rotary = tuple(tuple(each[mine_BL] for each in tables) for tables in self._rotary_tables(at.seq_length))
        else:
            rows = at.tokens_BL.shape[0], -1, -1, -1
            rotary = tuple(tuple(each.expand(rows) for each in tables) for tables in at.rotary)
        return replace(at, rotary=rotary)

    def _rotary_tables(self, seq_length: int) -> tuple[PositionTables, ...]:
        """Return the tables of each rotary embedding of the model, and then the factors of queries."""
        if not self._rotary or len(self._rotary[0][0]) < seq_length:
            like, longest = self.like, max(seq_length, self.arch.seq_length)
            self._rotary = tuple(rotary_tables(longest, rotary, like) for rotary in rotaries(self.arch))
            if (factor := temperature(self.arch)) is not None:
                self._rotary += (temperature_table(longest, factor, like),)
        return tuple(tuple(each[:seq_length] for each in tables) for tables in self._rotary)

    def set_activation_hook(self, hook: ActivationHook | None) -> None:
        """Call `hook` with the path and output of the embedding and of each layer, during recomputation as well."""
        self._activation_hook = hook or _no_hook

    def set_fp8_hook(self, hook: Fp8Hook | None) -> None:
        """Call `hook` with the path of each linear and the operands that it quantizes."""
        for path, (_, gemm) in self._fp8_linears().items():
            gemm.watch(partial(hook, path) if hook else None)

    def _layers(self, layers: range, x_MH: Tensor, at: Pass) -> Tensor:
        for index in layers:
            x_MH = self.layers[str(index)](x_MH, at)
            self._activation_hook(f"layers.{index}", x_MH)
        return x_MH

    def forward(self, stage: Stage, x_MH: Tensor | None, at: Pass) -> Tensor:
        """Compute a stage: return the residual stream [M, H], or on the last stage this rank's share of the loss.

        With multi-token prediction the losses of its modules follow [1 + modules].  Without a target the last stage
        returns logits [B, S, V]; if a pass with a KV cache needs no logits, it returns the residual stream.  `x_MH` is
        the output of the stage before, None for the first stage.
        """
        if stage.has_embedding:
            x_MH = self.embedding_dropout(self.embedding(at, self.embedding_weight), at)
            self._activation_hook("embedding", x_MH)
        assert x_MH is not None, f"stage {stage.index} was given nothing"
        at = self._with_documents(at)
        offloaded = self.offload.begin(self.parameters(), x_MH.device) if self.recompute.offloads else None
        for run in self.recompute.runs(stage.layers):
            compute = partial(recomputed, self._layers) if run.is_recomputed else self._layers
            with offloaded.group() if offloaded else nullcontext():
                x_MH = compute(run.layers, x_MH, replace(at, kept=KeptResults()) if run.is_recomputed else at)
        if not stage.has_head or not (at.has_end or at.keeps_hidden):
            return x_MH
        x_MH = self.final_norm(x_MH)
        if at.keeps_hidden:
            keep_hidden(x_MH, at, self.mode, self.comm)
        y: Tensor = self.head(x_MH, self.head_weight, at) if at.has_end else x_MH
        return torch.stack((y, *self._losses_ahead(x_MH, at))) if at.ahead else y

    def _losses_ahead(self, x_MH: Tensor, at: Pass) -> Iterator[Tensor]:
        """Yield this rank's share of the loss of each module of multi-token prediction."""
        for (index, module), ahead in zip(self.modules_ahead, at.ahead, strict=True):
            there = replace(at, tokens_BL=ahead.tokens_BL, target=ahead.target)
            embedded_MH = module.embedding(there, self.embedding_weight)
            is_recomputed = self.recompute.recomputes_ahead
            compute = partial(recomputed, module) if is_recomputed else module
            x_MH = compute(x_MH, embedded_MH, replace(at, kept=KeptResults()) if is_recomputed else at)
            self._activation_hook(f"mtp.{index}", x_MH)
            yield module.head(x_MH, self.head_weight, there)
