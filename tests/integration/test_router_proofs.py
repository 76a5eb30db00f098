"""Fact: routers give the numbers of one process with every balance option and every load, in float64.

Loss, gradient norm, gradients, parameters, biases and loads of two steps agree between accumulations of 1, 2 and 4
microbatches, foldings and dispatchers; also where scores tie, experts have no token, or one has all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.experts import router
from megatron3d.experts.plan import Balance, Experts, router_notes
from megatron3d.experts.router import Routes
from megatron3d.experts.rows import Groups
from megatron3d.model.experts import ExpertMLP, Router
from megatron3d.model.microbatch import Pass
from megatron3d.train.state import build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples, StepTrace, differences, flips
from tests.support.equality import MODELS, TOLERANCE, VOCAB_SIZE, configure, run_trace
from tests.support.turn_ranks import connect, run_turns

BATCH = 4
MODEL = {**MODELS["experts, shared experts, losses of routers"], "num_layers": 2, "mtp_num_layers": 0}
NONE = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": 0.0,
    "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": None,
    "moe_expert_capacity_factor": None,
}
BALANCES: dict[str, dict[str, Any]] = {
    "none": {},
    "sequences": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5},
    "global batch": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.5},
    "z-loss": {"moe_z_loss_coeff": 0.3},
    "bias": {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.05},
    "capacity": {"moe_expert_capacity_factor": 1.0},
    "capacity below an even load": {"moe_expert_capacity_factor": 0.6},
    "first tokens": {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"},
    "padded to capacity": {"moe_expert_capacity_factor": 0.6, "moe_pad_expert_input_to_capacity": True},
    "experts in turn": {"moe_router_force_load_balancing": True, "moe_expert_capacity_factor": 1.0},
    "two losses": {
        "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
        "moe_aux_loss_coeff": (0.5, 0.3),
    },
}
EP = "expert_model_parallel_size"
DISPATCHER = "moe_token_dispatcher_type"
SEQUENCES = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# Ranks, sequences of a microbatch, keys of the layout.
LAYOUTS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (1, 2, {}),
    (1, 1, {}),
    (2, 1, {EP: 2, DISPATCHER: "alltoall", "zero_stage": 3}),
    (2, 2, {EP: 2, DISPATCHER: "allgather", **SEQUENCES}),
    (2, 1, {"expert_tensor_parallel_size": 2, "context_parallel_size": 2}),
)


def check_layouts(model: dict[str, Any]) -> None:
    """Compare every layout with one process and one microbatch."""
    keys = MODEL | model
    wanted = run_trace(0, 1, settings(keys, BATCH, {}), 2)
    assert wanted is not None
    for num_ranks, rows, parallel in LAYOUTS:
        config = settings(keys, rows, parallel)
        assert check(config, num_ranks, VOCAB_SIZE) == []
        got = run_turns(run_trace, num_ranks, config, 2)[0]
        assert list(differences(wanted, got, TOLERANCE)) == [], (num_ranks, rows, parallel)


def settings(keys: dict[str, Any], rows: int, parallel: dict[str, Any]) -> Any:
    return configure(keys, parallel, micro_batch_size=rows, global_batch_size=BATCH)


@pytest.mark.parametrize("name", BALANCES)
def test_accumulation_and_layout_leave_each_balance(name: str) -> None:
    check_layouts(NONE | BALANCES[name])


@pytest.mark.parametrize(
    ("parallel", "sequences"),
    [({}, 2), ({EP: 2, DISPATCHER: "alltoall"}, 4), ({EP: 2, DISPATCHER: "allgather"} | SEQUENCES, 2)],
)
def test_experts_that_are_padded_have_their_capacity_and_the_same_numbers(
    parallel: dict[str, Any], sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every expert multiplies as many rows in every step, and rows of zeros change nothing."""
    counts, forward = set[int](), ExpertMLP.forward

    def counting(module: ExpertMLP, x_RH: Tensor, weights_R: Tensor, rows: Groups) -> Tensor:
        counts.update(rows.counts if torch.is_grad_enabled() else ())
        return forward(module, x_RH, weights_R, rows)

    def trace(**keys: Any) -> StepTrace:
        counts.clear()
        model = MODEL | NONE | {"moe_expert_capacity_factor": 1.2, "add_bias_linear": True, **keys}
        found = run_turns(run_trace, 1 + bool(parallel), settings(model, 2, parallel), 2)[0]
        assert found is not None
        return found

    monkeypatch.setattr(ExpertMLP, "forward", counting)
    wanted = trace()
    assert len(counts) > 1
    assert list(differences(wanted, trace(moe_pad_expert_input_to_capacity=True), TOLERANCE)) == []
    capacity = math.ceil(1.2 * MODEL["seq_length"] * MODEL["moe_router_topk"] / MODEL["num_moe_experts"])
    assert counts == {sequences * capacity}


def test_experts_in_turn_have_the_same_load_whatever_the_router_says() -> None:
    experts = Experts(num_experts=8, topk=3, ffn_hidden_size=1)
    rows_M, generator = torch.arange(16).flip(0), torch.Generator().manual_seed(1)
    routes = [router.route(torch.randn(16, 8, generator=generator), experts, row_M=rows_M).experts_MK for _ in range(2)]
    assert torch.equal(*routes) and torch.equal(routes[0].flatten().bincount(), torch.full((8,), 6))
    assert bool((routes[0].diff(dim=1) > 0).all()), "of each token in ascending order, none twice"
    assert "WARNING: moe_router_force_load_balancing" in "".join(router_notes(Balance(forces_even_load=True)))


def test_the_balance_of_a_microbatch_is_that_of_all_its_sequences() -> None:
    """It is the loss of a sequence where a microbatch has one, another where it has more, and of all its ranks'."""

    def of(name: str, rows: int, ranks: int = 1, parallel: dict[str, Any] | None = None) -> StepTrace:
        balance = {"moe_router_load_balancing_type": name, "moe_aux_loss_coeff": 0.5}
        trace = run_turns(run_trace, ranks, settings(MODEL | NONE | balance, rows, parallel or {}), 2)[0]
        assert trace is not None
        return trace

    whole, one = of("aux_loss", BATCH), of("aux_loss", 1)
    assert list(differences(of("seq_aux_loss", 1), one, TOLERANCE)) == []
    assert list(differences(of("seq_aux_loss", BATCH), whole, TOLERANCE))
    for parallel in (SEQUENCES | {EP: 2}, {"context_parallel_size": 2}):
        assert list(differences(whole, of("aux_loss", BATCH, 2, parallel), TOLERANCE)) == [], parallel


def test_logged_losses_are_means_over_the_global_batch() -> None:
    """They have no factor, and neither recomputation nor accumulation counts a token twice."""
    found = []
    for rows, train in ((BATCH, {}), (1, {"recompute_granularity": "full", "recompute_num_layers": 1})):
        balance = {"moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"), "moe_z_loss_coeff": 0.3}
        keys = MODEL | NONE | balance | {"moe_aux_loss_coeff": (0.5, 0.25)}
        spec = RunSpec(configure(keys, {}, micro_batch_size=rows, global_batch_size=BATCH, **train), 1, VOCAB_SIZE)
        comm = connect(spec)
        state, length = build_state(spec, comm, torch.device("cpu")), spec.arch.seq_length
        samples = RandomSamples(1, spec.arch.vocab_size, length)
        batch = BatchLoader(samples, comm.mesh, spec.mode.batch_axes, rows, BATCH, torch.device("cpu")).step(0)
        step = StepSettings(1, BATCH * length, BATCH)
        result = train_step(state, batch, 1e-3, step, watches_routers=True)
        assert result.routers is not None
        (row,) = result.routers.rows(MODEL["moe_router_topk"], has_bias=False)
        found.append({name: row[name] for name in ("seq_aux_loss", "global_aux_loss", "z_loss")})
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    # An even load makes the loss of the global batch 1; that of a sequence is less even.
    assert found[0]["global_aux_loss"] == pytest.approx(1) and found[0]["seq_aux_loss"] > 1 and found[0]["z_loss"] > 0


def test_another_choice_is_named() -> None:
    wanted = run_trace(0, 1, settings(MODEL, BATCH, {}), 1)
    assert wanted is not None
    name = "choices.layers.1.mlp.router of step 1"
    tokens = BATCH * MODEL["seq_length"]
    assert wanted[name].shape == (tokens, MODEL["moe_router_topk"])
    other = wanted[name].clone()
    other[5, 0], other[9] = -1, -1
    assert list(differences(wanted, {**wanted, name: other}, TOLERANCE)) == [
        f"{name}: 2 of {tokens} tokens choose other experts than in one process"
    ]
    assert list(flips(wanted, {**wanted, name: other})) == [
        f"layers.1.mlp.router: 2 of {tokens} tokens choose other experts"
    ]


def rounded(logits_ME: Tensor) -> Tensor:
    """Return sigmoids in tenths, of which many tie, with the gradients of sigmoids."""
    scores_ME = logits_ME.sigmoid()
    return scores_ME + ((scores_ME * 10).round() / 10 - scores_ME).detach()


def equal(logits_ME: Tensor) -> Tensor:
    """Return scores that are all equal, so that the first experts get every token and the others none."""
    scores_ME = logits_ME.sigmoid()
    return scores_ME - scores_ME.detach() + 0.5


ONE = {"moe_router_topk": 1, "moe_router_num_groups": None, "moe_router_group_topk": None}
LOADS: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any]]] = {
    "ties": (rounded, {}),
    "experts without tokens": (equal, {"moe_router_load_balancing_type": "global_aux_loss"}),
    "all tokens to one expert": (equal, ONE),
    "all tokens to one expert, which takes some": (equal, ONE | {"moe_expert_capacity_factor": 1.5}),
}


@pytest.mark.parametrize("name", LOADS)
def test_every_load_gives_the_numbers_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, model = LOADS[name]
    monkeypatch.setitem(router._SCORES, "sigmoid", scores)
    chosen = list[Tensor]()
    original = router.top_experts

    def top_experts(choice_ME: Tensor, count: int) -> Tensor:
        chosen.append(original(choice_ME, count))
        return chosen[-1]

    monkeypatch.setattr(router, "top_experts", top_experts)
    # The bias of the choice would end the ties after the first step.
    bias = {"moe_router_enable_expert_bias": False, "moe_router_bias_update_rate": None}
    check_layouts(bias | model)
    if scores is equal:
        topk = model.get("moe_router_topk", MODEL["moe_router_topk"])
        mine = [each for each in chosen if each.shape[1] == topk]
        assert mine and all(torch.equal(each, torch.arange(topk).expand_as(each)) for each in mine)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_dropped_choices_add_nothing(dispatcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step equals one in which experts compute the dropped choices too, with weights of 0."""
    config = settings(MODEL | {"moe_expert_capacity_factor": 1.0}, 2, {EP: 2, DISPATCHER: dispatcher})
    got = run_turns(run_trace, 2, config, 2)[0]
    within, shares = Router._within_capacity, list[float]()

    def without_weight(self: Router, routes: Routes, at: Pass) -> Routes:
        taken_MK = within(self, routes, at).experts_MK < self.experts.num_experts
        shares.append(taken_MK.double().mean().item())
        return routes._replace(weights_MK=routes.weights_MK * taken_MK)

    monkeypatch.setattr(Router, "_within_capacity", without_weight)
    wanted = run_turns(run_trace, 2, config, 2)[0]
    assert max(shares) < 1
    assert list(differences(wanted, got, TOLERANCE)) == []
