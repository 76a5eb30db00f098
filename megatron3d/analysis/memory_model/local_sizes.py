"""Local sizes of one microbatch on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from megatron3d.analysis.memory_model.kernel_memory import KERNELS, KernelMemory
from megatron3d.analysis.memory_model.local_matmul import LocalMatmul
from megatron3d.model import layer_kinds
from megatron3d.model.architecture import GATED, Architecture
from megatron3d.model.layer_kinds import AttentionKind, attention_kind, has_experts, keys_seen, layer_counts
from megatron3d.model.linears import LinearSize, linears_of_layer, mtp_linears
from megatron3d.model.recompute_spec import NO_RECOMPUTE, Recompute
from megatron3d.ops.router_spec import Experts
from megatron3d.parallel.attention_heads import HeadSplit
from megatron3d.parallel.attention_pairs import LONGEST
from megatron3d.parallel.context import TokenOrder
from megatron3d.parallel.context_exchange import GATHER, ExchangeSizes, exchange_ring, scores_computed
from megatron3d.parallel.layout import span
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes.mode import Mode
from megatron3d.parallel.sequence_pairs import DROPOUT_PIECE, DROPOUT_ROWS, num_scores
from megatron3d.parallel.tp_overlap import OVERLAP_ALL, TPOverlap


@dataclass(frozen=True)
class LocalSizes:
    """A microbatch of `micro_batch_size` sequences over all ranks that shard it, seen from one rank of the mesh.

    Attributes:
        narrow_wgrad: axes reduce dW in the network's dtype, not in main_grad's.
        masks_documents: attention is masked between documents; `resets_positions`: positions restart at each document.
        layer: layer that kinds of layers are taken from; `documents`: where documents begin in typical sequences.
        expert_load: rows of this rank's experts, in multiples of those of a balanced load.
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

    @property
    def experts(self) -> Experts | None:
        """Mixture of experts of this layer; None where it has an MLP."""
        return self.arch.experts if has_experts(self.arch, self.layer) else None

    @property
    def home_tokens(self) -> int:
        """Tokens that are at home on this rank, with all their features."""
        return self.part(self.num_tokens, self.mode.home)

    @property
    def etensor_ranks(self) -> int:
        """Ranks that split each expert, and gather one another's tokens for it."""
        return self.mesh.size(self.mode.etensor)

    @property
    def gathered_tokens(self) -> int:
        """Tokens that this rank sends to experts: its own, and those of the ranks that split the same experts."""
        return self.home_tokens * self.etensor_ranks

    @property
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

    @property
    def layer_ahead(self) -> LocalSizes:
        """Sizes of the layer of a module of multi-token prediction, of the last layer's kind."""
        return self.by_kind([self.arch.num_layers - 1])[0][0]

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

    @property
    def window(self) -> int | None:
        """Keys that a query of this layer sees; None: all before it, as with a window that is no shorter."""
        window = self.attention.window
        return None if window is None or window >= self.arch.seq_length else window

    @property
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

    def by_kind(self, layers: Iterable[int]) -> list[tuple[LocalSizes, int]]:
        """Return the sizes of one layer of each kind among `layers`, and how many there are of it."""
        counts = layer_counts(self.arch, layers).items()
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
    def wgrad_itemsize(self) -> int:
        """Bytes of an element of a dW that axes reduce."""
        return self.itemsize if self.narrow_wgrad else self.wide

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole microbatch."""
        return self.micro_batch_size * self.arch.seq_length

    @property
    def tokens(self) -> int:
        """This rank's tokens of the residual stream."""
        return self.part(self.num_tokens, self.mode.residual[0])

    @property
    def hidden(self) -> int:
        """This rank's features of the residual stream."""
        return self.part(self.arch.hidden_size, self.mode.residual[1])

    @property
    def residual(self) -> int:
        """Bytes of this rank's shard of the residual stream."""
        return self.tokens * self.hidden * self.itemsize

    @property
    def splits_features(self) -> bool:
        """Whether norms reduce their statistics over ranks."""
        return bool(self.mesh.nontrivial(self.mode.residual[1]))

    @property
    def inner_tokens(self) -> int:
        """This rank's tokens inside attention and MLP: its positions of whole sequences."""
        return self.part(self.num_tokens, self.mode.inner[0])

    @property
    def sequences(self) -> int:
        """This rank's sequences inside attention and MLP."""
        return self.part(self.micro_batch_size, self.mode.sequence_axes)

    @property
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
            sizes = mode.exchange, self.order, arch.seq_length, backward, self.window, self.longest_piece
            each = self.sequences * scores_computed(*sizes, self.documents)
        return int(each * self.num_queries)

    @property
    def longest_piece(self) -> int | None:
        """Most queries that attention takes at once; None: all of a pair."""
        if self.arch.attention_dropout:
            return DROPOUT_PIECE if self.arch.seq_length > DROPOUT_ROWS else None
        return None if self.arch.attention_softcap is None else LONGEST

    @property
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

    @property
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

    @property
    def num_queries(self) -> int:
        """Number of query heads on this rank."""
        low, high = self.heads.query_span
        return high - low

    @property
    def num_groups(self) -> int:
        """Number of key/value heads that this rank's query heads read."""
        low, high = self.heads.group_span
        return high - low

    @property
    def keys_width(self) -> int:
        """Features of the keys on this rank before they are all-gathered; values have as many."""
        return self.part(self.arch.num_query_groups * self.arch.kv_channels, self.mode.inner[1])

    @property
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
