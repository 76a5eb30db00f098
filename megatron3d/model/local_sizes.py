"""Local sizes of one microbatch on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from megatron3d.attention.context.plan import GATHER, ExchangeSizes, TokenOrder, exchange_ring, scores_computed
from megatron3d.attention.plan import DROPOUT_PIECE, DROPOUT_ROWS, LONGEST, HeadSplit, num_scores
from megatron3d.experts.plan import Experts
from megatron3d.linear.fp8_plan import Fp8, QuantizedMatmul, Recipe
from megatron3d.linear.overlap_plan import OVERLAP_ALL, TPOverlap
from megatron3d.model import spec as layer_kinds
from megatron3d.model.linear_spec import EXPERT_LINEARS, MTP_LINEARS, LinearSize, linears_of_layer, mtp_linears
from megatron3d.model.spec import (
    CORE_ATTN,
    DENSE_MLP,
    GATED,
    NO_RECOMPUTE,
    Architecture,
    AttentionKind,
    Recompute,
    attention_kind,
    has_experts,
    keys_seen,
    layer_counts,
)
from megatron3d.ops.plan import CPU_LOSS_CHUNK, LossChunk, token_moves
from megatron3d.parallel.layout import span
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes.mode import Mode


class LocalMatmul(NamedTuple):
    """Matmul of one linear: plan, global sizes m, n, k, and the elements of X, W and Y that this rank stores.

    `whole_w` are the elements of W after its all-gather.
    """

    plan: MatmulPlan
    m: int
    n: int
    k: int
    x: int
    w: int
    y: int
    whole_w: int

    def multiplied(self, mesh: Mesh) -> tuple[float, float, float]:
        """Return m, n and k of the GEMM of one rank."""
        plan = self.plan
        return self.m / mesh.size(plan.m), self.n / mesh.size(plan.n), self.k / mesh.size(plan.k)

    def flops(self, mesh: Mesh) -> int:
        """Return the FLOPs of the GEMM of one rank."""
        plan, size = self.plan, mesh.size
        return 2 * (self.m // size(plan.m)) * (self.n // size(plan.n)) * (self.k // size(plan.k))


@dataclass(frozen=True)
class KernelMemory:
    """Memory that torch's kernels keep for backward, which depends on the device.

    Attributes:
        narrow_statistics: LayerNorm keeps mean and scale in its input's dtype, not in fp32.
        fused_rms_norm: RMSNorm keeps its input and a number per row; otherwise what each of its operations keeps.
        num_leaving: most shards in send: gloo does not report that one is done, and on a GPU the CPU runs ahead of them
            all, so that the engine's limit holds on both.
        num_received: additional whole buffers of a reduce-scatter: gloo receives all ranks' data and then adds.
        softmax_again: longest sequences for which bf16 attention keeps no number per row of scores.
        adds_dw: a chunk's dW of the LM head is multiplied apart and then added to main_grad, as bf16 and oneDNN's fp32
            kernel on a CPU do; others accumulate in the GEMM.
        sums_rows: backward of the embedding sums the gradients of each distinct token before it adds them to main_grad.
        fused_loss: the loss writes its gradient into the memory of the logits.
        update_piece: elements that the optimizer updates at once if its state is narrower than the weights.
        on_gpu: the run is on GPUs, whose buckets of gradients are larger by default.
        sdpa_workspace: the backward of fused attention has a workspace beyond its gradients.
        gemm_workspace: bytes that the GEMM library keeps as tensors.
        multiplies_fp8: kernels read fp8 operands, and quantize them at once; else operands are quantized by torch's
            operations, and dequantized for each GEMM.
    """

    narrow_statistics: bool
    fused_rms_norm: bool
    num_leaving: int
    num_received: int
    softmax_again: int
    adds_dw: bool
    update_piece: int
    sums_rows: bool
    fused_loss: bool
    on_gpu: bool = False
    sdpa_workspace: bool = False
    gemm_workspace: int = 0
    multiplies_fp8: bool = False


KERNELS: Mapping[str, KernelMemory] = {
    "cpu": KernelMemory(
        narrow_statistics=True,
        fused_rms_norm=False,
        num_leaving=4,
        num_received=1,
        softmax_again=512,
        adds_dw=True,
        update_piece=2**18,
        sums_rows=True,
        fused_loss=False,
    ),
    "gpu": KernelMemory(
        narrow_statistics=False,
        fused_rms_norm=True,
        num_leaving=5,  # those the engine lets be, and the one that it starts
        num_received=0,
        softmax_again=0,
        adds_dw=False,
        update_piece=2**22,
        on_gpu=True,
        sums_rows=False,
        fused_loss=True,
        sdpa_workspace=True,
        gemm_workspace=2 * 32 * 2**20,  # cuBLAS on Hopper, for the thread of forward and that of backward
        multiplies_fp8=True,
    ),
}


@dataclass(frozen=True)
class LocalSizes:
    """A microbatch of `micro_batch_size` sequences over all ranks that shard it, seen from one rank of the mesh.

    Attributes:
        narrow_wgrad: axes reduce dW in the network's dtype, not in main_grad's.
        masks_documents: attention is masked between documents; `resets_positions`: positions restart at each document.
        layer: layer that kinds of layers are taken from; `documents`: where documents begin in typical sequences.
        expert_load: rows of this rank's experts, in multiples of those of a balanced load.
        loss_chunk: largest chunk of tokens whose logits exist at a time.
        is_compiled: the compiler makes one kernel of the operations between linears.
        defers_wgrads: the schedule splits backward.
        records_logits: forward finds the largest logit of each head.
        fp8: linears that multiply in fp8; None: none does.
        is_fp16: the network's dtype is fp16, which does not hold all values of fp8 times a power of 2.
        is_ahead: the layer is that of a module of multi-token prediction.
    """

    arch: Architecture
    mode: Mode
    mesh: Mesh
    micro_batch_size: int
    itemsize: int
    recompute: Recompute = NO_RECOMPUTE
    overlap: TPOverlap = OVERLAP_ALL
    kernels: KernelMemory = KERNELS["cpu"]
    masks_documents: bool = False
    resets_positions: bool = False
    layer: int = 0
    narrow_wgrad: bool = False
    documents: tuple[tuple[int, ...], ...] | None = None
    expert_load: float = 1.0
    loss_chunk: LossChunk = CPU_LOSS_CHUNK
    is_compiled: bool = False
    defers_wgrads: bool = False
    records_logits: bool = False
    fp8: Fp8 | None = None
    is_fp16: bool = False
    is_ahead: bool = False

    @cached_property
    def listed(self) -> dict[str, Any]:
        """What follows from these sizes and is listed once."""
        return {}

    def part(self, size: int, axes: Axes) -> int:
        """Return this rank's part of a dimension that `axes` split."""
        low, high = span(size, axes, self.mesh)
        return high - low

    @cached_property
    def matmuls(self) -> Mapping[str, LocalMatmul]:
        """Matmuls of a layer's linears by path, in the order of the forward pass."""
        return {path: self._matmul(linear) for path, linear in self.linears.items()}

    @cached_property
    def linears(self) -> Mapping[str, LinearSize]:
        """Linears of this layer by path; those of a mixture of experts are the shared experts'."""
        return linears_of_layer(self.arch, self.experts is not None)

    @cached_property
    def experts(self) -> Experts | None:
        """Mixture of experts of this layer; None where it has an MLP."""
        return self.arch.experts if has_experts(self.arch, self.layer) else None

    @cached_property
    def home_tokens(self) -> int:
        """Tokens that are at home on this rank, with all their features."""
        return self.part(self.num_tokens, self.mode.home)

    @property
    def etensor_ranks(self) -> int:
        """Ranks that split each expert, and gather one another's tokens for it."""
        return self.mesh.size(self.mode.etensor)

    @cached_property
    def gathered_tokens(self) -> int:
        """Tokens that this rank sends to experts: its own, and those of the ranks that split the same experts."""
        return self.home_tokens * self.etensor_ranks

    @cached_property
    def expert_rows(self) -> int:
        """Rows of this rank's experts."""
        return 0 if self.experts is None else round(self.gathered_tokens * self.experts.topk * self.expert_load)

    @property
    def expert_ffn(self) -> int:
        """Inner features of this rank's shard of an expert."""
        return 0 if self.experts is None else self.experts.ffn_hidden_size // self.etensor_ranks

    @cached_property
    def mtp_matmuls(self) -> Mapping[str, LocalMatmul]:
        """Matmuls of a module of multi-token prediction besides those of its layer."""
        return {path: self._matmul(linear) for path, linear in mtp_linears(self.arch).items()}

    @cached_property
    def layer_ahead(self) -> LocalSizes:
        """Sizes of the layer of a module of multi-token prediction, of the last layer's kind."""
        last = self.by_kind([self.arch.num_layers - 1])[0][0]
        return last if self.fp8 is None else replace(last, is_ahead=True)

    def quantized(self, path: str, matmul: LocalMatmul) -> QuantizedMatmul | None:
        """Return the matmul of a linear of this layer, or of a module that predicts ahead, if it multiplies in fp8.

        Of modules that predict ahead the first one counts for all.
        """
        recipe = self.recipe_of(path)
        if recipe is None:
            return None
        return QuantizedMatmul(recipe, matmul.plan, self.mesh, matmul.m, matmul.n, matmul.k, self.stores_weights)

    @property
    def stores_weights(self) -> bool:
        """Whether weights that multiply in fp8 are stored so."""
        return self.fp8 is not None and self.fp8.stores_weights

    def recipe_of(self, path: str) -> Recipe | None:
        """Return the recipe of a linear of this layer, or of its experts, if it multiplies in fp8."""
        layer = "mtp.0" if path in MTP_LINEARS else "mtp.0.layer" if self.is_ahead else f"layers.{self.layer}"
        return self.fp8.recipe if self.fp8 is not None and self.fp8.takes(f"{layer}.{path}") else None

    def is_traced(self, path: str, plan: MatmulPlan) -> bool:
        """Return whether a linear of this layer is in a compiled graph, which then makes its operands.

        It has no axes, its wgrad does not wait, and the compiler takes its attention or its MLP (`model/layers.py`).
        """
        waits = self.defers_wgrads or (self.overlap.weight_grad and bool(self.mode.expand.on(self.mesh).w))
        if not self.is_compiled or waits or plan.m or plan.k or plan.n or path in MTP_LINEARS:
            return False
        if path.startswith("attention."):
            return not self._attention_is_eager
        return self.experts is None and DENSE_MLP not in self.recompute.chosen

    @property
    def _attention_is_eager(self) -> bool:
        """Whether the compiler leaves the attention of this layer out of its graph."""
        arch, expand = self.arch, self.mode.expand.on(self.mesh)
        return bool(
            arch.attention_dropout
            or self.attention.window is not None
            or not arch.has_vanilla_softmax
            or self.masks_documents
            or CORE_ATTN in self.recompute.chosen
            or self.heads.gather_axes
            or self.mode.context
            or (arch.is_latent and (expand.k or expand.n))
        )

    @cached_property
    def head_matmul(self) -> LocalMatmul:
        """Matmul of the LM head."""
        arch = self.arch
        return self._matmul(LinearSize(True, arch.hidden_size, {"head": arch.padded_vocab_size}))

    @cached_property
    def chunk_rows(self) -> tuple[int, int]:
        """Rows of this rank in a chunk of `ops/cross_entropy.py`, and the ranks whose rows are gathered."""
        plan = self.mode.expand.on(self.mesh)
        token_bytes = self.part(self.arch.padded_vocab_size, plan.n) * self.wide
        rows = self.loss_chunk.rows(self.tokens, token_bytes, plan, self.mesh)
        return min(rows, self.tokens), self.mesh.size(token_moves(plan)[0])

    def _matmul(self, linear: LinearSize) -> LocalMatmul:
        plan, m, k = linear.plan(self.mode).on(self.mesh), self.num_tokens, linear.num_inputs
        (x_rows, x_columns), (w_rows, w_columns), (y_rows, y_columns) = plan.x_layout, plan.w_layout, plan.y_layout
        x = self.part(m, x_rows) * self.part(k, x_columns)
        w = self.part(linear.num_outputs, w_rows) * self.part(k, w_columns)
        y = self.part(m, y_rows) * sum(self.part(size, y_columns) for size in linear.outputs.values())
        return LocalMatmul(plan, m, linear.num_outputs, k, x, w, y, w * self.mesh.size(plan.w))

    @cached_property
    def attention(self) -> AttentionKind:
        """The kind of attention of this layer."""
        return attention_kind(self.arch, self.layer)

    @cached_property
    def window(self) -> int | None:
        """Keys that a query of this layer sees; None: all before it, as with a window that is no shorter."""
        window = self.attention.window
        return None if window is None or window >= self.arch.seq_length else window

    @cached_property
    def keys_seen(self) -> int:
        """Most keys that a query of this layer sees."""
        return keys_seen(self.arch, self.layer)

    @cached_property
    def seen_share(self) -> float:
        """Share of the causal half of the scores that this layer's window and the documents leave."""
        seq, every = self.arch.seq_length, self.documents or ((),)
        lengths = [last - first for starts in every for first, last in pairwise((0, *starts, seq))]
        return sum(each**2 - max(each - self.keys_seen, 0) ** 2 for each in lengths) / (len(every) * seq**2)

    @property
    def rotated_share(self) -> float:
        """Share of a head's channels that this layer rotates."""
        rotary = self.attention.rotary
        return rotary.num_channels / self.arch.kv_channels if rotary else 0.0

    def recomputing(self, recompute: Recompute) -> LocalSizes:
        """Return these sizes with other modules recomputed, which no cached value depends on."""
        found = replace(self, recompute=recompute)
        cached = {name: value for name, value in vars(self).items() if name not in vars(found)}
        vars(found).update(listed=self.listed, **{name: cached[name] for name in cached if name != "listed"})
        return found

    def by_kind(self, layers: Iterable[int]) -> list[tuple[LocalSizes, int]]:
        """Return the sizes of one layer of each kind among `layers`, and how many there are of it."""
        counts = kind_counts(self.arch, self.fp8, layers).items()
        return [(self if self.layer == place else replace(self, layer=place), count) for place, count in counts]

    @property
    def sequences_read(self) -> int:
        """Sequences that this rank reads."""
        return self.part(self.micro_batch_size, self.mode.batch_axes)

    @property
    def wide(self) -> int:
        """Bytes of an element of main_grad, and of fp32 statistics (8 in fp64)."""
        return max(self.itemsize, 4)

    @property
    def narrow(self) -> int:
        """Bytes of an element where gradients are copied to the model's dtype, else 0."""
        return self.itemsize if self.itemsize < self.wide else 0

    @property
    def adds_dw(self) -> bool:
        """Whether dW of a GEMM is computed apart and then added to main_grad."""
        return self.kernels.adds_dw and self.itemsize < 8

    @property
    def wgrad_itemsize(self) -> int:
        """Bytes of an element of a dW that axes reduce."""
        return self.itemsize if self.narrow_wgrad else self.wide

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the whole microbatch."""
        return self.micro_batch_size * self.arch.seq_length

    @cached_property
    def tokens(self) -> int:
        """This rank's tokens of the residual stream."""
        return self.part(self.num_tokens, self.mode.residual[0])

    @cached_property
    def hidden(self) -> int:
        """This rank's features of the residual stream."""
        return self.part(self.arch.hidden_size, self.mode.residual[1])

    @cached_property
    def residual(self) -> int:
        """Bytes of this rank's shard of the residual stream."""
        return self.tokens * self.hidden * self.itemsize

    @cached_property
    def inner_tokens(self) -> int:
        """This rank's tokens inside attention and MLP: its positions of whole sequences."""
        return self.part(self.num_tokens, self.mode.inner[0])

    @cached_property
    def sequences(self) -> int:
        """This rank's sequences inside attention and MLP."""
        return self.part(self.micro_batch_size, self.mode.sequence_axes)

    @cached_property
    def positions(self) -> int:
        """Positions of each sequence that this rank holds."""
        return self.arch.seq_length // self.mesh.size(self.mode.context)

    def scores(self, backward: bool) -> int:
        """Return the attention scores that this rank computes for all its heads in forward or in backward."""
        arch, mode = self.arch, self.mode
        if self.drops_whole_keys:
            each = Fraction(self.inner_tokens * arch.seq_length)
        elif not mode.context:
            every = self.documents or ((),)
            scores = sum(num_scores(arch.seq_length, self.window, self.longest_piece, starts) for starts in every)
            each = Fraction(self.sequences * scores, len(every))
        else:
            each = self.sequences * scores_computed(
                mode.exchange,
                self.order,
                arch.seq_length,
                backward,
                window=self.window,
                longest=self.longest_piece,
                starts=self.documents,
            )
        return int(each * self.num_queries)

    @cached_property
    def longest_piece(self) -> int | None:
        """Most queries that attention takes at once; None: all of a pair."""
        if self.arch.attention_dropout:
            return DROPOUT_PIECE if self.arch.seq_length > DROPOUT_ROWS else None
        return None if self.arch.attention_softcap is None else LONGEST

    @cached_property
    def order(self) -> TokenOrder:
        """Which positions of its sequences this rank holds."""
        return TokenOrder.of_mode(self.mode, self.mesh, layer_kinds.widest_window(self.arch))

    @property
    def keeps_result(self) -> bool:
        """Whether attention that is recomputed keeps its output and log-sum-exp, as that of context ranks does."""
        return bool(self.mode.context) and not self.drops_whole_keys

    @property
    def drops_whole_keys(self) -> bool:
        """Whether weights have dropout where a rank has all keys: scores are kept, or pieces of them recomputed."""
        return bool(self.arch.attention_dropout) and (not self.mode.context or self.mode.exchange == GATHER)

    @cached_property
    def exchange(self) -> ExchangeSizes:
        """Sizes of what this rank exchanges with other context ranks; all-gathers send keys before they are copied."""
        mode, seq = self.mode, self.arch.seq_length
        is_even = self.heads.are_even or mode.exchange == GATHER
        groups, width = self.num_groups if is_even else self.num_queries, self.inner_tokens * self.arch.kv_channels
        in_parts = not self.drops_whole_keys
        sizes = ExchangeSizes(width * self.num_queries, width * groups, groups, self.itemsize, in_parts=in_parts)
        if mode.exchange == GATHER or not mode.context or (self.window is None and self.documents is None):
            return sizes
        ring = exchange_ring(mode.exchange, self.order, seq, self.documents, self.window)
        return replace(sizes, steps=len(ring.steps))

    @property
    def whole_keys(self) -> int:
        """Elements of keys and values of whole sequences, as context ranks gather them; 0 without context ranks."""
        ranks = self.mesh.size(self.mode.context)
        return 2 * self.inner_tokens * ranks * self.num_groups * self.arch.kv_channels if ranks > 1 else 0

    @cached_property
    def heads(self) -> HeadSplit:
        """This rank's attention heads."""
        arch, axes = self.arch, self.mesh.nontrivial(self.mode.inner[1])
        return HeadSplit(arch.num_attention_heads, arch.num_query_groups, arch.kv_channels, axes, self)

    @cached_property
    def num_queries(self) -> int:
        """Number of query heads on this rank."""
        low, high = self.heads.query_span
        return high - low

    @cached_property
    def num_groups(self) -> int:
        """Number of key/value heads that this rank's query heads read."""
        low, high = self.heads.group_span
        return high - low

    @cached_property
    def keys_width(self) -> int:
        """Features of the keys on this rank before they are all-gathered; values have as many."""
        return self.part(self.arch.num_query_groups * self.arch.kv_channels, self.mode.inner[1])

    @cached_property
    def ffn(self) -> int:
        """This rank's inner features of the MLP, or of the shared experts."""
        size = self.arch.ffn_hidden_size if self.experts is None else self.experts.shared_ffn_hidden_size
        return self.part(size, self.mode.inner[1])

    @property
    def is_gated(self) -> bool:
        """Whether the MLP is gated."""
        return self.arch.activation in GATED

    def inner(self, width: int) -> int:
        """Return the bytes of `width` features for this rank's inner tokens."""
        return self.inner_tokens * width * self.itemsize


def kind_counts(arch: Architecture, fp8: Fp8 | None, layers: Iterable[int]) -> Mapping[int, int]:
    """Return how many of these layers are of each kind, by the first layer of the model that is of this kind.

    Layers with other linears in fp8 are of another kind.
    """
    if fp8 is None:
        return layer_counts(arch, layers)
    firsts = _first_alike(arch, fp8)
    return Counter(firsts[layer] for layer in layers)


@cache
def _first_alike(arch: Architecture, fp8: Fp8) -> tuple[int, ...]:
    """Return the first layer of the kind of each layer."""
    firsts, found = dict[object, int](), list[int]()
    for layer in range(arch.num_layers):
        (kind,) = layer_counts(arch, [layer])
        mixture = has_experts(arch, layer)
        paths = (*linears_of_layer(arch, mixture), *(EXPERT_LINEARS if mixture else ()))
        taken = tuple(path for path in paths if fp8.takes(f"layers.{layer}.{path}"))
        found.append(firsts.setdefault((kind, taken), layer))
    return tuple(found)
