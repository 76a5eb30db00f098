"""Fact: lookups in a sharded table return rows of the whole table, and its gradient is the whole gradient's shard.

Where no axis reduces the gradient it is added to main_grad, with every bit that adding a gradient of the table's size
gives, but without its memory.  This catches a buffer that is not cleared before the first microbatch of a step, rows
that are added token by token (which rounds differently for each number of microbatches), and sums in bf16.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.linear.main_grad import MainGrads
from megatron3d.ops.embedding import embedding
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from tests.support.largest_tensor import LargestTensor
from tests.support.main_grad_buffer import Buffer
from tests.support.shards import cut, error, every_group, normal
from tests.support.turn_ranks import run_turns

PADDED_VOCAB, HIDDEN, TOKENS = 72, 24, 96
EVERY_FORM = [(name, form) for name, entry in MODES.items() for form in entry.forms]


def token_ids() -> torch.Tensor:
    """Return token ids that contain every row, some of them often."""
    return torch.randint(0, PADDED_VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0)).square() % PADDED_VOCAB


def errors(plan: MatmulPlan, comm: Comm) -> tuple[float, float]:
    mesh = comm.mesh
    w_VH, dy_MH, tokens_M = normal(PADDED_VOCAB, HIDDEN, seed=1), normal(TOKENS, HIDDEN, seed=2), token_ids()
    expected = F.embedding(tokens_M, w_VH.requires_grad_())
    expected.backward(dy_MH)
    plan = plan.on(mesh)
    hidden, vocabulary = plan.w_layout
    stored = (vocabulary, hidden)
    mine = cut(w_VH.detach(), stored, mesh).requires_grad_()
    got = embedding(cut(tokens_M, (plan.m,), mesh), mine, PADDED_VOCAB, plan, comm)
    got.backward(cut(dy_MH, plan.y_layout, mesh))
    assert mine.grad is not None and w_VH.grad is not None, "the table has no gradient"
    summed = comm.all_reduce(mine.grad, tuple(axis for axis in plan.m if axis not in plan.w)).wait()
    return (
        error(got.detach(), cut(expected.detach(), plan.y_layout, mesh)),
        error(summed, cut(w_VH.grad, stored, mesh)),
    )


def wrong(rank: int, world_size: int) -> list[str]:
    out = []
    for name, form in EVERY_FORM:
        mode = build_mode(name, form, MODES[name].default_shape(world_size))
        found = errors(mode.embed, every_group(Mesh(mode.axes, rank)))
        if not max(found) < 1e-13:
            out.append(f"{name} {form} on rank {rank}: {found}")
    return out


def frequent_token_error(rank: int, world_size: int) -> float:
    """Return the relative error of the bf16 gradient of a token that occurs 4096 times."""
    mode = build_mode("1d", None, (world_size,))
    comm = every_group(Mesh(mode.axes, rank))
    w_VH = torch.zeros(4 // world_size, 2, dtype=torch.bfloat16, requires_grad=True)
    tokens_M = torch.zeros(4096, dtype=torch.int64)
    embedding(tokens_M, w_VH, 4, mode.embed, comm).backward(torch.ones(4096, 2, dtype=torch.bfloat16))
    assert w_VH.grad is not None, "the table has no gradient"
    expected = torch.zeros(4, 2)
    expected[0] = 4096
    return (w_VH.grad - cut(expected, (("t",), ()), comm.mesh)).abs().max().item() / 4096


@pytest.mark.parametrize("world_size", [8, 6])
def test_lookup_and_gradient_in_every_form(world_size: int) -> None:
    assert run_turns(wrong, world_size) == [[]] * world_size


def test_on_one_rank_it_equals_torch() -> None:
    got = embedding(
        token_ids(), normal(PADDED_VOCAB, HIDDEN, seed=1).requires_grad_(), PADDED_VOCAB, MatmulPlan(), None
    )
    assert got.grad_fn is not None and got.grad_fn.name() == "EmbeddingBackward0"


def test_a_frequent_tokens_gradient_does_not_stop_growing_in_bf16() -> None:
    """A bf16 sum of single additions would stop at 256."""
    assert max(run_turns(frequent_token_error, 2)) < 2**-8


def test_a_frequent_tokens_gradient_grows_on_one_rank_too() -> None:
    nobody = ProcessComm(Mesh((("t", 1),)), [])
    w_VH = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    y_MH = embedding(torch.zeros(4096, dtype=torch.int64), w_VH, 4, MatmulPlan(), nobody)
    y_MH.backward(torch.ones(4096, 2, dtype=torch.bfloat16))
    assert w_VH.grad is not None and (w_VH.grad[0] == 4096).all()


ALONE = ProcessComm(Mesh((("t", 1),)), [])


def accumulated(dtype: torch.dtype, num_microbatches: int, has_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """Return main_grad after some microbatches, and the sum of gradients of the table's size, in fp32 or wider."""
    main_grads, w_VH = MainGrads(), normal(PADDED_VOCAB, HIDDEN, seed=1).to(dtype).requires_grad_()
    buffer = Buffer(w_VH)
    main_grads.register(w_VH, buffer)
    expected = torch.zeros_like(buffer.sum)
    if has_gradient:  # of the LM head, with tied embeddings
        main_grads.add(w_VH, w_VH.detach())
        expected += w_VH.detach()
    for number in range(num_microbatches):
        tokens_M = token_ids().roll(number)[: TOKENS - number]
        dy_MH = normal(len(tokens_M), HIDDEN, seed=number + 2).to(dtype)
        y_MH = embedding(tokens_M, w_VH, PADDED_VOCAB, MatmulPlan(), ALONE, main_grads)
        y_MH.backward(dy_MH)
        expected += torch.zeros_like(expected).index_add_(0, tokens_M, dy_MH.to(expected.dtype))
    assert w_VH.grad is None and buffer.num_closed == num_microbatches + has_gradient
    return buffer.sum, expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_main_grad_has_every_bit_of_gradients_of_the_tables_size(dtype: torch.dtype, has_gradient: bool) -> None:
    found, expected = accumulated(dtype, 3, has_gradient)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_no_gradient_of_the_tables_size_exists(tokens: int) -> None:
    main_grads, w_VH = MainGrads(), torch.zeros(1000, 4, requires_grad=True)
    main_grads.register(w_VH, buffer := Buffer(w_VH))
    y_MH = embedding(torch.arange(tokens) // 2, w_VH, 1000, MatmulPlan(), ALONE, main_grads)
    with LargestTensor({buffer.sum}) as largest:
        y_MH.backward(torch.ones(tokens, 4))
    assert largest.numel <= 4 * tokens
    assert buffer.sum[:4, 0].tolist() == [2.0 if 2 * row < tokens - 1 else float(2 * row < tokens) for row in range(4)]
