"""Context parallelism: mesh axes that split the positions of every sequence, behind the axes that split sequences.

Causal attention gives later positions more work.  So a sequence is cut into 2 c chunks, and of c ranks rank r holds the
chunks r and 2 c - 1 - r ("zigzag", as in Llama 3, arXiv:2407.21783, section 3.3.2, and Brandon et al. 2023,
arXiv:2311.09431):

    chunk of the sequence     0  1  2  3  4  5  6  7
    context rank              0  1  2  3  3  2  1  0

Packed documents may be divided by their own work instead (`parallel/document_chunks.py`).  Everything that depends on
a position takes it from `TokenOrder`: rotary and learned positions, labels, dropout masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron3d.parallel.document_chunks import Chunks, balanced_chunks
from megatron3d.parallel.layout import span
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes.mode import Mode

# Exchanges of keys and values between context ranks by name (`cp_comm_type`); the first one is the default.
CONTEXT_EXCHANGES = ("all_gather", "p2p", "a2a", "a2a+p2p")
# How positions are divided among context ranks by name (`context_parallel_load_balancer`); the first is the default.
ZIGZAG, DOCUMENTS = LOAD_BALANCERS = ("zigzag", "documents")
Span = tuple[int, int]


def with_context(
    mode: Mode,
    axes: tuple[tuple[str, int], ...],
    exchange: str = CONTEXT_EXCHANGES[0],
    load_balancer: str = ZIGZAG,
) -> Mode:
    """Return a mode whose tokens are split over context axes as well, behind the axes that split sequences.

    Axes of one rank change nothing, so that a layout without context parallelism has no such axis.
    """
    live = tuple((name, size) for name, size in axes if size > 1)
    if not live:
        return mode
    names = tuple(name for name, _ in live)

    def widened(plan: MatmulPlan) -> MatmulPlan:
        return replace(plan, m=plan.m + names)

    plans = widened(mode.expand), widened(mode.contract)
    mode = replace(mode, axes=live + mode.axes, expand=plans[0], contract=plans[1], context=names, exchange=exchange)
    return replace(mode, load_balancer=load_balancer)


def zigzag(seq_length: int, num_ranks: int, rank: int) -> tuple[Span, ...]:
    """Return the chunks of a sequence that context rank `rank` holds, half-open and in ascending order."""
    if num_ranks == 1:
        return ((0, seq_length),)
    size, odd = divmod(seq_length, 2 * num_ranks)
    assert not odd, f"{seq_length} positions do not make {2 * num_ranks} chunks"
    return tuple((chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * num_ranks - 1 - rank))


@dataclass(frozen=True)
class TokenOrder:
    """Which tokens of a microbatch a rank holds, in which order.

    The tokens of a microbatch are ordered by the axes that split sequences, then by context rank, sequence and
    position.  Layouts split this order, and all ranks of a context group hold the same sequences.

    Attributes:
        batch: axes that split whole sequences when these are read.
        context: axes that split the positions of a sequence, the first one slowest.
        by_documents: sequences of several documents are divided by the work of their documents.
        window: number of keys that a query sees in the layers with the most work; None: all before it.
    """

    batch: Axes
    context: Axes
    mesh: Mesh
    by_documents: bool = False
    window: int | None = None

    @classmethod
    def of_mode(cls, mode: Mode, mesh: Mesh, window: int | None = None) -> TokenOrder:
        """Return the order of a mode's tokens on this rank."""
        return cls(mode.batch_axes, mode.context, mesh, mode.load_balancer == DOCUMENTS, window)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that split the positions of a sequence."""
        return self.mesh.size(self.context)

    @property
    def num_groups(self) -> int:
        """Number of groups of context ranks, which read different sequences of a microbatch."""
        return self.mesh.size(self.batch)

    def chunks(self, seq_length: int, rank: int | None = None) -> tuple[Span, ...]:
        """Return the positions that a context rank holds, this one by default, in the order of its tokens.

        They are those of a sequence of one document.
        """
        return zigzag(seq_length, self.num_ranks, self.mesh.index(self.context) if rank is None else rank)

    def held(self, seq_length: int, starts: tuple[int, ...] = ()) -> Chunks:
        """Return the positions that each context rank holds of a sequence whose further documents begin at `starts`."""
        alike = tuple(self.chunks(seq_length, rank) for rank in range(self.num_ranks))
        return balanced_chunks(alike, starts, self.window) if self.by_documents and starts else alike

    def local_length(self, seq_length: int) -> int:
        """Return how many positions of each sequence this rank holds."""
        return seq_length // self.num_ranks

    def sequences(self, num_sequences: int, axes: Axes) -> Span:
        """Return this rank's sequences of a microbatch whose tokens `axes` split."""
        return span(num_sequences, tuple(axis for axis in axes if axis not in self.context), self.mesh)

    def local_rows(self, num_sequences: int, seq_length: int, axes: Axes) -> Span:
        """Return which rows of [sequences read, local length], flattened, belong to a layout whose tokens `axes` split.

        `axes` begin with the axes of `batch` and `context`, except those of one rank.
        """
        num_tokens = num_sequences * seq_length
        first, _ = span(num_tokens, self.batch + self.context, self.mesh)
        low, high = span(num_tokens, axes, self.mesh)
        return low - first, high - first
