"""All-gather and GEMM, and GEMM and reduce-scatter, in as many rounds as ranks: transfers overlap with GEMMs.

    GEMMs of rank r of p, round by round
    all-gather and GEMM        rows of r        rows of r - 1    ...   rows of r + 1     while the next arrive
    GEMM and reduce-scatter    part of r + 1    part of r + 2    ...   part of r         while the last one is sent

Each rank adds the terms of its part in the order of the ranks, in fp32 or wider, and rounds once (Wang et al. 2023,
ASPLOS, decompose collectives and GEMMs in this way).  Letters: M rows, K summed, N columns; of what this rank has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm, GatheredProduct, Pending, PutProduct
from megatron3d.parallel.mesh import Axes

# Parts of a product that are being sent while the next is computed; a part's memory is kept until it has been sent.
MAX_IN_FLIGHT = 2


def all_gather_matmul(comm: Comm, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
    """Return the gathered rows of `a` and their product with b^T; the rows of each rank are multiplied on arrival."""
    ranks, mine, a_MK = comm.mesh.size(axes), comm.mesh.index(axes), a_MK.contiguous()
    rows, product = (a_MK.new_empty((ranks, len(a_MK), width)) for width in (a_MK.shape[1], len(b_NK)))
    arriving = [comm.shift(a_MK, rows[(mine - by) % ranks], axes, by) for by in range(1, ranks)]
    put(product[mine], a_MK, b_NK)
    rows[mine].copy_(a_MK)
    for by, pending in enumerate(arriving, 1):
        put(product[(mine - by) % ranks], pending.wait(), b_NK)
    return GatheredProduct(rows.flatten(0, 1), product.flatten(0, 1))


def matmul_reduce_scatter(comm: Comm, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
    """Return this rank's part along `dim` of the sum over `axes` of a b^T; a part is sent when it is computed."""
    ranks, mine = comm.mesh.size(axes), comm.mesh.index(axes)
    size = (len(a_MK), len(b_NK))[dim]
    assert size % ranks == 0, f"{len(a_MK)} x {len(b_NK)} along {dim} does not divide by {axes}={ranks} ranks"
    a_parts = a_MK.chunk(ranks) if dim == 0 else [a_MK] * ranks
    b_parts = b_NK.chunk(ranks) if dim == 1 else [b_NK] * ranks
    terms = a_MK.new_empty((ranks, len(a_parts[0]), len(b_parts[0])))
    in_flight: list[Pending] = []
    for by in range(1, ranks):
        if len(in_flight) == MAX_IN_FLIGHT:
            in_flight.pop(0).wait()
        to = (mine + by) % ranks
        part = torch.empty_like(terms[0])
        put(part, a_parts[to], b_parts[to])
        in_flight.append(comm.shift(part, terms[(mine - by) % ranks], axes, by))
        del part
    put(terms[mine], a_parts[mine], b_parts[mine])

    def finish() -> Tensor:
        for pending in in_flight:
            pending.wait()
        return terms.sum(0)

    return Pending(finish)
