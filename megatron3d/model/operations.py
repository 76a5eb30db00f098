"""A layer, and what stands before and behind the layers, as lists of operations in forward order.

    input_norm | attention ... proj | dropout, add | post_attention_norm | fc1 | activation | fc2 | dropout, add

All that is predicted of a layer is a sum over its list.  Whoever adds an option to a layer adds its operation here, or
to those of attention or of experts; nothing in `forecast/` names a feature of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron3d.model.attention_operations import attention_operations
from megatron3d.model.expert_operations import expert_operations
from megatron3d.model.linear_spec import MTP_LINEARS
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import (
    FINAL_NORM,
    INDEX,
    KernelBytes,
    MemoryKernel,
    Operation,
    Stored,
    added,
    dropout,
    linear,
    mlp_operations,
    stream_norm,
)
from megatron3d.model.spec import DENSE_MLP, INPUT_NORMS, LAYERNORM, rotaries, temperature
from megatron3d.model.workspaces import embedding_backward, embedding_forward, head_forward
from megatron3d.ops.plan import relayout_traffic
from megatron3d.parallel.matmul_plan import Traffic, flows, ring

OPERATIONS = "operations"


def layer_operations(local: LocalSizes) -> Sequence[Operation]:
    """Return the operations of the layer `local.layer`, which are listed once."""
    if OPERATIONS not in local.listed:
        local.listed[OPERATIONS] = _layer(local)
    found: Sequence[Operation] = local.listed[OPERATIONS]
    return found


def _layer(local: LocalSizes) -> list[Operation]:
    sites, found = local.arch.norm_sites, list[Operation]()
    stream = Stored("layer", "input", local.residual)

    def normed(site: str, x: Stored) -> Stored:
        if site not in sites:
            return x
        found.append(replace(stream_norm(local, site, x), module=LAYERNORM if site in INPUT_NORMS else None))
        return found[-1].output

    def ends(site: str, norm: str) -> Stored:
        """Append the end of attention or MLP, and return the residual stream behind it."""
        normed(norm, found[-1].output if found[-1].writes else Stored(norm, "input", local.residual))
        found.extend(dropout(local, f"{site}_dropout"))
        found.append(added(local, site))
        return found[-1].output

    first = normed("input_norm", stream)
    found.extend(attention_operations(local, first))
    behind = ends("attention", "attention_output_norm")
    sums = found[-1]
    x = normed("post_attention_norm", (stream, first, behind)[local.arch.mlp_input])
    if local.experts is None:
        found.extend(replace(each, within=(DENSE_MLP,)) for each in mlp_operations(local, x))
    else:
        found.extend(expert_operations(local, local.experts, x))
    ends("mlp", "mlp_output_norm")
    # The MLP reads the sum behind attention, or what attention reads.
    place = found.index(sums) if local.arch.mlp_input == 2 else 0
    found[place] = replace(found[place], sums_gradients=True)
    return found


def embedding_operations(local: LocalSizes) -> list[Operation]:
    """Return the embedding, which keeps the indices of its rows, and its dropout."""
    arch, plan = local.arch, local.mode.embed
    sent = flows(plan, local.mesh, local.num_tokens, arch.hidden_size, arch.padded_vocab_size, local.itemsize)
    live = plan.on(local.mesh)
    rows = local.part(local.num_tokens, live.m)
    saves = [Stored("embedding", "rows", rows * (INDEX + 1 if live.k else INDEX))]
    # Positions that restart are a view of a kept tensor, unless context ranks cut theirs from it.
    is_view = local.resets_positions and not local.mode.context
    if arch.position_embedding_type == "learned_absolute" and not is_view:
        saves.append(Stored("embedding", "positions", local.tokens * INDEX))
    table = Operation(
        name="embedding",
        reads=(Stored("embedding", "tokens", rows * INDEX),),
        writes=(Stored("embedding", "output", local.residual),),
        saves=saves,
        params=("embedding.position",),
        moves=(_embedding_bytes(local, rows),),
        sent=(*sent.gather_w, *sent.reduce_y),
        sent_back=(*sent.gather_dy, *sent.reduce_dw),
        peaks={"backward of the embedding": embedding_backward(local)},
        forward_peaks={"embedding": embedding_forward(local)},
    )
    return [table, *dropout(local, "embedding_dropout")]


def _embedding_bytes(local: LocalSizes, rows: int) -> KernelBytes:
    """Return what the lookup moves, and its backward, which accumulates rows in fp32."""
    plan, size = local.mode.embed, local.itemsize
    features, table = local.part(local.arch.hidden_size, plan.n), local.part(local.arch.padded_vocab_size, plan.k)
    backward = rows * (2 * size + 4 + 8) + table * (4 + 4 + size)
    return KernelBytes(4 * rows * features * size, backward * features, 4, 5)


def head_operations(local: LocalSizes) -> list[Operation]:
    """Return the final norm, the LM head and the loss.

    Each chunk of tokens has its logits, loss, dgrad and wgrad before the next one, all in forward, which keeps the
    dgrad; the weight is gathered, and dW reduced, once.
    """
    normed, matmul = stream_norm(local, FINAL_NORM, Stored(FINAL_NORM, "input", local.residual)), local.head_matmul
    mesh, plan = local.mesh, matmul.plan
    rows, gathered = local.chunk_rows
    vocabulary = mesh.nontrivial(plan.y_layout[1])
    whole = flows(plan, mesh, *matmul[1:4], local.itemsize, wgrad_itemsize=local.wgrad_itemsize)
    scattered = mesh.size(axis for axis, dim in plan.dy.items() if dim == "M")
    sent, sums = [*whole.gather_w, *whole.reduce_dw], list[Traffic]()
    for start in range(0, local.tokens, rows):
        here = min(rows, local.tokens - start) * gathered
        each = flows(plan, mesh, here * mesh.size(plan.m), matmul.n, matmul.k, local.itemsize)
        sent += each.gather_x + each.reduce_y + each.gather_dy + each.reduce_dx
        logits = here // scattered * local.wide
        sums += [ring("all_reduce", vocabulary, count * logits, mesh) for count in (1, 2) if vocabulary]
    chunks, flops = -(-local.tokens // rows), matmul.flops(mesh)
    head = Operation(
        name="head",
        reads=(normed.output,),
        writes=(Stored("head", "logits", matmul.y * local.wide),),
        saves=(Stored("head", "gradient of its input", local.residual),),
        matmul=matmul,
        chunks=chunks,
        accumulates=not plan.w,
        flops=flops,
        backward_flops=2 * flops,
        sent=sent,
        forward_peaks=head_forward(local),
    )
    loss = Operation(
        name="head.loss",
        reads=head.writes,
        writes=(Stored("head", "loss", local.wide),),
        kernels=(MemoryKernel("loss", matmul.y, chunks),),
        sent=sums,
    )
    return [normed, head, loss]


def ahead_operations(local: LocalSizes) -> list[Operation]:
    """Return a module of multi-token prediction without its embedding, its layer and its LM head.

    They are two norms, two linears and their sum, and the change to the layout of the residual stream.
    """
    mode, num_bytes = local.mode, local.num_tokens * local.arch.hidden_size * local.itemsize
    sites = "embedding_norm", "hidden_norm"
    found = [stream_norm(local, site, Stored(site, "input", local.residual)) for site in sites]
    for path, normed in zip(MTP_LINEARS, found[::-1], strict=True):
        matmul = local.mtp_matmuls[path]
        found.append(linear(local, path, normed.output, matmul.y * local.itemsize, matmul))
    summed = replace(added(local, "mtp"), writes=found[-1].writes)
    relayout = Operation(
        name="mtp.relayout",
        writes=(Stored("mtp.relayout", "output", local.residual),),
        sent=relayout_traffic(mode.inner, mode.residual, local.mesh, num_bytes),
        sent_back=relayout_traffic(mode.residual, mode.inner, local.mesh, num_bytes),
    )
    return [*found, summed, relayout]


def rotary_tables(local: LocalSizes) -> list[Stored]:
    """Return cos and sin of the rotary embeddings, and factors of queries, which all layers of a rank share."""
    copies = (("cos and sin", local.arch.seq_length), ("those of this rank", local.positions))
    return [
        Stored("rotary", what, length * width * local.wide)
        for width in _table_widths(local)
        for what, length in copies[: 2 if local.mode.context else 1]
    ]


def _table_widths(local: LocalSizes) -> list[int]:
    """Return the numbers of a position in each table."""
    return [*(2 * each.num_channels for each in rotaries(local.arch)), *([1] if temperature(local.arch) else [])]


def document_tables(local: LocalSizes) -> list[Stored]:
    """Return what all layers of a stage share for a packed microbatch: rotary tables of positions in documents."""
    tokens = local.sequences_read * local.positions
    return [
        Stored("documents", "cos and sin", tokens * width * local.wide)
        for width in (_table_widths(local) if local.resets_positions else ())
    ]
