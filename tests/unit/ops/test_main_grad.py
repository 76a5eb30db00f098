"""Fact: a weight gradient that nothing reduces is made where its leaf's gradients are summed: over microbatches,
panels, chunks of the loss, and late halves of a backward, and on a GPU without being rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.ops.cross_entropy import Head, head_loss
from megatron3d.ops.main_grad import give_sink
from megatron3d.ops.matmul import Matmul
from megatron3d.ops.weight_prefetch import WeightGrads
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.tp_overlap import TPOverlap

ALONE = ProcessComm(Mesh((("t", 1),)), [])
CUDA = pytest.param(
    "cuda", torch.bfloat16, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
)


class Memory:
    """A sum that starts as what must not be seen."""

    def __init__(self, w: Tensor) -> None:
        self.sum = torch.full(w.shape, torch.nan, dtype=torch.promote_types(w.dtype, torch.float32), device=w.device)
        self.num_rooms = self.num_arrived = 0

    def room(self) -> tuple[Tensor, bool]:
        self.num_rooms += 1
        return self.sum, self.num_rooms > 1

    def arrived(self) -> None:
        self.num_arrived += 1


def matrix(rows: int, columns: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("cpu", torch.float32), CUDA])
@pytest.mark.parametrize("num_panels", [1, 2])
@pytest.mark.parametrize("are_put_off", [False, True])
def test_gradients_of_microbatches_are_summed_there(
    device: str, dtype: torch.dtype, num_panels: int, are_put_off: bool
) -> None:
    w, grads = matrix(6, 4, device, dtype), WeightGrads()
    give_sink(w, memory := Memory(w))
    xs = [matrix(8, 4, device, dtype), matrix(12, 4, device, dtype)]
    matmul = Matmul(MatmulPlan(), ALONE, TPOverlap(num_panels), grads)
    late: list[Callable[[], None]] = []
    for num_before, x in enumerate(xs):
        with grads.put_off() if are_put_off else nullcontext(late) as late:
            matmul(x, w).square().sum().backward()
        assert memory.num_arrived == num_before + (not are_put_off)
        with torch.no_grad():
            for compute in late:
                compute()
    assert w.grad is None and memory.num_arrived == len(xs)
    expected = torch.stack([2 * (x @ w.T).double().T @ x.double() for x in xs]).sum(0)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2)
    torch.testing.assert_close(memory.sum.double(), expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_the_heads_gradient_is_summed_there(chunk_tokens: int) -> None:
    x, w, labels = matrix(8, 4), matrix(6, 4), torch.arange(8) % 6
    give_sink(w, memory := Memory(w))
    for _ in range(2):
        head_loss(x, w, labels, 8, Head(MatmulPlan(), ALONE, 6, 6, chunk_tokens))
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ w.T, labels), w)
    assert w.grad is None and memory.num_arrived == 2
    torch.testing.assert_close(memory.sum, 2 * expected, rtol=1e-12, atol=1e-12)
