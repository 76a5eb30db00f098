"""Fact: a wgrad GEMM whose result is not reduced accumulates in main_grad.

This holds over microbatches, chunks of the loss and deferred wgrads; on a GPU bf16 GEMM results are accumulated
unrounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.linear.main_grad import MainGrads, WgradQueue
from megatron3d.linear.matmul import Matmul
from megatron3d.ops.cross_entropy import LMHead, head_loss
from megatron3d.ops.plan import LossChunk
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from tests.support.main_grad_buffer import Buffer

ALONE = ProcessComm(Mesh((("t", 1),)), [])
CUDA = pytest.param(
    "cuda", torch.bfloat16, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
)


def registered(w: Tensor) -> tuple[MainGrads, Buffer]:
    """Return a registry with a buffer for `w`."""
    main_grads, buffer = MainGrads(), Buffer(w)
    main_grads.register(w, buffer)
    return main_grads, buffer


def matrix(rows: int, columns: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("cpu", torch.float32), CUDA])
@pytest.mark.parametrize("defers", [False, True])
def test_gradients_of_microbatches_accumulate_in_main_grad(device: str, dtype: torch.dtype, defers: bool) -> None:
    w = matrix(6, 4, device, dtype)
    main_grads, buffer = registered(w)
    wgrads = WgradQueue(main_grads)
    xs = [matrix(8, 4, device, dtype), matrix(12, 4, device, dtype)]
    matmul = Matmul(MatmulPlan(), ALONE, main_grads=main_grads, wgrads=wgrads)
    late: list[Callable[[], None]] = []
    for num_before, x in enumerate(xs):
        with wgrads.defer() if defers else nullcontext(late) as late:
            matmul(x, w).square().sum().backward()
        assert buffer.num_closed == num_before + (not defers)
        with torch.no_grad():
            for compute in late:
                compute()
    assert w.grad is None and buffer.num_closed == len(xs)
    expected = torch.stack([2 * (x @ w.T).double().T @ x.double() for x in xs]).sum(0)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2)
    torch.testing.assert_close(buffer.sum.double(), expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_the_heads_gradient_accumulates_in_main_grad(chunk_tokens: int) -> None:
    x, w, labels = matrix(8, 4), matrix(6, 4), torch.arange(8) % 6
    main_grads, buffer = registered(w)
    for _ in range(2):
        head_loss(x, w, labels, 8, LMHead(MatmulPlan(), ALONE, 6, 6, LossChunk(chunk_tokens), main_grads))
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ w.T, labels), w)
    assert w.grad is None and buffer.num_closed == 2
    torch.testing.assert_close(buffer.sum, 2 * expected, rtol=1e-12, atol=1e-12)


def test_autograds_gradient_is_moved_to_main_grad() -> None:
    w = matrix(6, 4)
    _, buffer = registered(w)
    for _ in range(2):
        w.square().sum().backward()
    assert w.grad is None and buffer.num_closed == 2
    torch.testing.assert_close(buffer.sum, 4 * w.detach(), rtol=0, atol=0)


def test_a_gradient_without_a_buffer_goes_to_grad() -> None:
    w = matrix(6, 4)
    for _ in range(2):
        MainGrads().add(w, torch.ones_like(w))
    assert w.grad is not None and w.grad.eq(2).all()


def routes(dtype: torch.dtype, has_bias: bool) -> Iterator[list[Tensor]]:
    """Yield Y, dX and the main_grads after two microbatches: of the plain matmul, then of the planned one."""
    for wgrads in (False, True):  # a queue that defers nothing makes the matmul take the planned way
        w, b = matrix(6, 4, dtype=dtype), matrix(1, 6, dtype=dtype).detach()[0].requires_grad_()
        main_grads = MainGrads()
        buffers = [Buffer(w), Buffer(b)]
        for param, buffer in zip((w, b), buffers, strict=True):
            main_grads.register(param, buffer)
        matmul = Matmul(MatmulPlan(), ALONE, main_grads=main_grads, wgrads=WgradQueue(main_grads) if wgrads else None)
        found = []
        for rows in (8, 12):
            x = matrix(rows, 4, dtype=dtype)
            y = matmul(x, w, b if has_bias else None)
            y.backward(matrix(rows, 6, dtype=dtype).detach())
            assert x.grad is not None and w.grad is None and b.grad is None
            found += [y.detach(), x.grad]
        assert [buffer.num_closed for buffer in buffers] == [2, 2 * has_bias]
        yield [*found, *(buffer.sum for buffer in buffers[: 1 + has_bias])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_plain_matmul_equals_the_planned_one_bit_for_bit(dtype: torch.dtype, has_bias: bool) -> None:
    """Would catch a bias gradient dropped or added twice, and other kernels than the planned way's."""
    for plain, planned in zip(*routes(dtype, has_bias), strict=True):
        torch.testing.assert_close(plain, planned, rtol=0, atol=0)


def test_autograd_does_not_visit_the_parameters_of_a_plain_matmul() -> None:
    """Each visit calls a Python hook, which costs as much as a small GEMM."""
    w = matrix(6, 4)
    main_grads, buffer = registered(w)
    y = Matmul(MatmulPlan(), ALONE, main_grads=main_grads)(matrix(8, 4), w)
    assert y.grad_fn is not None and len(y.grad_fn.next_functions) == 1
    y.sum().backward()
    assert buffer.num_closed == 1


def test_a_plain_matmul_of_an_input_without_gradient_still_has_a_weight_gradient() -> None:
    w = matrix(6, 4)
    main_grads, buffer = registered(w)
    x = matrix(8, 4).detach()
    Matmul(MatmulPlan(), ALONE, main_grads=main_grads)(x, w).sum().backward()
    torch.testing.assert_close(buffer.sum, x.sum(0).expand(6, 4), rtol=1e-12, atol=1e-12)


def test_a_plain_matmul_without_gradients_builds_no_graph() -> None:
    w = matrix(6, 4)
    main_grads, _ = registered(w)
    with torch.no_grad():
        assert Matmul(MatmulPlan(), ALONE, main_grads=main_grads)(matrix(8, 4), w).grad_fn is None
