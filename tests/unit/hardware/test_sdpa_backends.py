"""Fact: the start-up line names the attention kernel that torch selects, and those that it could use."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from megatron3d.hardware.devices import chosen, describe_attention, usable

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def build(dtype: torch.dtype, num_groups: int = 4, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (torch.empty(1, n, 32, 8, dtype=dtype, device=device, requires_grad=True) for n in (4, num_groups))
    return q, k


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_groups", [4, 2])
@pytest.mark.parametrize("backend,name", [(SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "flash")])
def test_the_named_kernel_is_the_one_that_runs(
    dtype: torch.dtype, num_groups: int, backend: SDPBackend, name: str
) -> None:
    q, k = build(dtype, num_groups)
    with sdpa_kernel([backend]):
        assert chosen(q, k) == name and usable(q, k) == (name,)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=num_groups != 4)
    called = {event.key for event in seen.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in called) == (name == "flash")


def test_a_cpu_has_two_attention_kernels() -> None:
    assert usable(*build(torch.float32)) == ("flash", "math")


def test_torch_says_which_kernels_a_gpu_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = torch.backends.cuda
    for name, answer in (("flash", True), ("efficient", False), ("cudnn", True)):
        monkeypatch.setattr(flags, f"can_use_{name}_attention", lambda params, answer=answer: answer)
    q, k = build(torch.bfloat16, 2, "meta")
    assert usable(q, k) == ("flash", "cuDNN", "math")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        assert usable(q, k) == ("flash", "cuDNN")


def test_the_line_of_the_report() -> None:
    assert describe_attention(CPU, torch.bfloat16, (4, 4, 16), 64) == (
        "attention: flash kernel for 4 heads of 16 in bfloat16 on each rank (usable: flash, math)"
    )
    assert describe_attention(CPU, torch.float32, (4, 2, 16), 64, dropout=0.1) == (
        "attention: plain matmuls in training, since attention_dropout=0.1; in evaluation flash kernel for "
        "4 heads (2 key/value) of 16 in float32 on each rank (usable: flash, math)"
    )
    assert describe_attention(CPU, torch.float32, (4, 4, 16), 64, packed="by pairs") == (
        "attention: flash kernel for 4 heads of 16 in float32 on each rank (usable: flash, math); "
        "within documents and windows by pairs"
    )
