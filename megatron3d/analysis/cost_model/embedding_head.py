"""Time of what is at the ends of the network: the embedding, and the last norm with head and loss."""

from __future__ import annotations

from megatron3d.analysis.cost_model.breakdown import MEMORY, PRODUCTS, Times, add, waiting
from megatron3d.analysis.cost_model.concat_copies import Joins, joins
from megatron3d.analysis.cost_model.layer import Machine, Overlaps
from megatron3d.analysis.memory_model.local_sizes import Work
from megatron3d.parallel.matmul_plan import Traffic, flows


def embedding_times(work: Work, machine: Machine) -> tuple[Times, Times]:
    """Forward and backward of the embedding; backward adds rows up in fp32."""
    arch, plan, size = work.arch, work.mode.embed, machine.device.itemsize
    sent = flows(plan, work.mesh, work.num_tokens, arch.hidden_size, arch.padded_vocab_size, size)
    over = Overlaps(machine, work.mesh, 1)
    rows = work.part(work.num_tokens, plan.m) * work.part(arch.hidden_size, plan.n)
    table = work.part(arch.padded_vocab_size, plan.k) * work.part(arch.hidden_size, plan.n)
    forward = Times({MEMORY: machine.device.pass_s(4 * rows * size, 4)})
    backward = Times({MEMORY: machine.device.pass_s(rows * (2 * size + 4 + 8) + table * (4 + 4 + size), 5)})
    return (
        add((forward, over.after(sent.gather_w), over.after(sent.reduce_y))),
        add((backward, over.after(sent.gather_dy), over.after(sent.reduce_dw))),
    )


def head_times(work: Work, machine: Machine) -> Times:
    """Of head and loss, gradients included: they are computed with the loss."""
    arch, plan, device = work.arch, work.mode.expand, machine.device
    sizes = work.num_tokens, arch.padded_vocab_size, arch.hidden_size, device.itemsize
    sent = flows(plan, work.mesh, *sizes)
    copied = joins(plan, work.mesh, *sizes) if machine.profile.copies_concats else Joins()
    over, live = Overlaps(machine, work.mesh, 1), plan.on(work.mesh)
    tokens, columns = work.num_tokens / work.mesh.size(plan.m), arch.padded_vocab_size / work.mesh.size(plan.n)
    features = arch.hidden_size / work.mesh.size(plan.k)
    product = device.product_s(tokens, columns, features)
    kept = work.mesh.size(live.dy)
    logits = device.pass_s(tokens * columns / kept * machine.profile.logit_bytes, 10)
    adding = machine.adding_s(columns * features, 0.0 if sent.reduce_dw else product)
    norm = machine.profile.norm
    normed = device.pass_s(work.tokens * work.hidden * (norm.forward + norm.backward) * device.itemsize, 2)
    vocabulary = work.mesh.nontrivial(plan.y_layout[1])
    ranks = work.mesh.size(vocabulary)
    sums = Traffic("all_reduce", vocabulary, 3 * 4 * tokens / kept * 2 * (ranks - 1) / ranks)
    return add(
        (
            Times({PRODUCTS: 3 * product, MEMORY: logits + adding + normed + device.pass_s(sum(copied))}),
            *(over.after(calls) for calls in sent),
            waiting(vocabulary, machine.network.seconds(sums, work.mesh)) if vocabulary else Times(),
        )
    )
