"""Time of the embedding, and of the final norm, LM head and loss."""

from __future__ import annotations

from megatron3d.analysis.cost_model.breakdown import GEMMS, MEMORY, TimeBreakdown, combine, exposed_time
from megatron3d.analysis.cost_model.concat_copies import ConcatCopies, concat_copies
from megatron3d.analysis.cost_model.layer import Machine, OverlapModel
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.parallel.loss_chunks import LossChunk
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


def head_times(local: LocalSizes, machine: Machine, chunk: LossChunk) -> TimeBreakdown:
    """Return the time of LM head and loss with their gradients, which are computed together with the loss.

    Each chunk of tokens has a GEMM for its logits, dX and dW; dW is added to main_grad, or to a buffer that is reduced.
    """
    arch, plan = local.arch, local.mode.expand
    device = machine.device
    sizes = local.num_tokens, arch.padded_vocab_size, arch.hidden_size, device.itemsize
    sent = flows(plan, local.mesh, *sizes, max(device.itemsize, machine.profile.wgrad_itemsize))
    copied = concat_copies(plan, local.mesh, *sizes) if machine.profile.copies_concats else ConcatCopies()
    over, live = OverlapModel(machine, local.mesh, 1), plan.on(local.mesh)
    tokens, columns = local.num_tokens / local.mesh.size(plan.m), arch.padded_vocab_size / local.mesh.size(plan.n)
    features = arch.hidden_size / local.mesh.size(plan.k)
    num_chunks = count_chunks(local, machine, chunk)
    product = device.gemm_s(tokens / num_chunks, columns, features)
    kept = local.mesh.size(live.dy)
    logit_bytes, num_kernels = loss_bytes(machine)
    logits = device.memory_bound_s(tokens * columns / kept * logit_bytes, num_kernels * num_chunks)
    adding = machine.accumulation_s(columns * features, 0.0 if sent.reduce_dw else product)
    adding *= 1 if sent.reduce_dw else num_chunks
    norm = machine.profile.norm
    normed = device.memory_bound_s(local.tokens * local.hidden * (norm.forward + norm.backward) * device.itemsize, 2)
    vocabulary = local.mesh.nontrivial(plan.y_layout[1])
    ranks = local.mesh.size(vocabulary)
    sums = Traffic("all_reduce", vocabulary, 3 * 4 * tokens / kept * 2 * (ranks - 1) / ranks)
    gemms = TimeBreakdown({GEMMS: 3 * num_chunks * product})
    return combine(
        (
            gemms.plus(TimeBreakdown({MEMORY: logits + adding + normed + device.memory_bound_s(sum(copied))})),
            *(over.exposed(calls) for calls in sent),
            exposed_time(vocabulary, machine.network.seconds(sums, local.mesh)) if vocabulary else TimeBreakdown(),
        )
    )


def count_chunks(local: LocalSizes, machine: Machine, chunk: LossChunk) -> int:
    """Return the chunks of a microbatch's tokens whose logits exist at a time; 1 for a framework that has none."""
    if machine.profile.logit_bytes is not None:
        return 1
    plan = local.mode.expand.on(local.mesh)
    token_bytes = local.part(local.arch.padded_vocab_size, plan.n) * max(machine.device.itemsize, 4)
    return -(-local.tokens // chunk.rows(local.tokens, token_bytes, plan, local.mesh))


def loss_bytes(machine: Machine) -> tuple[float, int]:
    """Return the bytes that the loss and its gradient move per logit, the GEMMs not included, and their kernels.

    This framework's, where the profile gives none: on GPUs two fused kernels read the fp32 logits, read them again and
    write the gradient (`ops/triton_cross_entropy.py`).  Otherwise maximum (1 access), difference and exponential (4),
    sum (1) and scale (2) of `ops/cross_entropy.py`, and casts of narrower logits and gradients.
    """
    given, size = machine.profile.logit_bytes, machine.device.itemsize
    if given is not None:
        return given, 10
    wide = max(size, 4)
    if machine.on_gpu and wide == 4:
        return 2 * wide + size, 2
    casts = 2 * (size + wide) if size < wide else 0
    return 8 * wide + casts, 10
