"""Operations of a mixture of experts, with the load that `LocalSizes.expert_load` says.

    to whole rows | router | dispatch | shared experts | padding | fc1 | activation | fc2 | return, combine | gate

Tokens are on their way to the ranks of their experts during the shared experts' GEMMs, and their gradients during the
GEMMs of the shared experts' backward.  Small tensors (a number or a weight per token and expert) count roughly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron3d.experts.plan import (
    MICROBATCH,
    SEQUENCE,
    DispatchSizes,
    Experts,
    RowsSent,
    backward_traffic,
    balanced_exchange,
    expert_plan,
    forward_traffic,
    padded_rows,
    sharing_axes,
    tokens_traffic,
)
from megatron3d.linear.fp8_plan import QuantizedMatmul, packed_bytes
from megatron3d.model.fp8_workspaces import rows_backward
from megatron3d.model.linear_spec import SHARED_FC1, SHARED_FC2, expert_linears
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import INDEX, LocalGemm, MemoryKernel, Operation, Stored, mlp_operations
from megatron3d.model.spec import MOE, MOE_ACT, SHARED_EXPERTS
from megatron3d.parallel.matmul_plan import Traffic, ring
from megatron3d.parallel.mesh import Axes
from megatron3d.parallel.modes.mode import ALLGATHER

ROUTER, EXPERT_FC1, ACTIVATION, EXPERT_FC2, COMBINE = (
    f"mlp.{name}" for name in ("router", "experts.fc1", "experts.activation", "experts.fc2", "combine")
)
PADDING = "mlp.experts.padding"
EXPERT_RANKS = "mlp.expert_ranks"
# Counts of tokens of each sequence are reduced as fp32.
_COUNT_BYTES = 4


def expert_operations(local: LocalSizes, experts: Experts, x: Stored) -> list[Operation]:
    """Return the operations of a mixture of experts on x."""
    hidden, ffn, rows, size = local.arch.hidden_size, local.expert_ffn, computed_rows(local, experts), local.itemsize
    parts, count = 2 if local.is_gated else 1, experts.num_experts // local.mesh.size(local.mode.experts)
    collect = list(_back_to_residual(local))
    spread = [call for call in collect if call.axes == local.mesh.nontrivial(local.mode.residual[1])]
    rows_at_home = _whole_rows(local, x)
    made = () if rows_at_home is x else (rows_at_home,)
    whole = Operation(name="mlp.whole_rows", reads=(x,), writes=made, sent=spread, sent_back=collect)
    weighting = [_weighting(local, rows)] if experts.applies_probs_on_input else []
    fc1 = _rows_linear(local, EXPERT_FC1, Stored(EXPERT_FC1, "rows", rows * hidden * size), rows, parts * ffn, hidden)
    fc1 = replace(fc1, writes=(Stored(EXPERT_FC1, "output", parts * rows * ffn * size),))
    between = Operation(
        name=ACTIVATION,
        reads=(fc1.output,),
        writes=(Stored(EXPERT_FC2, "input", rows * ffn * size),),
        saves=(fc1.output, Stored(ACTIVATION, "weights of rows", rows * local.wide)),
        module=MOE_ACT,
        kernels=(MemoryKernel("activation", rows * ffn * (1.5 if local.is_gated else 1)),),
        peaks=_gradients(local, ACTIVATION, (6 if local.is_gated else 3) * rows * ffn),
    )
    # The biases of rows that have their weights are saved; all ranks but the first of those that split experts add 0.
    adds_zeros = local.arch.has_mlp_bias and any(local.mesh.coord(axis) for axis in local.mode.etensor)
    zeros = [Stored(EXPERT_FC2, "biases of 0", count * hidden * size)] if adds_zeros else []
    fc2 = _rows_linear(local, EXPERT_FC2, between.output, rows, hidden, ffn)
    fc2 = replace(fc2, saves=(*fc2.saves, *zeros))
    shared = mlp_operations(local, x, SHARED_FC1, SHARED_FC2) if experts.shared_ffn_hidden_size else []
    exchange, outer = _exchange(local, experts), _gather(local, experts)
    there = [outer.dispatch(), exchange.dispatch()]
    combine = _combine(local, experts)
    back = [combine, exchange.returned()] if exchange.gathers else [exchange.returned(), combine]
    gate = _shared_gate(local, x, spread, collect) if experts.has_shared_gate else ()
    last = Operation(name="mlp.residual", sent=collect, sent_back=spread)
    computed = [*_padding(local, rows), *weighting, fc1, between, fc2]
    shared = [_beside_rows(local, replace(operation, within=(SHARED_EXPERTS, MOE)), experts) for operation in shared]
    found = [whole, _router(local, experts, x), *there, *shared, *computed, *back, outer.returned(), *gate, last]
    end = 1 + max(place for place, operation in enumerate(found) if operation.saves)  # where recomputation stops
    return [replace(operation, within=operation.within or (MOE,)) for operation in found[:end]] + found[end:]


def _beside_rows(local: LocalSizes, operation: Operation, experts: Experts) -> Operation:
    """Return an operation of shared experts, in whose backward gradients of rows are sent, and those of tokens come."""
    rows = local.gathered_tokens * experts.topk + local.expert_rows if _exchanges(local) else 0
    if _gathers(local):
        rows = local.gathered_tokens + _tokens_summed(local)
    coming = rows * local.arch.hidden_size * local.itemsize
    peaks = {name: size + coming for name, size in operation.peaks.items()}
    return replace(operation, peaks=peaks, dgrad_peak=operation.dgrad_peak and operation.dgrad_peak + coming)


def _rows_linear(local: LocalSizes, name: str, x: Stored, rows: int, outputs: int, features: int) -> Operation:
    """Return a linear of `rows` of this rank's experts, which keeps x or the rows in fp8."""
    experts, parts = local.arch.experts, 2 if local.is_gated else 1
    assert experts is not None, f"{name} is a linear of experts"
    count = experts.num_experts // local.mesh.size(local.mode.experts)
    # dW of an expert, before it is added in fp32.
    one = local.arch.hidden_size * parts * local.expert_ffn * (local.itemsize < local.wide)
    sent, sent_back = _largest_values(local, name, rows, count)
    is_packed = name == EXPERT_FC1 and not experts.applies_probs_on_input
    return Operation(
        name=name,
        saves=_kept_rows(local, name, rows, features) or (x,),
        gemms=(LocalGemm(rows / count, outputs, features, count),),
        fp8=_quantized(local, name, rows / count),
        rows_packed=local.home_tokens * is_packed,
        is_deferred=local.recipe_of(name) is None,
        operand_bytes=_deferred_bytes(local, name, rows, features, outputs),
        flops=2 * rows * features * outputs,
        backward_flops=4 * rows * features * outputs,
        sent=sent,
        sent_back=sent_back,
        peaks=_backward_of_rows(local, name, rows, count, one),
    )


def _kept_rows(local: LocalSizes, name: str, rows: int, features: int) -> tuple[Stored, ...]:
    """Return the rows that a linear of experts keeps in fp8, and their scales; none: it keeps them as they are."""
    recipe = local.recipe_of(name)
    if recipe is None:
        return ()
    scales = Stored(name, "scales of rows", rows * (packed_bytes(recipe, features) - features))
    return Stored(name, "rows in fp8", rows * features), scales


def _deferred_bytes(local: LocalSizes, name: str, rows: int, features: int, outputs: int) -> int:
    """Return the bytes of X in fp8 and of dY as a deferred wgrad keeps them; 0: they follow from the GEMMs."""
    kept = sum(stored.num_bytes for stored in _kept_rows(local, name, rows, features))
    return kept and kept + rows * outputs * local.itemsize


def _backward_of_rows(local: LocalSizes, name: str, rows: int, count: int, dw: int) -> dict[str, int]:
    """Return the peak of the backward of a linear of as many experts; `dw` are elements of a dW before it is added."""
    fp8, size = _quantized(local, name, rows / count), expert_linears(local.arch)[name]
    if fp8 is not None:
        return _gradients(local, name, rows_backward(local, fp8, rows, dw * local.itemsize) // local.itemsize)
    features = size.num_outputs + size.num_inputs
    split = size.num_outputs if size.expands else size.num_inputs
    return _gradients(local, name, rows * (features - split + split // local.etensor_ranks) + dw)


def _quantized(local: LocalSizes, name: str, rows: float) -> QuantizedMatmul | None:
    """Return the matmul of rows and one expert, if it multiplies in fp8, over the ranks that split the expert."""
    recipe, size = local.recipe_of(name), expert_linears(local.arch)[name]
    plan = expert_plan(size.expands, local.mesh.nontrivial(local.mode.etensor))
    if recipe is None:
        return None
    numbers = round(rows), size.num_outputs, size.num_inputs
    return QuantizedMatmul(recipe, plan, local.mesh, *numbers, local.stores_weights).by_rows


def _largest_values(local: LocalSizes, name: str, rows: int, count: int) -> tuple[Sequence[Traffic], Sequence[Traffic]]:
    """Return the all-reduces by which ranks that split experts find scales, in forward and in backward."""
    fp8 = _quantized(local, name, rows)
    return ((), ()) if fp8 is None else fp8.flows_of_rows(count)


def _weighting(local: LocalSizes, rows: int) -> Operation:
    """Return the product of rows and their weights before the experts, which keeps both factors."""
    hidden, name = local.arch.hidden_size, "mlp.experts.weighting"
    return Operation(
        name=name,
        saves=(
            Stored(name, "rows", rows * hidden * local.itemsize),
            Stored(name, "weights of rows", rows * local.wide),
        ),
        kernels=(MemoryKernel("add", rows * hidden),),
        peaks=_gradients(local, name, 3 * rows * hidden * local.wide // local.itemsize),
    )


def _padding(local: LocalSizes, rows: int) -> Iterator[Operation]:
    """Yield the copies of rows into `rows` of experts that are padded, and of their outputs back."""
    balance, hidden = local.arch.balance, local.arch.hidden_size
    if balance is not None and balance.pads_to_capacity:
        yield Operation(
            name=PADDING,
            saves=(Stored(PADDING, "places of rows", local.expert_rows * INDEX),),
            kernels=(MemoryKernel("layout", rows * hidden),),
            peaks=_gradients(local, PADDING, (rows + local.expert_rows) * hidden),
        )


def _padded_rows(local: LocalSizes, experts: Experts) -> int:
    """Return the rows of this rank's experts where they are padded, else 0."""
    balance = local.arch.balance
    return computed_rows(local, experts) if balance is not None and balance.pads_to_capacity else 0


def _gradients(local: LocalSizes, site: str, elements: int) -> dict[str, int]:
    """Return the peak of a backward of experts: gradients of rows, and copies in another order.

    Gradients of the output of gated shared experts, and of their gate's input, wait meanwhile.
    """
    experts = local.arch.experts
    waiting = 2 * local.home_tokens * local.arch.hidden_size * (experts is not None and experts.has_shared_gate)
    return {f"backward of {site}": (elements + waiting) * local.itemsize + local.residual}


def _back_to_residual(local: LocalSizes) -> Iterator[Traffic]:
    """Yield the collectives from whole rows to the residual stream, which are the last ones of a layer."""
    features, copies = (local.mesh.nontrivial(axes) for axes in (local.mode.residual[1], local.mode.copies))
    whole = local.home_tokens * local.arch.hidden_size * local.itemsize * local.mesh.size(copies)
    if copies:
        yield ring("all_gather", copies, whole, local.mesh)
    if features:
        yield ring("all_to_all", features, local.residual, local.mesh)


def _router(local: LocalSizes, experts: Experts, x: Stored) -> Operation:
    """Return the router, which keeps its input, the choice of experts, the order of rows, and what its losses need."""
    hidden, home, balance = local.arch.hidden_size, local.home_tokens, local.arch.balance
    has_capacity = balance is not None and balance.capacity_factor is not None
    # The choice, and whether its expert takes it.
    chosen = Stored(ROUTER, "choice", home * experts.topk * (INDEX + has_capacity))
    flops = 2 * hidden * home * experts.num_experts
    sent, ranks = list[Traffic](), local.mesh
    axes = local.mesh.nontrivial(axis for axis in local.mode.home if axis not in local.mode.batch_axes)
    once = list[Traffic]()
    if axes and balance is not None and {SEQUENCE, MICROBATCH} & set(balance.losses):
        counts = local.sequences_read * experts.num_experts * _COUNT_BYTES
        sent.append(ring("all_reduce", axes, counts, local.mesh))
    if axes and has_capacity:
        slots = home * experts.topk
        sizes = slots * INDEX, slots * local.wide, home * INDEX
        once += [ring("all_gather", axes, ranks.size(axes) * each, local.mesh) for each in sizes]
    # Rows are copied to the order of experts, weighted between the linears, and added.
    kernels = (MemoryKernel("rows", local.expert_rows * hidden),)
    return Operation(
        name=ROUTER,
        saves=(_whole_rows(local, x), *_choice(local, experts)),
        once=(chosen,),
        kernels=kernels,
        gemms=(LocalGemm(home, experts.num_experts, hidden),),
        flops=flops,
        backward_flops=2 * flops,
        sent=sent + once,
        sent_in_layer=sent,
        peaks={
            f"backward of {ROUTER}": local.expert_rows * hidden * local.itemsize
            + _sum_bytes(local, experts)
            + local.residual
        },
    )


def _whole_rows(local: LocalSizes, x: Stored) -> Stored:
    """Return the whole rows of this rank: x, or a copy of what an all-to-all gives, or of a part of x."""
    if not local.mesh.nontrivial((*local.mode.residual[1], *local.mode.copies)):
        return x
    return Stored(ROUTER, "whole rows", local.home_tokens * local.arch.hidden_size * local.itemsize)


def _choice(local: LocalSizes, experts: Experts) -> Iterator[Stored]:
    """Yield the choice of experts, the order of rows, and what the losses of the router keep."""
    balance, scores = local.arch.balance, local.home_tokens * experts.num_experts * local.wide
    slots = local.gathered_tokens * experts.topk
    yield Stored(ROUTER, "choice", slots * INDEX)
    yield _order(local, experts)
    yield Stored(ROUTER, "weights", slots * local.wide)
    if experts.score_function != "softmax" or experts.pre_softmax:
        yield Stored(ROUTER, "scores", scores)
    if balance is not None and balance.losses:
        yield Stored(ROUTER, "scores of the balance loss", (3 if SEQUENCE in balance.losses else 2) * scores)
    if balance is not None and balance.z_coeff:
        yield Stored(ROUTER, "logits", scores)


def _order(local: LocalSizes, experts: Experts) -> Stored:
    """Return the order of rows, by which they are dispatched and added."""
    ranks = local.mesh.size(local.mode.experts)
    if _gathers(local):
        return Stored(ROUTER, "order of rows", local.expert_rows * INDEX)
    reordered = 2 * local.expert_rows * (ranks > 1 and experts.num_experts > ranks)
    return Stored(ROUTER, "order of rows", (local.gathered_tokens * experts.topk + reordered) * INDEX)


@dataclass(frozen=True)
class _Exchange:
    """One exchange of tokens with the ranks of their experts, or with those that split the same experts."""

    name: str
    local: LocalSizes
    axes: Axes
    dispatcher: str
    sizes: DispatchSizes

    @property
    def gathers(self) -> bool:
        """Whether a rank has the tokens of all ranks, and adds its experts' part of their outputs."""
        return bool(self.axes) and self.dispatcher == ALLGATHER

    @property
    def _given(self) -> tuple[str, Axes, DispatchSizes, int, RowsSent]:
        ranks = self.local.mesh.size(self.axes)
        rows = balanced_exchange(self.sizes, ranks, self.local.mesh.index(self.axes))
        return self.dispatcher, self.axes, self.sizes, ranks, rows

    def _calls(self, backward: bool, again: bool = False) -> list[Traffic]:
        if not self.axes:
            return []
        return backward_traffic(*self._given) if backward else forward_traffic(*self._given, again)

    def _tokens(self, backward: bool) -> list[Traffic]:
        """Return the collective that is in flight during the shared experts, if this is that of their layer."""
        if not self.axes or self.name != EXPERT_RANKS:
            return []
        return [tokens_traffic(*self._given, backward)]

    def dispatch(self) -> Operation:
        """Return the way there."""
        sent, back, again = self._calls(False)[:-1], self._calls(True)[1:], self._calls(False, again=True)[:-1]
        return Operation(
            name=f"{self.name}.dispatch",
            sent=sent,
            sent_back=back,
            sent_in_layer=again,
            hidden=self._tokens(False),
            hidden_back=self._tokens(True),
            behind=(SHARED_FC1, SHARED_FC2),
            hides_if="tokens",
            busiest=self._busiest,
        )

    def returned(self) -> Operation:
        """Return the way back."""
        back = self._calls(False)[-1:], self._calls(True)[:1]
        return Operation(name=f"{self.name}.return", sent=back[0], sent_back=back[1], busiest=self._busiest)

    @property
    def _busiest(self) -> float:
        return 1.0 if self.dispatcher == ALLGATHER else self.local.expert_load


def dispatch_sizes(local: LocalSizes, experts: Experts) -> DispatchSizes:
    """Return the sizes of the exchange of tokens with the ranks of their experts."""
    hidden, topk, num_experts = local.arch.hidden_size, experts.topk, experts.num_experts
    recipe = None if experts.applies_probs_on_input else local.recipe_of(EXPERT_FC1)
    packed = None if recipe is None else packed_bytes(recipe, hidden)
    return DispatchSizes(local.gathered_tokens, hidden, topk, num_experts, local.itemsize, local.wide, packed)


def _exchange(local: LocalSizes, experts: Experts) -> _Exchange:
    axes = local.mesh.nontrivial(local.mode.experts)
    return _Exchange(EXPERT_RANKS, local, axes, local.mode.dispatcher, dispatch_sizes(local, experts))


def _gather(local: LocalSizes, experts: Experts) -> _Exchange:
    """Return the exchange with the ranks that split the same experts."""
    sizes = replace(dispatch_sizes(local, experts), tokens=local.home_tokens)
    return _Exchange("mlp.etensor", local, local.mesh.nontrivial(local.mode.etensor), ALLGATHER, sizes)


def _combine(local: LocalSizes, experts: Experts) -> Operation:
    """Return the sum of each token's outputs, which keeps the order of rows alone: their weights come before fc2."""
    hidden, ranks = local.arch.hidden_size, local.mesh.size(local.mode.experts)
    combined = rows_combined(local, experts) * hidden
    gathered = local.gathered_tokens * hidden * (ranks if _gathers(local) else local.etensor_ranks > 1)
    grads = gathered + (1 + _exchanges(local)) * max(local.expert_rows * hidden, combined)
    if padded := _padded_rows(local, experts):  # the gathered gradient is free when rows are padded
        grads = max(grads, (padded + local.expert_rows) * hidden)
    return Operation(
        name=COMBINE,
        saves=(_order(local, experts),),
        peaks=_gradients(local, COMBINE, grads),
        forward_peaks={"sum of experts' outputs": _combination_peak(local, experts, False)},
        peaks_again={"sum of experts' outputs": _combination_peak(local, experts, True)},
    )


def _shared_gate(local: LocalSizes, x: Stored, spread: list[Traffic], collect: list[Traffic]) -> Iterator[Operation]:
    """Yield the gate of the shared experts, a product of whole rows with one column, and what it multiplies."""
    home, hidden = local.home_tokens, local.arch.hidden_size
    whole, flops = _whole_rows(local, x), 2 * hidden * home
    yield Operation(name="mlp.shared_gate", saves=(whole,), flops=flops, backward_flops=2 * flops)
    kept = Stored("mlp.gated", "output of shared experts", home * hidden * local.itemsize)
    yield Operation(name="mlp.gated", saves=(kept,), sent=spread, sent_back=collect)


def _combination_peak(local: LocalSizes, experts: Experts, is_again: bool) -> int:
    """Return the transient bytes of the forward's end: the layer's input, the output of shared experts, the sum of
    rows, these, and those of the experts, which are sent in another order.

    A forward that is recomputed follows the all-gather of its output's gradient.
    """
    again = _tokens_summed(local) * (is_again and (_gathers(local) or local.etensor_ranks > 1))
    rows = again + rows_combined(local, experts) + _exchanges(local) * local.expert_rows
    row = local.arch.hidden_size * local.itemsize
    padded = _padded_rows(local, experts)
    without_zeros = padded and (again + padded + local.expert_rows) * row
    are_sorted = experts.num_experts > local.mesh.size(local.mode.experts)
    returned = _exchanges(local) * (rows + are_sorted * local.expert_rows) * row
    shared = local.home_tokens * row * bool(experts.shared_ffn_hidden_size)
    return local.residual + shared + max(_sum_bytes(local, experts) + rows * row, returned, without_zeros)


def rows_combined(local: LocalSizes, experts: Experts) -> int:
    """Return the rows that this rank adds: those of its experts, or those that return to its tokens."""
    return local.expert_rows if _gathers(local) else local.gathered_tokens * experts.topk


def worst_load(local: LocalSizes, experts: Experts) -> float:
    """Return the largest load of a rank: each token of its group chooses as many of its experts as it can.

    With a capacity its experts take no more than that of each sequence which the group has tokens of.
    """
    ranks, balance = local.mesh.size(local.mode.experts), local.arch.balance
    num_local = experts.num_experts // ranks
    worst = ranks * min(experts.topk, num_local) / experts.topk
    if balance is None or balance.capacity_factor is None:
        return worst
    taken = num_local * padded_rows(balance, experts, _tokens_of_sequences(local), local.arch.seq_length)
    return min(worst, taken / (local.gathered_tokens * experts.topk))


def _tokens_of_sequences(local: LocalSizes) -> int:
    """Return the tokens of all sequences that any rank of this rank's expert group has tokens of."""
    return local.home_tokens * local.mesh.size(local.mesh.nontrivial(sharing_axes(local.mode)))


def computed_rows(local: LocalSizes, experts: Experts) -> int:
    """Return the rows that this rank's experts multiply, rows of zeros included."""
    balance = local.arch.balance
    if balance is None or not balance.pads_to_capacity:
        return local.expert_rows
    num_local = experts.num_experts // local.mesh.size(local.mode.experts)
    return num_local * padded_rows(balance, experts, _tokens_of_sequences(local), local.arch.seq_length)


def expected_load(local: LocalSizes, imbalance: float) -> float:
    """Return the load of the busiest rank that predictions assume: `imbalance`, or the largest that there can be."""
    return 1.0 if local.arch.experts is None else min(imbalance, worst_load(local, local.arch.experts))


def _gathers(local: LocalSizes) -> bool:
    """Return whether a rank has the tokens of all ranks of its expert group."""
    return local.mode.dispatcher == ALLGATHER and local.mesh.size(local.mode.experts) > 1


def _exchanges(local: LocalSizes) -> bool:
    """Return whether rows go to the ranks of their experts and return."""
    return local.mesh.size(local.mode.experts) > 1 and not _gathers(local)


def _tokens_summed(local: LocalSizes) -> int:
    """Return the tokens whose rows this rank adds: with `allgather` those of all ranks."""
    return local.gathered_tokens * (local.mesh.size(local.mode.experts) if _gathers(local) else 1)


# Indices of a row that the sum of rows reads: its place by token, its token, and where the sum's kernel writes that;
# and those of a token: where its rows begin, and the kernel's numbers of rows and places of the largest.
_SUM_INDICES = 3


def _sum_bytes(local: LocalSizes, experts: Experts) -> int:
    """Return the bytes of the sum of rows, and of the indices of its kernel."""
    tokens = _tokens_summed(local)
    indices = _SUM_INDICES * (rows_combined(local, experts) + tokens) * INDEX
    return tokens * local.arch.hidden_size * local.itemsize + indices
