"""Rules of context parallelism: every length of a sequence is a whole number of chunks, two per context rank, and every
exchange of keys and values has the heads and the sizes that it needs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts, near_multiples
from megatron3d.parallel.context import CONTEXT_EXCHANGES, DOCUMENTS, ZIGZAG
from megatron3d.parallel.context_exchange import BOTH, head_axes
from megatron3d.parallel.mesh import Mesh

SIZE, WARMUP = "parallel.context_parallel_size", "train.seq_length_warmup"
EXCHANGE, SIZES = "parallel.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"
BALANCER = "parallel.context_parallel_load_balancer"
ANY = CONTEXT_EXCHANGES[0]


def has_chunks(facts: Facts) -> bool:
    """Return whether the length of sequences is a whole number of chunks, two for each context rank."""
    size = facts.config.parallel.context_parallel_size
    return size == 1 or facts.config.model.seq_length % (2 * size) == 0


def context_problems(facts: Facts) -> Iterator[str]:
    """Yield a message per length that the context ranks cannot split, and where there are no documents to balance."""
    size, model = facts.config.parallel.context_parallel_size, facts.config.model
    if size == 1:
        return
    balancer = facts.config.parallel.context_parallel_load_balancer
    if balancer == DOCUMENTS and not facts.config.data.reset_attention_mask:
        yield (
            f"{facts.named(BALANCER)}: without data.reset_attention_mask every sequence is one document, of which "
            f"{ZIGZAG} gives all ranks the same work; use data.reset_attention_mask=true, or {ZIGZAG}"
        )
    step = 2 * size
    if not has_chunks(facts):
        yield (
            f"{facts.named(SIZE)}: model.seq_length={model.seq_length} is not a multiple of {step}, two chunks for "
            f"each of {size} ranks; use model.seq_length {one_of(near_multiples(step, model.seq_length))}, or another "
            "context_parallel_size"
        )
        return
    warmup = facts.config.train.seq_length_warmup
    if warmup is not None and (warmup[0] % step or warmup[1] % step):
        first = min(max(warmup[0] // step, 1) * step, model.seq_length)
        yield (
            f"{facts.named(WARMUP)}: start and increment must be multiples of {step}, two chunks of a sequence for "
            f"each of the {size} context ranks; use for example [{first},{step},{warmup[2]}]"
        )


def hierarchy_problems(facts: Facts) -> Iterator[str]:
    """Yield what is wrong with the sizes of the two context axes, which `a2a+p2p` needs and no other exchange has."""
    parallel = facts.config.parallel
    size, sizes = parallel.context_parallel_size, parallel.hierarchical_context_parallel_sizes
    if parallel.cp_comm_type != BOTH:
        if sizes is not None:
            yield f"{facts.named(SIZES)}: only parallel.cp_comm_type={BOTH} has two sizes; remove it"
        return
    divisors = [inner for inner in range(2, size) if size % inner == 0]
    example = f"[{divisors[0]},{size // divisors[0]}]" if divisors else None
    remedy = (
        f"use for example {example}" if example else f"use a context_parallel_size such as 4, or cp_comm_type {ANY}"
    )
    if sizes is None:
        yield f"{facts.named(EXCHANGE)}: needs {SIZES}, the ranks of a2a and of p2p; {remedy}"
    elif sizes[0] * sizes[1] != size or 1 in sizes:
        yield (f"{facts.named(SIZES)}: must be two sizes above 1 whose product is {SIZE}={size}; {remedy}")


def exchange_problems(facts: Facts) -> Iterator[str]:
    """Yield heads that the ranks of an exchange do not divide."""
    arch, mode = facts.arch, facts.spec.mode
    if not mode.context or mode.exchange == ANY:
        return
    mesh = Mesh(mode.axes)
    heads, ranks = (
        arch.num_attention_heads // mesh.size(mode.inner[1]),
        mesh.size(head_axes(mode.exchange, mode.context)),
    )
    if heads % ranks:
        yield (
            f"{facts.named(EXCHANGE)}: {heads} query heads on each rank, of model.num_attention_heads="
            f"{arch.num_attention_heads}, do not divide by the {ranks} ranks that exchange heads; "
            f"use p2p or {ANY}, or another context_parallel_size"
        )
