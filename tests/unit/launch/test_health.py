"""Fact: a node is refused exactly for faults that would stop other ranks later, with the GPU and the reason."""

from __future__ import annotations

import pytest
import torch

from megatron3d.launch.__main__ import Gpu, fault_of, find_gpus, node_problems

GOOD = Gpu("H100", 79 * 2**30, 80 * 2**30)


def test_a_healthy_node_has_no_problem() -> None:
    assert list(node_problems(2, [GOOD, GOOD])) == list(node_problems(0, [])) == []


def test_what_is_wrong_is_named() -> None:
    used, broken = Gpu("H100", 40 * 2**30, 80 * 2**30), Gpu("H100", 80 * 2**30, 80 * 2**30, "an error")
    found = list(node_problems(4, [GOOD, used, broken]))
    assert [problem.partition(":")[0] for problem in found] == [
        "torch sees 3 of the 4 GPUs that SLURM gave",
        "GPU 1 (H100)",
        "GPU 2 (H100) computes wrongly or not at all",
    ]
    assert "holds 40.0 of 80.0 GiB" in found[1]


def test_torch_is_not_imported_where_no_gpu_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "accelerator")
    assert find_gpus(0) == []


def test_one_wrong_entry_of_a_gemm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert fault_of(device) is None
    multiply = torch.Tensor.__matmul__
    calls: list[int] = []

    def damaged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = multiply(a, b)
        product[17, 5] += 1 if not calls else 0
        calls.append(1)
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", damaged)
    assert fault_of(device) == f"1 of {1024**2} entries of a matrix product"
