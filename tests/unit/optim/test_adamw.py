"""Fact: every update is torch's fused AdamW, for any order and split of the elements; a skipped one changes nothing.

bf16 moments are rounded stochastically without bias, so that they follow where rounding to nearest would stall.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron3d.config.schema import OptimizerConfig
from megatron3d.optim import adamw
from megatron3d.optim.adamw import ParamGroup, Update, update_chunked, update_fused, update_with_apex

CONFIG = OptimizerConfig(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)
MADE, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)
SIZES = (40, 0, 1, 23)


def random(size: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(main: torch.dtype, moments: torch.dtype | None = None, sizes: Sequence[int] = SIZES) -> ParamGroup:
    group = ParamGroup(0.3, states=([], []))
    for seed, size in enumerate(sizes):
        group.mains.append(random(size, seed, main))
        group.grads.append(torch.zeros(size, dtype=main))
        group.states[0].append(torch.zeros(size, dtype=moments or main))
        group.states[1].append(torch.zeros(size, dtype=moments or main))
    return group


def give_gradients(group: ParamGroup, seed: int) -> None:
    for number, grad in enumerate(group.grads):
        grad.copy_(random(len(grad), 100 * seed + number))


def snapshot(group: ParamGroup) -> list[Tensor]:
    return [t.clone() for tensors in group.lists[1:] for t in tensors]


def apex_kernel(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """AdamCapturableFunctor of apex's csrc/multi_tensor_adam.cu, with its frontend's checks of the arguments."""
    assert chunk_size > 0 and mode == 1 and bias_correction == 1
    assert noop_flag.dtype == step.dtype == torch.int32 and noop_flag.numel() == step.numel() == 1
    assert lr.dtype == inv_scale.dtype == torch.float32
    assert len(tensor_lists) == 4 and len({len(tensors) for tensors in tensor_lists}) == 1
    if noop_flag.item() == 1:
        return
    for g, p, m, v in zip(*tensor_lists, strict=True):
        assert len(g) > 0 and g.dtype == p.dtype == m.dtype == v.dtype == torch.float32
        g.mul_(inv_scale)
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        unbiased = m / (1 - beta1 ** step.item()), v / (1 - beta2 ** step.item())
        p.sub_(lr * (unbiased[0] / (unbiased[1].sqrt() + epsilon) + weight_decay * p))


UPDATES: dict[str, tuple[Update, torch.dtype, torch.dtype]] = {
    "fused": (update_fused, torch.float32, torch.float32),
    "in pieces": (update_chunked, torch.float32, torch.float32),
    "bf16": (update_chunked, torch.float32, torch.bfloat16),
    "bf16 beside fp64": (update_chunked, torch.float64, torch.bfloat16),
    "apex": (update_with_apex(apex_kernel), torch.float32, torch.float32),
}


def steps_agree(update: Update, main: torch.dtype, tolerance: float) -> None:
    """Compare four updates, one of them skipped, with torch's fused ones."""
    mine, theirs, num_steps = build(main), build(main), torch.zeros(())
    for seed, (lr, skipped) in enumerate([(0.1, MADE), (0.05, MADE), (0.2, SKIPPED), (0.02, MADE)]):
        for group, function in ((mine, update), (theirs, update_fused)):
            give_gradients(group, seed + 1)
            function(group, CONFIG, lr, num_steps, skipped)
        num_steps = num_steps + 1 - skipped
        for a, b in zip(snapshot(mine), snapshot(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("piece", [1, 7, 2**18])
def test_an_update_in_pieces_equals_the_fused_update(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "CPU_CHUNK", piece)
    steps_agree(update_chunked, torch.float64, 1e-12)
    steps_agree(update_chunked, torch.float32, 2e-6)


def test_apexs_kernel_equals_the_fused_update() -> None:
    steps_agree(update_with_apex(apex_kernel), torch.float32, 2e-6)


def test_apexs_kernel_receives_pieces_that_it_can_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """apex counts the elements of a tensor in 32 bits."""
    monkeypatch.setattr(adamw, "_MAX_KERNEL_SIZE", 8)
    steps_agree(update_with_apex(apex_kernel), torch.float32, 2e-6)


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_update_changes_nothing(name: str, bad: float) -> None:
    update, main, moments = UPDATES[name]
    group = build(main, moments)
    give_gradients(group, 1)
    update(group, CONFIG, 0.1, torch.zeros(()), MADE)
    before = snapshot(group)
    give_gradients(group, 2)
    group.grads[0][3] = bad
    update(group, CONFIG, 0.1, torch.ones(()), SKIPPED)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(group), strict=True))


@pytest.mark.parametrize("name", [*UPDATES, "fused, as on a GPU"])
def test_a_factor_scales_the_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left scaled, as reports of them expect; a skipped update changes no gradient in its kernel."""
    if name not in UPDATES:
        monkeypatch.setattr(adamw, "takes_divisor", lambda grad: True)
    update, main, moments = UPDATES[name.partition(",")[0]]
    plain, scaled, factor = build(main, moments), build(main, moments), torch.tensor(0.375, dtype=main)
    for step in range(3):
        for group in (plain, scaled):
            give_gradients(group, step)
        for grad in plain.grads:
            grad.mul_(factor)
        scaled.factor = factor
        for group in (plain, scaled):
            update(group, CONFIG, 0.1, torch.tensor(float(step)), MADE)
        for a, b in zip((*plain.grads, *snapshot(plain)), (*scaled.grads, *snapshot(scaled)), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
    before = [grad.clone() for grad in scaled.grads]
    update(scaled, CONFIG, 0.1, torch.tensor(3.0), SKIPPED)
    assert name == "fused" or all(torch.equal(a, b) for a, b in zip(before, scaled.grads, strict=True))


@pytest.mark.parametrize("name", UPDATES)
def test_an_empty_update_is_not_an_error(name: str) -> None:
    update, main, moments = UPDATES[name]
    for sizes in ((), (0,)):
        update(build(main, moments, sizes), CONFIG, 0.1, torch.zeros(()), MADE)


def test_temporary_memory_is_that_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "CPU_CHUNK", 64)
    group = build(torch.float32, torch.bfloat16, (1000,))
    own = {t.untyped_storage().data_ptr() for tensors in group.lists for t in tensors}
    largest = []  # type: ignore[var-annotated]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = function(*args, **(kwargs or {}))
            made = [t for t in (out if isinstance(out, list | tuple) else [out]) if isinstance(t, Tensor)]
            largest.extend(t.untyped_storage().nbytes() for t in made if t.untyped_storage().data_ptr() not in own)
            return out

    with Watch():
        update_chunked(group, CONFIG, 0.1, torch.zeros(()), MADE)
    assert max(largest) == 64 * 4


class Kernels(TorchDispatchMode):
    """Count operations that are not views."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        made = out[0] if isinstance(out, list | tuple) else out
        is_mutable, inputs = function._schema.is_mutable, [t for t in args if isinstance(t, Tensor)]
        storages = {t.untyped_storage()._cdata for t in inputs}
        self.count += is_mutable or made.untyped_storage()._cdata not in storages  # else it is a view
        return out


def test_a_chunk_with_bf16_moments_takes_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a chunk took 45 kernels: halves were masked and shifted, and results selected and copied apart."""
    counts = []
    for num_chunks in (1, 2):
        monkeypatch.setattr(adamw, "CPU_CHUNK", 64 // num_chunks)
        group = build(torch.float32, torch.bfloat16, (64,))
        with Kernels() as kernels:
            update_chunked(group, CONFIG, 0.1, torch.zeros(()), MADE)
        counts.append(kernels.count)
    assert counts[1] - counts[0] <= 31


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 neighbours of each element, the one nearer to zero first."""
    bits = x.view(torch.int32) & -0x10000
    return bits.view(torch.float32), (bits + 0x10000).view(torch.float32)


def test_stochastic_rounding_takes_a_neighbour_and_is_unbiased() -> None:
    x = random(2000, 1, torch.float32)
    near, far = neighbours(x)
    draws = torch.stack([adamw._round_stochastically(x, random_bits(2000, seed), 0).float() for seed in range(400)])
    assert bool(((draws == near) | (draws == far)).all())
    error = (draws.mean(0) - x) / (far - near)
    assert error.abs().max() < 5 * 0.5 / math.sqrt(400)
    assert error.mean().abs() < 4 * 0.5 / math.sqrt(400 * 2000)


def random_bits(size: int, seed: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (size,), generator=torch.Generator().manual_seed(seed)).int()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 2.0**-126, math.inf, -math.inf])
def test_values_of_bf16_are_rounded_to_themselves(value: float) -> None:
    x = torch.full((100,), value)
    assert torch.equal(adamw._round_stochastically(x, random_bits(100, 1), 0), x.bfloat16())


@pytest.mark.parametrize("other_step", [False, True])
def test_the_bits_of_the_hash_are_even_and_independent(other_step: bool) -> None:
    """Every bit is set half the time, alone and jointly with every other bit of the next element or of the next step.

    Weights and gradients have a few neighbouring values.
    """
    size = 2**15
    w, g = 1 + torch.arange(size) % 128 / 128, torch.arange(size) // 128 / 4096
    first = adamw._random_bits(w, g, adamw._salt(torch.tensor(7.0)))
    second = adamw._random_bits(w, g, adamw._salt(torch.tensor(8.0))) if other_step else first.roll(1)
    bits, others = ((noise.unsqueeze(-1) >> torch.arange(32)) & 1 for noise in (first, second))
    band = 5 * 0.5 / math.sqrt(size)
    assert (bits.double().mean(0) - 0.5).abs().max() < band
    equal = (bits.unsqueeze(-1) == others.unsqueeze(-2)).double().mean(0)
    assert (equal - 0.5).abs().max() < band


def test_bf16_moments_do_not_depend_on_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor, or its permuted elements in several tensors, give the same bits."""
    whole = build(torch.float32, torch.bfloat16, (50,))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    parts = ParamGroup(whole.weight_decay, states=([], []))
    for mine, theirs in zip(parts.lists, whole.lists, strict=True):
        mine.extend(theirs[0][order].split([17, 0, 33]))
    for step in range(5):
        give_gradients(whole, step)
        for part, piece in zip(parts.grads, whole.grads[0][order].split([17, 0, 33]), strict=True):
            part.copy_(piece)
        for group, piece_size in ((whole, 2**18), (parts, 5)):
            monkeypatch.setattr(adamw, "CPU_CHUNK", piece_size)
            update_chunked(group, CONFIG, 0.1, torch.tensor(float(step)), MADE)
    for mine, theirs in zip(parts.lists, whole.lists, strict=True):
        assert torch.equal(torch.cat(mine), theirs[0][order])


def test_bf16_second_moments_decay_where_rounding_to_nearest_would_not() -> None:
    """After 1000 steps with a beta2 of 0.999 and no gradient, 0.999^1000 = 0.368 of the squares is left."""
    config = OptimizerConfig(adam_beta2=0.999)
    group, nearest = ParamGroup(0.0, states=([], [])), torch.ones(4096).bfloat16()
    for tensors, values in zip(group.lists, (torch.zeros(4096), random(4096, 1).float()), strict=False):
        tensors.append(values)
    group.states[0].append(torch.zeros(4096).bfloat16())
    group.states[1].append(torch.ones(4096).bfloat16())
    for step in range(1000):
        update_chunked(group, config, 0.0, torch.tensor(float(step)), MADE)
        nearest = (nearest.float() * 0.999).bfloat16()
    assert torch.equal(nearest, torch.ones(4096).bfloat16())
    assert group.states[1][0].float().mean().item() == pytest.approx(0.999**1000, rel=3e-3)


@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_each_moment_has_its_own_dtype(types: tuple[torch.dtype, torch.dtype]) -> None:
    """An fp32 moment keeps the values of the fused update."""
    mixed, fused = build(torch.float32), build(torch.float32)
    for tensors, dtype in zip(mixed.lists[2:], types, strict=True):
        tensors[:] = [t.to(dtype) for t in tensors]
    for group, update in ((mixed, update_chunked), (fused, update_fused)):
        give_gradients(group, 1)
        update(group, CONFIG, 0.1, torch.zeros(()), MADE)
    for mine, theirs, dtype in zip(mixed.lists[2:], fused.lists[2:], types, strict=True):
        tolerance = 2**-7 if dtype == torch.bfloat16 else 2e-6
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=1e-9)


def regression(update: Update, moments: torch.dtype) -> float:
    """Return the mean loss of the last 100 of 600 steps of a noisy linear regression."""
    config, truth = OptimizerConfig(adam_beta2=0.999), random(64, 0, torch.float32)
    group, losses = build(torch.float32, moments, (64,)), []
    for step in range(600):
        x = random(64 * 32, step + 1, torch.float32).view(32, 64)
        y = x @ truth + 0.1 * random(32, 10_000 + step, torch.float32)
        error = x @ group.mains[0] - y
        group.grads[0].copy_(x.T @ error / 32)
        group.weight_decay = 0.0
        update(group, config, 0.02 * (1 - step / 600), torch.tensor(float(step)), MADE)
        losses.append(error.square().mean().item())
    return sum(losses[-100:]) / 100


def test_bf16_moments_train_as_well_as_fp32() -> None:
    """The loss is within 5 % of fp32's last loss, of which 0.01 is noise of the data."""
    wide, narrow = regression(update_fused, torch.float32), regression(update_chunked, torch.bfloat16)
    assert wide < 0.02
    assert narrow == pytest.approx(wide, rel=0.05)
