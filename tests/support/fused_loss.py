"""Compare the fused loss with the loss in torch's operations, and compile its kernels for GPUs, in a new process.

Whether Triton interprets kernels on the CPU is decided when it is imported: `python -m tests.support.fused_loss CHECK`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.ops import triton_kernels
from megatron3d.ops.cross_entropy import LOSS_KERNELS, LMHead, VocabShard, head_loss
from megatron3d.ops.plan import LossChunk
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from tests.support.shards import cut, error, normal, plan_comm
from tests.support.triton_process import assemble
from tests.support.turn_ranks import make_comm, run_turns

IGNORED = -100
# The interpreter cuts bf16 off, where a GPU rounds to the nearest.
NARROW_STEP = {torch.bfloat16: 2**-7, torch.float16: 2**-11, torch.float32: 2e-6}


def problem(tokens: int, vocab: int, padded: int, spread: float) -> tuple[Tensor, Tensor]:
    """Return fp32 logits, minus infinity where the vocabulary is padded, and labels of which every fifth is ignored."""
    labels_C = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    labels_C[::5] = IGNORED
    logits_CV = (spread * normal(tokens, padded, seed=2)).float()
    logits_CV[:, vocab:] = float("-inf")
    return logits_CV, labels_C


def difference(fused: Tensor, slow: Tensor, step: float) -> float:
    """Return the largest difference, where 1 is `step` of the value and a millionth of the largest value."""
    assert fused.dtype == slow.dtype and torch.equal(fused.isfinite(), slow.isfinite()), "dtype or infinities differ"
    fused, slow = fused.double(), slow.double()
    if not slow.isfinite().all():
        return 0.0
    allowed = step * slow.abs() + 1e-6 * slow.abs().max()
    return ((fused - slow).abs() / allowed.clamp(min=1e-30)).max().item()


def compare_kernels(comm: Comm, vocab: int, padded: int, dtype: torch.dtype | None, spread: float) -> dict[str, float]:
    """Return differences of loss and gradient of this rank's shard of the vocabulary."""
    axes = comm.mesh.names
    logits_CV, labels_C = problem(6, vocab, padded, spread)
    layout = (), axes
    low = comm.mesh.index(axes) * (padded // comm.mesh.size(axes))
    shard = VocabShard(low, low + padded // comm.mesh.size(axes), axes, comm)
    results = []
    for name in ("torch", "triton"):
        local = cut(logits_CV, layout, comm.mesh)
        results.append(LOSS_KERNELS[name](local, labels_C, 7, torch.tensor(4.0), shard, dtype))
    (slow, slow_grad), (fused, fused_grad) = results
    found = {"loss": difference(fused.reshape(1), slow.reshape(1), 2e-6)}
    if dtype is None:
        assert slow_grad is None and fused_grad is None, "a gradient that nothing asked for"
        return found
    return found | {"gradient": difference(fused_grad, slow_grad, NARROW_STEP[dtype])}


def one_rank(rank: int, num_ranks: int) -> dict[str, float]:
    """Return differences by case, for vocabularies around the kernels' block, and logits that would overflow."""
    comm = make_comm(Mesh((("t", num_ranks),), rank), [("t",)])
    cases = {
        f"{vocab} of {padded}, {dtype}, spread {spread}": compare_kernels(comm, vocab, padded, dtype, spread)
        for vocab, padded in ((5, 8), (129, 256), (250, 256))
        for dtype, spread in (
            (torch.bfloat16, 3.0),
            (torch.float16, 3.0),
            (torch.float32, 3.0),
            (None, 3.0),
            (torch.float32, 1e5),
            (torch.bfloat16, float("nan")),
        )
    }
    return {f"{name}: {which}": value for name, found in cases.items() for which, value in found.items()}


def one_head(rank: int, num_ranks: int, mode_name: str) -> dict[str, float]:
    """Return differences of loss, dX and dW of the whole head in a mode, in fp16, with two chunks; 1 is 0.2 %."""
    mode = build_mode(mode_name, None, MODES[mode_name].default_shape(num_ranks))
    mesh = Mesh(mode.axes, rank)
    plan = mode.expand.on(mesh)
    comm = plan_comm(mesh, plan, also=plan.y_layout)
    x_MH, w_VH = (normal(rows, 16, seed=seed).half() for rows, seed in ((64, 3), (256, 4)))
    labels_M = torch.randint(0, 201, (64,), generator=torch.Generator().manual_seed(5))
    results = []
    for kernel in ("torch", "triton"):
        x, w = cut(x_MH, plan.x_layout, mesh).requires_grad_(), cut(w_VH, plan.w_layout, mesh).requires_grad_()
        head = LMHead(plan, comm, 201, 256, LossChunk(32), kernel=kernel)
        loss = head_loss(x, w, cut(labels_M, (plan.m,), mesh), 64, head)
        loss.backward()
        results.append((loss.detach().reshape(1), x.grad, w.grad))
    return {
        name: error(fused.double(), slow.double()) / 2e-3
        for name, slow, fused in zip(("loss", "dX", "dW"), *results, strict=True)
        if slow is not None and fused is not None
    }


def interpret() -> Mapping[str, float]:
    """Return all differences, in units of what rounding explains, with kernels that Triton interprets."""
    triton_kernels.BLOCK = 128
    found = {
        f"{num_ranks} ranks, rank {rank}, {name}": value
        for num_ranks in (1, 4)
        for rank, cases in enumerate(run_turns(one_rank, num_ranks))
        for name, value in cases.items()
    }
    return found | {
        f"{mode}, rank {rank}, {name}": value
        for mode, num_ranks in (("1d", 2), ("3d", 8))
        for rank, cases in enumerate(run_turns(one_head, num_ranks, mode))
        for name, value in cases.items()
    }


def compiled() -> Mapping[str, str]:
    """Return the PTX of every kernel by name and compute capability."""
    numbers = {"num_tokens": "i32", "vocab": "i32", "row_stride": "i32"}
    statistics = {"logits": "*fp32", "columns": "*i64", "statistics": "*fp32", **numbers}
    gradient = {"logits": "*fp32", "columns": "*i64", "factors": "*fp32", "grad": "*bf16", **numbers}
    kernels = {
        "statistics": (triton_kernels.vocab_statistics_kernel, statistics),
        "gradient": (triton_kernels.logits_grad_kernel, {**gradient, "grad_stride": "i32"}),
    }
    constants, options = {"BLOCK": triton_kernels.BLOCK}, triton_kernels.OPTIONS
    return {
        f"{name} sm_{sm}": assemble(kernel, signature, constants, options, sm)
        for name, (kernel, signature) in kernels.items()
        for sm in (80, 90)
    }


CHECKS: Mapping[str, Callable[[], Mapping[str, Any]]] = {"interpret": interpret, "assemble": compiled}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(CHECKS[sys.argv[1]]()))
