"""Fact: the update is torch's AdamW per parameter after clipping by the global norm, for any loss scale.

A non-finite gradient changes nothing, and the learning rate passes through its corner points.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, GroupOptions, OptimizerConfig, TrainConfig
from megatron3d.errors import UserError
from megatron3d.optim.optimizer import Optimizer, learning_rate, weight_decay
from megatron3d.optim.precision import LossScale
from megatron3d.optim.rule_spec import in_groups
from megatron3d.parallel.layout import ParamSpec, Part
from megatron3d.parallel.mesh import Mesh
from megatron3d.zero import Buffers
from tests.support import megatron_core

SHAPES = {"matrix": (5, 3), "bias": (5,), "other": (2, 4), "norm": (7,)}
DECAYED = ("matrix", "other")
STYLES: tuple[Any, ...] = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


def build(
    config: OptimizerConfig, dtype: torch.dtype = torch.float64, loss_scale: LossScale | None = None
) -> tuple[nn.Module, Buffers, Optimizer]:
    """Return an optimizer of four parameters with random values."""
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(0, device="meta")) for name in SHAPES})
    specs = {
        name: ParamSpec((Part(name, shape, shape),), ((),) * len(shape), (), decay=name in DECAYED)
        for name, shape in SHAPES.items()
    }
    comm = ProcessComm(Mesh((("data", 1),)), [])
    ordered = partial(in_groups, config)
    buffers = Buffers(model, {0: specs}, comm, dtype, torch.device("cpu"), 1e6, in_groups=ordered)
    for seed, (_, _, view) in enumerate(buffers.shards("main")):
        view.copy_(random(view, seed))
    buffers.publish()
    return model, buffers, Optimizer(buffers, config, loss_scale)


def random(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def give_gradients(buffers: Buffers, seed: int) -> Tensor:
    """Assign random gradients and return their norm."""
    for number, (_, _, view) in enumerate(buffers.shards("grad")):
        view.copy_(random(view, 100 * seed + number))
    return buffers.square_norm().sqrt()


def snapshot(buffers: Buffers, optimizer: Optimizer) -> list[Tensor]:
    """Return parameters, moments and number of steps."""
    moments = [shard.values for shard in optimizer.state]
    return [t.clone() for t in (*(view for _, _, view in buffers.shards("main")), *moments, optimizer.num_steps)]


@pytest.mark.parametrize("clip_grad", [0.0, 1.5])
def test_the_update_equals_torchs_adamw_per_parameter(clip_grad: float) -> None:
    config = OptimizerConfig(weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6, clip_grad=clip_grad)
    _, buffers, optimizer = build(config)
    copies = {name: nn.Parameter(view.clone()) for name, _, view in buffers.shards("main")}
    groups = [{"params": [p], "weight_decay": 0.3 if name in DECAYED else 0.0} for name, p in copies.items()]
    theirs = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, foreach=False, fused=False)
    for step, lr in enumerate((0.1, 0.05, 0.2, 0.0)):
        norm = give_gradients(buffers, step)
        for name, _, view in buffers.shards("grad"):
            copies[name].grad = view.clone()
        if clip_grad:
            assert norm > clip_grad
            nn.utils.clip_grad_norm_(copies.values(), clip_grad)
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
        assert optimizer.step(norm, lr).item() == 0
        for name, _, view in buffers.shards("main"):
            torch.testing.assert_close(view, copies[name].detach(), rtol=1e-12, atol=1e-14)
    assert optimizer.num_steps == 4


def test_groups_have_their_own_learning_rate_and_weight_decay() -> None:
    """The first group that names a parameter is its own, and may give weight decay to a vector."""
    names = list(SHAPES)
    vector = next(name for name in names if name not in DECAYED)
    groups = [
        {"params": names[0], "lr_mult": 0.5, "wd_mult": 3.0},
        {"params": [vector, names[0]], "wd_mult": 1.0},
    ]
    config = OptimizerConfig.model_validate({"weight_decay": 0.3, "clip_grad": 0.0, "param_groups": groups})
    _, buffers, optimizer = build(config)
    copies = {name: nn.Parameter(view.clone()) for name, _, view in buffers.shards("main")}
    decays = {name: 0.3 if name in DECAYED else 0.0 for name in names} | {names[0]: 0.9, vector: 0.3}
    theirs = torch.optim.AdamW(
        [{"params": [p], "lr": 0.05 if n == names[0] else 0.1, "weight_decay": decays[n]} for n, p in copies.items()],
        betas=(config.adam_beta1, config.adam_beta2),
        foreach=False,
        fused=False,
    )
    for step in range(3):
        norm = give_gradients(buffers, step)
        for name, _, view in buffers.shards("grad"):
            copies[name].grad = view.clone()
        theirs.step()
        optimizer.step(norm, 0.1)
    for name, _, view in buffers.shards("main"):
        torch.testing.assert_close(view, copies[name].detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm,clip_grad,factor", [(8.0, 2.0, 0.25), (2.0, 8.0, 1.0), (8.0, 0.0, 1.0)])
def test_clipping_scales_by_the_given_norm(norm: float, clip_grad: float, factor: float) -> None:
    """The norm is global, not that of this rank's shards."""
    _, buffers, optimizer = build(OptimizerConfig(clip_grad=clip_grad))
    give_gradients(buffers, 1)
    before = [view.clone() for _, _, view in buffers.shards("grad")]
    optimizer.step(torch.tensor(norm, dtype=torch.float64), 0.1)
    for (_, _, after), gradient in zip(buffers.shards("grad"), before, strict=True):
        torch.testing.assert_close(after, factor * gradient, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_non_finite_gradient_changes_nothing(bad: float, clip_grad: float, dtype: torch.dtype) -> None:
    model, buffers, optimizer = build(OptimizerConfig(clip_grad=clip_grad), dtype)
    assert optimizer.step(give_gradients(buffers, 1), 0.1).item() == 0
    before, network = snapshot(buffers, optimizer), [p.detach().clone() for p in model.parameters()]
    give_gradients(buffers, 2)
    buffers.flat_buffers[-1].grad[-1] = bad
    assert optimizer.step(buffers.square_norm().sqrt(), 0.1).item() == 1
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(buffers, optimizer), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(network, model.parameters(), strict=True))
    assert optimizer.step(give_gradients(buffers, 3), 0.1).item() == 0
    assert optimizer.num_steps == 2


def test_the_model_uses_the_updated_weights() -> None:
    model, buffers, optimizer = build(OptimizerConfig(), torch.bfloat16)
    optimizer.step(give_gradients(buffers, 1), 0.1)
    for name, _, view in buffers.shards("main"):
        assert torch.equal(model.get_parameter(name).detach().flatten(), view.bfloat16())


def test_restored_moments_and_steps_continue_exactly() -> None:
    config = OptimizerConfig()
    _, buffers, optimizer = build(config)
    optimizer.step(give_gradients(buffers, 1), 0.1)
    _, others, continued = build(config)
    for mine, theirs in zip(others.flat_buffers, buffers.flat_buffers, strict=True):
        mine.main.copy_(theirs.main)
    for copy, moment in zip(continued.state, optimizer.state, strict=True):
        copy.values.copy_(moment.values)
    continued.set_num_steps(optimizer.num_steps.item())
    optimizer.step(give_gradients(buffers, 2), 0.1)
    continued.step(give_gradients(others, 2), 0.1)
    pairs = zip(snapshot(buffers, optimizer), snapshot(others, continued), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def scaled_by(**values: Any) -> LossScale:
    return LossScale(TrainConfig(**{"precision": "fp16"} | values), torch.device("cpu"))


@pytest.mark.parametrize("clip_grad", [0.0, 1.5])
@pytest.mark.parametrize("scale", [2.0**20, 1000.0])
def test_scaled_gradients_give_the_update_of_unscaled_ones(clip_grad: float, scale: float) -> None:
    """The norm is passed unscaled; clipping and unscaling are one multiplication."""
    config = OptimizerConfig(clip_grad=clip_grad)
    _, plain, optimizer = build(config)
    _, scaled, other = build(config, loss_scale=scaled_by(loss_scale=scale))
    for seed in range(3):
        norm = give_gradients(plain, seed)
        give_gradients(scaled, seed)
        for flat in scaled.flat_buffers:
            flat.grad.mul_(scale)
        assert other.loss_scale is not None
        optimizer.step(norm, 0.1)
        other.step(other.loss_scale.unscale(scaled.square_norm().sqrt()), 0.1)
        for a, b in zip(snapshot(plain, optimizer), snapshot(scaled, other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    "clip_grad,precision,scales", [(0.0, "fp32", False), (1.0, "fp32", True), (0.0, "fp16", True), (1.0, "fp16", True)]
)
def test_gradients_are_multiplied_by_the_kernel_of_the_update(
    clip_grad: float, precision: str, scales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping and unscaling take no pass of their own over the gradients."""
    _, buffers, optimizer = build(OptimizerConfig(clip_grad=clip_grad), loss_scale=scaled_by(precision=precision))
    norm, versions = give_gradients(buffers, 1), [flat.grad._version for flat in buffers.flat_buffers]
    factors = []
    spied = dict.fromkeys(optimizer._updates, lambda group, *_: factors.append(group.factor))
    monkeypatch.setattr(optimizer, "_updates", spied)
    optimizer.step(norm, 0.1)
    assert [flat.grad._version for flat in buffers.flat_buffers] == versions
    assert len(factors) == 2 and all((factor is not None) == scales for factor in factors)


def test_the_loss_scale_halves_with_skipped_updates_until_one_is_made() -> None:
    loss_scale = scaled_by(hysteresis=2)
    _, buffers, optimizer = build(OptimizerConfig(), loss_scale=loss_scale)
    seen = []
    for bad in (math.inf, math.nan, math.inf, None):
        give_gradients(buffers, 1)
        if bad is not None:
            buffers.flat_buffers[0].grad[0] = bad
        skipped = optimizer.step(loss_scale.unscale(buffers.square_norm().sqrt()), 0.1)
        seen.append((skipped.item(), math.log2(float(loss_scale.factor))))
    assert seen == [(1, 32), (1, 31), (1, 30), (0, 30)]
    assert optimizer.num_steps == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moments_have_the_configured_dtype(dtype: torch.dtype) -> None:
    _, buffers, optimizer = build(OptimizerConfig(exp_avg_dtype="bf16", exp_avg_sq_dtype="fp32"), dtype)
    optimizer.step(give_gradients(buffers, 1), 0.1)
    dtypes = {(shard.name, shard.values.dtype) for shard in optimizer.state}
    assert dtypes == {("exp_avg", torch.bfloat16), ("exp_avg_sq", torch.float32)}
    assert optimizer.num_bytes == sum(6 * flat.main.numel() for flat in buffers.flat_buffers)


def test_bf16_moments_equal_the_fused_ones_up_to_rounding() -> None:
    config = OptimizerConfig(clip_grad=1.5)
    _, wide, optimizer = build(config)
    _, narrow, other = build(config.model_copy(update={"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}))
    for seed in range(3):
        optimizer.step(give_gradients(wide, seed), 0.01)
        other.step(give_gradients(narrow, seed), 0.01)
    for one, two in zip(other.state, optimizer.state, strict=True):
        a, b = one.values, two.values
        torch.testing.assert_close(a.double(), b, rtol=3 * 2**-7, atol=3 * 2**-7 * b.abs().max().item())
    for mine, theirs in zip(narrow.flat_buffers, wide.flat_buffers, strict=True):
        torch.testing.assert_close(mine.main, theirs.main, rtol=0, atol=3 * 0.01 * 2**-5)


@pytest.mark.parametrize("options", [{}, {"exp_avg_dtype": "bf16"}])
def test_flat_buffers_of_any_shard_length_are_updated(options: dict[str, Any]) -> None:
    """Buffers split in two, one half possibly empty, with gradients in new memory, give the same update."""
    config = OptimizerConfig(clip_grad=0.0, **options)
    _, whole, optimizer = build(config)
    halves = []
    for part in (0, 1):
        _, shard, _ = build(config)
        for number, flat in enumerate(shard.flat_buffers):
            cut = 0 if number == 0 else len(flat.main) // 3
            flat.main = flat.main.split([cut, len(flat.main) - cut])[part].clone()
        halves.append((shard, Optimizer(shard, config)))
    for seed in range(3):
        norm = give_gradients(whole, seed)
        for part, (shard, own) in enumerate(halves):
            for number, (flat, theirs) in enumerate(zip(shard.flat_buffers, whole.flat_buffers, strict=True)):
                cut = 0 if number == 0 else len(theirs.main) // 3
                flat.grad = theirs.grad.split([cut, len(theirs.main) - cut])[part].clone()
            own.step(norm, 0.1)
        optimizer.step(norm, 0.1)
    assert len(halves[0][0].flat_buffers[0].main) == 0
    for number, flat in enumerate(whole.flat_buffers):
        joined = torch.cat([shard.flat_buffers[number].main for shard, _ in halves])
        torch.testing.assert_close(joined, flat.main, rtol=1e-12, atol=1e-14)


def test_a_rank_without_parameters_counts_steps_like_the_others() -> None:
    _, buffers, _ = build(OptimizerConfig())
    buffers.flat_buffers = []
    optimizer = Optimizer(buffers, OptimizerConfig())
    assert optimizer.step(torch.tensor(1.0), 0.1).item() == 0
    assert optimizer.step(torch.tensor(math.inf), 0.1).item() == 1
    assert optimizer.num_steps == 1


def test_apex_is_refused_where_it_is_not_installed() -> None:
    with pytest.raises(UserError, match=r"^optimizer.adam_implementation=apex: .*or use .*adam_implementation torch$"):
        build(OptimizerConfig(adam_implementation="apex"), torch.float32)


def rates(style: Any, iterations: list[int], **fields: Any) -> list[float]:
    values = {"lr": 1.0, "min_lr": 0.1, "lr_warmup_iters": 10, "lr_decay_iters": 110} | fields
    config = Config(optimizer=OptimizerConfig(lr_decay_style=style, **values), train=TrainConfig(train_iters=500))
    phases = RunSpec(config).lr_phases
    return [learning_rate(config.optimizer, phases, iteration) for iteration in iterations]


@pytest.mark.parametrize("style", STYLES)
def test_warmup_is_linear_and_ends_at_the_full_rate(style: Any) -> None:
    assert rates(style, [1, 5, 10]) == pytest.approx([0.1, 0.5, 1.0])


@pytest.mark.parametrize(
    "style,middle,end",
    [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1), ("WSD", 1.0, 0.1)],
)
def test_corner_points(style: Any, middle: float, end: float) -> None:
    """Check half-way between warm-up and end, at the end, and after it."""
    assert rates(style, [60, 110, 111, 500]) == pytest.approx([middle, end, end, end])


def test_inverse_square_root_halves_at_four_times_the_warmup_and_stops_at_the_minimum() -> None:
    assert rates("inverse-square-root", [40, 90]) == pytest.approx([1 / 2, 1 / 3])
    assert rates("inverse-square-root", [100_000]) == [0.1]
    assert rates("inverse-square-root", [1, 4], lr_warmup_iters=0) == pytest.approx([1.0, 0.5])


def test_cosine_at_a_quarter() -> None:
    assert rates("cosine", [35]) == pytest.approx([0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2])


@pytest.mark.parametrize("iteration", [10, 60, 90, 91, 95, 100, 109, 110])
@pytest.mark.parametrize("shape", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_wsd_shapes_are_those_of_megatron(shape: str, iteration: int) -> None:
    """Reference: the formulas of Megatron-LM's OptimizerParamScheduler, by the elapsed part of the decay phase."""
    elapsed = max(iteration - 90, 0) / 20
    rest = {
        "linear": 1.0 - elapsed,
        "cosine": 0.5 * (math.cos(math.pi * elapsed) + 1.0),
        "exponential": 2.0 * math.pow(0.5, elapsed) - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(elapsed),
    }[shape]
    got = rates("WSD", [iteration], lr_wsd_decay_iters=20, lr_wsd_decay_style=shape)
    assert got == pytest.approx([0.1 + 0.9 * rest], abs=1e-12)


SCHEDULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"train_iters": 90}, {"lr_warmup_fraction": 0.123}),
    ({"train_iters": 90}, {"lr_warmup_iters": 7, "lr_decay_iters": 80, "lr_wsd_decay_iters": 9}),
    ({"train_samples": 1003}, {"lr_warmup_samples": 77, "lr_decay_samples": 901, "lr_wsd_decay_samples": 101}),
    ({"train_samples": 1003, "rampup_batch_size": (2, 2, 300)}, {"lr_warmup_fraction": 0.2}),
    ({"train_samples": 1003, "rampup_batch_size": (2, 2, 300)}, {"lr_warmup_samples": 50}),
]


@pytest.mark.parametrize("length,given_keys", SCHEDULES, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_rates_are_those_of_megatron_core(style: Any, length: dict[str, Any], given_keys: dict[str, Any]) -> None:
    """Reference: OptimizerParamScheduler with steps as Megatron-LM's training sets them, resumed half-way.

    Its rate after a step, which Megatron-LM uses for the next one, is that of the step here.
    """
    growth: Any = {"start_weight_decay": 0.01, "end_weight_decay": 0.3, "weight_decay_incr_style": "cosine"}
    shape: Any = {"lr_warmup_init": 0.05, "lr_decay_style": style, "lr_wsd_decay_style": "cosine"}
    ours = OptimizerConfig(lr=1.0, min_lr=0.1, **shape, **growth, **given_keys)
    config = Config(optimizer=ours, train=TrainConfig(global_batch_size=12, **length))
    spec, group = RunSpec(config), {"max_lr": 1.0, "min_lr": 0.1, "lr_mult": 1.0, "wd_mult": 1.0}

    def scheduler() -> Any:
        unit, factor = ("samples", 1) if "train_samples" in length else ("iters", 12)
        end = (given_keys.get(f"lr_decay_{unit}") or length[f"train_{unit}"]) * factor
        fraction = given_keys.get("lr_warmup_fraction")
        warmup = given_keys.get(f"lr_warmup_{unit}", 0) * factor if fraction is None else fraction * end
        phase = (given_keys.get(f"lr_wsd_decay_{unit}") or end // factor // 10) * factor
        optimizer = type("Optimizer", (), {"param_groups": [group]})()
        kind = megatron_core.core("optimizer_param_scheduler").OptimizerParamScheduler
        steps = {"wsd_decay_steps": phase, "lr_wsd_decay_style": "cosine"}
        run = length[f"train_{unit}"] * factor
        return kind(optimizer, 0.05, 1.0, 0.1, warmup, end, style, 0.01, 0.3, run, "cosine", **steps)

    consumed, theirs, found, wanted = 0, scheduler(), [], []
    for iteration in range(1, spec.train_iters + 1):
        if iteration == spec.train_iters // 2:
            saved, theirs = theirs.state_dict(), scheduler()
            theirs.load_state_dict(saved)
        size = spec.batches.at(consumed).num_samples
        consumed += size
        theirs.step(size)
        wanted.append(group["lr"])
        position = spec.lr_phases.position(iteration, consumed)
        found.append(learning_rate(ours, spec.lr_phases, position))
        assert weight_decay(ours, spec.lr_phases, position) == pytest.approx(group["weight_decay"], abs=1e-12)
    if style != "inverse-square-root" or spec.lr_phases.warmup:
        assert found == pytest.approx(wanted, abs=1e-12)


def megatrons_rate(style: str, step: float, warmup: float, decay: float, phase: float, init: float) -> float:
    """Return what `OptimizerParamScheduler.get_lr` of Megatron-Core 0.16 does, for rates from 1 to 0.1."""
    if warmup > 0 and step <= warmup:
        return init + (1.0 - init) * step / warmup
    if style == "constant":
        return 1.0
    if step > decay:
        return 0.1
    if style == "inverse-square-root":
        return max(0.1, max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5)
    ratio, elapsed = (step - warmup) / (decay - warmup), max(step - (decay - phase), 0) / phase
    coefficient = {
        "linear": 1.0 - ratio,
        "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
        "WSD": 1.0 - math.sqrt(elapsed),
    }[style]
    return 0.1 + coefficient * 0.9


def megatrons_decay(style: str, step: float, steps: float, start: float, end: float) -> float:
    """Return what its `get_wd` does."""
    if step > steps or style == "constant":
        return end
    ratio = step / steps
    return start + (end - start) * {"linear": ratio, "cosine": 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)}[style]


@pytest.mark.parametrize("unit", ["iters", "samples"])
@pytest.mark.parametrize("growth", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("style", STYLES)
def test_every_boundary_is_that_of_megatron(style: Any, growth: Any, unit: str) -> None:
    """Rate and weight decay of every step of a run that is longer than its schedule, in samples on a growing batch.

    The steps at the ends of warm-up, stable phase, decay and run, and those next to them, are among these.
    """
    factor = 12 if unit == "samples" else 1
    warmup, decay, phase, length = 8 * factor, 60 * factor, 20 * factor, 70 * factor
    lengths = {"lr_warmup": warmup, "lr_decay": decay, "lr_wsd_decay": phase}
    ours = OptimizerConfig(
        lr=1.0,
        min_lr=0.1,
        lr_decay_style=style,
        lr_wsd_decay_style="minus_sqrt",
        lr_warmup_init=0.05,
        weight_decay_incr_style=growth,
        **({} if growth == "constant" else {"start_weight_decay": 0.01, "end_weight_decay": 0.3}),
        **{f"{name}_{unit}": value for name, value in lengths.items()},
    )
    ramp = {"rampup_batch_size": (4, 4, 240)} if unit == "samples" else {}
    train = TrainConfig(global_batch_size=12, **{f"train_{unit}": length}, **ramp)
    spec = RunSpec(Config(optimizer=ours, train=train))
    start, end = (0.1, 0.1) if growth == "constant" else (0.01, 0.3)
    consumed, positions = 0, []
    for iteration in range(1, spec.train_iters + 5):
        consumed += spec.batches.at(consumed).num_samples
        place = spec.lr_phases.position(iteration, consumed)
        positions.append(place)
        expected = megatrons_rate(style, place, warmup, decay, phase, 0.05)
        assert learning_rate(ours, spec.lr_phases, place) == pytest.approx(expected, abs=1e-12)
        expected = megatrons_decay(growth, place, length, start, end)
        assert weight_decay(ours, spec.lr_phases, place) == pytest.approx(expected, abs=1e-12)
    assert {warmup, decay - phase, decay, length} <= {*positions} and positions[-1] > length


def test_an_independent_decay_follows_the_schedule_and_not_the_size_of_the_rate() -> None:
    """Without gradients a step leaves 1 - weight_decay lr(t) / lr of the weights, whatever lr is."""
    for lr in (1e-2, 1e-4):
        group = GroupOptions(params="other", lr_mult=0.5, wd_mult=1.0)
        config = OptimizerConfig(
            lr=lr, weight_decay=0.25, independent_weight_decay=True, lr_warmup_iters=4, param_groups=(group,)
        )
        phases = RunSpec(Config(optimizer=config)).lr_phases
        for position, left in ((2, 1 - 0.25 / 2), (4, 1 - 0.25)):
            _, buffers, optimizer = build(config)
            for flat in buffers.flat_buffers:
                flat.main.fill_(1.0)
                flat.grad.zero_()
            rate, decay = learning_rate(config, phases, position), weight_decay(config, phases, position)
            optimizer.step(torch.tensor(1.0), rate, decay)
            found = {name: set(values.tolist()) for name, _, values in buffers.shards("main") if len(values)}
            for name, values in found.items():
                expected = left if buffers.specs[name].decay else 1.0
                assert [*values] == pytest.approx([expected], rel=1e-6), name


def test_nanogpts_schedule_has_both_ends_one_later() -> None:
    """Reference: get_lr of nanoGPT, whose iterations begin with 0, with warm-up over 9 and decay to 109."""

    def nanogpt(it: int) -> float:
        if it < 9:
            return (it + 1) / (9 + 1)
        if it > 109:
            return 0.1
        return 0.1 + 0.5 * (1.0 + math.cos(math.pi * (it - 9) / (109 - 9))) * 0.9

    iterations = list(range(1, 130))
    assert rates("cosine", iterations) == pytest.approx([nanogpt(it - 1) for it in iterations])


def test_wsd_decays_over_its_last_phase() -> None:
    assert rates("WSD", [90, 100, 110], lr_wsd_decay_iters=20) == pytest.approx([1.0, 0.55, 0.1])
    assert rates("WSD", [99, 110], lr_wsd_decay_iters=None) == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize("style", STYLES)
def test_the_decay_lasts_for_the_whole_training_by_default(style: Any) -> None:
    given_end = rates(style, [1, 250, 499, 500], lr_decay_iters=500)
    assert rates(style, [1, 250, 499, 500], lr_decay_iters=None) == given_end


@pytest.mark.parametrize("style", STYLES)
@given(
    warmup=st.integers(0, 20),
    length=st.integers(1, 50),
    phase=st.one_of(st.none(), st.integers(1, 60)),
    iteration=st.integers(1, 100),
)
def test_never_above_the_peak_or_below_the_minimum_and_falling_after_warmup(
    style: Any, warmup: int, length: int, phase: int | None, iteration: int
) -> None:
    fields = {"lr_warmup_iters": warmup, "lr_decay_iters": warmup + length, "lr_wsd_decay_iters": phase}
    now, later = rates(style, [iteration, iteration + 1], **fields)
    assert 0 < now <= 1 + 1e-12
    if iteration >= max(warmup, 1):
        assert 0.1 - 1e-12 <= later <= now + 1e-12
