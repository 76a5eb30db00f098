"""Fact: a dW that axes reduce is summed in main_grad's fp32, not rounded to bf16 before; fp64 numbers do not change."""

from __future__ import annotations

import pytest
import torch
from common.loopback import LoopbackComm
from torch import Tensor

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.linear.gemm import Operand
from megatron3d.linear.main_grad import MainGrads, WgradSum
from megatron3d.linear.matmul import Matmul
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.train.state import build_state
from tests.support.main_grad_buffer import Buffer
from tests.support.shards import cut, normal, plan_comm
from tests.support.turn_ranks import run_turns

PLAN = MatmulPlan(m=("a",), w={"a": "N"})
ROWS, INPUTS, OUTPUTS = 64, 8, 16
# Products of one 1 and zeros are exact; the sum of four ranks' terms is not representable in bf16.
TERMS = (1.0, 2.0**-8, 2.0**-8, 2.0**-9)


def reduced(
    rank: int, world_size: int, num_gemms: int, dtype: torch.dtype, narrow: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return this rank's main_grad of W, and what it should be."""
    mesh = Mesh((("a", world_size),)).at(rank)
    comm = plan_comm(mesh, PLAN)
    w = cut(normal(OUTPUTS, INPUTS, seed=1), PLAN.w_layout, mesh).to(dtype).requires_grad_()
    main_grads, buffer = MainGrads(), Buffer(w, narrow)
    main_grads.register(w, buffer)
    x, dy = torch.zeros(ROWS, INPUTS, dtype=dtype), torch.zeros(ROWS, OUTPUTS, dtype=dtype)
    x[0], dy[0] = 1.0, TERMS[rank]
    if num_gemms == 1:
        Matmul(PLAN, comm, main_grads=main_grads)(x.requires_grad_(), w).backward(dy)
    else:
        total = WgradSum(w, PLAN, comm, main_grads)
        for dy_part, x_part in zip(dy.chunk(num_gemms), x.chunk(num_gemms), strict=True):
            total.add(Operand(dy_part), Operand(x_part))
        reduction = total.finish()
        assert reduction is not None
        main_grads.add(w, reduction.wait())
    assert w.grad is None and buffer.num_closed == 1
    return buffer.sum, torch.full_like(buffer.sum, sum(TERMS))


@pytest.mark.parametrize("num_gemms", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_terms_that_bf16_would_lose_reach_main_grad(num_gemms: int, dtype: torch.dtype) -> None:
    """Would catch a reduction in bf16: it gives 1.0 or 1.0078, where the sum is 1.009766."""
    for found, expected in run_turns(reduced, 4, num_gemms, dtype):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("num_gemms", [1, 2])
def test_a_reduction_in_bf16_rounds_the_terms(num_gemms: int) -> None:
    """What `train.tp_grad_reduce_in_bf16` chooses: half the bytes, and a sum within a step of bf16."""
    for found, expected in run_turns(reduced, 4, num_gemms, torch.bfloat16, torch.bfloat16):
        assert torch.equal(found, found.bfloat16().float()) and not torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=0)


def test_the_key_chooses_the_dtype_of_every_weight() -> None:
    for narrow, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        model = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
        train = {"precision": "bf16", "tp_grad_reduce_in_bf16": narrow, "global_batch_size": 2, "micro_batch_size": 2}
        parallel = {"tensor_parallel_mode": "2d", "tensor_model_parallel_size": 2}
        spec = RunSpec(Config.model_validate({"model": model, "train": train, "parallel": parallel}), 2, 61)
        state = build_state(spec, LoopbackComm(spec.mesh), torch.device("cpu"), initializes=False)
        grads = state.model.main_grads
        assert {grads.reduce_dtype(param, torch.bfloat16) for param in state.model.parameters()} == {dtype}
