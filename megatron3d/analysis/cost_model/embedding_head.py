"""Time of the embedding, and of the final norm, LM head and loss."""

from __future__ import annotations

from megatron3d.analysis.cost_model.breakdown import GEMMS, MEMORY, TimeBreakdown, combine, exposed_time
from megatron3d.analysis.cost_model.concat_copies import ConcatCopies, concat_copies
from megatron3d.analysis.cost_model.layer import Machine, OverlapModel
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.parallel.matmul_plan import Traffic, flows


def embedding_times(local: LocalSizes, machine: Machine) -> tuple[TimeBreakdown, TimeBreakdown]:
    """Return forward and backward of the embedding; backward accumulates rows in fp32."""
    arch, plan = local.arch, local.mode.embed
    size = machine.device.itemsize
    sent = flows(plan, local.mesh, local.num_tokens, arch.hidden_size, arch.padded_vocab_size, size)
    over = OverlapModel(machine, local.mesh, 1)
    rows = local.part(local.num_tokens, plan.m) * local.part(arch.hidden_size, plan.n)
    table = local.part(arch.padded_vocab_size, plan.k) * local.part(arch.hidden_size, plan.n)
    forward = TimeBreakdown({MEMORY: machine.device.memory_bound_s(4 * rows * size, 4)})
    backward = TimeBreakdown(
        {MEMORY: machine.device.memory_bound_s(rows * (2 * size + 4 + 8) + table * (4 + 4 + size), 5)}
    )
    return (
        combine((forward, over.exposed(sent.gather_w), over.exposed(sent.reduce_y))),
        combine((backward, over.exposed(sent.gather_dy), over.exposed(sent.reduce_dw))),
    )


def head_times(local: LocalSizes, machine: Machine) -> TimeBreakdown:
    """Return the time of LM head and loss with their gradients, which are computed together with the loss."""
    arch, plan = local.arch, local.mode.expand
    device = machine.device
    sizes = local.num_tokens, arch.padded_vocab_size, arch.hidden_size, device.itemsize
    sent = flows(plan, local.mesh, *sizes, max(device.itemsize, machine.profile.wgrad_itemsize))
    copied = concat_copies(plan, local.mesh, *sizes) if machine.profile.copies_concats else ConcatCopies()
    over, live = OverlapModel(machine, local.mesh, 1), plan.on(local.mesh)
    tokens, columns = local.num_tokens / local.mesh.size(plan.m), arch.padded_vocab_size / local.mesh.size(plan.n)
    features = arch.hidden_size / local.mesh.size(plan.k)
    product = device.gemm_s(tokens, columns, features)
    kept = local.mesh.size(live.dy)
    logits = device.memory_bound_s(tokens * columns / kept * machine.profile.logit_bytes, 10)
    adding = machine.accumulation_s(columns * features, 0.0 if sent.reduce_dw else product)
    norm = machine.profile.norm
    normed = device.memory_bound_s(local.tokens * local.hidden * (norm.forward + norm.backward) * device.itemsize, 2)
    vocabulary = local.mesh.nontrivial(plan.y_layout[1])
    ranks = local.mesh.size(vocabulary)
    sums = Traffic("all_reduce", vocabulary, 3 * 4 * tokens / kept * 2 * (ranks - 1) / ranks)
    return combine(
        (
            TimeBreakdown({GEMMS: 3 * product, MEMORY: logits + adding + normed + device.memory_bound_s(sum(copied))}),
            *(over.exposed(calls) for calls in sent),
            exposed_time(vocabulary, machine.network.seconds(sums, local.mesh)) if vocabulary else TimeBreakdown(),
        )
    )
