"""Fact: the chunked loss is torch's cross-entropy over the whole vocabulary, in value and gradients.

This holds for any chunk size, padding, ignored labels and layout; the full logits never exist.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron3d.comm.interface import Comm
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.ops.cross_entropy import LMHead, head_logits, head_loss
from megatron3d.ops.plan import LossChunk
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes import MODES, build_mode
from tests.support.largest_tensor import LargestTensor
from tests.support.shards import cut, error, normal, plan_comm
from tests.support.turn_ranks import run_turns

ALONE = ProcessComm(Mesh((("t", 1),)), [])
EVERY_FORM = [(name, form) for name, entry in MODES.items() for form in entry.forms]
IGNORED = -100


def whole_problem(tokens: int, vocab: int, padded: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return X, padded W, and labels of which every fifth is ignored."""
    labels_M = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    labels_M[::5] = IGNORED
    return normal(tokens, hidden, seed=2), normal(padded, hidden, seed=3), labels_M


def reference(x_MH: Tensor, w_VH: Tensor, labels_M: Tensor, vocab: int, num_tokens: int) -> list[Tensor]:
    """Return loss, dX, dW from full logits."""
    x, w = x_MH.clone().requires_grad_(), w_VH.clone().requires_grad_()
    loss = F.cross_entropy(F.linear(x, w)[:, :vocab], labels_M, ignore_index=IGNORED, reduction="sum") / num_tokens
    return [loss.detach(), *torch.autograd.grad(loss, (x, w))]


@settings(deadline=None)
@given(
    tokens=st.integers(1, 20),
    vocab=st.integers(1, 12),
    padding=st.integers(0, 5),
    chunk=st.integers(1, 25),
    num_tokens=st.integers(1, 99),
)
def test_any_chunk_gives_torchs_loss_and_gradients(
    tokens: int, vocab: int, padding: int, chunk: int, num_tokens: int
) -> None:
    x_MH, w_VH, labels_M = whole_problem(tokens, vocab, vocab + padding, hidden=4)
    head = LMHead(MatmulPlan(), ALONE, vocab, vocab + padding, LossChunk(chunk))
    x, w = x_MH.clone().requires_grad_(), w_VH.clone().requires_grad_()
    loss = head_loss(x, w, labels_M, num_tokens, head, scale=torch.tensor(4.0))
    loss.backward()
    expected, dx, dw = reference(x_MH, w_VH, labels_M, vocab, num_tokens)
    assert x.grad is not None and w.grad is not None
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(x.grad, 4 * dx, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(w.grad, 4 * dw, rtol=1e-12, atol=1e-13)
    assert not w.grad[vocab:].any(), "padding has a gradient"


def split_errors(plan: MatmulPlan, chunk: int, comm: Comm) -> dict[str, float]:
    tokens, vocab, padded, mesh = 96, 61, 72, comm.mesh
    x_MH, w_VH, labels_M = whole_problem(tokens, vocab, padded, hidden=24)
    head = LMHead(plan, comm, vocab, padded, LossChunk(chunk))
    x, w = cut(x_MH, plan.x_layout, mesh).requires_grad_(), cut(w_VH, plan.w_layout, mesh).requires_grad_()
    share = head_loss(x, w, cut(labels_M, (plan.m,), mesh), 77, head)
    share.backward()
    expected, dx, dw = reference(x_MH, w_VH, labels_M, vocab, 77)
    assert x.grad is not None and w.grad is not None, "no gradient"
    logits, part = head_logits(x.detach(), w.detach(), head), cut(masked_logits(x_MH, w_VH, vocab), plan.y_layout, mesh)
    finite = part.isfinite()
    assert torch.equal(logits.isfinite(), finite), "padding is not masked"
    return {
        "loss": error(comm.all_reduce(share.detach(), plan.y_layout[0]).wait(), expected),
        "dx": error(x.grad, cut(dx, plan.x_layout, mesh)),
        "dw": error(comm.all_reduce(w.grad, w_copies(plan)).wait(), cut(dw, plan.w_layout, mesh)),
        "logits": error(logits[finite], part[finite]),
    }


def masked_logits(x_MH: Tensor, w_VH: Tensor, vocab: int) -> Tensor:
    logits = F.linear(x_MH, w_VH)
    logits[:, vocab:] = float("-inf")
    return logits


def w_copies(plan: MatmulPlan) -> Axes:
    """Return the axes over which the gradient rule all-reduces the head's gradient."""
    return tuple(axis for axis in plan.m if axis not in plan.w)


def wrong(rank: int, world_size: int) -> list[str]:
    """Return errors for chunks of 1 token, of a size that leaves a remainder, and larger than the shard."""
    out = []
    for name, form in EVERY_FORM:
        mode = build_mode(name, form, MODES[name].default_shape(world_size))
        mesh = Mesh(mode.axes, rank)
        plan = mode.expand.on(mesh)
        comm = plan_comm(mesh, plan, also=(*plan.y_layout, w_copies(plan)))
        for chunk in (1, 20, 1000):
            found = split_errors(plan, chunk, comm)
            if not max(found.values()) < 1e-12:
                out.append(f"{name} {form}, chunks of {chunk}, rank {rank}: {found}")
    return out


@pytest.mark.parametrize("world_size", [8, 6])
def test_split_loss_in_every_form(world_size: int) -> None:
    assert run_turns(wrong, world_size) == [[]] * world_size


class Products(TorchDispatchMode):
    """Count GEMMs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return func(*args, **(kwargs or {}))


def test_the_full_logits_never_exist() -> None:
    tokens, vocab, hidden, chunk = 64, 512, 4, 8
    x_MH, w_VH, labels_M = whole_problem(tokens, vocab, vocab, hidden)
    with LargestTensor() as largest:
        loss = head_loss(
            x_MH.requires_grad_(),
            w_VH.requires_grad_(),
            labels_M,
            tokens,
            LMHead(MatmulPlan(), ALONE, vocab, vocab, LossChunk(chunk)),
        )
        loss.backward()
    assert largest.numel == max(chunk * vocab, vocab * hidden)


def test_large_logits_do_not_overflow() -> None:
    x_MH, w_VH, labels_M = whole_problem(10, 7, 8, hidden=4)
    head = LMHead(MatmulPlan(), ALONE, 7, 8, LossChunk(4))
    loss = head_loss(1e4 * x_MH.float(), w_VH.float(), labels_M, 10, head)
    expected, *_ = reference(1e4 * x_MH, w_VH, labels_M, 7, 10)
    assert error(loss.double(), expected) < 1e-5


def test_bf16_is_summed_in_fp32() -> None:
    """In bf16 neither the sum of a thousand equal token losses nor the weight's gradient would be right."""
    x_MH, w_VH = torch.ones(1024, 1, dtype=torch.bfloat16), torch.zeros(8, 1, dtype=torch.bfloat16)
    x, w = x_MH.requires_grad_(), w_VH.requires_grad_()
    loss = head_loss(x, w, torch.zeros(1024, dtype=torch.int64), 1024, LMHead(MatmulPlan(), ALONE, 8, 8, LossChunk(16)))
    loss.backward()
    assert loss.dtype == torch.float32 and w.grad is not None
    assert abs(loss.item() - 2.0794415) < 1e-6
    torch.testing.assert_close(w.grad[:, 0].float(), torch.tensor([-0.875] + [0.125] * 7), rtol=2**-8, atol=0)


def test_evaluation_multiplies_once_per_chunk() -> None:
    x_MH, w_VH, labels_M = whole_problem(10, 7, 8, hidden=4)
    head = LMHead(MatmulPlan(), ALONE, 7, 8, LossChunk(5))
    with torch.no_grad(), Products() as products:
        head_loss(x_MH.requires_grad_(), w_VH.requires_grad_(), labels_M, 10, head)
    assert products.count == 2
