"""Fact: a router chooses and weighs experts as its definition says, and its losses have their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron3d.experts.grouped_matmul import GroupedMatmul, grouped_input_grad, grouped_product
from megatron3d.experts.plan import Experts
from megatron3d.experts.router import (
    balance_terms,
    counts_of_sequences,
    route,
    router_logits,
    top_experts,
    with_loss,
    z_terms,
)
from megatron3d.experts.rows import (
    Groups,
    RowCounts,
    RowOrder,
    Rows,
    add_rows,
    groups_of,
    ranges,
    take_tokens,
    take_weights,
)
from megatron3d.linear.gemm import Gemm, Operand
from megatron3d.linear.main_grad import MainGrads
from tests.support.main_grad_buffer import Buffer

E, K = 8, 3


def logits(rows: int = 13) -> Tensor:
    return torch.randn(rows, E, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def groups(counts: list[int]) -> Groups:
    return groups_of(counts, torch.tensor(counts))


def test_ties_go_to_the_lower_expert_and_slots_ascend() -> None:
    choice = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0, 2.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    assert top_experts(choice, 3).tolist() == [[1, 2, 4], [0, 1, 2]]


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_softmax_after_the_choice_is_normalized_and_before_it_is_not(pre_softmax: bool) -> None:
    routes = route(logits(), Experts(E, K, 1, pre_softmax=pre_softmax, scaling_factor=2.0))
    probs = logits().softmax(-1).gather(1, routes.experts_MK)
    wanted = probs if pre_softmax else probs / probs.sum(-1, keepdim=True)
    torch.testing.assert_close(routes.weights_MK, 2 * wanted)


@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus"])
def test_a_bias_changes_the_choice_alone(score_function: str) -> None:
    bias = torch.zeros(E, dtype=torch.float64)
    bias[5] = 10.0
    routes = route(logits(), Experts(E, K, 1, score_function=score_function), bias)
    scores = logits().sigmoid() if score_function == "sigmoid" else (1 + logits().exp()).log().sqrt()
    assert (routes.experts_MK == 5).any(1).all()
    chosen = scores.gather(1, routes.experts_MK)
    torch.testing.assert_close(routes.weights_MK, chosen / chosen.sum(-1, keepdim=True))


def test_experts_come_from_the_best_groups() -> None:
    """Check the choice against a loop over tokens: groups of 2, the best 2 by the sum of their best 1 (3 // 2)."""
    experts = route(logits(), Experts(E, K, 1, score_function="sigmoid", num_groups=4, group_topk=2)).experts_MK
    for row, chosen in zip(logits().sigmoid().tolist(), experts.tolist(), strict=True):
        groups = sorted(range(4), key=lambda group: -max(row[2 * group : 2 * group + 2]))[:2]
        inside = [expert for group in groups for expert in (2 * group, 2 * group + 1)]
        assert chosen == sorted(sorted(inside, key=lambda expert: -row[expert])[:K])


def test_the_balance_loss_of_a_sequence() -> None:
    """Check against the definition: E / (K S) counts times the mean of normalized scores."""
    routes, sequence = route(logits(12), Experts(E, K, 1, score_function="sigmoid")), torch.arange(12) // 6
    counts = counts_of_sequences(routes.experts_MK, E, sequence, 2)
    terms = balance_terms(routes.scores_ME, (counts / 6).double()[sequence], K)
    for place in range(2):
        mine = sequence == place
        scores = logits(12).sigmoid()[mine]
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        share = torch.nn.functional.one_hot(routes.experts_MK[mine], E).sum((0, 1)) * E / (K * 6)
        torch.testing.assert_close(terms[mine].mean(), (share * mean).sum())


def test_logits_in_fp32_keep_their_input_in_its_own_dtype() -> None:
    kept, x, w = list[Tensor](), torch.randn(5, 4, dtype=torch.bfloat16), torch.randn(E, 4, dtype=torch.bfloat16)
    x, w, bias = x.requires_grad_(), w.requires_grad_(), torch.randn(E)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (kept.append(each), each)[1], lambda each: each):
        y = router_logits(x, w, bias)
    assert {each.dtype for each in kept} == {torch.bfloat16} and y.dtype == torch.float32
    wanted = torch.autograd.grad((x.float() @ w.float().T + bias).square().sum(), (x, w))
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), (x, w)), wanted)


def test_a_loss_adds_its_gradient_to_the_weights() -> None:
    x, scale = logits().requires_grad_(), 3.0
    (with_loss(x.sigmoid(), z_terms(x).sum(), scale).square().sum()).backward()
    y = logits().requires_grad_()
    (y.sigmoid().square().sum() + scale * torch.logsumexp(y, -1).square().sum()).backward()
    assert x.grad is not None and y.grad is not None
    torch.testing.assert_close(x.grad, y.grad)


def test_rows_go_to_experts_and_back() -> None:
    """Check outputs and gradients of a mixture against a loop over tokens and slots; some experts have no token."""
    x, weights = torch.randn(9, 5, dtype=torch.float64), torch.rand(9, K, dtype=torch.float64)
    w = torch.randn(E, 4, 5, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(4)[:K].sort().values for _ in range(9)])  # experts 4 to 7 have no row
    rows = RowOrder(chosen, E)
    counts = RowCounts(rows.counts_E, []).on_host
    mine = [each.clone().requires_grad_() for each in (x, weights, w.flatten(0, 1))]
    groups = groups_of(counts, rows.counts_E)
    y = GroupedMatmul(E, MainGrads())(take_tokens(Rows(mine[0]), rows, sum(counts)), mine[2], groups)
    add_rows(y * take_weights(mine[1], rows, sum(counts)).unsqueeze(1), rows).square().sum().backward()
    theirs = [each.clone().requires_grad_() for each in (x, weights, w)]
    slots = [[theirs[1][t, k] * (theirs[2][chosen[t, k]] @ theirs[0][t]) for k in range(K)] for t in range(len(chosen))]
    total = torch.stack([torch.stack(each).sum(0) for each in slots])
    total.square().sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.reshape(other.shape), other.grad)
    assert counts[4:] == [0, 0, 0, 0] and sum(counts) == 9 * K


def test_the_sum_of_rows_keeps_no_rows() -> None:
    """Experts weight their own outputs: the sum needs the order of rows alone, and of tokens without one gives 0."""
    chosen, kept = torch.tensor([[0, 1], [0, E], [E, E], [1, 2]]), list[Tensor]()
    rows, y = RowOrder(chosen, E), torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        out = add_rows(y, rows)
    assert kept and not any(each.is_floating_point() for each in kept)
    wide = y.detach().float()  # rows of experts 0, 0, 1, 1, 2
    total = torch.stack((wide[0] + wide[2], wide[1], torch.zeros(4), wide[3] + wide[4]))
    is_tie = total.view(torch.int32) & 0xFFFF == 0x8000  # which the kernel of some CPUs rounds up
    assert out[~is_tie].equal(total.to(torch.bfloat16)[~is_tie]), "added in fp32, and rounded once"
    out.sum().backward()
    assert y.grad is not None and y.grad.equal(torch.ones_like(y))


def test_weight_gradients_accumulate_in_main_grad() -> None:
    """Check two microbatches: the first overwrites the buffer, also of an expert without rows, the second adds."""
    w, x, grads = torch.nn.Parameter(torch.randn(E * 4, 5)), torch.randn(6, 5), MainGrads()
    buffer = Buffer(w)
    grads.register(w, buffer)
    matmul = GroupedMatmul(E, grads)
    for counts in ([6] + 7 * [0], [0, 2, 4] + 5 * [0]):
        matmul(Rows(x.clone().requires_grad_()), w, groups(counts)).sum().backward()
    wanted = torch.zeros(E, 5)
    wanted[0], wanted[1], wanted[2] = x.sum(0), x[:2].sum(0), x[2:].sum(0)
    torch.testing.assert_close(buffer.sum.view(E, 4, 5), wanted.unsqueeze(1).expand(E, 4, 5))


class Shapes(Gemm):
    """Native GEMM that notes how many rows each product has."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def y(self, x: Operand, w: Operand, bias_N: Tensor | None = None, into_MN: Tensor | None = None) -> Tensor:
        self.rows.add(len(x.data))
        return super().y(x, w, bias_N, into_MN)

    def dx(self, dy: Operand, w: Operand, into_MK: Tensor | None = None) -> Tensor:
        self.rows.add(len(dy.data))
        return super().dx(dy, w, into_MK)

    def dw(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        self.rows |= {len(dy.data), len(x.data)}
        return super().dw(dy, x, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_onednn_compiles_few_kernels_for_many_numbers_of_rows(dtype: torch.dtype) -> None:
    """oneDNN keeps a kernel for each shape, with its memory: in bf16 rows are padded, and the numbers are the same."""
    gemm, w = Shapes(), torch.nn.Parameter(torch.randn(E * 16, 8).to(dtype))
    matmul = GroupedMatmul(E, MainGrads(), gemm=gemm)
    for first in range(0, 400, E):
        counts = [first + place for place in range(E)]
        x = torch.randn(sum(counts), 8).to(dtype).requires_grad_()
        y = matmul(Rows(x), w, groups(counts))
        dy = torch.randn_like(y)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        parts = zip(ranges(counts), w.detach().double().chunk(E), dw.chunk(E), strict=True)
        for part, w_NK, dw_NK in parts:
            one, grad = x[part].detach().double(), dy[part].double()
            for got, wanted in ((y[part], one @ w_NK.T), (dx[part], grad @ w_NK), (dw_NK, grad.T @ one)):
                torch.testing.assert_close(got, wanted.to(dtype), rtol=0.02, atol=0.05)
    assert len(gemm.rows) <= 26 if dtype == torch.bfloat16 else len(gemm.rows) == 400


def test_rows_are_multiplied_by_the_weight_of_their_expert() -> None:
    x, w, rows = torch.randn(7, 8), torch.randn(3, 16, 8), groups([0, 5, 2])
    y = torch.cat([x[:5] @ w[1].T, x[5:] @ w[2].T])
    torch.testing.assert_close(grouped_product(Operand(x), w, rows), y)
    torch.testing.assert_close(grouped_input_grad(Operand(y), w, rows), torch.cat([y[:5] @ w[1], y[5:] @ w[2]]))
