"""Time of a transformer layer on one rank, forward and the two halves of backward, in kinds.

    forward     gather X, (W came under the linear before), product, reduce Y
    backward    gather dY, dX's product over the gather of X, dW's product over the reduction of dX,
                W comes under the products before, dW is reduced under those that follow

What is hidden under a product costs it a part of its units; what is longer than the product is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron3d.analysis.cost_model.breakdown import ATTENTION, MEMORY, PRODUCTS, TAX, Times, add, waiting
from megatron3d.analysis.cost_model.concat_copies import Joins, joins
from megatron3d.analysis.cost_model.execution_profile import TWO_COPIES, ExecutionProfile, MemoryAccesses
from megatron3d.analysis.cost_model.kernels import Device
from megatron3d.analysis.cost_model.network import Network
from megatron3d.analysis.memory_model.local_sizes import Work
from megatron3d.model.recompute_spec import CORE_ATTN, MLP_ACT
from megatron3d.parallel.matmul_plan import Flows, MatmulPlan, Traffic, flows
from megatron3d.parallel.mesh import Mesh


@dataclass(frozen=True)
class Machine:
    """What computes, what joins it, and what the program is like."""

    device: Device
    network: Network
    profile: ExecutionProfile

    def adding_s(self, num_weights: float, product_s: float) -> float:
        """Seconds to add a gradient to its sum; a product of so many seconds makes it, and may do that by the way."""
        seconds = self.device.pass_s(num_weights * self.profile.grad_bytes)
        is_hidden = self.profile.fuses_grad_sum and not self.device.kernels.adds_launch
        return max(0.0, seconds - product_s) if is_hidden else seconds

    def compiled(self) -> Machine:
        """With what a compiler makes of passes that are counted as they are written."""
        return replace(self, profile=replace(self.profile, rotary=TWO_COPIES))


class Phases(NamedTuple):
    """Times of forward, input gradient, weight gradient, and backward in one; and of computing forward again."""

    forward: Times
    input_grad: Times
    weight_grad: Times
    backward: Times


class Linear(NamedTuple):
    """A planned product: its local sizes, global sizes, and plan."""

    plan: MatmulPlan
    m: int
    n: int
    k: int


def linears(work: Work) -> dict[str, Linear]:
    """The four of a layer with global sizes."""
    arch, up, down = work.arch, work.mode.expand, work.mode.contract
    heads, keys = arch.num_attention_heads * arch.kv_channels, 2 * arch.num_query_groups * arch.kv_channels
    hidden, ffn, tokens = arch.hidden_size, arch.ffn_hidden_size, work.num_tokens
    return {
        "qkv": Linear(up, tokens, heads + keys, hidden),
        "proj": Linear(down, tokens, hidden, heads),
        "fc1": Linear(up, tokens, ffn * (1 + work.is_gated), hidden),
        "fc2": Linear(down, tokens, hidden, ffn),
    }


class Planned(NamedTuple):
    """A linear's product, in seconds, and its collectives."""

    product_s: float
    sent: Flows
    weight: float
    output: float
    joins: Joins

    @staticmethod
    def of(linear: Linear, mesh: Mesh, machine: Machine) -> Planned:
        """With sizes as this rank multiplies them."""
        plan, (m, n, k) = linear.plan, linear[1:]
        m_here, n_here, k_here = m / mesh.size(plan.m), n / mesh.size(plan.n), k / mesh.size(plan.k)
        sent = flows(plan, mesh, m, n, k, machine.device.itemsize)
        y_parts = mesh.size(axis for axis, dim in plan.y.items() if dim)
        seconds = machine.device.product_s(m_here, n_here, k_here)
        copied = joins(plan, mesh, m, n, k, machine.device.itemsize) if machine.profile.copies_concats else Joins()
        return Planned(seconds, sent, n_here * k_here / mesh.size(plan.w), m_here * n_here / y_parts, copied)


class Overlaps:
    """Times of communication that runs under computation, or does not."""

    def __init__(self, machine: Machine, mesh: Mesh, num_panels: int) -> None:
        self._machine, self._mesh, self._num_panels = machine, mesh, num_panels

    def after(self, calls: list[Traffic]) -> Times:
        """Communication that everything waits for."""
        return add(waiting(call.axes, self._machine.network.seconds(call, self._mesh)) for call in calls)

    def under(self, calls: list[Traffic], seconds: float, hides: bool = True) -> Times:
        """Communication under a computation of so many seconds: what is longer, and what it takes from that."""
        times = self.after(calls)
        if not hides or not times:
            return times
        hidden = min(times.total, seconds)
        tax = Times({TAX: hidden * self._machine.device.comm_tax})
        return times.times(1 - hidden / times.total).plus(tax)

    def panelled(self, calls: list[Traffic], seconds: float) -> Times:
        """Communication of a product's own operands, in panels: all but one of them under the product of another."""
        if not calls:
            return Times()
        panels = self._num_panels
        if self._machine.profile.ring_panels:
            panels = max(panels, self._mesh.size(calls[0].axes))
        if panels == 1:
            return self.after(calls)
        times, share = self.after(calls), (panels - 1) / panels
        hidden = min(times.total * share, seconds * share)
        tax = Times({TAX: hidden * self._machine.device.comm_tax})
        return times.times(1 - hidden / times.total).plus(tax)


def layer_phases(work: Work, machine: Machine) -> Phases:
    """Of one layer for one microbatch, what is computed again being part of the backward and the input's gradient."""
    planned = {name: Planned.of(linear, work.mesh, machine) for name, linear in linears(work).items()}
    over = Overlaps(machine, work.mesh, work.overlap.num_panels)
    forward = [_forward(planned, over, work, machine), *_between(work, machine, backward=False)]
    back_i, back_w, whole = _backward(planned, over, work, machine)
    between = add(_between(work, machine, backward=True))
    again = add(_again(work, machine, add(forward), over, planned))
    return Phases(add(forward), add((back_i, between, again)), back_w, add((whole, between, again)))


def _forward(planned: Mapping[str, Planned], over: Overlaps, work: Work, machine: Machine) -> Times:
    overlap, parts, before = work.overlap, [], 0.0
    for each in planned.values():
        parts.append(Times({PRODUCTS: each.product_s, MEMORY: machine.device.pass_s(each.joins.forward)}))
        parts.append(over.panelled(each.sent.gather_x + each.sent.reduce_y, each.product_s))
        parts.append(over.under(each.sent.gather_w, before, overlap.weight_gather))
        before = each.product_s
    # The first linear's weight comes under the last of the layer before.
    first = next(iter(planned.values()))
    parts.append(_less(over, first.sent.gather_w, before, overlap.weight_gather))
    return add(parts)


def _less(over: Overlaps, calls: list[Traffic], seconds: float, hides: bool) -> Times:
    """The first gather of a layer was counted as uncovered; what its neighbour covers is taken off."""
    covered, bare = over.under(calls, seconds, hides), over.after(calls)
    return Times({kind: covered.get(kind, 0.0) - bare.get(kind, 0.0) for kind in {*covered, *bare}})


def _backward(
    planned: Mapping[str, Planned], over: Overlaps, work: Work, machine: Machine
) -> tuple[Times, Times, Times]:
    """Input's gradient, weight's gradient, and both in one."""
    overlap, half, late, whole = work.overlap, list[Times](), list[Times](), list[Times]()
    hides = overlap.input_grad and machine.profile.overlaps_input_grad
    for each in planned.values():
        sent, seconds, copied = each.sent, each.product_s, each.joins
        product = Times({PRODUCTS: seconds})
        gathers_w = [] if overlap.keep_gathered_weights else sent.gather_w
        common = [
            product,
            over.panelled(sent.gather_dy, seconds),
            over.under(gathers_w, 2 * seconds, overlap.weight_gather),
        ]
        sums = over.under(sent.reduce_dw, 2 * seconds, overlap.weight_grad)
        add_up = Times({MEMORY: machine.adding_s(each.weight, 0.0 if sent.reduce_dw else seconds)})
        add_up = add_up.plus(Times({MEMORY: machine.device.pass_s(copied.x + copied.w)}))
        bias = machine.profile.bias_grad * each.output * work.arch.add_bias_linear * machine.device.itemsize
        common.append(Times({MEMORY: machine.device.pass_s(bias)}))
        common.append(Times({MEMORY: machine.device.pass_s(copied.dy + copied.dx + copied.w * bool(gathers_w))}))
        half += [*common, over.panelled(sent.reduce_dx, seconds)]
        late += [product, over.after(sent.gather_x), sums, add_up]
        whole += [*common, over.under(sent.gather_x, seconds), product, sums, add_up]
        whole.append(over.under(sent.reduce_dx, seconds, hides))
    return add(half), add(late), add(whole)


def _between(work: Work, machine: Machine, backward: bool) -> Iterator[Times]:
    """Everything between the products."""
    profile, arch, size = machine.profile, work.arch, machine.device.itemsize
    residual, inner = work.tokens * work.hidden, work.inner_tokens
    heads = work.num_queries * arch.kv_channels
    keys = 2 * work.num_groups * arch.kv_channels

    def passes(elements: float, passes: MemoryAccesses, count: int = 1) -> Times:
        num = passes.backward if backward else passes.forward
        return Times({MEMORY: count * machine.device.pass_s(elements * num * size, passes.num_kernels)})

    yield passes(residual, profile.norm, 2)
    yield passes(residual, profile.add, 2)
    yield passes(residual, profile.dropout, 2 * (arch.hidden_dropout > 0))
    yield passes(inner * work.ffn * (1.5 if work.is_gated else 1), profile.activation)
    yield passes(inner * (2 * heads + keys), profile.layout)
    if arch.position_embedding_type == "rope":
        yield passes(inner * (heads + keys / 2), profile.rotary)
    if arch.qk_layernorm:
        yield passes(inner * (heads + keys / 2), profile.norm)
    yield _attention(work, machine, backward)
    axes = work.heads.gather_axes
    if axes:
        ranks = work.mesh.size(axes)
        whole = inner * work.keys_width * ranks * size
        call = Traffic("reduce_scatter" if backward else "all_gather", axes, whole * (ranks - 1) / ranks)
        yield waiting(axes, 2 * machine.network.seconds(call, work.mesh))
    features = work.mesh.nontrivial(work.mode.residual[1])
    if features:
        ranks = work.mesh.size(features)
        call = Traffic("all_reduce", features, 2 * 2 * work.tokens * 4 * (ranks - 1) / ranks)
        yield waiting(features, 2 * machine.network.seconds(call, work.mesh))


def _attention(work: Work, machine: Machine, backward: bool) -> Times:
    """Fused, of the causal half; or two products of all scores, four backward, and passes over them."""
    arch, seq, device = work.arch, work.arch.seq_length, machine.device
    heads = work.sequences * work.num_queries
    if machine.profile.fuses_attention:
        flops = 4 * heads * seq * seq * arch.kv_channels / 2
        return Times({ATTENTION: device.attention_s(flops * (2.5 if backward else 1), backward)})
    first = device.product_s(seq, seq, arch.kv_channels, heads)
    second = device.product_s(seq, arch.kv_channels, seq, heads)
    scores = machine.profile.scores
    seconds = device.pass_s(
        heads * seq * seq * (scores.backward if backward else scores.forward) * device.itemsize, scores.num_kernels
    )
    return Times({ATTENTION: (1 + backward) * (first + second) + seconds})


def _again(
    work: Work, machine: Machine, forward: Times, over: Overlaps, planned: Mapping[str, Planned]
) -> Iterator[Times]:
    """What backward computes again; gathers of weights are not ahead then."""
    recompute, profile = work.recompute, machine.profile
    if recompute.granularity == "full":
        ahead = work.overlap.weight_gather
        yield forward.plus(*(over.after(each.sent.gather_w) for each in planned.values() if ahead))
    if recompute.repeats(CORE_ATTN):
        yield _attention(work, machine, backward=False)
    if recompute.repeats(MLP_ACT):
        elements = work.inner_tokens * work.ffn * (1.5 if work.is_gated else 1)
        num_bytes = elements * profile.activation.forward * machine.device.itemsize
        yield Times({MEMORY: machine.device.pass_s(num_bytes)})
