"""Fact: a dropout mask is a function of its key and the global index alone, and is statistically random."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.ops import dropout as dropout_module
from megatron3d.ops.dropout import derive_seed, dropout, keep_mask
from tests.support.largest_tensor import LargestTensor
from tests.support.triton_process import check, needs_triton

KEYS = [derive_seed(1234, 0, "layers.0.mlp"), derive_seed(1234, 1, "layers.0.mlp"), derive_seed(7, 0, "embedding")]
ROWS, COLUMNS = torch.arange(600), torch.arange(500)


def bits(key: int, rate: float = 0.5) -> torch.Tensor:
    """Return +1 where kept, -1 where dropped, [600, 500]."""
    return keep_mask(key, ROWS, COLUMNS, rate).double() * 2 - 1


def within_chance(mean: float, count: int, spread: float = 1.0) -> bool:
    """Return whether a mean of `count` independent values of standard deviation `spread` is within 5 deviations."""
    return abs(mean) < 5 * spread / count**0.5


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**63),
    first=st.integers(0, 2**40),
    rows=st.lists(st.integers(0, 59), min_size=1, max_size=20),
    columns=st.tuples(st.integers(0, 39), st.integers(1, 40)),
    rate=st.floats(0.01, 0.99),
)
def test_a_mask_of_a_box_equals_its_part_of_the_whole_mask(
    seed: int, first: int, rows: list[int], columns: tuple[int, int], rate: float
) -> None:
    key = derive_seed(seed)
    whole = keep_mask(key, first + torch.arange(60), torch.arange(40), rate)
    low, high = min(columns), max(columns)
    part = keep_mask(key, first + torch.tensor(rows), torch.arange(low, high), rate)
    assert torch.equal(part, whole[rows][:, low:high])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_drop_rate_is_the_configured_one(key: int, rate: float) -> None:
    dropped = 1 - keep_mask(key, ROWS, COLUMNS, rate).double()
    spread = (rate * (1 - rate)) ** 0.5
    assert within_chance(dropped.mean().item() - rate, dropped.numel(), spread)
    for dim in (0, 1):
        deviations = (dropped.mean(dim) - rate) / spread * dropped.shape[dim] ** 0.5
        assert deviations.abs().max() < 5.5
        assert within_chance(deviations.square().mean().item() - 1, deviations.numel(), 2**0.5)


@pytest.mark.parametrize("first,second", list(combinations(KEYS, 2)))
def test_keys_give_independent_masks(first: int, second: int) -> None:
    assert within_chance((bits(first) * bits(second)).mean().item(), ROWS.numel() * COLUMNS.numel())


@pytest.mark.parametrize("key", KEYS)
def test_neighbouring_elements_are_independent(key: int) -> None:
    """Row and column are hashed separately and added: neither shifts nor rectangles may be correlated."""
    mask = bits(key)
    for down, right in [(0, 1), (1, 0), (1, 1), (1, 2), (8, 8), (64, 64), (128, 256)]:
        pairs = mask[down:, right:] * mask[: 600 - down, : 500 - right]
        assert within_chance(pairs.mean().item(), pairs.numel()), (down, right)
    rectangles = mask[1:, 1:] * mask[1:, :-1] * mask[:-1, 1:] * mask[:-1, :-1]
    assert within_chance(rectangles.mean().item(), rectangles.numel())
    products = mask @ mask.T / mask.shape[1] ** 0.5
    products.fill_diagonal_(0)
    assert products.abs().max() < 6


@pytest.mark.parametrize("chunk", [1, 7, 1000, 10**6])
def test_chunks_have_the_same_mask(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = keep_mask(KEYS[0], ROWS[:20], COLUMNS[:30], 0.3)
    monkeypatch.setattr(dropout_module, "CPU_HASH_CHUNK", chunk)
    assert torch.equal(keep_mask(KEYS[0], ROWS[:20], COLUMNS[:30], 0.3), expected)


def test_the_workspace_is_that_of_a_chunk() -> None:
    """Before, three numbers of 8 bytes per element were there at a time."""
    with LargestTensor() as largest:
        keep = keep_mask(KEYS[0], torch.arange(2000), COLUMNS, 0.3)
    assert largest.numel == keep.numel() and largest.num_bytes == keep.nbytes


@needs_triton
@pytest.mark.slow
def test_the_interpreted_kernel_writes_the_same_mask(tmp_path: Path) -> None:
    found = check("fused_dropout", "interpret", tmp_path, TRITON_INTERPRET="1")
    assert len(found) == 12 and not any(found.values()), found


@needs_triton
@pytest.mark.slow
def test_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    assert all("st.global" in ptx for ptx in check("fused_dropout", "assemble", tmp_path).values())


def test_far_rows_do_not_repeat_near_ones() -> None:
    """Rows of a large batch have token indices beyond 2^32."""
    near, far = (keep_mask(KEYS[0], ROWS + first, COLUMNS, 0.5).double() * 2 - 1 for first in (0, 2**32))
    assert within_chance((near * far).mean().item(), near.numel())


def test_each_component_of_the_key_changes_the_mask() -> None:
    parts = [(1, 2, "a"), (2, 1, "a"), (1, 2, "b"), (12, "a"), (1, "2", "a"), (1, 2, "a", 0)]
    assert len({derive_seed(*part) for part in parts}) == len(parts)
    assert all(0 <= derive_seed(*part) < 2**63 for part in parts)


def test_kept_elements_are_scaled_in_value_and_gradient() -> None:
    x = torch.randn(600, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    keep = keep_mask(KEYS[0], ROWS, COLUMNS, 0.2)
    y = dropout(x, keep, 0.2)
    y.backward(torch.ones_like(y))
    expected = torch.where(keep, 1.25, 0.0).double()
    assert x.grad is not None
    torch.testing.assert_close(y, expected * x)
    torch.testing.assert_close(x.grad, expected)
    assert within_chance(expected.mean().item() - 1, expected.numel(), 0.5)


def test_the_dtype_is_kept() -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    y = dropout(x, torch.ones(2, 3, dtype=torch.bool), 0.1)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad is not None and x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("key", [*KEYS, 2**20])
def test_rows_and_columns_are_hashed_differently(key: int) -> None:
    mask = bits(key)[:500]
    assert within_chance((mask * mask.T).triu(1).sum().item() / 124750, 124750)


def test_masks_are_the_same_on_every_machine_and_version() -> None:
    mask = keep_mask(derive_seed(1234, 3, "layers.1.mlp.fc2"), torch.arange(2), torch.arange(16), 0.5)
    assert ["".join(map(str, row)) for row in mask.int().tolist()] == ["0111111111011010", "0101100101101010"]
